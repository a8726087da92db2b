/** Steer: one prompt, answered plain and steered side by side. */

import { isAbort, told } from "../api";
import { Code, CodePanel, curl, py, pyCall, pyClient } from "../code";
import { directions, emptyState, formatSelect, layersOf, middle, page, type Context, type View } from "../context";
import { append, button, field, h, notice, select } from "../dom";
import { generate, pathOf, plainBody, type Asked } from "../generate";
import { short } from "../scale";
import { keep, number, text, type State } from "../state";
import { TokenText } from "../tokens";

interface Slider {
  name: string;
  /** null: every layer of the vector. */
  layer: number | null;
  scale: number;
}

export function steer(context: Context, state: State): View {
  const sliders = readSliders(state["v"]);
  const vectors = directions(context);
  if (!sliders.length && vectors.length) sliders.push(fresh());
  let running: AbortController | null = null;

  const save = () => {
    state["v"] = sliders.length ? sliders.map((one) => [one.name, one.layer, one.scale]) : undefined;
    keep("steer", state);
    code.update();
  };
  const code = new CodePanel(snippets);
  const prompt = h("textarea", { rows: 3, value: text(state, "prompt"), placeholder: "How was your day?", input: () => ((state["prompt"] = prompt.value), save()), keydown: (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), void run());
  } });
  const maxTokens = h("input", { type: "number", min: 1, max: 100000, value: number(state, "max", 80), change: () => ((state["max"] = Math.max(1, Math.round(Number(maxTokens.value)) || 80)), save()) });
  const rows = h("div", { class: "sliders" });
  const runButton = button("Run both", () => void run(), "primary");
  const stopButton = button("Stop", () => running?.abort());
  stopButton.hidden = true;
  const panes = h("div", { class: "panes" });

  function fresh(): Slider {
    const vector = vectors[0]!;
    return { name: vector.name, layer: middle(layersOf(context, vector)), scale: 1 };
  }

  function drawSliders(): void {
    rows.replaceChildren(...sliders.map(sliderRow));
    if (!vectors.length && !sliders.length) {
      rows.append(h("p", { class: "hint" }, "No vectors are registered. ", h("a", { href: "#/library" }, "Register or fit one"), "."));
    }
  }

  function sliderRow(one: Slider): HTMLElement {
    const vector = context.server.vectors.find((each) => each.name === one.name);
    const layers = layersOf(context, vector);
    const most = Math.max(4, Math.abs(one.scale));
    const range = h("input", { type: "range", min: -most, max: most, step: 0.1, value: one.scale });
    const exact = h("input", { type: "number", step: 0.1, value: one.scale, class: "exact" });
    range.setAttribute("aria-label", `Strength of ${one.name}`);
    exact.setAttribute("aria-label", `Strength of ${one.name}, as a number`);
    const set = (value: number) => {
      one.scale = Number.isFinite(value) ? value : 0;
      range.value = exact.value = String(one.scale);
      save();
    };
    range.addEventListener("input", () => set(Number(range.value)));
    exact.addEventListener("change", () => {
      const value = Number(exact.value);
      const reach = String(Math.max(4, Math.abs(value)));
      [range.min, range.max] = [`-${reach}`, reach];
      set(value);
    });
    const names = vectors.map((each) => [each.name, each.name] as const);
    const shownNames = vectors.some((each) => each.name === one.name) ? names : [[one.name, `${one.name} (not registered)`] as const, ...names];
    const remove = button("Remove", () => (sliders.splice(sliders.indexOf(one), 1), drawSliders(), save()), "quiet");
    remove.setAttribute("aria-label", `Remove ${one.name}`);
    return h(
      "div",
      { class: "slider" },
      h(
        "div",
        { class: "pair" },
        field("Vector", select(shownNames, one.name, (name) => {
          one.name = name;
          const own = layersOf(context, context.server.vectors.find((each) => each.name === name));
          if (one.layer !== null && !own.includes(one.layer)) one.layer = middle(own);
          (drawSliders(), save());
        })),
        field("Layer", select([["all", "all its layers"], ...layers.map((each) => [String(each), String(each)] as const)], one.layer === null ? "all" : String(one.layer), (value) => ((one.layer = value === "all" ? null : Number(value)), save()))),
      ),
      h("div", { class: "strength" }, range, exact, remove),
    );
  }

  const edits = () => sliders.filter((one) => one.scale !== 0).map((one) => ({ op: "steer", vector: { name: one.name }, ...(one.layer === null ? {} : { layer: one.layer }), scale: one.scale }));

  function asked(isSteered: boolean): Asked {
    const given = edits();
    return {
      model: context.server.model,
      format: text(state, "format", "chat") === "text" ? "text" : "chat",
      messages: [{ role: "user", content: prompt.value }],
      maxTokens: number(state, "max", 80),
      temperature: 0,
      midstream: isSteered && given.length ? { edits: given } : undefined,
    };
  }

  async function run(): Promise<void> {
    if (running) return;
    if (!prompt.value.trim()) {
      prompt.focus();
      return;
    }
    const control = (running = new AbortController());
    [runButton.hidden, stopButton.hidden] = [true, false];
    const strengths = sliders.map((one) => `${one.name} ${one.scale > 0 ? "+" : ""}${short(one.scale)}`).join(", ");
    const plain = pane("Plain", "no edits");
    const steered = pane("Steered", strengths || "no edits");
    panes.replaceChildren(plain.element, steered.element);
    await Promise.all([read(plain, asked(false), control.signal), read(steered, asked(true), control.signal)]);
    running = null;
    [runButton.hidden, stopButton.hidden] = [false, true];
    compare(plain.tokens, steered.tokens, steered.element);
  }

  async function read(into: Pane, given: Asked, signal: AbortSignal): Promise<void> {
    into.element.setAttribute("aria-busy", "true");
    try {
      for await (const update of generate(given, signal)) {
        into.tokens.add(...update.pieces);
        const receipt = update.results?.receipt;
        if (receipt?.edited) into.foot.textContent = `${receipt.edited.applied} of ${receipt.edited.expected} edits applied`;
      }
    } catch (error) {
      append(into.element, isAbort(error) ? h("p", { class: "hint" }, "Stopped.") : notice("error", told(error)));
    }
    into.tokens.draw(true);
    into.element.removeAttribute("aria-busy");
  }

  function snippets() {
    const given = asked(true);
    const names = edits().length ? ["Steer"] : [];
    const steering = edits().map((one) => pyCall("Steer", [py(one.vector.name)], { layer: "layer" in one ? one.layer : undefined, scale: one.scale }));
    const isChat = given.format === "chat";
    const common = { model: given.model, max_tokens: given.maxTokens, temperature: 0 };
    const to = (more: Record<string, unknown>) => pyCall(isChat ? "client.chat" : "client.complete", [isChat ? "messages" : "prompt"], { ...common, ...more });
    const first = isChat ? `messages = ${py(given.messages)}` : `prompt = ${py(prompt.value)}`;
    const more = steering.length ? { steer: new Code(steering.length > 1 ? `[${steering.join(", ")}]` : steering[0]!) } : {};
    return {
      python: `${pyClient(names)}${first}\nplain = ${to({})}\nsteered = ${to(more)}\nprint(plain.text)\nprint(steered.text)\n`,
      curl: curl("POST", pathOf(given), plainBody(given)),
    };
  }

  drawSliders();
  panes.append(emptyState("Plain beside steered", "Both answers are decoded greedily and at the same time, so that every difference is the steering’s."));
  const aside = h(
    "aside",
    { class: "panel", "aria-label": "Settings" },
    h("div", { class: "stack" }, rows, button("Add a vector", () => vectors.length && (sliders.push(fresh()), drawSliders(), save()))),
    h("details", { class: "more" }, h("summary", {}, "Model settings"), h("div", { class: "stack" }, formatSelect(text(state, "format", "chat"), (value) => ((state["format"] = value), save())), field("Most tokens", maxTokens))),
  );
  const main = h("div", { class: "main" }, h("form", { class: "composer top", submit: (event: Event) => (event.preventDefault(), void run()) }, field("Prompt", prompt), h("div", { class: "row" }, runButton, stopButton)), panes, code.element);
  return {
    element: page("Steer", "Add vectors to the residual stream while the model writes.", aside, main),
    stop: () => running?.abort(),
  };
}

interface Pane {
  element: HTMLElement;
  tokens: TokenText;
  foot: HTMLElement;
}

function pane(title: string, subtitle: string): Pane {
  const tokens = new TokenText(title, null);
  const foot = h("p", { class: "pane-foot" });
  const element = h("article", { class: "pane", "aria-label": title }, h("h2", {}, title, h("small", {}, subtitle)), tokens.element, foot);
  return { element, tokens, foot };
}

function compare(plain: TokenText, steered: TokenText, element: HTMLElement): void {
  const nth = steered.tokens.findIndex((one, at) => one.text !== plain.tokens[at]?.text);
  if (!steered.tokens.length || !plain.tokens.length) return;
  const told = nth < 0 ? "Both answers are the same." : `The answers differ from token ${nth + 1} on.`;
  element.querySelector(".pane-foot")!.append(element.querySelector(".pane-foot")!.textContent ? ` · ${told}` : told);
}

function readSliders(value: unknown): Slider[] {
  if (!Array.isArray(value)) return [];
  return value
    .filter((one) => Array.isArray(one) && typeof one[0] === "string")
    .map(([name, layer, scale]) => ({ name, layer: Number.isInteger(layer) ? layer : null, scale: typeof scale === "number" ? scale : 1 }));
}
