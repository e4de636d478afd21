/** A text as it was denoised, to go forward and back in. */

import type { Frame, Token } from "../wire/types";

/** A position of the text. Cells are never changed, only replaced. */
export interface Cell {
  /** null: hidden. */
  readonly text: string | null;
  /** When it was revealed, or predicted last; null: it is hidden, or was given. */
  readonly probability: number | null;
  /** The number of the frame that wrote this text, from 1 on; 0: it is hidden, or was given. */
  readonly frame: number;
  /** The most probable tokens that a constraint forbids here, the likeliest first. */
  readonly forbidden: readonly Token[];
}

/** Whether a constraint forbids a likelier token than the one that is shown. */
export function overruled(cell: Cell): boolean {
  return (cell.forbidden[0]?.probability ?? 0) > (cell.probability ?? 1);
}

export interface Change {
  readonly position: number;
  readonly before: Cell;
  readonly after: Cell;
}

/** Whether a change writes another text. */
export function writes({ before, after }: Change): boolean {
  return after.text !== null && after.text !== before.text;
}

const HIDDEN_CELL: Cell = { text: null, probability: null, frame: 0, forbidden: [] };

export class Recording {
  readonly initial: readonly Cell[];
  /** What each frame changed. */
  readonly changes: Change[][] = [];
  readonly frames: Frame[] = [];
  /** Whether the frames say what a constraint forbids. */
  constrained = false;
  private readonly last: Cell[];

  /**
   * @param tokens The canvas; null where it is hidden.
   * @param revises Whether revealed tokens may change, or be hidden again.
   */
  constructor(
    tokens: readonly (string | null)[],
    readonly revises = false,
  ) {
    this.initial = tokens.map((text) => ({ ...HIDDEN_CELL, text }));
    this.last = [...this.initial];
  }

  /** The recording of frames that are all there. */
  static of(tokens: readonly (string | null)[], frames: readonly Frame[], revises = false): Recording {
    const recording = new Recording(tokens, revises);
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
    for (const { position, text, probability, forbidden = [] } of frame.revealed) {
      this.constrained ||= forbidden.length > 0;
      const before = this.last[position];
      const frame = before?.text === text ? before.frame : this.length + 1;
      change(position, { text, probability, frame, forbidden });
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

  /** Tokens that are revealed before this position stay as they are after this many frames; all do where none may change. */
  settled(at: number): number {
    return this.revises ? (this.frames[Math.min(at, this.length) - 1]?.committed ?? 0) : this.size;
  }

  /** Hidden tokens that are visible after the last frame. */
  get revealed(): number {
    return this.last.filter((cell) => cell.probability !== null).length;
  }

  /** The tokens that each frame writes. */
  get written(): number[] {
    return this.changes.map((changes) => changes.filter(writes).length);
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
