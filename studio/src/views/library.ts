/** Library: registered vectors; register more, or fit them to pairs typed here. */

import { call, send, told, type Json, type VectorInfo } from "../api";
import { CodePanel, curl, py, pyCall, pyClient } from "../code";
import { emptyState, page, STREAM_SITES, type Context, type View } from "../context";
import { button, field, h, notice, select } from "../dom";
import { saveVector, vectorPath as pathOf } from "../download";
import { fitVector } from "../fit";
import { short } from "../scale";
import { hashOf, keep, text, type State } from "../state";

const NAME = /^[A-Za-z0-9_:-][A-Za-z0-9_.:/-]{0,127}$/;
const METHODS = [
  ["mean", "Difference of means"],
  ["lda", "Linear discriminant"],
  ["logistic", "Logistic regression"],
  ["pca", "PCA of the pairs’ differences"],
] as const;
const MOST_BYTES = 64 << 20;

export function library(context: Context, state: State): View {
  const control = new AbortController();
  const list = h("div", { class: "vectors" });
  const isFit = () => text(state, "tab", "fit") === "fit";
  const save = () => {
    keep("library", state);
    code.update();
  };

  // -------------------------------------------------------------- list

  function drawList(): void {
    const { vectors } = context.server;
    if (!vectors.length) {
      list.replaceChildren(emptyState("No vectors yet", "Fit one to pairs of texts, or register a file. Then colour a chat by it, or steer with it."));
      return;
    }
    const head = h("tr", {}, ...["Name", "Where", "Norm", ""].map((one) => h("th", { scope: "col", class: one === "Norm" ? "num" : null }, one)));
    list.replaceChildren(h("table", { class: "plain vectors" }, h("thead", {}, head), h("tbody", {}, ...vectors.map(vectorRow))));
  }

  function vectorRow(one: VectorInfo): HTMLElement {
    const told = h("span", { class: "hint" });
    const remove = button("Remove", () => void removed(one.name, told), "quiet");
    remove.setAttribute("aria-label", `Remove ${one.name}`);
    const middleLayer = one.taps[Math.floor(one.taps.length / 2)]?.[1];
    const uses = one.edits?.length
      ? []
      : [
          h("a", { href: hashOf("steer", { v: [[one.name, middleLayer ?? null, 1]] }) }, "Steer"),
          h("a", { href: hashOf("chat", { color: "vector", vector: one.name, layer: middleLayer }) }, "Colour"),
          saveButton(one.name, told),
        ];
    return h("tr", {}, h("th", { scope: "row" }, one.name), h("td", {}, where(one)), h("td", { class: "num" }, norms(one)), h("td", {}, h("div", { class: "actions" }, ...uses, remove, told)));
  }

  function saveButton(name: string, said: HTMLElement): HTMLElement {
    const made = button("Save file", () => void saveVector(name, control.signal).catch((error) => (said.textContent = told(error))), "quiet");
    made.setAttribute("aria-label", `Save ${name} as a file`);
    return made;
  }

  async function removed(name: string, said: HTMLElement): Promise<void> {
    if (!confirm(`Remove ${name}? Requests that run keep it.`)) return;
    try {
      await call("DELETE", pathOf(name), undefined, control.signal);
      await context.refresh();
      drawList();
    } catch (error) {
      said.textContent = told(error);
    }
  }

  // -------------------------------------------------------------- fit

  const name = h("input", { value: text(state, "name"), placeholder: "cheerful", required: true, pattern: NAME.source, input: () => ((state["name"] = name.value), save()) });
  const positive = lines("positive", "I feel wonderful today.\nWhat a lovely surprise!\nThis is great news.");
  const negative = lines("negative", "I feel terrible today.\nWhat an awful mess!\nThis is bad news.");
  const counted = h("p", { class: "hint", "aria-live": "polite" });
  const fitButton = button("Fit and register", () => void fit(), "primary");
  const fitted = h("div", { "aria-live": "polite" });

  function lines(key: string, placeholder: string): HTMLTextAreaElement {
    const box: HTMLTextAreaElement = h("textarea", { rows: 6, value: text(state, key), placeholder, input: () => ((state[key] = box.value), count(), save()) });
    return box;
  }
  const given = (box: HTMLTextAreaElement) => box.value.split("\n").map((one) => one.trim()).filter(Boolean);

  function count(): void {
    const [more, less] = [given(positive).length, given(negative).length];
    const pairs = more === less ? `${more} pairs, held out together for the scores.` : `${more} and ${less} lines: no pairs, each line is held out alone.`;
    counted.textContent = more || less ? pairs : "One text a line. Line n of both boxes is a pair.";
  }

  function fitBody() {
    const site = text(state, "site") || (STREAM_SITES.find((one) => context.server.sites.has(one)) ?? "resid_post");
    return { positive: given(positive), negative: given(negative), method: text(state, "method", "mean"), ...(site === "resid_post" ? {} : { site }), name: name.value };
  }

  async function fit(): Promise<void> {
    const body = fitBody();
    if (!NAME.test(body.name)) return said(name, "Give it a name of letters, digits and _ . : / -");
    if (!body.positive.length || !body.negative.length) return said(body.positive.length ? negative : positive, "Write at least one text in each box.");
    fitButton.disabled = true;
    fitted.replaceChildren(notice("info", `Fitting ${body.positive.length + body.negative.length} texts …`));
    try {
      const directions = await fitVector(context, body, control.signal);
      drawList();
      fitted.replaceChildren(fitResult(body.name, directions));
    } catch (error) {
      if (!control.signal.aborted) fitted.replaceChildren(notice("error", told(error)));
    }
    fitButton.disabled = false;
  }

  function said(box: HTMLElement, problem: string): void {
    fitted.replaceChildren(notice("error", problem));
    box.focus();
  }

  // -------------------------------------------------------------- register

  const fileName = h("input", { value: text(state, "name"), placeholder: "cheerful", pattern: NAME.source, input: () => ((state["name"] = fileName.value), save()) });
  const file = h("input", { type: "file", accept: ".safetensors,.gguf,.json" });
  const paste = h("textarea", { rows: 5, spellcheck: "false", placeholder: '{"15": [0.12, -0.03, …]}' });
  const registerButton = button("Register", () => void register(), "primary");
  const registered = h("div", { "aria-live": "polite" });

  async function register(): Promise<void> {
    const as = fileName.value;
    const chosen = file.files?.[0];
    const tell = (problem: string) => registered.replaceChildren(notice("error", problem));
    if (!NAME.test(as)) return tell("Give it a name of letters, digits and _ . : / -");
    if (!chosen && !paste.value.trim()) return tell("Choose a file, or paste numbers.");
    if (chosen && chosen.size > MOST_BYTES) return tell("The file is larger than 64 MiB.");
    registerButton.disabled = true;
    try {
      const isJson = !chosen || chosen.name.toLowerCase().endsWith(".json");
      const source = chosen ? (isJson ? await chosen.text() : await chosen.arrayBuffer()) : paste.value;
      if (isJson) await call("PUT", pathOf(as), parsed(source as string), control.signal);
      else await send("PUT", pathOf(as), source, control.signal, "application/octet-stream");
      await context.refresh();
      drawList();
      registered.replaceChildren(notice("ok", `${as} is registered.`));
    } catch (error) {
      tell(told(error));
    }
    registerButton.disabled = false;
  }

  // -------------------------------------------------------------- page

  const code = new CodePanel(() => {
    if (!isFit()) {
      return {
        python: `${pyClient([])}vectors = {15: [0.12, -0.03]}  # {layer: numbers}\nclient.vectors.register(${py(fileName.value || "name")}, vectors)\n`,
        curl: `${curl("PUT", pathOf(fileName.value || "name"))} \\\n  -H 'content-type: application/octet-stream' --data-binary @vectors.safetensors`,
      };
    }
    const body = fitBody();
    const { positive: more, negative: less, method, name: as } = body;
    const named = { method: method === "mean" ? undefined : method, site: "site" in body ? body.site : undefined, name: as || undefined };
    return {
      python: `${pyClient([])}positive = ${py(more)}\nnegative = ${py(less)}\nfound = ${pyCall("client.fit", ["positive", "negative"], named)}\nprint(found)\n`,
      curl: curl("POST", "/v1/midstream/fit", body),
    };
  });
  const sites = STREAM_SITES.filter((one) => context.server.sites.has(one));
  const fitForm = h(
    "form",
    { class: "stack", submit: (event: Event) => (event.preventDefault(), void fit()) },
    field("Name", name),
    h("div", { class: "pair" }, field("Positive texts", positive), field("Negative texts", negative)),
    counted,
    h(
      "details",
      { class: "more" },
      h("summary", {}, "Method"),
      h(
        "div",
        { class: "stack" },
        field("Method", select(METHODS, text(state, "method", "mean"), (value) => ((state["method"] = value), save()))),
        sites.length > 1 ? field("Site", select(sites.map((one) => [one, one]), text(state, "site") || sites[0]!, (value) => ((state["site"] = value), save()))) : null,
      ),
    ),
    h("div", { class: "row" }, fitButton),
    fitted,
  );
  const fileForm = h(
    "form",
    { class: "stack", submit: (event: Event) => (event.preventDefault(), void register()) },
    field("Name", fileName),
    field("File", file, "safetensors with tensors such as resid_post.15, a GGUF control vector, or JSON. Pickles (.pt, .bin) are not read."),
    field("Or numbers", paste, "JSON: a vector by layer, or by site and layer."),
    h("div", { class: "row" }, registerButton),
    registered,
  );
  const body = h("div", {});
  const tabs = ([["fit", "Fit to pairs"], ["file", "Register a file"]] as const).map(([value, title]) =>
    button(title, () => {
      state["tab"] = value;
      save();
      draw();
    }),
  );
  function draw(): void {
    tabs.forEach((one, nth) => one.setAttribute("aria-pressed", String(isFit() === (nth === 0))));
    body.replaceChildren(isFit() ? fitForm : fileForm);
  }
  count();
  draw();
  drawList();
  const readOnly = context.server.admin ? null : notice("info", "This server lets nobody change vectors over HTTP. Start it with a key, or bound to 127.0.0.1.");
  const aside = h("aside", { class: "panel wide", "aria-label": "Add vectors" }, readOnly, h("div", { class: "segments" }, ...tabs), body);
  const main = h("div", { class: "main" }, h("h2", { class: "part" }, "Registered vectors"), list, code.element);
  return { element: page("Library", "Named vectors of the server, for every client.", aside, main), stop: () => control.abort() };
}

function where(one: VectorInfo): string {
  if (one.edits?.length) return `${one.edits.length} whole edits`;
  const taps = one.taps.filter((tap) => tap !== null);
  if (!taps.length) return "any layer";
  const layers = taps.map((tap) => tap[1]);
  const shown = layers.length > 1 ? `layers ${layers[0]} – ${layers.at(-1)}` : `layer ${layers[0]}`;
  return `${shown}, ${[...new Set(taps.map((tap) => tap[0]))].join(", ")}`;
}

function norms(one: VectorInfo): string {
  if (!one.norms.length) return "";
  const [low, high] = [Math.min(...one.norms), Math.max(...one.norms)];
  return low === high ? short(low) : `${short(low)} – ${short(high)}`;
}

function fitResult(name: string, found: Json): HTMLElement {
  const scored = (found.layers as Json[]).filter((one) => one.score);
  const best = found.best_layer as number | null;
  const use = best ?? found.layers[Math.floor(found.layers.length / 2)].layer;
  const links = h(
    "div",
    { class: "row" },
    h("a", { class: "button", href: hashOf("steer", { v: [[name, use, 1]] }) }, "Steer with it"),
    h("a", { class: "button", href: hashOf("chat", { color: "vector", vector: name, layer: use }) }, "Colour a chat"),
    h("a", { class: "button", href: hashOf("layers", { by: "vector", vector: name }) }, "Layers × tokens"),
  );
  if (!scored.length) return notice("ok", `${name} is registered. A class has a single line, so nothing could be held out and there are no scores.`, links);
  const rows = scored.map((one) => {
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--w", `${Math.round(100 * one.score.auc)}%`);
    return h("tr", { class: one.layer === best ? "best" : null }, h("th", { scope: "row" }, String(one.layer)), h("td", { class: "bar-cell" }, bar), h("td", { class: "num" }, one.score.auc.toFixed(3)), h("td", { class: "num" }, short(one.score.d_prime)));
  });
  const head = h("tr", {}, ...["Layer", "", "AUC", "d′"].map((one) => h("th", { scope: "col" }, one)));
  const box = h("div", { class: "scroll short" }, h("table", { class: "plain auc" }, h("caption", {}, `Scores on held-out texts, ${found.num_folds} folds`), h("thead", {}, head), h("tbody", {}, ...rows)));
  requestAnimationFrame(() => (box.scrollTop = (box.querySelector<HTMLElement>("tr.best")?.offsetTop ?? 0) - box.clientHeight / 2));
  return h(
    "div",
    { class: "stack" },
    notice("ok", `${name} is registered at ${found.layers.length} layers. Held-out texts are separated best at layer ${best}.`, links),
    box,
  );
}

function parsed(source: string): unknown {
  try {
    return JSON.parse(source);
  } catch (error) {
    throw new Error(`These are no numbers in JSON: ${error instanceof Error ? error.message : error}`);
  }
}
