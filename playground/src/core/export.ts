/** Recordings as files. */

import type { Cell } from "./recording";
import type { Run } from "./run";
import { doubtTint, orderTint } from "./tint";

/** All that is needed to show or compute with a run again. */
export function toJson(model: string, runs: Run[]): string {
  const each = runs.map((run) => ({
    request: run.request,
    status: run.status,
    seconds: run.seconds,
    canvas: run.recording?.initial.map((cell) => cell.text) ?? [],
    frames: run.recording?.frames ?? [],
    result: run.summary,
  }));
  return `${JSON.stringify({ format: "unmask-playground-1", model, runs: each }, null, 2)}\n`;
}

const COLUMNS = 88;
const CHARACTER = 8.4; // the width of one at 14 px
const LINE = 26;
const MARGIN = 32;
const ACCENT = [184, 67, 15];

/** Whether XML can hold a character. */
function valid(code: number): boolean {
  if (code < 0x20) return code === 0x9 || code === 0xa || code === 0xd;
  return code < 0xd800 || (code > 0xdfff && code !== 0xfffe && code !== 0xffff);
}

/** Text for XML; characters that it cannot hold become a question mark in a diamond. */
export function escapeXml(text: string): string {
  const clean = [...text].map((character) => (valid(character.codePointAt(0) ?? 0) ? character : "\ufffd")).join("");
  return clean.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

function shade(tint: number): string {
  const mixed = ACCENT.map((channel) => Math.round(255 + (channel - 255) * (tint / 100) * 0.6));
  return `rgb(${mixed.join(" ")})`;
}

/** A figure of one text: each token with its colour, lines as wide as a page. */
export function toSvg(
  cells: readonly Cell[],
  frames: number,
  colour: "probability" | "order",
  caption: string,
): string {
  const shapes: string[] = [];
  let [column, line] = [0, 0];
  const newLine = () => {
    column = 0;
    line += 1;
  };
  // Renderers drop spaces at the beginning of a text, so that it begins after them.
  const write = (text: string) => {
    const x = MARGIN + (column + text.length - text.trimStart().length) * CHARACTER;
    const y = MARGIN + line * LINE + 15;
    if (text.trim()) shapes.push(`<text x="${x.toFixed(1)}" y="${y}">${escapeXml(text.trim())}</text>`);
  };
  for (const cell of cells) {
    const [text = "", ...others] = (cell.text ?? "   ").split("\n");
    const width = [...text].length;
    if (column && column + width > COLUMNS) newLine();
    if (width) {
      const x = MARGIN + column * CHARACTER + 0.5;
      const tint = colour === "order" ? orderTint(cell.frame, frames) : doubtTint(cell.probability ?? 1);
      const fill = cell.text === null ? "rgb(232 230 225)" : shade(tint);
      const size = `width="${(width * CHARACTER - 1).toFixed(1)}" height="20" rx="2"`;
      shapes.push(`<rect x="${x.toFixed(1)}" y="${MARGIN + line * LINE}" ${size} fill="${fill}"/>`);
      write(text);
      column += width;
    }
    for (const part of others) {
      newLine();
      write(part);
      column = [...part].length;
    }
  }
  const [width, height] = [2 * MARGIN + COLUMNS * CHARACTER, 2 * MARGIN + (line + 2) * LINE];
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${width.toFixed(0)}" height="${height}" viewBox="0 0 ${width.toFixed(0)} ${height}">`;
  const style = 'font-family="IBM Plex Mono, ui-monospace, monospace" font-size="14" fill="rgb(29 28 26)"';
  const foot = `<text x="${MARGIN}" y="${height - MARGIN + 8}" font-size="11" fill="rgb(102 99 92)">${escapeXml(caption)}</text>`;
  return `${head}<rect width="100%" height="100%" fill="white"/><g ${style}>${shapes.join("")}${foot}</g></svg>\n`;
}

/** Hand a file to the browser. */
export function download(name: string, type: string, content: string): void {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
