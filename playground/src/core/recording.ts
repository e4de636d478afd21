/** A text as it was denoised, to go forward and back in. */

import type { Frame } from "../wire/types";

/** A position of the text. Cells are never changed, only replaced. */
export interface Cell {
  /** null: hidden. */
  readonly text: string | null;
  /** When it was revealed; null: it is hidden, or was given. */
  readonly probability: number | null;
  /** The number of the frame that revealed it, from 1 on; 0: it is hidden, or was given. */
  readonly frame: number;
}

export interface Change {
  readonly position: number;
  readonly before: Cell;
  readonly after: Cell;
}

const HIDDEN_CELL: Cell = { text: null, probability: null, frame: 0 };

export class Recording {
  readonly initial: readonly Cell[];
  /** What each frame changed. */
  readonly changes: Change[][] = [];
  readonly frames: Frame[] = [];
  private readonly last: Cell[];

  constructor(tokens: (string | null)[]) {
    this.initial = tokens.map((text) => (text === null ? HIDDEN_CELL : { text, probability: null, frame: 0 }));
    this.last = [...this.initial];
  }

  /** The recording of frames that are all there. */
  static of(tokens: (string | null)[], frames: Frame[]): Recording {
    const recording = new Recording(tokens);
    for (const frame of frames) recording.add(frame);
    return recording;
  }

  /** Number of frames. Before the first one stands the canvas. */
  get length(): number {
    return this.frames.length;
  }

  get size(): number {
    return this.initial.length;
  }

  add(frame: Frame): void {
    const changes: Change[] = [];
    const change = (position: number, after: Cell) => {
      const before = this.last[position];
      if (!before) throw new RangeError(`position ${position} of a text of ${this.size} tokens`);
      changes.push({ position, before, after });
      this.last[position] = after;
    };
    for (const position of frame.hidden) change(position, HIDDEN_CELL);
    for (const { position, text, probability } of frame.revealed) {
      change(position, { text, probability, frame: this.length + 1 });
    }
    this.frames.push(frame);
    this.changes.push(changes);
  }

  /** The text after this many frames. */
  cells(at: number): Cell[] {
    const cells = [...this.initial];
    for (const changes of this.changes.slice(0, at)) for (const { position, after } of changes) cells[position] = after;
    return cells;
  }

  /** The cell at a position after the last frame. */
  final(position: number): Cell {
    return this.last[position] ?? HIDDEN_CELL;
  }

  /** Positions before this no longer change after this many frames. */
  committed(at: number): number {
    const given = this.initial.findIndex((cell) => cell.text === null);
    return this.frames[at - 1]?.committed ?? (given < 0 ? this.size : given);
  }

  /** Hidden tokens that are visible after the last frame. */
  get revealed(): number {
    return this.last.filter((cell) => cell.probability !== null).length;
  }

  /** The most tokens that one frame reveals. */
  get widest(): number {
    return this.frames.reduce((most, frame) => Math.max(most, frame.revealed.length), 0);
  }
}

/** Positions at which the final texts differ; a longer text differs in what it has more. */
export function differences(one: Recording, other: Recording): Set<number> {
  const found = new Set<number>();
  for (let position = 0; position < Math.max(one.size, other.size); position++) {
    if (one.final(position).text !== other.final(position).text) found.add(position);
  }
  return found;
}
