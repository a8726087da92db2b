/** The code that reproduces a view: with the Python client, and with curl. */

import { base, keys } from "./api";
import { button, h } from "./dom";

/** A value as a Python literal. */
export function py(value: unknown, indent = ""): string {
  const deeper = `${indent}    `;
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value).replaceAll("\u007f", "\\x7f");
  if (Array.isArray(value)) return list(value.map((one) => py(one, deeper)), "[", "]", indent);
  if (typeof value === "object") {
    const parts = Object.entries(value).map(([name, one]) => `${py(name)}: ${py(one, deeper)}`);
    return list(parts, "{", "}", indent);
  }
  return String(value);
}

function list(parts: string[], open: string, close: string, indent: string): string {
  const line = open + parts.join(", ") + close;
  if (line.length + indent.length <= 80) return line;
  return `${open}\n${parts.map((one) => `${indent}    ${one},\n`).join("")}${indent}${close}`;
}

/** A call of a method with its arguments, one on each line. */
export function pyCall(method: string, positional: string[], named: Record<string, unknown>): string {
  const parts = [
    ...positional,
    ...Object.entries(named)
      .filter(([, value]) => value !== undefined)
      .map(([name, value]) => `${name}=${value instanceof Code ? value.text : py(value, "    ")}`),
  ];
  const line = `${method}(${parts.join(", ")})`;
  return line.length <= 80 ? line : `${method}(\n${parts.map((one) => `    ${one},\n`).join("")})`;
}

/** Python that is not a literal. */
export class Code {
  constructor(readonly text: string) {}
}

export function pyClient(names: string[]): string {
  const given = [py(base)];
  if (keys().api) given.push('api_key=os.environ["MIDSTREAM_KEY"]');
  if (keys().admin) given.push('admin_key=os.environ["MIDSTREAM_ADMIN_KEY"]');
  const os = given.length > 1 ? "import os\n\n" : "";
  return `${os}from midstream import ${["Client", ...names].sort().join(", ")}\n\nclient = Client(${given.join(", ")})\n`;
}

export function curl(method: string, path: string, body?: unknown, isStream = false): string {
  const parts = [`curl -sSf${isStream ? " -N" : ""}${method === "POST" ? "" : ` -X ${method}`} ${quoted(base + path)}`];
  if (keys().api) parts.push('-H "authorization: Bearer $MIDSTREAM_KEY"');
  if (keys().admin) parts.push('-H "x-midstream-admin-key: $MIDSTREAM_ADMIN_KEY"');
  if (body !== undefined) {
    parts.push("-H 'content-type: application/json'", `-d ${quoted(JSON.stringify(body, null, 2))}`);
  }
  return parts.join(" \\\n  ");
}

function quoted(text: string): string {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export interface Snippets {
  python: string;
  curl: string;
}

/** Copies a text. Returns false where the browser does not allow it, as on a page without TLS. */
export async function copied(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A folded panel with the code of a view, made when it is opened. */
export class CodePanel {
  readonly element: HTMLDetailsElement;
  readonly #code = h("code", {});
  #kind: keyof Snippets = "python";

  constructor(readonly make: () => Snippets) {
    const tabs = (["python", "curl"] as const).map((kind) => {
      const tab = button(kind === "python" ? "Python" : "curl", () => {
        this.#kind = kind;
        tabs.forEach((one) => one.setAttribute("aria-pressed", String(one === tab)));
        this.update();
      });
      tab.setAttribute("aria-pressed", String(kind === this.#kind));
      return tab;
    });
    const copy = button("Copy", async () => {
      copy.textContent = (await copied(this.#code.textContent ?? "")) ? "Copied" : "Select it to copy";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    this.element = h(
      "details",
      { class: "code", toggle: () => this.update() },
      h("summary", {}, "Code of this view"),
      h("div", { class: "row" }, h("div", { class: "segments" }, ...tabs), copy),
      h("pre", { tabindex: 0, "aria-label": "Code" }, this.#code),
    );
  }

  update(): void {
    if (this.element.open) this.#code.textContent = this.make()[this.#kind];
  }
}
