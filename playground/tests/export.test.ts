import { describe, expect, it } from "vitest";
import { escapeXml, toJson, toSvg } from "../src/core/export";
import { Recording } from "../src/core/recording";
import { Run } from "../src/core/run";
import { DECODING } from "../src/core/settings";
import { doubtTint, orderTint, percent } from "../src/core/tint";

const cell = (text: string | null, probability: number | null = 1, frame = 1) => ({
  text,
  probability,
  frame,
  forbidden: [],
});
const parse = (svg: string) => new DOMParser().parseFromString(svg, "image/svg+xml");

describe("toSvg", () => {
  it("writes every visible token once, in lines of a page's width", () => {
    const cells = [..."abcdefghij"].map((letter) => cell(letter.repeat(30)));
    const page = parse(toSvg(cells, 1, "probability", "caption"));
    const texts = [...page.querySelectorAll("text")];
    expect(texts.map((text) => text.textContent)).toEqual([...cells.map(({ text }) => text), "caption"]);
    expect(new Set(texts.slice(0, -1).map((text) => text.getAttribute("y"))).size).toBe(5);
  });

  it("breaks lines where the text does", () => {
    const page = parse(toSvg([cell("a"), cell("b\n\nc"), cell(null, null, 0)], 1, "order", ""));
    const lines = [...page.querySelectorAll("text")].slice(0, 3).map((text) => text.getAttribute("y"));
    expect(lines[0]).toBe(lines[1]);
    expect(Number(lines[2]) - Number(lines[1])).toBe(52);
  });

  it("puts spaces before a word as room, since renderers drop them", () => {
    const page = parse(toSvg([cell("a"), cell("  b ")], 1, "probability", ""));
    const [first, second] = [...page.querySelectorAll("text")];
    expect(second?.textContent).toBe("b");
    expect(Number(second?.getAttribute("x")) - Number(first?.getAttribute("x"))).toBeCloseTo(3 * 8.4, 1);
  });

  it("is well-formed whatever a model writes", () => {
    const nasty = '</text><script>alert("1")</script>&\u0000\u0007\ud800';
    const svg = toSvg([cell(nasty)], 1, "probability", nasty);
    expect(svg).not.toContain("<script");
    expect(svg).not.toContain("\u0007");
    expect(escapeXml("\ud83d\ude00\ud83d")).toBe("😀\ufffd");
  });
});

it("exports what replays to the text", () => {
  const run = new Run("m", DECODING, { seed: 1 }, "masked");
  const frame = {
    step: 1,
    revealed: [{ position: 0, token: 4, text: "a", probability: 0.5 }],
    hidden: [],
    committed: 1,
  };
  run.recording = Recording.of([null], [frame]);
  const { model, runs } = JSON.parse(toJson([run]));
  expect(model).toBe("m");
  expect(Recording.of(runs[0].canvas, runs[0].frames).cells(1)).toEqual(run.recording.cells(1));
  expect(runs[0].request).toEqual({ seed: 1 });
});

describe("tints", () => {
  it("grow with doubt, and fade with time", () => {
    expect([1, 0.9, 0.5, 0].map(doubtTint)).toEqual([0, 18, 59, 100]);
    expect([1, 5, 9].map((frame) => orderTint(frame, 9))).toEqual([100, 56, 12]);
    expect([orderTint(0, 9), orderTint(1, 1)]).toEqual([0, 100]);
  });

  it("are said in percent", () => {
    expect([1, 0.9996, 0.999, 0.5, 0].map(percent)).toEqual(["100 %", "100 %", "99.9 %", "50.0 %", "0 %"]);
  });
});
