/** Fits of directions, also of the ready examples, and how this tab reads what it fitted. */

import { call, floats, type Json } from "./api";
import { keepReadings, type Context, type Reading } from "./context";

export interface FitBody {
  positive: string[];
  negative: string[];
  name: string;
  method?: string;
  site?: string;
}

/** Fits and registers a direction. Returns the directions of the answer. */
export async function fitVector(context: Context, body: FitBody, signal: AbortSignal): Promise<Json> {
  const { directions } = await call<Json>("POST", "/v1/midstream/fit", body, signal);
  keepReadings(readings(body.name, directions.layers));
  await context.refresh();
  return directions;
}

/** Bias and unit by layer, with which a probe reads −1 and 1 at the class means. */
function readings(name: string, layers: Json[]): Record<string, Reading> {
  const found: Record<string, Reading> = {};
  for (const layer of layers) {
    if (!layer.midpoint) continue;
    const [vector, midpoint] = [floats(layer.vector.f32), floats(layer.midpoint.f32)];
    const dot = (a: Float32Array, b: Float32Array) => a.reduce((sum, value, index) => sum + value * b[index]!, 0);
    const unit = dot(vector, vector) / 2;
    if (unit > 0) found[`${name}@${layer.layer}`] = { bias: -dot(midpoint, vector), unit };
  }
  return found;
}

export interface Example {
  title: string;
  name: string;
  prompt: string;
  /** Strength at which it is shown first. */
  scale: number;
  positive: string[];
  negative: string[];
}

const THINGS = ["The food was", "Our holiday was", "The film was", "My job is", "My day was", "The party was", "Her answer was", "The concert was"];
const REQUESTS = ["send me the report", "close the door", "call me tomorrow", "wait a moment", "read this letter", "tell me the price", "help me with this", "come to the meeting"];

/** Vectors for any model that reads English. Each is fitted when it is first used. */
export const EXAMPLES: readonly Example[] = [
  {
    title: "Cheerful",
    name: "example/cheerful",
    prompt: "How was your day?",
    scale: 1,
    positive: THINGS.map((start) => `${start} wonderful.`),
    negative: THINGS.map((start) => `${start} terrible.`),
  },
  {
    title: "Formal",
    name: "example/formal",
    prompt: "Write a short message to a friend about dinner.",
    scale: 1,
    positive: REQUESTS.map((words) => `I would be most grateful if you could kindly ${words}, at your earliest convenience.`),
    negative: REQUESTS.map((words) => `hey dude, ${words} ok? lol thx`),
  },
];
