/** What a lens and an SAE return, decoded. */

import { floats, ints, type Json } from "./api";

export interface LensRows {
  positions: number[];
  layers: number[];
  top: number;
  ids: Int32Array;
  /** Log-probabilities of `ids`. */
  logprobs: Float32Array;
  /** Log-probabilities of the chosen tokens, [rows, layers, tokens]. */
  tokenLogprobs: Float32Array;
  tokens: number;
}

export function lensRows(value: Json): LensRows {
  const [, layers = 0, top = 0] = value.shape as number[];
  const sums = floats(value.logsumexp);
  const less = (numbers: Float32Array, width: number) =>
    numbers.map((one, nth) => one - sums[width ? Math.floor(nth / width) : 0]!);
  const tokens = (value.tokens as unknown[]).length;
  return {
    positions: value.positions,
    layers: value.layers,
    top: layers ? top : 0,
    ids: ints(value.ids),
    logprobs: less(floats(value.values), top),
    tokenLogprobs: less(floats(value.token_values), tokens),
    tokens,
  };
}

export interface FeatureRows {
  positions: number[];
  values: Float32Array;
  count: number;
}

/** Activations of the chosen features, [rows, features]. */
export function featureRows(value: Json): FeatureRows {
  return { positions: value.positions, values: floats(value.feature_values), count: value.features.length };
}
