/** A recording as an animated picture. Texts are drawn elsewhere: here they are masks, which say how much ink is where. */

import { GIFEncoder } from "gifenc";
import type { Frame } from "../wire/types";
import { COLUMNS, layOut, type Piece, widthOf } from "./layout";
import { type Cell, Recording } from "./recording";
import { BLANK, type Colour, INK, mix, type Rgb, shade, tintOf } from "./tint";

/** In pixels: one character, a line, the box around a text, and the room around all. */
export const [CHARACTER, LINE, BOX, MARGIN] = [12, 38, 30, 40];
/** How much ink a pixel may have: none is 0, and this less one is all. */
export const INKS = 8;
const TINTS = 29;
const PAPERS: Rgb[] = [BLANK, ...Array.from({ length: TINTS }, (_, level) => shade((100 * level) / (TINTS - 1)))];
const PALETTE = PAPERS.flatMap((paper) =>
  Array.from({ length: INKS }, (_, ink) => [...mix(paper, INK, ink / (INKS - 1))]),
);
const UNCHANGED = PALETTE.length;
const WHITE = INKS; // paper of tint 0, without ink
const MOST_FRAMES = 240;
const MOST_PIXELS = 4e8; // of all frames: some seconds

/** What the picture of a recording is made of, in a form that can be sent to a worker. */
export interface Scene {
  readonly canvas: readonly (string | null)[];
  readonly frames: readonly Frame[];
  readonly colour: Colour;
  readonly caption: string;
  /** Frames a second. */
  readonly speed: number;
  /** Whether it begins again at its end. */
  readonly loops: boolean;
}

/** The ink of each text, `widthOf(text) * CHARACTER` times `BOX` pixels, row by row. */
export type Masks = ReadonlyMap<string, Uint8Array>;

/** What a cell shows in its room, which is that of its final text: so nothing moves. */
function placed(recording: Recording): Piece[][] {
  const finals = recording.initial.map((_, position) => recording.final(position).text ?? "   ");
  const pieces: Piece[][] = finals.map(() => []);
  for (const piece of layOut(finals).pieces) pieces[piece.position]?.push(piece);
  return pieces;
}

/** The text of each piece of a cell. Another text than the final one is in the first piece, as far as it fits. */
function written(cell: Cell, final: string | null, pieces: readonly Piece[]): string[] {
  if (cell.text === null) return pieces.map(() => "");
  if (cell.text === final) return pieces.map((piece) => piece.text);
  return pieces.map((piece, index) => (index ? "" : clipped(cell.text ?? "", widthOf(piece.text))));
}

function clipped(text: string, width: number): string {
  return [...text.replaceAll("\n", "↵")].slice(0, width).join("");
}

/** All texts that a scene shows. */
export function textsOf(scene: Scene): Set<string> {
  const recording = Recording.of(scene.canvas, scene.frames);
  const pieces = placed(recording);
  const texts = new Set([clipped(scene.caption, COLUMNS)]);
  const add = (position: number, cell: Cell) => {
    for (const text of written(cell, recording.final(position).text, pieces[position] ?? [])) texts.add(text);
  };
  recording.initial.forEach((cell, position) => {
    add(position, cell);
  });
  for (const { position, after } of recording.changes.flat()) add(position, after);
  return texts;
}

/** The numbers of the frames that are drawn: all, unless they are too many or too large. */
export function drawnFrames(length: number, pixels: number): number[] {
  const count = Math.max(1, Math.min(length, MOST_FRAMES, Math.floor(MOST_PIXELS / pixels)));
  return Array.from({ length: count }, (_, index) => Math.round((length * (index + 1)) / count));
}

/** The scene as a GIF. */
export function toGif(scene: Scene, masks: Masks): Uint8Array<ArrayBuffer> {
  const recording = Recording.of(scene.canvas, scene.frames);
  const pieces = placed(recording);
  const lines = 1 + Math.max(0, ...pieces.flat().map((piece) => piece.line));
  const [width, height] = [2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + (lines + 1) * LINE];
  const pixels = new Uint8Array(width * height).fill(WHITE);

  const box = (column: number, line: number, characters: number, paper: number, text: string) => {
    const mask = text ? masks.get(text) : undefined;
    const stride = widthOf(text) * CHARACTER;
    for (let y = 0; y < BOX; y++) {
      const start = (MARGIN + line * LINE + y) * width + MARGIN + column * CHARACTER;
      for (let x = 0; x < characters * CHARACTER; x++) {
        const ink = mask && x < stride ? (mask[y * stride + x] ?? 0) : 0;
        const between = x === characters * CHARACTER - 1;
        pixels[start + x] = between && !ink ? WHITE : paper * INKS + ink;
      }
    }
  };
  const draw = (position: number, cell: Cell) => {
    const mine = pieces[position] ?? [];
    const tint = cell.text === null ? 0 : tintOf(cell, recording.length, scene.colour);
    const paper = cell.text === null ? 0 : 1 + Math.round((tint / 100) * (TINTS - 1));
    written(cell, recording.final(position).text, mine).forEach((text, index) => {
      const piece = mine[index];
      if (piece) box(piece.column, piece.line, widthOf(piece.text), paper, text);
    });
  };

  const caption = clipped(scene.caption, COLUMNS);
  box(0, lines, COLUMNS, 1, caption);
  recording.initial.forEach((cell, position) => {
    draw(position, cell);
  });
  const gif = GIFEncoder();
  const delay = 1000 / scene.speed;
  gif.writeFrame(pixels, width, height, { palette: PALETTE, delay, repeat: scene.loops ? 0 : -1 });
  const drawn = drawnFrames(recording.length, width * height);
  let shown = 0;
  for (const at of drawn) {
    pixels.fill(UNCHANGED);
    const changed = new Map<number, Cell>();
    for (const { position, after } of recording.changes.slice(shown, at).flat()) changed.set(position, after);
    for (const [position, cell] of changed) draw(position, cell);
    const held = at === recording.length ? 3000 : delay * (at - shown);
    gif.writeFrame(pixels, width, height, { transparent: true, transparentIndex: UNCHANGED, delay: held, dispose: 1 });
    shown = at;
  }
  gif.finish();
  return gif.bytes();
}
