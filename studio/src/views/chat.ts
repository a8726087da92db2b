/** Chat: answers whose tokens are coloured by a score. */

import { isAbort, told } from "../api";
import { CodePanel, curl, py, pyCall, pyClient } from "../code";
import { coloringControls, coloringOf } from "../coloring";
import { emptyState, formatSelect, page, type Context, type View } from "../context";
import { button, field, h, notice } from "../dom";
import { generate, pathOf, plainBody, promptOf, type Asked, type Message, type Piece } from "../generate";
import { keep, number, text, type State } from "../state";
import { TokenText, type Mark } from "../tokens";

const PARTIAL = "midstream.partial";

/** An answer of this tab, with all scores that were read of it. */
interface Answer {
  article: HTMLElement;
  tokens: TokenText;
  pieces: Piece[];
  marks: Map<string, Mark[]>;
  why: HTMLElement;
}

export function chat(context: Context, state: State): View {
  const messages: Message[] = readMessages(state["m"]);
  const answers: Answer[] = [];
  let running: AbortController | null = null;
  let partial = "";
  let isLeaving = false;

  const log = h("div", { class: "log" });
  const prompt = h("textarea", { rows: 3, placeholder: "Say something. Enter sends, Shift+Enter makes a line.", keydown: onKey });
  prompt.setAttribute("aria-label", "Message");
  const sendButton = button("Send", submit, "primary");
  const stopButton = button("Stop", () => running?.abort());
  const clearButton = button("New chat", clear);
  const code = new CodePanel(snippets);

  const save = () => {
    state["m"] = messages.length ? messages : undefined;
    keep("chat", state);
    code.update();
  };
  const onChange = () => (save(), recolor());

  const system = h("textarea", { rows: 2, value: text(state, "system"), change: () => ((state["system"] = system.value), save()) });
  const maxTokens = h("input", { type: "number", min: 1, max: 100000, value: number(state, "max", 256), change: () => ((state["max"] = Math.max(1, Math.round(Number(maxTokens.value)) || 256)), save()) });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: number(state, "t", 0), change: () => ((state["t"] = Math.max(0, Number(temperature.value) || 0)), save()) });
  const aside = h(
    "aside",
    { class: "panel", "aria-label": "Settings" },
    coloringControls(context, state, onChange),
    h(
      "details",
      { class: "more" },
      h("summary", {}, "Model settings"),
      h(
        "div",
        { class: "stack" },
        formatSelect(text(state, "format", "chat"), (value) => ((state["format"] = value), save())),
        field("System prompt", system),
        h("div", { class: "pair" }, field("Maximum tokens", maxTokens), field("Temperature", temperature)),
      ),
    ),
  );

  function asked(): Asked {
    const format = text(state, "format", "chat") === "text" ? "text" : "chat";
    const given = text(state, "system");
    const own = coloringOf(context, state).field ?? undefined;
    return {
      model: context.server.model,
      format,
      messages: [...(given ? [{ role: "system", content: given } as const] : []), ...messages],
      maxTokens: number(state, "max", 256),
      temperature: number(state, "t", 0),
      midstream: own,
    };
  }

  function onKey(event: KeyboardEvent): void {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  }

  function submit(): void {
    const said = prompt.value;
    if (!said.trim() || running) return;
    prompt.value = "";
    messages.push({ role: "user", content: said });
    if (messages.length === 1) log.replaceChildren();
    log.append(saidBy("user", h("p", { class: "said" }, said)));
    save();
    void answer();
  }

  async function answer(): Promise<void> {
    const coloring = coloringOf(context, state);
    save();
    const control = (running = new AbortController());
    const tokens = new TokenText("Answer", coloring.paint);
    const why = h("p", { class: "hint", "aria-live": "polite" });
    const article = saidBy("assistant", tokens.element, why);
    const pieces: Piece[] = [];
    article.setAttribute("aria-busy", "true");
    log.append(article);
    follow(true);
    setBusy(true);
    partial = "";
    let start = 0;
    try {
      for await (const update of generate(asked(), control.signal)) {
        start = update.start ?? start;
        const isNear = nearEnd();
        pieces.push(...update.pieces);
        tokens.add(...update.pieces.map((one) => ({ text: one.text, score: coloring.ofPiece(one) })));
        partial += update.pieces.map((one) => one.text).join("");
        if (update.results) coloring.read(update.results, start, tokens);
        follow(isNear);
      }
      await coloring.end(tokens).catch(() => {});
    } catch (error) {
      if (isLeaving) return;
      const again = button("Answer again", () => redo(article));
      if (isAbort(error)) article.append(h("p", { class: "hint" }, "Stopped."));
      else article.append(notice("error", told(error), again));
    }
    tokens.draw(true);
    article.removeAttribute("aria-busy");
    running = null;
    const marks = new Map([[coloring.key, tokens.tokens.map(({ score, note }) => ({ score, note }))]]);
    answers.push({ article, tokens, pieces, marks, why });
    if (partial) messages.push({ role: "assistant", content: partial });
    sessionStorage.removeItem(PARTIAL);
    setBusy(false);
    save();
    recolor();
  }

  /** Colours the answers as is chosen now, where their scores are known, and else says why not. */
  function recolor(): void {
    const coloring = coloringOf(context, state);
    answers.forEach(({ article, tokens, pieces, marks, why }, nth) => {
      const known = coloring.field ? marks.get(coloring.key) : pieces.map((one) => ({ score: coloring.ofPiece(one) }));
      why.replaceChildren();
      if (known) return tokens.recolor(coloring.paint, known);
      why.append(`Not scored by “${coloring.paint?.title ?? ""}” when it was written${tokens.paint ? `: coloured by “${tokens.paint.title}”` : ""}. `);
      if (nth === answers.length - 1 && messages.at(-1)?.role === "assistant") why.append(button("Answer again", () => redo(article)));
    });
  }

  function redo(article: HTMLElement): void {
    if (running) return;
    article.remove();
    if (answers.at(-1)?.article === article) answers.pop();
    drop();
    void answer();
  }

  function drop(): void {
    if (messages.at(-1)?.role === "assistant") messages.pop();
  }

  function clear(): void {
    running?.abort();
    messages.length = 0;
    answers.length = 0;
    log.replaceChildren(welcome());
    save();
    prompt.focus();
  }

  function setBusy(isBusy: boolean): void {
    stopButton.hidden = !isBusy;
    sendButton.hidden = isBusy;
    clearButton.disabled = isBusy;
  }

  const nearEnd = () => window.innerHeight + window.scrollY > document.documentElement.scrollHeight - 160;

  function follow(is: boolean): void {
    if (is) requestAnimationFrame(() => window.scrollTo({ top: document.documentElement.scrollHeight }));
  }

  function welcome(): HTMLElement {
    const tries = ["What is the capital of France?", "Write a short poem about the sea.", "Explain gravity to a child."];
    return emptyState(
      "Talk to the model, token by token",
      "Each token of an answer is coloured by what you choose: how unlikely it was, a vector, a lens, or a feature of an SAE.",
      h("div", { class: "chips" }, ...tries.map((one) => button(one, () => ((prompt.value = one), submit())))),
    );
  }

  function snippets() {
    const given = asked();
    const { python } = coloringOf(context, state);
    const isChat = given.format === "chat";
    const prompted = isChat ? { messages: given.messages } : {};
    const call = pyCall("client.stream", isChat ? [] : [py(promptOf(given.messages))], {
      ...prompted, model: given.model, max_tokens: given.maxTokens, temperature: given.temperature, ...python.named,
    });
    const shown = python.named["probes"] ? ', out.probes["color"]' : python.named["capture"] ? `, out.${python.names[0] === "Lens" ? "lens" : "features"}` : "";
    return {
      python: `${pyClient(python.names)}for out in ${call}:\n    pass\nprint(out.text${shown})\n`,
      curl: curl("POST", pathOf(given), { ...plainBody(given), stream: true }, true),
    };
  }

  /** Messages of the link, and an answer that a reload cut off. */
  function restore(): void {
    if (!messages.length) return log.replaceChildren(welcome());
    for (const one of messages) {
      const tokens = new TokenText("Answer", null);
      tokens.add({ text: one.content });
      log.append(saidBy(one.role, one.role === "assistant" ? tokens.element : h("p", { class: "said" }, one.content)));
    }
    if (messages.at(-1)!.role !== "user") {
      log.append(h("div", { class: "row" }, button("Answer again, coloured", () => (log.querySelectorAll("article:last-of-type, .row").forEach((one) => one.remove()), drop(), void answer()))));
      return;
    }
    const kept = JSON.parse(sessionStorage.getItem(PARTIAL) ?? "{}") as { hash?: string; text?: string };
    const had = kept.hash === location.hash ? (kept.text ?? "") : "";
    const article = saidBy("assistant", h("p", { class: "said" }, had));
    article.append(
      notice("info", "This answer was cut off when the page was reloaded.", button("Answer again", () => (article.remove(), void answer()))),
    );
    log.append(article);
  }

  const onHide = () => {
    isLeaving = true;
    if (running) sessionStorage.setItem(PARTIAL, JSON.stringify({ hash: location.hash, text: partial }));
  };
  // The browser cuts the stream between these two.
  window.addEventListener("beforeunload", onHide);
  window.addEventListener("pagehide", onHide);
  restore();
  setBusy(false);
  const composer = h("form", { class: "composer", submit: (event: Event) => (event.preventDefault(), submit()) }, prompt, h("div", { class: "row" }, sendButton, stopButton, clearButton));
  const main = h("div", { class: "main" }, log, composer, code.element);
  return {
    element: page("Chat", "Answers whose tokens show what the model computes.", aside, main),
    stop: () => {
      window.removeEventListener("beforeunload", onHide);
      window.removeEventListener("pagehide", onHide);
      running?.abort();
    },
  };
}

function saidBy(role: Message["role"], ...content: HTMLElement[]): HTMLElement {
  return h("article", { class: `message ${role}` }, h("h2", {}, role === "user" ? "You" : role === "system" ? "System" : "Model"), ...content);
}

function readMessages(value: unknown): Message[] {
  if (!Array.isArray(value)) return [];
  return value.filter((one): one is Message => ["user", "assistant", "system"].includes(one?.role) && typeof one?.content === "string");
}
