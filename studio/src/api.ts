/** The server's public HTTP API. */

import { Events } from "./sse";

/** The server's address, without `/v1`: the page is at `…/midstream/`. */
export const base = new URL("..", location.href.split(/[?#]/)[0]).href.replace(/\/$/, "");

const KEYS = "midstream.keys";

export interface Keys {
  api: string;
  admin: string;
}

/** Keys last as long as the tab. */
export function keys(): Keys {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEYS) ?? "{}") as Partial<Keys>;
    return { api: String(found.api ?? ""), admin: String(found.admin ?? "") };
  } catch {
    return { api: "", admin: "" };
  }
}

export function setKeys(given: Keys): void {
  sessionStorage.setItem(KEYS, JSON.stringify(given));
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
  ) {
    super(message);
  }

  /** Whether a key is missing or wrong. */
  get needsKey(): boolean {
    return this.status === 401;
  }
}

const UNREACHABLE = "The server does not answer. It may have stopped, or the network may be down.";
const CUT = "The server stopped answering in the middle. What it had sent is kept.";

/** Called when the server answers (true) or cannot be reached (false). */
export let onReach: (isThere: boolean) => void = () => {};

export function watch(listener: (isThere: boolean) => void): void {
  onReach = listener;
}

export async function send(
  method: string,
  path: string,
  body?: unknown,
  signal?: AbortSignal,
  type = "application/json",
): Promise<Response> {
  const headers: Record<string, string> = {};
  const { api, admin } = keys();
  if (api) headers["authorization"] = `Bearer ${api}`;
  if (admin) headers["x-midstream-admin-key"] = admin;
  const init: RequestInit = { method, headers, cache: "no-store", signal: signal ?? null };
  if (body !== undefined) {
    headers["content-type"] = type;
    init.body = type === "application/json" ? JSON.stringify(body) : (body as BodyInit);
  }
  let answer: Response;
  try {
    answer = await fetch(base + path, init);
  } catch (error) {
    if (signal?.aborted) throw error;
    onReach(false);
    throw new ApiError(0, UNREACHABLE);
  }
  onReach(true);
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

export async function call<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const answer = await send(method, path, body, signal);
  const content = await answer.text().catch(() => {
    throw new ApiError(0, CUT);
  });
  return (content ? JSON.parse(content) : null) as T;
}

/** Yields the JSON of each event of a stream, until `[DONE]`. */
export async function* stream(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<Json> {
  const answer = await send("POST", path, body, signal);
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  const events = new Events();
  try {
    for (;;) {
      let part: ReadableStreamReadResult<string>;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal.aborted) throw error;
        onReach(false);
        throw new ApiError(0, CUT);
      }
      if (part.done) {
        onReach(false);
        throw new ApiError(0, CUT);
      }
      for (const data of events.feed(part.value)) {
        if (data === "[DONE]") return;
        const value = JSON.parse(data) as Json;
        if (value.error) throw errorIn(500, value);
        yield value;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export type Json = any;

async function errorOf(answer: Response): Promise<ApiError> {
  const content = await answer.text().catch(() => "");
  try {
    return errorIn(answer.status, JSON.parse(content));
  } catch {
    return new ApiError(answer.status, content.slice(0, 500) || `The server answered ${answer.status}.`);
  }
}

function errorIn(status: number, value: Json): ApiError {
  const error = value?.error ?? value;
  if (typeof error === "string") return new ApiError(status, error);
  const message = String(error?.message ?? error?.detail ?? JSON.stringify(error)).slice(0, 1000);
  return new ApiError(typeof error?.code === "number" ? error.code : status, message, error?.param ?? null);
}

/** Says what went wrong and what to do. */
export function told(error: unknown): string {
  if (!(error instanceof ApiError)) return error instanceof Error ? error.message : String(error);
  if (error.needsKey) return `${error.message}. Give the key under “API keys”.`;
  return error.message;
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

// ---------------------------------------------------------------- what the server has

export interface VectorInfo {
  name: string;
  taps: ([site: string, layer: number] | null)[];
  norms: number[];
  width: number;
  edits?: string[];
}

export interface Server {
  model: string;
  numLayers: number;
  hiddenSize: number;
  sites: Map<string, number[]>;
  vectors: VectorInfo[];
  lenses: string[];
  saes: string[];
  version: string;
  admin: boolean;
}

export async function readServer(): Promise<Server> {
  const [models, sites, status, vectors] = await Promise.all([
    call<Json>("GET", "/v1/models"),
    call<Json>("GET", "/v1/midstream/sites"),
    call<Json>("GET", "/v1/midstream/status"),
    readVectors(),
  ]);
  const tapped = new Map<string, number[]>();
  for (const one of sites.sites as Json[]) {
    if (!one.tapped || one.layer === null) continue;
    tapped.set(one.site, [...(tapped.get(one.site) ?? []), one.layer]);
  }
  return {
    model: models.data[0]?.id ?? "",
    numLayers: sites.num_layers,
    hiddenSize: sites.hidden_size,
    sites: tapped,
    vectors,
    lenses: ["logit", ...(status.lens_names ?? [])],
    saes: status.sae_names ?? [],
    version: status.midstream ?? "",
    admin: Boolean(status.admin),
  };
}

export async function readVectors(): Promise<VectorInfo[]> {
  return (await call<Json>("GET", "/v1/midstream/vectors")).vectors;
}

export async function textsOf(ids: number[]): Promise<Map<number, string>> {
  const distinct = [...new Set(ids)];
  if (!distinct.length) return new Map();
  const { texts } = await call<Json>("POST", "/v1/midstream/tokens", { ids: distinct });
  return new Map(distinct.map((id, nth) => [id, texts[nth] as string]));
}

/** Little-endian float32 or int32 numbers in base64. */
export function floats(base64: string): Float32Array {
  return new Float32Array(bytes(base64));
}

export function ints(base64: string): Int32Array {
  return new Int32Array(bytes(base64));
}

function bytes(base64: string): ArrayBuffer {
  return Uint8Array.from(atob(base64), (one) => one.charCodeAt(0)).buffer;
}
