/** Studio: the frame around the views. */

import { ApiError, keys, readServer, readVectors, setKeys, told, watch, type Server } from "./api";
import { copied } from "./code";
import type { Context, MakeView, View } from "./context";
import { button, field, h, notice } from "./dom";
import { readPlace } from "./state";
import { chat } from "./views/chat";
import { layers } from "./views/layers";
import { library } from "./views/library";
import { patching } from "./views/patching";
import { steer } from "./views/steer";

const VIEWS: readonly (readonly [path: string, title: string, make: MakeView])[] = [
  ["chat", "Chat", chat],
  ["steer", "Steer", steer],
  ["library", "Library", library],
  ["layers", "Layers × tokens", layers],
  ["patching", "Patching", patching],
];
const AGAIN_MS = 4000;

const app = document.querySelector<HTMLElement>("#app")!;
const main = h("main", { id: "main", tabindex: -1 });
const status = h("span", { class: "status", role: "status" });
const model = h("span", { class: "model" });
const nav = h("nav", { "aria-label": "Views" });
const dialog = h("dialog", { "aria-labelledby": "keys-title" });
const linkButton = button("Copy link", () => void copyLink(), "quiet");
let server: Server | null = null;
let view: View | null = null;
let shown: string | null = null;
let timer = 0;

app.append(
  h("a", { class: "skip", href: "#main", click: (event: Event) => (event.preventDefault(), main.focus()) }, "Skip to content"),
  h("header", { class: "top" }, h("a", { class: "brand", href: "#/chat" }, h("strong", {}, "midstream"), " studio"), nav, h("div", { class: "who" }, status, model, linkButton, button("API keys", openKeys, "quiet"))),
  main,
  dialog,
);

/** Copies the address of this view with its settings. */
async function copyLink(): Promise<void> {
  const isCopied = await copied(location.href);
  linkButton.textContent = isCopied ? "Copied" : "Copy the address";
  setTimeout(() => (linkButton.textContent = "Copy link"), 2000);
}

function openKeys(): void {
  const now = keys();
  const api = h("input", { type: "password", value: now.api, autocomplete: "off" });
  const admin = h("input", { type: "password", value: now.admin, autocomplete: "off" });
  const save = () => {
    setKeys({ api: api.value, admin: admin.value });
    dialog.close();
    void start();
  };
  dialog.replaceChildren(
    h(
      "form",
      { class: "stack", submit: (event: Event) => (event.preventDefault(), save()) },
      h("h2", { id: "keys-title" }, "Keys of this server"),
      field("API key", api, "Only if the server was started with --api-key."),
      field("Admin key", admin, "For changes of vectors, if the server has MIDSTREAM_ADMIN_KEY."),
      h("p", { class: "hint" }, "They are kept in this tab until it is closed, and sent to this server only."),
      h("div", { class: "row" }, h("button", { type: "submit", class: "primary" }, "Use them"), button("Cancel", () => dialog.close())),
    ),
  );
  dialog.showModal();
}

async function start(): Promise<void> {
  main.setAttribute("aria-busy", "true");
  try {
    server = await readServer();
    model.textContent = server.model;
    model.title = `${server.model} · midstream ${server.version}`;
    shown = null;
    route();
  } catch (error) {
    const isKey = error instanceof ApiError && error.needsKey;
    view?.stop();
    view = null;
    main.replaceChildren(
      h("div", { class: "empty" }, h("h1", {}, isKey ? "This server wants a key" : "No server"), notice(isKey ? "info" : "error", isKey ? "Give the API key that it was started with." : told(error)), isKey ? button("Give the key", openKeys, "primary") : button("Try again", () => void start(), "primary")),
    );
    if (isKey) openKeys();
  }
  main.removeAttribute("aria-busy");
}

function route(): void {
  if (!server || location.hash === shown) return;
  shown = location.hash;
  const { view: path, state } = readPlace(location.hash);
  const [name, title, make] = VIEWS.find(([each]) => each === path) ?? VIEWS[0]!;
  view?.stop();
  const context: Context = {
    server,
    refresh: async () => {
      context.server.vectors = await readVectors();
    },
  };
  document.title = `${title} · midstream studio`;
  nav.replaceChildren(...VIEWS.map(([each, label]) => h("a", { href: `#/${each}`, "aria-current": each === name ? "page" : null }, label)));
  // Not by scrollIntoView: since Chromium 150, the first Tab then goes on behind the link.
  const current = nav.querySelector<HTMLElement>("[aria-current]");
  if (current) nav.scrollLeft = current.offsetLeft - nav.offsetLeft + (current.offsetWidth - nav.clientWidth) / 2;
  view = make(context, state);
  main.replaceChildren(view.element);
  if (main.dataset["was"]) window.scrollTo({ top: 0 });
  main.dataset["was"] = name;
}

watch((isThere) => {
  clearTimeout(timer);
  status.textContent = isThere ? "" : "server unreachable";
  status.classList.toggle("gone", !isThere);
  if (!isThere) timer = window.setTimeout(() => void readVectors().catch(() => {}), AGAIN_MS);
});
addEventListener("hashchange", route);
void start();
