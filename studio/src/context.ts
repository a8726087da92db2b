/** What all views share. */

import type { Server, VectorInfo } from "./api";
import { field, h, select } from "./dom";
import type { State } from "./state";

export interface Context {
  server: Server;
  /** Reads the server's vectors again. */
  refresh: () => Promise<void>;
}

export interface View {
  element: HTMLElement;
  /** Ends what runs. */
  stop: () => void;
}

export type MakeView = (context: Context, state: State) => View;

export const STREAM_SITES = ["resid_post", "resid_mid", "resid_pre"];

/** Layers at which a vector can be used: its own, or all of them if it has none. */
export function layersOf(context: Context, vector: VectorInfo | undefined): number[] {
  const taps = (vector?.taps ?? []).filter((one) => one !== null);
  return taps.length ? taps.map((one) => one[1]) : (context.server.sites.get("resid_post") ?? []);
}

export function siteOf(vector: VectorInfo | undefined): string {
  return vector?.taps.find((one) => one !== null)?.[0] ?? "resid_post";
}

/** Vectors without whole edits, which have no direction to read. */
export function directions(context: Context): VectorInfo[] {
  return context.server.vectors.filter((one) => !one.edits?.length);
}

export function layerSelect(label: string, layers: number[], chosen: number, change: (layer: number) => void): HTMLElement {
  return field(label, select(layers.map((one) => [String(one), String(one)]), String(chosen), (value) => change(Number(value))));
}

export function middle(layers: number[]): number {
  return layers[Math.floor(layers.length / 2)] ?? 0;
}

export function formatSelect(format: string, change: (format: string) => void): HTMLElement {
  const options = [["chat", "Chat template"], ["text", "Plain text"]] as const;
  return field("Prompt format", select(options, format, change), "Plain text suits base models, which have no chat template.");
}

export function page(title: string, lead: string, aside: HTMLElement, main: HTMLElement): HTMLElement {
  return h(
    "section",
    { class: "view" },
    h("header", { class: "view-head" }, h("h1", {}, title), h("p", {}, lead)),
    h("div", { class: "columns" }, aside, main),
  );
}

export function emptyState(title: string, text: string, ...more: HTMLElement[]): HTMLElement {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text), ...more);
}

/** How a fit of this tab reads its directions: −1 at the negative class, 1 at the positive one. */
export interface Reading {
  bias: number;
  unit: number;
}

const READINGS = "midstream.readings";

export function readingOf(name: string, layer: number): Reading | undefined {
  return (JSON.parse(sessionStorage.getItem(READINGS) ?? "{}") as Record<string, Reading>)[`${name}@${layer}`];
}

/** Whether this tab has fitted a name. */
export function isFitted(name: string): boolean {
  const known = JSON.parse(sessionStorage.getItem(READINGS) ?? "{}") as Record<string, Reading>;
  return Object.keys(known).some((key) => key.startsWith(`${name}@`));
}

export function keepReadings(found: Record<string, Reading>): void {
  const known = JSON.parse(sessionStorage.getItem(READINGS) ?? "{}") as Record<string, Reading>;
  sessionStorage.setItem(READINGS, JSON.stringify({ ...known, ...found }));
}
