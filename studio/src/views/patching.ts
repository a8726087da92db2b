/** Patching: a heatmap of a sweep, which fills as its cells come. */

import { isAbort, stream, told, type Json } from "../api";
import { Code, CodePanel, curl, py, pyCall, pyClient } from "../code";
import { emptyState, page, type Context, type View } from "../context";
import { button, field, h, notice, select } from "../dom";
import { Grid } from "../grid";
import { percent, short, type Paint } from "../scale";
import { keep, text, type State } from "../state";

const PATH = "/v1/midstream/sweep";
const SITES = ["resid_pre", "resid_post", "resid_mid", "attn_out", "mlp_out"];
const TRY = { prompt: "The capital of Japan is", source: "The capital of France is", answer: " Paris", other: " Tokyo" };

export function patching(context: Context, state: State): View {
  let running: AbortController | null = null;
  const save = () => {
    keep("patching", state);
    code.update();
  };
  const input = (name: keyof typeof TRY) => {
    const box: HTMLInputElement = h("input", { value: text(state, name), placeholder: TRY[name], input: () => ((state[name] = box.value), save()) });
    return box;
  };
  const boxes = { prompt: input("prompt"), source: input("source"), answer: input("answer"), other: input("other") };
  const sites = SITES.filter((one) => context.server.sites.has(one));
  const site = () => text(state, "site") || (sites[0] ?? "resid_post");
  const out = h("div", { class: "result" });
  const runButton = button("Patch every cell", () => void run(), "primary");
  const stopButton = button("Stop", () => running?.abort());
  stopButton.hidden = true;

  const metric = () => (boxes.other.value ? { logit_diff: [boxes.answer.value, boxes.other.value] } : { logprob: boxes.answer.value });
  const body = () => ({ prompt: boxes.prompt.value, source: boxes.source.value, metric: metric(), sites: [site()], layers: "all", positions: "prompt", ...(text(state, "align") ? { align: text(state, "align") } : {}) });

  async function run(): Promise<void> {
    const missing = (["prompt", "source", "answer"] as const).find((name) => !boxes[name].value);
    if (missing) return boxes[missing].focus();
    if (running) return;
    const control = (running = new AbortController());
    [runButton.hidden, stopButton.hidden] = [true, false];
    const bar = h("progress", { max: 1, value: 0 });
    const line = h("p", { class: "hint", role: "status" }, "Running both prompts …");
    const head = h("div", { class: "progress" }, bar, line);
    out.replaceChildren(head);
    try {
      await read(control.signal, head, bar, line);
    } catch (error) {
      if (isAbort(error)) line.textContent = `Stopped. ${line.textContent}`;
      else head.replaceChildren(notice("error", told(error), button("Try again", () => void run())));
    }
    running = null;
    [runButton.hidden, stopButton.hidden] = [false, true];
  }

  async function read(signal: AbortSignal, head: HTMLElement, bar: HTMLProgressElement, line: HTMLElement): Promise<void> {
    let grid: Grid | null = null;
    let layers: number[] = [];
    let [known, cells] = [0, 0];
    const best: { value: number; told: string }[] = [];
    let recovered = (value: number): number | null => value;
    for await (const event of stream(PATH, { ...body(), model: context.server.model }, signal)) {
      if (event.type === "start") {
        layers = event.coords.layer;
        cells = event.cells;
        const { clean, corrupt } = event as { clean: number | null; corrupt: number };
        const span = clean === null ? 0 : clean - corrupt;
        if (span) recovered = (value) => (value - corrupt) / span;
        grid = new Grid(`${site()}, by layer and token`, [...layers].reverse().map(String), event.tokens, paintOf(event, span !== 0));
        out.replaceChildren(head, h("p", { class: "lead" }, leadOf(event)), grid.element);
      } else if (event.type === "cell" && grid) {
        const [, layer, position] = event.index as number[];
        const value: number | null = event.value === null ? null : Number(event.value);
        const score = value === null ? null : recovered(value);
        const told = value === null ? "no token of the source is there" : `${nameOf()} ${short(value)}, ${percent(score ?? 0)} recovered`;
        grid.set(layers.length - 1 - layer!, position!, { score, told });
        if (score !== null) best.push({ value: score, told: `layer ${layers[layer!]}, token ${position}: ${percent(score)}` });
        bar.value = ++known / cells;
        line.textContent = `${known} of ${cells} cells`;
      } else if (event.type === "result") {
        const top = best.sort((a, b) => b.value - a.value).slice(0, 3);
        line.textContent = `${known} cells · noise floor ${short(event.noise_floor)} · most: ${top.map((one) => one.told).join("; ")}`;
        bar.hidden = true;
        const problems = (event.receipts?.problems ?? []) as string[];
        if (problems.length) head.append(notice("error", `Receipts have problems: ${problems.slice(0, 3).join("; ")}`));
      }
    }
  }

  const nameOf = () => (boxes.other.value ? "logit difference" : "log-probability");

  function leadOf(event: Json): string {
    const clean = event.clean === null ? "" : `, the source ${short(event.clean)}`;
    return `Unpatched, the prompt has a ${nameOf()} of ${short(event.corrupt)}${clean}.`;
  }

  const code = new CodePanel(() => {
    const kind = boxes.other.value ? "LogitDiff" : "LogProb";
    const tokens = [boxes.answer.value, ...(boxes.other.value ? [boxes.other.value] : [])].map((one) => py(one));
    const align = text(state, "align") || undefined;
    const call = pyCall("client.sweep", [py(boxes.prompt.value), py(boxes.source.value), `${kind}(${tokens.join(", ")})`], {
      sites: site(), positions: "prompt", align, model: new Code(py(context.server.model)),
    });
    return {
      python: `${pyClient([kind])}sweep = ${call}\nprint(sweep.best(3))\n`,
      curl: curl("POST", PATH, body(), true),
    };
  });

  out.append(
    emptyState(
      "Which layer and token carry the answer?",
      "Each cell replaces one vector of the prompt by the source’s, and measures how much of the source’s answer comes back.",
      h("div", { class: "chips" }, button("Try: capitals of Japan and France", () => {
        for (const [name, value] of Object.entries(TRY)) state[name] = boxes[name as keyof typeof TRY].value = value;
        save();
        void run();
      })),
    ),
  );
  const aside = h(
    "aside",
    { class: "panel", "aria-label": "Settings" },
    h(
      "form",
      { class: "stack", submit: (event: Event) => (event.preventDefault(), void run()) },
      field("Prompt", boxes.prompt, "The one that is patched."),
      field("Source", boxes.source, "Where the vectors come from."),
      h("div", { class: "pair" }, field("Answer of the source", boxes.answer), field("Answer of the prompt", boxes.other)),
      h("p", { class: "hint" }, "The first token of each; a leading space counts. Without the second one, the log-probability of the first is measured."),
      h(
        "div",
        { class: "pair" },
        field("Site", select((sites.length ? sites : [site()]).map((one) => [one, one]), site(), (value) => ((state["site"] = value), save()))),
        field("If lengths differ", select([["", "refuse"], ["suffix", "align the ends"], ["prefix", "align the starts"]], text(state, "align"), (value) => ((state["align"] = value), save()))),
      ),
      h("div", { class: "row" }, runButton, stopButton),
    ),
  );
  const main = h("div", { class: "main" }, out, code.element);
  return { element: page("Patching", "Activation patching over layers and tokens.", aside, main), stop: () => running?.abort() };
}

function paintOf(event: Json, isShare: boolean): Paint {
  if (isShare) return { title: "recovered: 0 as the prompt, 1 as the source", center: 0, limits: [-1, 1], read: percent };
  return { title: "metric", center: event.corrupt, read: short };
}
