/** Steer: one prompt, answered at several strengths side by side. */

import { isAbort, told, type VectorInfo } from "../api";
import { Code, CodePanel, curl, py, pyCall, pyClient } from "../code";
import { coloringOf, type Coloring } from "../coloring";
import { directions, emptyState, isFitted, formatSelect, layersOf, middle, page, siteOf, type Context, type View } from "../context";
import { append, button, field, h, notice, select } from "../dom";
import { savePicture, saveVector } from "../download";
import { EXAMPLES, fitVector, type Example } from "../fit";
import { generate, pathOf, plainBody, type Asked } from "../generate";
import { Scale, short, type Paint } from "../scale";
import { keep, number, text, type State } from "../state";
import { TokenText } from "../tokens";

interface Slider {
  name: string;
  /** null: every layer of the vector. */
  layer: number | null;
  scale: number;
}

/** What the strengths of the sliders are multiplied by, one answer for each. */
const FACTORS = { five: [-1, -0.5, 0, 0.5, 1], two: [0, 1] } as const;
const SLIDER_MS = 250;

export function steer(context: Context, state: State): View {
  const sliders = readSliders(state["v"]);
  const vectors = () => directions(context);
  if (!sliders.length && vectors().length) sliders.push(fresh(vectors()[0]!));
  let running: AbortController | null = null;
  let timer = 0;
  const control = new AbortController();

  const save = () => {
    state["v"] = sliders.length ? sliders.map((slider) => [slider.name, slider.layer, slider.scale]) : undefined;
    keep("steer", state);
    code.update();
  };
  const code = new CodePanel(snippets);
  const prompt = h("textarea", { rows: 2, value: text(state, "prompt"), placeholder: "How was your day?", input: () => ((state["prompt"] = prompt.value), save()), keydown: (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), void run());
  } });
  const maxTokens = h("input", { type: "number", min: 1, max: 100000, value: number(state, "max", 48), change: () => ((state["max"] = Math.max(1, Math.round(Number(maxTokens.value)) || 48)), save()) });
  const rows = h("div", { class: "sliders" });
  const runButton = button("Answer", () => void run(), "primary");
  const stopButton = button("Stop", () => running?.abort());
  const pictureButton = button("Save picture", () => void picture());
  stopButton.hidden = true;
  pictureButton.disabled = true;
  const said = h("div", { "aria-live": "polite" });
  const panes = h("div", { class: "panes" });
  const legend = h("div", { class: "legend" });
  let shown: Pane[] = [];

  function fresh(vector: VectorInfo): Slider {
    return { name: vector.name, layer: middle(layersOf(context, vector)), scale: 1 };
  }

  // -------------------------------------------------------------- vectors

  function drawSliders(): void {
    const missing = EXAMPLES.filter((example) => !sliders.some((slider) => slider.name === example.name));
    rows.replaceChildren(...sliders.map(sliderRow));
    if (!sliders.length) rows.append(h("p", { class: "hint" }, "No vector is chosen. Take an example, or ", h("a", { href: "#/library" }, "register or fit one"), "."));
    if (missing.length) rows.append(h("div", { class: "examples" }, h("p", { class: "hint" }, "Examples, fitted when first used:"), h("div", { class: "chips" }, ...missing.map((example) => exampleChip(example)))));
  }

  function exampleChip(example: Example): HTMLElement {
    return button(example.title, () => void take(example));
  }

  /** Steers by an example, which is fitted first if need be. */
  async function take(example: Example): Promise<void> {
    running?.abort();
    try {
      const isKnown = vectors().some((vector) => vector.name === example.name);
      // Without the fit in this tab, the colours' units are unknown.
      if (!isKnown || (context.server.admin && !isFitted(example.name))) {
        said.replaceChildren(notice("info", `Fitting “${example.title}” to ${example.positive.length} pairs of sentences …`));
        await fitVector(context, { name: example.name, positive: example.positive, negative: example.negative }, control.signal);
      }
      said.replaceChildren();
    } catch (error) {
      if (!control.signal.aborted) said.replaceChildren(notice("error", told(error)));
      return;
    }
    const vector = vectors().find((registered) => registered.name === example.name);
    sliders.splice(0, sliders.length, { ...fresh(vector!), scale: example.scale });
    if (!prompt.value.trim()) state["prompt"] = prompt.value = example.prompt;
    drawSliders();
    save();
    await run();
  }

  function sliderRow(slider: Slider): HTMLElement {
    const vector = context.server.vectors.find((registered) => registered.name === slider.name);
    const layers = layersOf(context, vector);
    const most = Math.max(4, Math.abs(slider.scale));
    const range = h("input", { type: "range", min: -most, max: most, step: 0.1, value: slider.scale });
    const exact = h("input", { type: "number", step: 0.1, value: slider.scale, class: "exact" });
    range.setAttribute("aria-label", `Strength of ${slider.name}`);
    exact.setAttribute("aria-label", `Strength of ${slider.name}, as a number`);
    const set = (value: number) => {
      slider.scale = Number.isFinite(value) ? value : 0;
      range.value = exact.value = String(slider.scale);
      changed();
    };
    range.addEventListener("input", () => set(Number(range.value)));
    exact.addEventListener("change", () => {
      const value = Number(exact.value);
      const reach = String(Math.max(4, Math.abs(value)));
      [range.min, range.max] = [`-${reach}`, reach];
      set(value);
    });
    const names = vectors().map((registered) => [registered.name, registered.name.replace(/^example\/(.*)/, "$1 (example)")] as const);
    const shownNames = vectors().some((registered) => registered.name === slider.name) ? names : [[slider.name, `${slider.name} (not registered)`] as const, ...names];
    const remove = button("Remove", () => (sliders.splice(sliders.indexOf(slider), 1), drawSliders(), changed()), "quiet");
    remove.setAttribute("aria-label", `Remove ${slider.name}`);
    const file = button("Save file", () => void saveVector(slider.name, control.signal).catch((error) => said.replaceChildren(notice("error", told(error)))), "quiet");
    file.setAttribute("aria-label", `Save ${slider.name} as a file`);
    return h(
      "div",
      { class: "slider" },
      h(
        "div",
        { class: "pair" },
        field("Vector", select(shownNames, slider.name, (name) => {
          slider.name = name;
          const own = layersOf(context, context.server.vectors.find((registered) => registered.name === name));
          if (slider.layer !== null && !own.includes(slider.layer)) slider.layer = middle(own);
          (drawSliders(), changed());
        })),
        field("Layer", select([["all", "all its layers"], ...layers.map((layer) => [String(layer), String(layer)] as const)], slider.layer === null ? "all" : String(slider.layer), (value) => ((slider.layer = value === "all" ? null : Number(value)), changed()))),
      ),
      h("div", { class: "strength" }, range, exact),
      h("div", { class: "row tight" }, file, remove),
    );
  }

  /** Keeps the choice, and answers again with it once there are answers. */
  function changed(): void {
    save();
    clearTimeout(timer);
    if (shown.length && prompt.value.trim()) timer = window.setTimeout(() => void run(), SLIDER_MS);
  }

  function addVector(): void {
    const other = vectors().find((vector) => !sliders.some((slider) => slider.name === vector.name)) ?? vectors()[0];
    if (!other) return;
    sliders.push(fresh(other));
    drawSliders();
    changed();
  }

  // -------------------------------------------------------------- requests

  const factors = (): readonly number[] => FACTORS[text(state, "show", "five") === "two" ? "two" : "five"];
  const scaled = (factor: number) => sliders.map((slider) => ({ ...slider, scale: +(slider.scale * factor).toPrecision(6) })).filter((slider) => slider.scale !== 0);
  const edits = (factor: number) => scaled(factor).map((slider) => ({ op: "steer", vector: { name: slider.name }, ...(slider.layer === null ? {} : { layer: slider.layer }), scale: slider.scale }));

  /** Reads the first vector at the layer where it steers. */
  function coloring(): (Coloring & { layer: number }) | null {
    const first = sliders[0];
    const vector = vectors().find((registered) => registered.name === first?.name);
    if (!first || !vector) return null;
    const layer = first.layer ?? middle(layersOf(context, vector));
    return { ...coloringOf(context, { color: "vector", vector: first.name, layer }), layer };
  }

  function asked(factor: number): Asked {
    const given = edits(factor);
    const midstream = { ...coloring()?.field, ...(given.length ? { edits: given } : {}) };
    return {
      model: context.server.model,
      format: text(state, "format", "chat") === "text" ? "text" : "chat",
      messages: [{ role: "user", content: prompt.value }],
      maxTokens: number(state, "max", 48),
      temperature: 0,
      midstream: Object.keys(midstream).length ? midstream : undefined,
    };
  }

  async function run(): Promise<void> {
    if (!prompt.value.trim()) return prompt.focus();
    clearTimeout(timer);
    running?.abort();
    const own = (running = new AbortController());
    const read = coloring();
    [runButton.hidden, stopButton.hidden, pictureButton.disabled] = [true, false, true];
    shown = factors().map((factor) => pane(factor, titleOf(factor), read?.paint ?? null));
    panes.className = `panes ${factors().length > 2 ? "many" : ""}`;
    panes.replaceChildren(...shown.map((one) => one.element));
    legend.replaceChildren();
    await Promise.all(shown.map((one) => answer(one, read, own.signal)));
    if (running !== own) return;
    running = null;
    [runButton.hidden, stopButton.hidden, pictureButton.disabled] = [false, true, false];
    if (read) sameScale(read);
    shown.forEach(compare);
  }

  function titleOf(factor: number): string {
    const given = scaled(factor);
    if (!given.length) return "not steered";
    return given.map((slider) => `${shortName(slider.name)} × ${short(slider.scale)}`).join(", ");
  }

  async function answer(into: Pane, read: Coloring | null, signal: AbortSignal): Promise<void> {
    into.element.setAttribute("aria-busy", "true");
    let start = 0;
    const shift = shiftOf(into.factor);
    try {
      for await (const update of generate(asked(into.factor), signal)) {
        start = update.start ?? start;
        into.tokens.add(...update.pieces.map((piece) => ({ text: piece.text })));
        if (update.results) read?.read(less(update.results, shift), start, into.tokens);
        const receipt = update.results?.receipt;
        if (receipt?.edited) into.foot.textContent = toldOf(receipt.edited, edits(into.factor).length);
      }
    } catch (error) {
      if (signal.aborted && running !== null && running.signal !== signal) return;
      append(into.element, isAbort(error) ? h("p", { class: "hint" }, "Stopped.") : notice("error", told(error)));
    }
    into.tokens.draw(true);
    into.element.removeAttribute("aria-busy");
  }

  /** What the first vector's own steering adds to its score at the layer where it is read. */
  function shiftOf(factor: number): number {
    const read = coloring();
    const vector = vectors().find((registered) => registered.name === sliders[0]?.name);
    if (!read || !vector) return 0;
    const at = vector.taps.findIndex((tap) => tap === null || (tap[0] === siteOf(vector) && tap[1] === read.layer));
    const norm = vector.norms[at] ?? 0;
    return scaled(factor).filter((slider) => slider.name === vector.name && (slider.layer === null || slider.layer === read.layer)).reduce((sum, slider) => sum + slider.scale * norm * norm, 0);
  }

  /** Colours all answers on one scale, so that they can be compared. */
  function sameScale(read: Coloring): void {
    if (!read.paint) return;
    const scores = shown.flatMap((one) => one.tokens.tokens.map((token) => token.score)).filter((score): score is number => score !== undefined && Number.isFinite(score));
    if (!scores.length) return;
    const sorted = [...scores].sort((a, b) => a - b);
    const center = typeof read.paint.center === "number" ? read.paint.center : sorted[sorted.length >> 1]!;
    // Single extreme tokens, such as the first one, would make all others pale.
    const reach = Math.max(...[0.02, 0.98].map((share) => Math.abs(sorted[Math.floor(share * (sorted.length - 1))]! - center))) || 1;
    const paint: Paint = { ...read.paint, center, limits: [center - reach, center + reach] };
    legend.replaceChildren(Scale.of(scores, paint).legend());
    for (const one of shown) one.tokens.recolor(paint, one.tokens.tokens.map(({ score, note }) => ({ score, note })));
  }

  function compare(one: Pane): void {
    const plain = shown.find((other) => other.factor === 0);
    if (!plain || one === plain || !one.tokens.tokens.length || !plain.tokens.tokens.length) return;
    const isSame = one.tokens.tokens.length === plain.tokens.tokens.length && one.tokens.tokens.every((token, index) => token.text === plain.tokens.tokens[index]?.text);
    if (isSame) one.foot.append(`${one.foot.textContent ? " · " : ""}same answer as not steered`);
  }

  async function picture(): Promise<void> {
    const title = `“${prompt.value.trim()}”`;
    try {
      await savePicture(title, context.server.model, shown.map((one) => ({ title: titleOf(one.factor), sign: Math.sign(one.factor), tokens: one.tokens })));
    } catch (error) {
      said.replaceChildren(notice("error", told(error)));
    }
  }

  // -------------------------------------------------------------- page

  function snippets() {
    const given = asked(1);
    const names = edits(1).length ? ["Steer"] : [];
    const isChat = given.format === "chat";
    const common = { model: given.model, max_tokens: given.maxTokens, temperature: 0 };
    const steers = edits(1).map((edit) => pyCall("Steer", [py(edit.vector.name)], { layer: "layer" in edit ? edit.layer : undefined, scale: new Code(`factor * ${edit.scale}`) }));
    const steering = steers.length ? { steer: new Code(steers.length > 1 ? `[${steers.join(", ")}]` : steers[0]!) } : {};
    const call = pyCall(isChat ? "client.chat" : "client.complete", [isChat ? "messages" : "prompt"], { ...common, ...steering });
    const first = isChat ? `messages = ${py(given.messages)}` : `prompt = ${py(prompt.value)}`;
    const body = `out = ${call}\nprint(factor, out.text)`.replaceAll("\n", "\n    ");
    return {
      python: `${pyClient(names)}${first}\nfor factor in ${py([...factors()])}:\n    ${body}\n`,
      curl: curl("POST", pathOf(given), plainBody(given)),
    };
  }

  function welcome(): HTMLElement {
    return emptyState(
      "Watch an answer turn",
      "A vector is added to what the model computes while it writes. The same prompt is answered at five strengths, without chance, so every difference is the vector’s.",
      h("div", { class: "chips" }, ...EXAMPLES.map((example) => exampleChip(example))),
    );
  }

  drawSliders();
  panes.append(welcome());
  const readOnly = context.server.admin ? null : notice("info", "This server lets nobody add vectors over HTTP. Start it with a key, or bound to 127.0.0.1.");
  const aside = h(
    "aside",
    { class: "panel", "aria-label": "Settings" },
    readOnly,
    h("div", { class: "stack" }, rows, button("Add a vector", addVector)),
    field("Answers", select([["five", "at five strengths"], ["two", "plain and steered"]], text(state, "show", "five"), (value) => ((state["show"] = value === "five" ? undefined : value), changed()))),
    h("details", { class: "more" }, h("summary", {}, "Model settings"), h("div", { class: "stack" }, formatSelect(text(state, "format", "chat"), (value) => ((state["format"] = value), changed())), field("Maximum tokens", maxTokens))),
  );
  const composer = h("form", { class: "composer still", submit: (event: Event) => (event.preventDefault(), void run()) }, field("Prompt", prompt), h("div", { class: "row" }, runButton, stopButton, pictureButton));
  const main = h("div", { class: "main" }, composer, said, panes, legend, code.element);
  return {
    element: page("Steer", "Add vectors to what the model computes while it writes.", aside, main),
    stop: () => {
      clearTimeout(timer);
      running?.abort();
      control.abort();
    },
  };
}

interface Pane {
  factor: number;
  element: HTMLElement;
  tokens: TokenText;
  foot: HTMLElement;
}

function pane(factor: number, title: string, paint: Paint | null): Pane {
  const tokens = new TokenText(title, paint);
  const foot = h("p", { class: "pane-foot" });
  const element = h("article", { class: `pane ${factor > 0 ? "more" : factor < 0 ? "less" : ""}`, "aria-label": title }, h("h2", {}, title), tokens.element, foot);
  return { factor, element, tokens, foot };
}

const shortName = (name: string) => name.replace(/^example\//, "");

/** What the receipt says of edits, in words of a visitor: it counts each vector at each token. */
function toldOf({ applied, expected }: { applied: number; expected: number }, vectors: number): string {
  const isWhole = applied === expected;
  if (isWhole && vectors && applied % vectors === 0) return `steered at ${applied / vectors} tokens`;
  return isWhole ? `${applied} edits of tokens` : `${applied} of ${expected} edits of tokens`;
}

/** Probe scores of an event, each less a number. */
function less(results: Record<string, any>, shift: number): Record<string, any> {
  const found = results["probes"]?.color;
  if (!shift || !found) return results;
  return { ...results, probes: { ...results["probes"], color: { ...found, scores: (found.scores as number[]).map((score) => score - shift) } } };
}

function readSliders(value: unknown): Slider[] {
  if (!Array.isArray(value)) return [];
  return value
    .filter((one) => Array.isArray(one) && typeof one[0] === "string")
    .map(([name, layer, scale]) => ({ name, layer: Number.isInteger(layer) ? layer : null, scale: typeof scale === "number" ? scale : 1 }));
}
