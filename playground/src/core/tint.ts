/** How strongly a cell is coloured, in percent. */

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
