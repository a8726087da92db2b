/** Numbers as colours: blue below the centre, orange above it, the neutral colour at it. */

import { h } from "./dom";

export interface Paint {
  /** What the number is, for the legend. */
  title: string;
  /** The number with the neutral colour; "low": the smallest one; "median": the median. */
  center: number | "low" | "median";
  /** The ends, if they are known beforehand. */
  limits?: readonly [number, number];
  read: (score: number) => string;
}

export class Scale {
  private constructor(
    readonly low: number,
    readonly high: number,
    readonly center: number,
    readonly paint: Paint,
  ) {}

  static of(scores: readonly (number | null | undefined)[], paint: Paint): Scale {
    const known = scores.filter((one): one is number => typeof one === "number" && Number.isFinite(one));
    const sorted = [...known].sort((a, b) => a - b);
    let [low, high] = paint.limits ?? [sorted[0] ?? 0, sorted.at(-1) ?? 1];
    let center = low;
    if (paint.center !== "low") {
      center = paint.center === "median" ? (sorted[sorted.length >> 1] ?? 0) : paint.center;
      const reach = Math.max(Math.abs(low - center), Math.abs(high - center)) || 1;
      // Cells a little below the centre are noise.
      const isOneSided = known.length > 0 && sorted[0]! >= center - 0.05 * reach;
      [low, high] = [isOneSided ? center : center - reach, center + reach];
    }
    return new Scale(low, high, center, paint);
  }

  has(score: number): boolean {
    return score >= this.low && score <= this.high;
  }

  /** From −1 at the low end to 1 at the high one. */
  share(score: number): number {
    if (score === this.center) return 0;
    const span = score > this.center ? this.high - this.center : this.center - this.low;
    return span > 0 ? Math.max(-1, Math.min(1, (score - this.center) / span)) : 0;
  }

  color(element: HTMLElement, score: number | null | undefined): void {
    const has = typeof score === "number" && Number.isFinite(score);
    const share = has ? this.share(score) : 0;
    element.classList.toggle("pos", has && share > 0);
    element.classList.toggle("neg", has && share < 0);
    element.style.setProperty("--p", `${Math.round(Math.abs(share) * 100)}%`);
  }

  /** Shares of the colours of a legend, from the low end to the high one. */
  steps(): number[] {
    const first = this.center === this.low ? 0 : -4;
    return Array.from({ length: 5 - first }, (_, index) => (first + index) / 4);
  }

  legend(): HTMLElement {
    const ramp = h("span", { class: "ramp", "aria-hidden": "true" });
    for (const share of this.steps()) {
      const step = h("i");
      step.classList.toggle("pos", share > 0);
      step.classList.toggle("neg", share < 0);
      step.style.setProperty("--p", `${Math.abs(share) * 100}%`);
      ramp.append(step);
    }
    return h("span", { class: "legend-line" }, `${this.paint.title}`, h("span", {}, short(this.low)), ramp, h("span", {}, short(this.high)));
  }
}

/** A number in few digits, with a true minus. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size >= 1e5 || size < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(3));
  return text.replace("-", "−");
}

export function percent(value: number): string {
  return `${short(100 * value)} %`;
}
