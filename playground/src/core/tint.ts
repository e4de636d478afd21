/** How strongly a cell is colored, in percent, and the colors of pictures. */

import type { Cell } from "./recording";

/** What the colour of a cell says. */
export type Colour = "probability" | "order";
export type Rgb = readonly [number, number, number];

export const INK: Rgb = [29, 28, 26];
export const MUTED: Rgb = [102, 99, 92];
export const BLANK: Rgb = [232, 230, 225];
const ACCENT: Rgb = [184, 67, 15];

/** Between two colors; 0: the first one. */
export function mix(from: Rgb, to: Rgb, part: number): Rgb {
  const channel = (index: 0 | 1 | 2) => Math.round(from[index] + (to[index] - from[index]) * part);
  return [channel(0), channel(1), channel(2)];
}

/** The colour of a cell on white paper. */
export function shade(tint: number): Rgb {
  return mix([255, 255, 255], ACCENT, 0.6 * (tint / 100));
}

/** The tint of a visible cell after the last of so many frames. */
export function tintOf(cell: Cell, frames: number, colour: Colour): number {
  return colour === "order" ? orderTint(cell.frame, frames) : doubtTint(cell.probability ?? 1);
}

/** Certain tokens are bare ink; colour grows with doubt, fastest near certainty, where most tokens are. */
export function doubtTint(probability: number): number {
  const doubt = 1 - Math.min(1, Math.max(0, probability));
  return Math.round(100 * doubt ** 0.75);
}

/** The first frame is strongest, the last one faint. */
export function orderTint(frame: number, frames: number): number {
  if (frame < 1 || frames < 1) return 0;
  return Math.round(100 - (88 * (frame - 1)) / Math.max(1, frames - 1));
}

export function percent(probability: number): string {
  return probability > 0.9995 || probability === 0
    ? `${Math.round(100 * probability)} %`
    : `${(100 * probability).toFixed(1)} %`;
}
