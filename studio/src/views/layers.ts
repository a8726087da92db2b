/** Layers × tokens: what each layer would say next, or how far each layer goes along a vector. */

import { call, isAbort, textsOf, told, type Json } from "../api";
import { Code, CodePanel, curl, py, pyCall, pyClient } from "../code";
import { directions, emptyState, formatSelect, layersOf, page, siteOf, type Context, type View } from "../context";
import { button, field, h, notice, select } from "../dom";
import { promptOf, type Message } from "../generate";
import { Grid } from "../grid";
import { lensRows } from "../lens";
import { percent, short } from "../scale";
import { keep, text, type State } from "../state";
import { visible } from "../tokens";

/** A token's text in a cell: white space alone is shown as such. */
const word = (text: string) => (text.trim() ? text : text.replaceAll(" ", "␣")).replaceAll("\n", "⏎");

const TOP = 5;
const PROBES = 16; // scores of one token that a server allows by default

export function layers(context: Context, state: State): View {
  let running: AbortController | null = null;
  const save = () => {
    keep("layers", state);
    code.update();
  };
  const prompt = h("textarea", { rows: 3, value: text(state, "prompt"), placeholder: "The capital of France is", input: () => ((state["prompt"] = prompt.value), save()) });
  const out = h("div", { class: "result" });
  const runButton = button("Draw the map", () => void run(), "primary");
  const controls = h("div", { class: "stack" });
  const by = () => text(state, "by", "lens");
  const isChat = () => text(state, "format", "text") === "chat";
  const path = () => (isChat() ? "/v1/chat/completions" : "/v1/completions");
  const messages = (): Message[] => [{ role: "user", content: prompt.value }];

  function drawControls(): void {
    const set = (name: string, value: string) => {
      state[name] = value;
      save();
      drawControls();
    };
    const parts = [field("Map of", select([["lens", "a lens: likeliest next token"], ["vector", "a vector, as a probe"]], by(), (value) => set("by", value)))];
    if (by() === "lens") parts.push(field("Lens", select(context.server.lenses.map((one) => [one, one]), text(state, "lens", "logit"), (value) => set("lens", value))));
    else if (directions(context).length) parts.push(field("Vector", select(directions(context).map((one) => [one.name, one.name]), vectorName(), (value) => set("vector", value))));
    else parts.push(h("p", { class: "hint" }, "No vectors are registered. ", h("a", { href: "#/library" }, "Register or fit one"), "."));
    controls.replaceChildren(...parts, formatSelect(isChat() ? "chat" : "text", (value) => set("format", value)));
  }
  const vectorName = () => text(state, "vector") || (directions(context)[0]?.name ?? "");

  function common(): Record<string, unknown> {
    return { model: context.server.model, ...(isChat() ? { messages: messages() } : { prompt: promptOf(messages()) }), max_tokens: 1, temperature: 0 };
  }

  /** The fields `midstream` of the requests: probes are limited for each token. */
  function fields(): Record<string, unknown>[] {
    if (by() === "lens") return [{ capture: [{ layers: "all", top: TOP, positions: ["prompt"], kind: text(state, "lens", "logit") }], activations: "none" }];
    const vector = context.server.vectors.find((one) => one.name === vectorName());
    const own = layersOf(context, vector);
    const site = siteOf(vector);
    const probes = own.map((layer) => ({ direction: { name: vectorName() }, layer, ...(site === "resid_post" ? {} : { site }), name: `layer${layer}`, positions: ["prompt"] }));
    return Array.from({ length: Math.ceil(probes.length / PROBES) }, (_, nth) => ({ probes: probes.slice(nth * PROBES, (nth + 1) * PROBES) }));
  }

  async function run(): Promise<void> {
    if (!prompt.value.trim()) return prompt.focus();
    running?.abort();
    const control = (running = new AbortController());
    runButton.disabled = true;
    out.replaceChildren(notice("info", "Reading every layer …"));
    try {
      const bodies = fields().map((midstream) => ({ ...common(), return_token_ids: true, midstream }));
      if (!bodies.length) throw new Error("Choose a vector first.");
      const answers = await Promise.all(bodies.map((body) => call<Json>("POST", path(), body, control.signal)));
      const ids: number[] = answers[0].prompt_token_ids ?? answers[0].choices[0].prompt_token_ids;
      out.replaceChildren((by() === "lens" ? await lensGrid(ids, answers[0]) : await probeGrid(ids, answers)).element);
    } catch (error) {
      if (!isAbort(error)) out.replaceChildren(notice("error", told(error), button("Try again", () => void run())));
    }
    runButton.disabled = false;
  }

  async function lensGrid(ids: number[], answer: Json): Promise<Grid> {
    const rows = lensRows(answer.midstream.lens[text(state, "lens", "logit")]);
    const texts = await textsOf([...ids, ...rows.ids]);
    const from = [...rows.layers].reverse();
    const grid = new Grid("Likeliest next token of each layer", from.map(String), ids.map((id) => texts.get(id) ?? ""), {
      title: "probability", center: "low", limits: [0, 1], read: percent,
    });
    rows.positions.forEach((place, row) =>
      rows.layers.forEach((_, nth) => {
        const at = (row * rows.layers.length + nth) * rows.top;
        const words = Array.from({ length: rows.top }, (__, one) => `${visible(texts.get(rows.ids[at + one]!) ?? "")} ${percent(Math.exp(rows.logprobs[at + one]!))}`);
        grid.set(rows.layers.length - 1 - nth, place, {
          score: Math.exp(rows.logprobs[at]!),
          text: word(texts.get(rows.ids[at]!) ?? ""),
          told: `next: ${words.join(", ")}`,
        });
      }),
    );
    grid.draw();
    return grid;
  }

  async function probeGrid(ids: number[], answers: Json[]): Promise<Grid> {
    const texts = await textsOf(ids);
    const scores = Object.assign({}, ...answers.map((one) => one.midstream.probes)) as Record<string, Json>;
    const found = Object.keys(scores).map((name) => Number(name.slice(5))).sort((a, b) => b - a);
    const grid = new Grid(`${vectorName()} by layer`, found.map(String), ids.map((id) => texts.get(id) ?? ""), {
      title: vectorName(), center: "median", read: (score) => `⟨h, v⟩ ${short(score)}`,
    }, true);
    found.forEach((layer, row) => {
      const one = scores[`layer${layer}`];
      (one.positions as number[]).forEach((place, nth) => grid.set(row, place, { score: Number(one.scores[nth]) }));
    });
    grid.draw();
    return grid;
  }

  const code = new CodePanel(() => {
    const call_ = isChat() ? "client.chat" : "client.complete";
    const given = isChat() ? py(messages()) : py(promptOf(messages()));
    const rest = { model: context.server.model, max_tokens: 1, temperature: 0 };
    const kind = text(state, "lens", "logit");
    if (by() === "lens") {
      const lens = new Code(pyCall("Lens", [], { top: TOP, positions: "prompt", kind: kind === "logit" ? undefined : kind }));
      return {
        python: `${pyClient(["Lens"])}out = ${pyCall(call_, [given], { ...rest, capture: lens, activations: "none" })}\nprint(out.lens[${py(kind)}].grid())\n`,
        curl: curl("POST", path(), { ...common(), midstream: fields()[0] }),
      };
    }
    const own = layersOf(context, context.server.vectors.find((one) => one.name === vectorName())).slice(0, PROBES);
    const site = siteOf(context.server.vectors.find((one) => one.name === vectorName()));
    const more = site === "resid_post" ? "" : `, site=${py(site)}`;
    const probes = new Code(`[Probe(${py(vectorName())}, layer=n${more}, name=f"layer{n}", positions="prompt") for n in layers]`);
    return {
      python: `${pyClient(["Probe"])}layers = ${py(own)}  # a server allows ${PROBES} probes in a request\nout = ${pyCall(call_, [given], { ...rest, probes })}\nprint({name: out.probes[name] for name in out.probes})\n`,
      curl: curl("POST", path(), { ...common(), midstream: fields()[0] }),
    };
  });
  drawControls();
  out.append(emptyState("Look inside, layer by layer", "A lens shows which token each layer would choose next, the last layer at the top. A vector shows where in the prompt each layer goes along it."));
  const aside = h("aside", { class: "panel", "aria-label": "Settings" }, controls);
  const main = h("div", { class: "main" }, h("form", { class: "composer still", submit: (event: Event) => (event.preventDefault(), void run()) }, field("Prompt", prompt), h("div", { class: "row" }, runButton)), out, code.element);
  if (prompt.value) queueMicrotask(() => void run());
  return { element: page("Layers × tokens", "Every layer’s view of every token of a prompt.", aside, main), stop: () => running?.abort() };
}
