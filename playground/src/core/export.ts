/** Recordings as files. */

import { COLUMNS, layOut, widthOf } from "./layout";
import type { Cell } from "./recording";
import type { Run } from "./run";
import { BLANK, type Colour, INK, MUTED, type Rgb, shade, tintOf } from "./tint";

/** All that is needed to show or compute with runs of one model again. */
export function toJson(runs: Run[]): string {
  const each = runs.map((run) => ({
    request: run.request,
    status: run.status,
    seconds: run.seconds,
    canvas: run.recording?.initial.map((cell) => cell.text) ?? [],
    frames: run.recording?.frames ?? [],
    result: run.summary,
  }));
  return `${JSON.stringify({ format: "unmask-playground-1", model: runs[0]?.model, runs: each }, null, 2)}\n`;
}

const CHARACTER = 8.4; // the width of one at 14 px
const LINE = 26;
const MARGIN = 32;

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

const rgb = (colour: Rgb) => `rgb(${colour.join(" ")})`;

/** A figure of one text: each token with its colour, lines as wide as a page. */
export function toSvg(cells: readonly Cell[], frames: number, colour: Colour, caption: string): string {
  const { pieces, lines } = layOut(cells.map((cell) => cell.text ?? "   "));
  const shapes = pieces.map(({ position, text, column, line }) => {
    const cell = cells[position];
    const [x, y] = [MARGIN + column * CHARACTER, MARGIN + line * LINE];
    const fill = rgb(cell && cell.text !== null ? shade(tintOf(cell, frames, colour)) : BLANK);
    const size = `width="${(widthOf(text) * CHARACTER - 1).toFixed(1)}" height="20" rx="2"`;
    const box = `<rect x="${(x + 0.5).toFixed(1)}" y="${y}" ${size} fill="${fill}"/>`;
    if (!text.trim()) return box;
    // Renderers drop spaces at the beginning of a text, so that it begins after them.
    const indent = widthOf(text) - widthOf(text.trimStart());
    return `${box}<text x="${(x + indent * CHARACTER).toFixed(1)}" y="${y + 15}">${escapeXml(text.trim())}</text>`;
  });
  const [width, height] = [(2 * MARGIN + COLUMNS * CHARACTER).toFixed(0), 2 * MARGIN + (lines + 1) * LINE];
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">`;
  const style = `font-family="IBM Plex Mono, ui-monospace, monospace" font-size="14" fill="${rgb(INK)}"`;
  const foot = `<text x="${MARGIN}" y="${height - MARGIN + 8}" font-size="11" fill="${rgb(MUTED)}">${escapeXml(caption)}</text>`;
  return `${head}<rect width="100%" height="100%" fill="white"/><g ${style}>${shapes.join("")}${foot}</g></svg>\n`;
}

/** Hand a file to the browser. */
export function download(name: string, content: Blob): void {
  const address = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
