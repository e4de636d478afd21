/** Where the tokens of a text stand in a picture of it, in characters of equal width. */

export const COLUMNS = 88;

/** A part of a token, on one line. */
export interface Piece {
  /** Of the token. */
  readonly position: number;
  readonly text: string;
  readonly column: number;
  readonly line: number;
}

/** The number of characters of a text. */
export function widthOf(text: string): number {
  return [...text].length;
}

/** The pieces of all tokens, in lines as wide as a page, and the number of lines. */
export function layOut(texts: readonly string[]): { pieces: Piece[]; lines: number } {
  const pieces: Piece[] = [];
  let [column, line] = [0, 0];
  texts.forEach((whole, position) => {
    whole.split("\n").forEach((text, part) => {
      if (part || (column && column + widthOf(text) > COLUMNS)) [column, line] = [0, line + 1];
      if (text) pieces.push({ position, text, column, line });
      column += widthOf(text);
    });
  });
  return { pieces, lines: line + 1 };
}
