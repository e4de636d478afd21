import { describe, expect, it } from "vitest";
import { differences, overruled, Recording } from "../src/core/recording";
import type { Frame } from "../src/wire/types";

const shows = (step: number, ...tokens: [number, string][]): Frame => ({
  step,
  revealed: tokens.map(([position, text]) => ({ position, token: 1, text, probability: 0.5 })),
  hidden: [],
  committed: 0,
});

const texts = (recording: Recording, at: number) => recording.cells(at).map((cell) => cell.text);

describe("Recording", () => {
  it("gives the text after any number of frames", () => {
    const recording = Recording.of(["a", null, null], [shows(1, [2, "c"]), shows(2, [1, "b"])]);
    expect(texts(recording, 0)).toEqual(["a", null, null]);
    expect(texts(recording, 1)).toEqual(["a", null, "c"]);
    expect(texts(recording, 2)).toEqual(["a", "b", "c"]);
    expect(recording.cells(2).map((cell) => cell.frame)).toEqual([0, 2, 1]);
    expect(recording.revealed).toBe(2);
  });

  it("hides tokens again, also those that the same frame replaces", () => {
    const again: Frame = { ...shows(2, [1, "y"]), hidden: [0, 1] };
    const recording = Recording.of([null, null], [shows(1, [0, "a"], [1, "b"]), again]);
    expect(texts(recording, 2)).toEqual([null, "y"]);
    expect(recording.changes[1]).toHaveLength(3);
    expect(recording.written).toEqual([2, 1]);
  });

  it("knows which tokens a frame writes, and not only predicts again", () => {
    const again: Frame = { ...shows(2, [0, "a"], [1, "c"]), committed: 2 };
    again.revealed.forEach((each) => {
      each.probability = 0.9;
    });
    const recording = Recording.of([null, null], [shows(1, [0, "a"], [1, "b"]), again], true);
    expect(recording.cells(2).map(({ text, frame, probability }) => [text, frame, probability])).toEqual([
      ["a", 1, 0.9],
      ["c", 2, 0.9],
    ]);
    expect(recording.written).toEqual([2, 1]);
    expect([1, 2].map((at) => recording.settled(at))).toEqual([0, 2]);
  });

  it("says which revealed tokens stay: all, where none is hidden again", () => {
    const frames = [{ ...shows(1, [1, "b"]), committed: 2 }];
    const revised = Recording.of(["a", null, null], frames, true);
    expect([0, 1, 9].map((at) => revised.settled(at))).toEqual([0, 2, 2]);
    const plain = Recording.of(["a", null, null], frames);
    expect([0, 1].map((at) => plain.settled(at))).toEqual([3, 3]);
  });

  it("keeps what a constraint forbids, and knows where it forbade a likelier token", () => {
    const frame = shows(1, [0, "a"], [1, "b"]);
    for (const [index, probability] of [0.4, 0.6].entries())
      Object.assign(frame.revealed[index] ?? {}, { forbidden: [{ token: 9, text: "z", probability }] });
    const recording = Recording.of([null, null, "given"], [frame, { ...shows(2), hidden: [1] }]);
    expect(recording.cells(1).map(overruled)).toEqual([false, true, false]);
    expect(recording.cells(2)[1]?.forbidden).toEqual([]);
    expect(recording.constrained).toBe(true);
    expect(Recording.of([null], [shows(1, [0, "a"])]).constrained).toBe(false);
  });

  it("refuses a position that the text does not have", () => {
    expect(() => Recording.of([null], [shows(1, [1, "b"])])).toThrow("position 1 of a text of 1 tokens");
  });

  it("finds where final texts differ", () => {
    const one = Recording.of([null, null], [shows(1, [0, "a"], [1, "b"])]);
    const other = Recording.of([null, null, null], [shows(1, [0, "a"], [1, "x"], [2, "c"])]);
    expect([...differences(one, other)]).toEqual([1, 2]);
    expect(differences(one, one).size).toBe(0);
  });
});
