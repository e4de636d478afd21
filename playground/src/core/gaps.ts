/** Texts with gaps. In the editor one ▯ stands for one hidden token. */

export const HIDDEN = "▯";

/** A run of hidden tokens in a text. */
export interface Gap {
  start: number;
  length: number;
}

export function findGaps(text: string): Gap[] {
  return [...text.matchAll(/▯+/gu)].map((match) => ({ start: match.index, length: match[0].length }));
}

/** How many tokens a piece of text probably has: about four characters each, and at least one. */
export function guessTokens(text: string): number {
  return Math.max(
    1,
    Math.round(text.replaceAll(HIDDEN, "").length / 4) + findGaps(text).reduce((sum, gap) => sum + gap.length, 0),
  );
}

/** The text with what stands between `start` and `end` hidden; with nothing selected, a gap of four tokens. */
export function hide(text: string, start: number, end: number): { text: string; mark: string } {
  const mark = HIDDEN.repeat(start === end ? 4 : guessTokens(text.slice(start, end)));
  return { text: text.slice(0, start) + mark + text.slice(end), mark };
}

/** The text with another number of tokens in a gap; 0 removes it. */
export function resize(text: string, gap: Gap, length: number): string {
  return text.slice(0, gap.start) + HIDDEN.repeat(Math.max(0, length)) + text.slice(gap.start + gap.length);
}

/** The text as the server reads it, with the model's mask token for every hidden token. */
export function withMasks(text: string, maskToken: string): string {
  return text.replaceAll(HIDDEN, maskToken);
}
