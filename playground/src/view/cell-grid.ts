/** The tokens of a text on the page. Going from one frame to another touches the cells that differ, and no others. */

import { type Cell, overruled, type Recording, writes } from "../core/recording";
import { doubtTint } from "../core/tint";

export class CellGrid {
  /** Number of frames shown. */
  at = 0;
  /** Cells that were written since the grid was made. */
  touched = 0;
  private recording: Recording | null = null;
  private cells: Cell[] = [];
  private elements: HTMLElement[] = [];
  private fresh: number[] = [];
  private settled = 0;
  private end = Number.POSITIVE_INFINITY;
  private cursor = -1;
  private marked: ReadonlySet<number> = new Set();

  constructor(private readonly root: HTMLElement) {}

  /** Show another recording, before its first frame. */
  load(recording: Recording): void {
    this.recording = recording;
    this.cells = [...recording.initial];
    this.at = 0;
    this.fresh = [];
    this.cursor = -1;
    this.marked = new Set();
    this.end = recording.size;
    this.settled = recording.settled(0);
    this.elements = this.cells.map((_, position) => {
      const element = document.createElement("span");
      element.dataset.position = String(position);
      element.append("");
      return element;
    });
    this.root.replaceChildren(...this.elements);
    for (let position = 0; position < this.cells.length; position++) this.paint(position);
  }

  /** Show the text after this many frames. */
  show(at: number): void {
    if (!this.recording) return;
    const { changes, length } = this.recording;
    const target = Math.max(0, Math.min(at, length));
    if (target === this.at) return;
    const dirty = new Set(this.fresh);
    for (; this.at < target; this.at++) {
      for (const { position, after } of changes[this.at] ?? []) {
        this.cells[position] = after;
        dirty.add(position);
      }
    }
    for (; this.at > target; this.at--) {
      for (const { position, before } of [...(changes[this.at - 1] ?? [])].reverse()) {
        this.cells[position] = before;
        dirty.add(position);
      }
    }
    this.fresh = (changes[target - 1] ?? []).filter(writes).map(({ position }) => position);
    for (const position of this.fresh) dirty.add(position);
    const settled = this.recording.settled(target);
    const [low, high] = [Math.min(settled, this.settled), Math.max(settled, this.settled)];
    for (let position = low; position < high; position++) dirty.add(position);
    this.settled = settled;
    for (const position of dirty) this.paint(position);
  }

  /** Mark the cell that the keyboard or the pointer is on; -1: none. */
  point(position: number): void {
    const before = this.cursor;
    this.cursor = position;
    for (const each of new Set([before, position])) this.paint(each);
  }

  /** Mark the positions at which another text differs. */
  mark(positions: ReadonlySet<number>): void {
    if (positions === this.marked) return;
    const dirty = new Set([...this.marked, ...positions]);
    this.marked = positions;
    for (const position of dirty) this.paint(position);
  }

  /** Say where the answer ends: cells from there on follow its end token. */
  endAt(end: number): void {
    const [low, high] = [Math.min(end, this.end), Math.max(end, this.end)];
    this.end = end;
    for (let position = low; position < Math.min(high, this.cells.length); position++) this.paint(position);
  }

  private paint(position: number): void {
    const [cell, element] = [this.cells[position], this.elements[position]];
    if (!cell || !element) return;
    this.touched += 1;
    const hidden = cell.text === null;
    // A hidden cell keeps the room of the text it will show, where that is known, so that nothing moves in a replay.
    const text = cell.text ?? this.recording?.final(position).text ?? "";
    const names = ["cell"];
    if (hidden) names.push("hidden", ...(text ? ["known"] : []));
    else if (cell.probability === null) names.push("given");
    else names.push(position < this.settled ? "settled" : "draft");
    if (text.includes("\n")) names.push("newline");
    if (!hidden && !text) names.push("empty");
    if (overruled(cell)) names.push("overruled");
    if (this.fresh.includes(position)) names.push("fresh");
    if (position >= this.end) names.push("after");
    if (position === this.cursor) names.push("cursor");
    if (this.marked.has(position)) names.push("differs");
    element.className = names.join(" ");
    if (hidden) element.setAttribute("aria-hidden", "true");
    else element.removeAttribute("aria-hidden");
    element.style.setProperty("--doubt", `${cell.probability === null ? 0 : doubtTint(cell.probability)}%`);
    element.style.setProperty("--frame", String(cell.frame));
    // Another name begins the animation again, in a cell that changes in two frames running.
    element.style.setProperty("--appear", cell.frame % 2 ? "appear" : "appear-again");
    const node = element.firstChild as Text;
    if (node.data !== text) node.data = text;
  }
}
