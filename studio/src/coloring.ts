/** What colours the tokens of an answer: surprise, a vector, a lens, or a feature of an SAE. */

import { textsOf, type Json } from "./api";
import { Code, pyCall } from "./code";
import { directions, layerSelect, layersOf, middle, readingOf, siteOf, type Context } from "./context";
import { field, h, select } from "./dom";
import type { Piece } from "./generate";
import { featureRows, lensRows } from "./lens";
import { percent, short, type Paint } from "./scale";
import { number, text, type State } from "./state";
import { visible, type TokenText } from "./tokens";

export interface Coloring {
  /** Tells it from others: its scores are read only where it was asked for, unless `field` is null. */
  key: string;
  paint: Paint | null;
  /** The field `midstream` of the request; null: none is needed. */
  field: Record<string, unknown> | null;
  /** The same for the Python client: names to import, and arguments. */
  python: { names: string[]; named: Record<string, unknown> };
  /** Reads the scores of an event. */
  read: (results: Json, start: number, tokens: TokenText) => void;
  ofPiece: (piece: Piece) => number | undefined;
  /** Completes notes when the answer has ended. */
  end: (tokens: TokenText) => Promise<void>;
}

const KINDS = [
  ["none", "Nothing"],
  ["surprise", "Surprise: how unlikely each token was"],
  ["vector", "A vector, as a probe"],
  ["lens", "A lens"],
  ["feature", "A feature of an SAE"],
] as const;

/** The choice of a state; links of older versions say `confidence`. */
function kindOf(state: State): string {
  const kind = text(state, "color", "surprise");
  return kind === "confidence" ? "surprise" : kind;
}

export function coloringControls(context: Context, state: State, changed: () => void): HTMLElement {
  const box = h("div", { class: "stack" });
  const set = (name: string, value: unknown) => {
    state[name] = value;
    changed();
    draw();
  };
  const draw = () => {
    const kind = kindOf(state);
    const parts: HTMLElement[] = [field("Colour tokens by", select(KINDS, kind, (value) => set("color", value)))];
    if (kind === "vector") parts.push(...vectorControls(context, state, set));
    if (kind === "lens") parts.push(...lensControls(context, state, set));
    if (kind === "feature") parts.push(...featureControls(context, state, set));
    box.replaceChildren(...parts);
  };
  draw();
  return box;
}

type Set = (name: string, value: unknown) => void;

function vectorControls(context: Context, state: State, set: Set): HTMLElement[] {
  const vectors = directions(context);
  if (!vectors.length) return [h("p", { class: "hint" }, "No vectors are registered. ", h("a", { href: "#/library" }, "Register or fit one"), ".")];
  const { name, layer, layers } = vectorOf(context, state);
  return [
    field("Vector", select(vectors.map((one) => [one.name, one.name]), name, (value) => set("vector", value))),
    layerSelect("Layer", layers, layer, (value) => set("layer", value)),
  ];
}

function vectorOf(context: Context, state: State) {
  const vectors = directions(context);
  const name = text(state, "vector") || (vectors[0]?.name ?? "");
  const vector = vectors.find((one) => one.name === name);
  const layers = layersOf(context, vector);
  const wanted = number(state, "layer", middle(layers));
  return { name, vector, layers, layer: layers.includes(wanted) || !vector ? wanted : middle(layers) };
}

function lensControls(context: Context, state: State, set: Set): HTMLElement[] {
  const layers = context.server.sites.get("resid_post") ?? [];
  const word = h("input", { value: text(state, "word"), placeholder: " Paris", change: () => set("word", word.value) });
  return [
    field("Lens", select(context.server.lenses.map((one) => [one, one]), text(state, "lens", "logit"), (value) => set("lens", value))),
    layerSelect("Layer", layers, number(state, "layer", middle(layers)), (value) => set("layer", value)),
    field("Token", word, "Its probability at this layer. Empty: that of the likeliest token. A leading space counts."),
  ];
}

function featureControls(context: Context, state: State, set: Set): HTMLElement[] {
  const { saes } = context.server;
  if (!saes.length) return [h("p", { class: "hint" }, "The server has no SAEs. They are named by its setting “saes”.")];
  const index = h("input", { type: "number", min: 0, step: 1, value: number(state, "feature", 0), change: () => set("feature", Math.max(0, Math.round(Number(index.value)))) });
  return [
    field("SAE", select(saes.map((one) => [one, one]), text(state, "sae") || saes[0]!, (value) => set("sae", value))),
    field("Feature", index),
  ];
}

type Unkeyed = Omit<Coloring, "key">;

const NOTHING = {
  python: { names: [], named: {} },
  field: null,
  read: () => {},
  ofPiece: () => undefined,
  end: () => Promise.resolve(),
};

export function coloringOf(context: Context, state: State): Coloring {
  const made = chosen(context, state);
  return { ...made, key: JSON.stringify(made.field) };
}

function chosen(context: Context, state: State): Unkeyed {
  const kind = kindOf(state);
  if (kind === "vector" && (directions(context).length || text(state, "vector"))) return byVector(context, state);
  if (kind === "lens") return byLens(context, state);
  if (kind === "feature" && (context.server.saes.length || text(state, "sae"))) return byFeature(context, state);
  if (kind === "none") return { ...NOTHING, paint: null };
  return {
    ...NOTHING,
    paint: { title: "surprise (1 − probability)", center: "low", limits: [0, 1], read: (score) => `probability ${percent(1 - score)}` },
    ofPiece: (piece) => (piece.logprob === undefined ? undefined : 1 - Math.exp(piece.logprob)),
  };
}

function byVector(context: Context, state: State): Unkeyed {
  const { name, vector, layer } = vectorOf(context, state);
  const reading = readingOf(name, layer) ?? { bias: number(state, "bias", 0), unit: number(state, "unit", 1) };
  const isFitted = reading.unit !== 1 || reading.bias !== 0;
  if (isFitted) Object.assign(state, reading);
  const { bias, unit } = reading;
  const site = siteOf(vector);
  const probe = { layer, ...(bias ? { bias } : {}), ...(site === "resid_post" ? {} : { site }), name: "color", positions: "generated" };
  return {
    ...NOTHING,
    paint: {
      title: `${name}, layer ${layer}`,
      center: isFitted ? 0 : "median",
      read: (score) => `${name} ${short(score)}${isFitted ? "" : ` (⟨h, v⟩ at layer ${layer})`}`,
    },
    field: { probes: [{ direction: { name }, ...probe, positions: ["generated"] }] },
    python: { names: ["Probe"], named: { probes: new Code(pyCall("Probe", [JSON.stringify(name)], probe)) } },
    read: (results, start, tokens) => {
      const found = results.probes?.color;
      (found?.positions as number[] | undefined)?.forEach((place, nth) => tokens.score(place - start, Number(found.scores[nth]) / unit));
    },
  };
}

function byLens(context: Context, state: State): Unkeyed {
  const kind = text(state, "lens", "logit");
  const layer = number(state, "layer", middle(context.server.sites.get("resid_post") ?? []));
  const word = text(state, "word");
  const top = word ? 3 : 5;
  const tops = new Map<number, [id: number, logprob: number][]>();
  const lens = { layers: [layer], top, ...(word ? { tokens: [word] } : {}), positions: "generated", kind, stream: true };
  return {
    ...NOTHING,
    paint: {
      title: word ? `${visible(word)} next, layer ${layer}` : `likeliest next, layer ${layer}`,
      center: "low",
      limits: [0, 1],
      read: (score) => `${word ? visible(word) : "likeliest token"} ${percent(score)} at layer ${layer}`,
    },
    field: { capture: [{ ...lens, positions: ["generated"] }], activations: "none" },
    python: { names: ["Lens"], named: { capture: new Code(pyCall("Lens", [], lens)), activations: "none" } },
    read: (results, start, tokens) => {
      for (const part of results.lens ? [results.lens] : (results.lens_rows ?? [])) {
        const rows = lensRows(part[kind]);
        rows.positions.forEach((place, row) => {
          const chosen = word ? rows.tokenLogprobs[row * rows.tokens]! : rows.logprobs[row * top]!;
          tokens.score(place - start, Math.exp(chosen));
          tops.set(place - start, Array.from({ length: top }, (_, nth) => [rows.ids[row * top + nth]!, rows.logprobs[row * top + nth]!]));
        });
      }
    },
    end: async (tokens) => {
      const texts = await textsOf([...tops.values()].flatMap((one) => one.map(([id]) => id)));
      for (const [nth, found] of tops) {
        const score = tokens.tokens[nth]?.score;
        if (score === undefined) continue;
        tokens.score(nth, score, `next: ${found.map(([id, value]) => `${visible(texts.get(id) ?? "")} ${percent(Math.exp(value))}`).join(", ")}`);
      }
    },
  };
}

function byFeature(context: Context, state: State): Unkeyed {
  const sae = text(state, "sae") || context.server.saes[0]!;
  const feature = number(state, "feature", 0);
  const asked = { top: 0, features: [feature], positions: "generated", stream: true };
  return {
    ...NOTHING,
    paint: { title: `feature ${feature} of ${sae}`, center: "low", read: (score) => `feature ${feature}: ${short(score)}` },
    field: { capture: [{ sae, ...asked, positions: ["generated"] }], activations: "none" },
    python: { names: ["Features"], named: { capture: new Code(pyCall("Features", [JSON.stringify(sae)], asked)), activations: "none" } },
    read: (results, start, tokens) => {
      for (const part of results.features ? [results.features] : (results.feature_rows ?? [])) {
        const rows = featureRows(part[sae]);
        rows.positions.forEach((place, row) => tokens.score(place - start, rows.values[row * rows.count]!));
      }
    },
  };
}
