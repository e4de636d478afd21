import { describe, expect, it } from "vitest";
import { BOX, CHARACTER, drawnFrames, type Scene, textsOf, toGif } from "../src/core/animation";
import { widthOf } from "../src/core/layout";
import type { Frame } from "../src/wire/types";

const shows = (step: number, position: number, text: string): Frame => ({
  step,
  revealed: [{ position, token: 1, text, probability: 0.5 }],
  hidden: [],
  committed: 0,
});

const SCENE: Scene = {
  canvas: ["a\nb", null, null],
  frames: [shows(1, 1, " wrong"), { ...shows(2, 2, " cd"), hidden: [1] }, shows(3, 1, " e")],
  colour: "probability",
  caption: "model",
  speed: 5,
  loops: true,
};

/** Texts as ink that nothing can foresee. */
const masksOf = (scene: Scene) =>
  new Map(
    [...textsOf(scene)].map((text) => [
      text,
      Uint8Array.from({ length: widthOf(text) * CHARACTER * BOX }, (_, pixel) => Math.floor(pixel ** 2 / 7) % 8),
    ]),
  );

/** The blocks of a GIF, as its specification describes them: size, delays in 1/100 s and bytes of each picture, and how often it is shown. */
function read(bytes: Uint8Array) {
  const view = new DataView(bytes.buffer);
  const size = [view.getUint16(6, true), view.getUint16(8, true)];
  const delays: number[] = [];
  const lengths: number[] = [];
  let repeats: number | null = null;
  let at = 13 + 3 * 2 ** ((view.getUint8(10) & 7) + 1);
  const subBlocks = () => {
    const start = at;
    while (view.getUint8(at)) at += view.getUint8(at) + 1;
    at += 1;
    return at - start;
  };
  for (;;) {
    const kind = view.getUint8(at++);
    if (kind === 0x3b) break;
    if (kind === 0x2c) {
      at += 10;
      lengths.push(subBlocks());
    } else {
      const label = view.getUint8(at++);
      if (label === 0xf9) delays.push(view.getUint16(at + 2, true));
      if (label === 0xff) repeats = view.getUint16(at + 14, true);
      subBlocks();
    }
  }
  expect(at).toBe(bytes.length);
  return { size, delays, lengths, repeats };
}

describe("animations", () => {
  it("show the canvas and every frame, the last one longest", () => {
    const { size, delays, repeats } = read(toGif(SCENE, masksOf(SCENE)));
    expect(size).toEqual([1136, 194]);
    expect(delays).toEqual([20, 20, 20, 300]);
    expect(repeats).toBe(0);
  });

  it("hold only what changes", () => {
    const scene = { ...SCENE, canvas: [...SCENE.canvas, ...Array(200).fill(" word")] };
    const [first = 0, ...others] = read(toGif(scene, masksOf(scene))).lengths;
    expect(Math.max(...others)).toBeLessThan(first / 10);
  });

  it("are shown once where they shall not loop", () => {
    expect(read(toGif({ ...SCENE, loops: false }, masksOf(SCENE))).repeats).toBeNull();
  });

  it("need all texts that they show, in the room of the final ones", () => {
    expect([...textsOf(SCENE)].sort()).toEqual(["", " cd", " e", " w", "a", "b", "model"]);
  });

  it("skip frames of runs that are too long, but never the last one", () => {
    expect(drawnFrames(3, 1000)).toEqual([1, 2, 3]);
    const many = drawnFrames(4000, 1000);
    expect([many.length, many.at(-1)]).toEqual([240, 4000]);
    expect(drawnFrames(100, 1e8).length).toBe(4);
    expect(drawnFrames(0, 1000)).toEqual([0]);
  });

  it("of a run without frames are its canvas", () => {
    const { delays } = read(toGif({ ...SCENE, frames: [] }, masksOf({ ...SCENE, frames: [] })));
    expect(delays).toEqual([20, 300]);
  });
});
