/** State of a view, in the fragment of the URL: every view is a link. */

export type State = Record<string, unknown>;

export interface Place {
  view: string;
  state: State;
}

/** Reads `#/view?name=value`: values are JSON, or else text. */
export function readPlace(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const state: State = {};
  for (const [name, value] of new URLSearchParams(query)) {
    if (name !== "__proto__") state[name] = parsed(value);
  }
  return { view: path, state };
}

export function hashOf(view: string, state: State): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === undefined || value === null || value === "") continue;
    query.set(name, written(value));
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** Replaces the fragment without a new entry in the history. */
export function keep(view: string, state: State): void {
  history.replaceState(null, "", hashOf(view, state));
}

function parsed(value: string): unknown {
  if (!/^(?:[[{"]|-?\d|true$|false$)/.test(value)) return value;
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}

function written(value: unknown): string {
  if (typeof value === "string" && parsed(value) === value) return value;
  return JSON.stringify(value);
}

export function text(state: State, name: string, other = ""): string {
  const value = state[name];
  return typeof value === "string" ? value : typeof value === "number" ? String(value) : other;
}

export function number(state: State, name: string, other: number): number {
  const value = state[name];
  return typeof value === "number" && Number.isFinite(value) ? value : other;
}
