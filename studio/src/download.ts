/** Files that the page makes: a vector as safetensors, and a picture of answers. */

import { call, type Json } from "./api";
import { short } from "./scale";
import type { TokenText } from "./tokens";

export function download(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export const vectorPath = (name: string) => `/v1/midstream/vectors/${name.split("/").map(encodeURIComponent).join("/")}`;

/** Saves a registered vector in the format that `register` and `Directions.load` read. */
export async function saveVector(name: string, signal?: AbortSignal): Promise<void> {
  const found = await call<Json>("GET", vectorPath(name), undefined, signal);
  const header: Record<string, unknown> = { __metadata__: { name, format: "midstream" } };
  const parts: Uint8Array<ArrayBuffer>[] = [];
  let end = 0;
  (found.vectors as Json[]).forEach((vector, index) => {
    const data = Uint8Array.from(atob(vector.f32), (letter) => letter.charCodeAt(0));
    const tap = found.taps[index] as [string, number] | null;
    const shape = vector.shape ?? [data.length / 4];
    header[tap ? `${tap[0]}.${tap[1]}` : "vector"] = { dtype: "F32", shape, data_offsets: [end, (end += data.length)] };
    parts.push(data);
  });
  let text = JSON.stringify(header);
  text += " ".repeat((8 - (new TextEncoder().encode(text).length % 8)) % 8);
  const head = new TextEncoder().encode(text);
  const size = new DataView(new ArrayBuffer(8));
  size.setBigUint64(0, BigInt(head.length), true);
  download(`${name.replaceAll(/[^\w.-]+/g, "-")}.safetensors`, new Blob([size.buffer, head, ...parts]));
}

export interface Column {
  title: string;
  /** −1, 0 or 1: the colour of the line above it. */
  sign: number;
  tokens: TokenText;
}

const WIDTH = 1200;
const HEIGHT = 675;
const MARGIN = 40;
const GAP = 22;
const TOP = 128;
const BOTTOM = HEIGHT - 64;
const SIZES = [24, 22, 20, 18, 16, 15];

/** Draws answers side by side, each token on its colour, and saves them as PNG. */
export async function savePicture(title: string, model: string, columns: Column[]): Promise<void> {
  const style = getComputedStyle(document.documentElement);
  const colors = readColors();
  const [sans, serif] = [style.getPropertyValue("--sans"), style.getPropertyValue("--serif")];
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * WIDTH, 2 * HEIGHT];
  const draw = canvas.getContext("2d")!;
  draw.scale(2, 2);
  draw.fillStyle = colors["page"]!;
  draw.fillRect(0, 0, WIDTH, HEIGHT);
  const write = (text: string, x: number, y: number, font: string, color: string, most: number) => {
    draw.font = font;
    draw.fillStyle = colors[color]!;
    draw.fillText(cut(draw, text, most), x, y);
  };
  write(title, MARGIN, 62, `650 26px ${sans}`, "ink", WIDTH - 2 * MARGIN);
  write(`${model} · midstream`, MARGIN, HEIGHT - 26, `15px ${sans}`, "soft", WIDTH / 2 - MARGIN);
  const width = (WIDTH - 2 * MARGIN - GAP * (columns.length - 1)) / columns.length;
  // The largest type in which every answer is whole.
  const fits = (size: number) => {
    draw.font = `${size}px ${serif}`;
    return columns.every((column) => place(draw, column.tokens, width, size).every((piece) => TOP + piece.y <= BOTTOM));
  };
  const size = SIZES.find(fits) ?? SIZES.at(-1)!;
  columns.forEach((column, index) => {
    const left = MARGIN + index * (width + GAP);
    draw.fillStyle = colors[column.sign > 0 ? "hot" : column.sign < 0 ? "cold" : "soft"]!;
    draw.fillRect(left, 84, width, 3);
    write(column.title, left, 110, `600 16px ${sans}`, "ink", width);
    draw.font = `${size}px ${serif}`;
    for (const piece of place(draw, column.tokens, width, size)) {
      if (TOP + piece.y > BOTTOM) break;
      mark(draw, piece.share, left + piece.x, TOP + piece.y - 0.95 * size, piece.width, 1.25 * size, colors);
      draw.fillStyle = colors["ink"]!;
      draw.fillText(piece.text, left + piece.x, TOP + piece.y);
    }
  });
  drawLegend(draw, columns[0]!.tokens, `14px ${sans}`, colors);
  const blob = await new Promise<Blob | null>((done) => canvas.toBlob(done, "image/png"));
  if (!blob) throw new Error("This browser cannot make a picture.");
  download("midstream-steering.png", blob);
}

function readColors(): Record<string, string> {
  const probe = document.body.appendChild(document.createElement("span"));
  const found = ["page", "ink", "soft", "hot", "cold"].map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color] as const;
  });
  probe.remove();
  return Object.fromEntries(found);
}

function mark(draw: CanvasRenderingContext2D, share: number, x: number, y: number, width: number, height: number, colors: Record<string, string>): void {
  if (!share) return;
  draw.globalAlpha = Math.abs(share) * 0.62;
  draw.fillStyle = colors[share > 0 ? "hot" : "cold"]!;
  draw.fillRect(x, y, width, height);
  draw.globalAlpha = 1;
}

interface Piece {
  text: string;
  x: number;
  /** The base line, from the top of the column's text. */
  y: number;
  width: number;
  share: number;
}

/** Breaks the tokens of an answer into lines of a width, between words. */
function place(draw: CanvasRenderingContext2D, tokens: TokenText, width: number, size: number): Piece[] {
  const line = 1.45 * size;
  const found: Piece[] = [];
  let [x, y] = [0, size];
  for (const [index, token] of tokens.tokens.entries()) {
    for (const part of token.text.split(/(\n)/)) {
      let text = x ? part : part.trimStart();
      const isFull = x > 0 && startsWord(part) && x + draw.measureText(part + restOfWord(tokens, index)).width > width;
      if (part === "\n" || isFull || (x > 0 && x + draw.measureText(text).width > width)) [x, y, text] = [0, y + line, part.trim() ? part.trimStart() : ""];
      if (!text) continue;
      const wide = draw.measureText(text).width;
      found.push({ text, x, y, width: wide, share: tokens.shareOf(index) });
      x += wide;
    }
  }
  return found;
}

const startsWord = (text: string) => /^\s/.test(text);

/** The text of the tokens after one that belong to the same word. */
function restOfWord(tokens: TokenText, index: number): string {
  let rest = "";
  for (let next = index + 1; next < tokens.tokens.length && rest.length < 40; next++) {
    const text = tokens.tokens[next]!.text;
    if (startsWord(text)) break;
    rest += text;
  }
  return rest;
}

function drawLegend(draw: CanvasRenderingContext2D, tokens: TokenText, font: string, colors: Record<string, string>): void {
  const { scale } = tokens;
  if (!scale) return;
  draw.font = font;
  draw.textAlign = "right";
  let x = WIDTH - MARGIN;
  const y = HEIGHT - 26;
  const put = (text: string) => {
    draw.fillStyle = colors["soft"]!;
    draw.fillText(text, x, y);
    x -= draw.measureText(text).width + 8;
  };
  put(short(scale.high));
  for (const share of [...scale.steps()].reverse()) mark(draw, share, (x -= 13), y - 12, 13, 14, colors);
  x -= 8;
  put(short(scale.low));
  put(scale.paint.title);
  draw.textAlign = "left";
}

function cut(draw: CanvasRenderingContext2D, text: string, most: number): string {
  if (draw.measureText(text).width <= most) return text;
  let end = text.length;
  while (end > 1 && draw.measureText(`${text.slice(0, end)}…`).width > most) end--;
  return `${text.slice(0, end)}…`;
}
