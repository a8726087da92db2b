/** Server-sent events: the data of each event of a stream. */

export class Events {
  #rest = "";

  /** Returns the data of the events that are complete after more text. */
  feed(text: string): string[] {
    const parts = (this.#rest + text).split(/\r\n\r\n|\n\n|\r\r/);
    this.#rest = parts.pop() ?? "";
    const found: string[] = [];
    for (const part of parts) {
      const lines = part.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:"));
      if (lines.length) found.push(lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n"));
    }
    return found;
  }
}
