/** A grid of layers and tokens, whose cells show their numbers to pointer, touch and arrow keys. */

import { h } from "./dom";
import { Scale, type Paint } from "./scale";
import { visible } from "./tokens";

export interface Cell {
  score?: number | null | undefined;
  text?: string | undefined;
  told?: string | undefined;
}

export class Grid {
  readonly element: HTMLElement;
  readonly cells: Cell[][];
  readonly #nodes: HTMLElement[][];
  readonly #readout = h("output", { class: "readout", "aria-live": "polite" });
  readonly #legend = h("div", { class: "legend" });
  #at: [number, number] = [0, 0];
  #frame = 0;

  /**
   * @param label what it shows
   * @param rows labels of the rows, the first at the top
   * @param columns texts of the columns
   * @param paint colours of all cells; rows are coloured each on its own if `byRow`
   */
  constructor(
    label: string,
    readonly rows: readonly string[],
    readonly columns: readonly string[],
    readonly paint: Paint,
    readonly byRow = false,
  ) {
    this.cells = rows.map(() => columns.map(() => ({})));
    this.#nodes = rows.map((_, row) =>
      columns.map((_, column) => h("td", { role: "gridcell", "data-at": `${row},${column}` })),
    );
    const head = h("tr", {}, h("td", { class: "corner" }, "layer ↑ token →"), ...columns.map((one) => h("th", { scope: "col" }, h("span", {}, visible(one).slice(1, -1)))));
    const table = h(
      "table",
      { role: "grid", tabindex: 0, "aria-label": `${label}. Arrow keys go from cell to cell.` },
      h("thead", {}, head),
      h("tbody", {}, ...this.#nodes.map((nodes, row) => h("tr", {}, h("th", { scope: "row" }, rows[row]!), ...nodes))),
    );
    const at = (event: Event) => (event.target as HTMLElement).closest?.("td[data-at]")?.getAttribute("data-at")?.split(",").map(Number);
    const point = (event: Event) => {
      const found = at(event);
      if (found) this.show(found[0]!, found[1]!);
    };
    table.addEventListener("pointerover", point);
    table.addEventListener("click", point);
    table.addEventListener("focus", () => this.show(...this.#at));
    table.addEventListener("keydown", (event) => this.#key(event));
    this.element = h("div", { class: "grid" }, h("div", { class: "scroll" }, table), h("div", { class: "foot" }, this.#readout, this.#legend));
  }

  set(row: number, column: number, cell: Cell): void {
    if (!this.cells[row]?.[column]) return;
    this.cells[row][column] = cell;
    this.#frame ||= requestAnimationFrame(() => this.draw());
  }

  show(row: number, column: number): void {
    this.#nodes[this.#at[0]]?.[this.#at[1]]?.classList.remove("on");
    this.#at = [row, column];
    this.#nodes[row]?.[column]?.classList.add("on");
    const cell = this.cells[row]?.[column];
    if (!cell) return;
    const value = cell.score === undefined ? "not known yet" : cell.score === null ? "no value" : this.paint.read(cell.score);
    this.#readout.textContent = `layer ${this.rows[row]}, ${visible(this.columns[column]!)}  ${cell.told ?? value}`;
  }

  draw(): void {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const whole = Scale.of(this.cells.flat().map((one) => one.score), this.paint);
    this.cells.forEach((cells, row) => {
      const scale = this.byRow ? Scale.of(cells.map((one) => one.score), this.paint) : whole;
      cells.forEach((cell, column) => {
        const node = this.#nodes[row]![column]!;
        const text = cell.text ?? "";
        if (node.textContent !== text) node.textContent = text;
        node.classList.toggle("known", cell.score !== undefined);
        scale.color(node, cell.score);
      });
    });
    this.#legend.replaceChildren(this.byRow ? "each layer on its own scale" : whole.legend());
  }

  #key(event: KeyboardEvent): void {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const row = Math.min(Math.max(this.#at[0] + step[0]!, 0), this.rows.length - 1);
    const column = Math.min(Math.max(this.#at[1] + step[1]!, 0), this.columns.length - 1);
    this.show(row, column);
    this.#nodes[row]?.[column]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
