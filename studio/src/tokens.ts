/** A text whose tokens are coloured by a score: pointer, touch and arrow keys show the number. */

import { h } from "./dom";
import { Scale, type Paint } from "./scale";

export interface Mark {
  score?: number | undefined;
  note?: string | undefined;
}

export interface Token extends Mark {
  text: string;
}

export class TokenText {
  readonly element: HTMLElement;
  readonly tokens: Token[] = [];
  readonly #text: HTMLElement;
  readonly #readout: HTMLElement;
  readonly #legend: HTMLElement;
  readonly #foot: HTMLElement;
  #paint: Paint | null = null;
  #spans: HTMLElement[] = [];
  #active = -1;
  #scale: Scale | null = null;
  #drawn = 0;
  #frame = 0;
  #repaint = false;
  #scaledAt = 0;

  constructor(
    readonly label: string,
    paint: Paint | null,
  ) {
    this.#text = h("div", { class: "tokens", role: "group" });
    this.#readout = h("output", { class: "readout", "aria-live": "polite" });
    this.#legend = h("div", { class: "legend" });
    this.#foot = h("div", { class: "foot" }, this.#readout, this.#legend);
    this.element = h("div", { class: "token-text" }, this.#text, this.#foot);
    this.#use(paint);
    const at = (event: Event) => this.#spans.indexOf((event.target as HTMLElement).closest?.(".t") as HTMLElement);
    this.#text.addEventListener("pointerover", (event) => this.show(at(event)));
    this.#text.addEventListener("click", (event) => this.show(at(event)));
    this.#text.addEventListener("focus", () => this.show(Math.max(this.#active, 0)));
    this.#text.addEventListener("keydown", (event) => this.#key(event));
  }

  get paint(): Paint | null {
    return this.#paint;
  }

  /** Colours the tokens by other scores, one for each. */
  recolor(paint: Paint | null, marks: readonly Mark[]): void {
    this.#use(paint);
    this.tokens.forEach((token, nth) => ((token.score = marks[nth]?.score), (token.note = marks[nth]?.note)));
    this.#spans.forEach((span) => span.classList.remove("pos", "neg", "on"));
    this.draw(true);
    this.show(this.#active);
  }

  add(...tokens: Token[]): void {
    this.tokens.push(...tokens);
    this.#later();
  }

  /** Gives a token its score, once it is known. */
  score(nth: number, score: number, note?: string): void {
    const token = this.tokens[nth];
    if (!token) return;
    token.score = score;
    token.note = note ?? token.note;
    if (nth < this.#drawn) this.#color(nth);
    if (this.#scale && !this.#scale.has(score)) this.#repaint = true;
    if (nth === this.#active) this.show(nth);
    this.#later();
  }

  /** The scale of the colours; null before tokens have scores. */
  get scale(): Scale | null {
    return this.#scale;
  }

  /** From −1 to 1: how a token is coloured; 0 if it is not. */
  shareOf(nth: number): number {
    const score = this.tokens[nth]?.score;
    return this.#scale && score !== undefined && Number.isFinite(score) ? this.#scale.share(score) : 0;
  }

  show(nth: number): void {
    const token = this.tokens[nth];
    if (!token || !this.paint) return;
    this.#spans[this.#active]?.classList.remove("on");
    this.#active = nth;
    this.#spans[nth]?.classList.add("on");
    this.#readout.textContent =
      `${visible(token.text)}  ${token.score === undefined ? "no score" : this.paint.read(token.score)}` +
      (token.note ? `  ${token.note}` : "");
  }

  /** Draws what was added since the last time, and all colours again if the scale is another. */
  draw(isLast = false): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const added: HTMLElement[] = [];
    for (; this.#drawn < this.tokens.length; this.#drawn++) {
      const span = h("span", { class: "t" }, this.tokens[this.#drawn]!.text);
      this.#spans.push(span);
      added.push(span);
    }
    this.#text.append(...added);
    if (!this.paint) return;
    // The scale of thousands of tokens is not made again for each.
    if (this.#scale && !this.#repaint && !isLast && this.tokens.length < 1.1 * this.#scaledAt) {
      for (let nth = this.#drawn - added.length; nth < this.#drawn; nth++) this.#color(nth);
      return;
    }
    this.#scale = Scale.of(this.tokens.map((one) => one.score), this.paint);
    this.#scaledAt = this.tokens.length;
    this.#repaint = false;
    this.#spans.forEach((_, nth) => this.#color(nth));
    this.#legend.replaceChildren(this.#scale.legend());
  }

  #use(paint: Paint | null): void {
    this.#paint = paint;
    this.#foot.hidden = !paint;
    this.#text.setAttribute("aria-label", paint ? `${this.label}. Arrow keys go from token to token.` : this.label);
    if (paint) this.#text.setAttribute("tabindex", "0");
    else this.#text.removeAttribute("tabindex");
  }

  #later(): void {
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  #color(nth: number): void {
    const score = this.tokens[nth]!.score;
    this.#scale?.color(this.#spans[nth]!, score);
  }

  #key(event: KeyboardEvent): void {
    const last = this.tokens.length - 1;
    const to = { ArrowRight: this.#active + 1, ArrowLeft: this.#active - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const nth = Math.min(Math.max(to, 0), last);
    this.show(nth);
    this.#spans[nth]?.scrollIntoView({ block: "nearest" });
  }
}

/** A token's text with its white space shown. */
export function visible(text: string): string {
  return `“${text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣")}”`;
}
