import { beforeEach, describe, expect, it } from "vitest";
import { Recording } from "../src/core/recording";
import { CellGrid } from "../src/view/cell-grid";
import type { Frame } from "../src/wire/types";

/** Numbers between 0 and 1 that are the same in each run. */
function* numbers(): Generator<number, never> {
  for (let state = 1; ; ) {
    state = (state * 48271) % 2147483647;
    yield state / 2147483647;
  }
}

/** Frames that reveal, replace and hide any of the positions. */
function anyFrames(size: number, count: number): Frame[] {
  const source = numbers();
  const draw = (below: number) => Math.floor(source.next().value * below);
  return Array.from({ length: count }, (_, step) => ({
    step,
    revealed: Array.from({ length: draw(4) }, () => {
      return { position: draw(size), token: 0, text: `t${draw(99)}`, probability: source.next().value };
    }),
    hidden: Array.from({ length: draw(2) }, () => draw(size)),
    committed: Math.floor((step * size) / count),
  }));
}

/** What a reader sees. */
const shown = (root: HTMLElement) =>
  [...root.children].map((cell) => (cell.classList.contains("hidden") ? null : cell.textContent));

describe("CellGrid", () => {
  let root: HTMLElement;
  let grid: CellGrid;
  beforeEach(() => {
    root = document.createElement("div");
    grid = new CellGrid(root);
  });

  it("shows the same after any jumps as after no jump", () => {
    const recording = Recording.of(Array(40).fill(null), anyFrames(40, 60), true);
    grid.load(recording);
    for (const at of [5, 60, 3, 31, 30, 0, 59, 1]) {
      grid.show(at);
      expect(shown(root)).toEqual(recording.cells(at).map((cell) => cell.text));
      const fresh = new CellGrid(document.createElement("div"));
      fresh.load(recording);
      fresh.show(at);
      const classes = (element: HTMLElement) => [...element.children].map((cell) => cell.className);
      expect(classes(root)).toEqual(classes((fresh as unknown as { root: HTMLElement }).root));
    }
  });

  it("touches the cells that change, and no others", () => {
    const frames = Array.from({ length: 200 }, (_, step) => ({
      step: step + 1,
      revealed: [{ position: step, token: 0, text: "a", probability: 0.9 }],
      hidden: [],
      committed: step + 1,
    }));
    grid.load(Recording.of(Array(512).fill(null), frames));
    const loaded = grid.touched;
    for (let at = 1; at <= 200; at++) grid.show(at);
    expect(loaded).toBe(512);
    expect(grid.touched - loaded).toBe(399); // the new cell, and the one before it, which is no longer new
    const before = grid.touched;
    grid.show(200);
    expect(grid.touched).toBe(before);
  });

  it("keeps elements from frame to frame", () => {
    grid.load(Recording.of([null, null], anyFrames(2, 5)));
    const elements = [...root.children];
    grid.show(5);
    expect([...root.children]).toEqual(elements);
  });

  const reveal = (position: number) => ({ position, token: 0, text: "x", probability: 0.25 });
  const twoFrames = [
    { step: 1, revealed: [reveal(2)], hidden: [], committed: 1 },
    { step: 2, revealed: [reveal(1)], hidden: [], committed: 3 },
  ];

  it("marks what may still change, what stays, given tokens, and those just revealed", () => {
    grid.load(Recording.of(["given", null, null], twoFrames, true));
    grid.show(1);
    expect([...root.children].map((cell) => cell.className)).toEqual([
      "cell given",
      "cell hidden known",
      "cell draft fresh",
    ]);
    grid.show(2);
    expect([...root.children].map((cell) => cell.className)).toEqual([
      "cell given",
      "cell settled fresh",
      "cell settled",
    ]);
    expect((root.children[2] as HTMLElement).style.getPropertyValue("--doubt")).toBe("81%");
    expect(root.children[1]?.getAttribute("aria-hidden")).toBeNull();
  });

  it("shows a token that changes, and one that is predicted again as it was", () => {
    const predicted = (step: number, texts: string, committed: number) => ({
      step,
      revealed: [...texts].map((text, position) => ({ position, token: 0, text, probability: step / 4 })),
      hidden: [],
      committed,
    });
    const frames = [predicted(1, "ab", 0), predicted(2, "ac", 0), predicted(3, "xc", 2)];
    grid.load(Recording.of([null, null], frames, true));
    const seen = [1, 2, 3].map((at) => {
      grid.show(at);
      return [...root.children].map((cell) => `${cell.className} ${cell.textContent}`);
    });
    expect(seen).toEqual([
      ["cell draft fresh a", "cell draft fresh b"],
      ["cell draft a", "cell draft fresh c"],
      ["cell settled fresh x", "cell settled c"],
    ]);
    const styles = [...root.children].map((cell) => (cell as HTMLElement).style);
    expect(styles.map((style) => style.getPropertyValue("--doubt"))).toEqual(["35%", "35%"]);
    expect(styles.map((style) => style.getPropertyValue("--appear"))).toEqual(["appear", "appear-again"]);
  });

  it("marks nothing as a draft where no revealed token is hidden again", () => {
    grid.load(Recording.of(["given", null, null], twoFrames));
    for (const at of [1, 2]) {
      grid.show(at);
      expect(root.querySelector(".draft")).toBeNull();
    }
  });

  it("marks where a constraint forbids a likelier token", () => {
    const revealed = [0.2, 0.3].map((probability, position) => ({
      ...reveal(position),
      forbidden: [{ token: 9, text: "z", probability }],
    }));
    grid.load(Recording.of([null, null], [{ step: 1, revealed, hidden: [], committed: 2 }]));
    grid.show(1);
    expect([...root.children].map((cell) => cell.classList.contains("overruled"))).toEqual([false, true]);
    grid.show(0);
    expect(root.querySelector(".overruled")).toBeNull();
  });

  it("shows what follows the end of the answer as such", () => {
    grid.load(new Recording([null, null, null]));
    grid.endAt(1);
    expect([...root.children].map((cell) => cell.classList.contains("after"))).toEqual([false, true, true]);
    grid.endAt(3);
    expect(root.querySelector(".after")).toBeNull();
  });

  it("writes what a model says as text, never as markup", () => {
    const text = '<img src=x onerror="alert(1)">';
    grid.load(
      Recording.of(
        [null],
        [{ step: 1, revealed: [{ position: 0, token: 0, text, probability: 1 }], hidden: [], committed: 1 }],
      ),
    );
    grid.show(1);
    expect(root.querySelector("img")).toBeNull();
    expect(root.textContent).toBe(text);
  });
});
