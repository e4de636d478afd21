import { describe, expect, it } from "vitest";
import { findGaps, guessTokens, hide, resize } from "../src/core/gaps";
import { makeRequest } from "../src/core/requests";
import { describe as describeDecoding, diffusionFields, revises, SettingError } from "../src/core/settings";
import { fromFragment, SETUP, type Setup, toFragment } from "../src/core/share";
import type { Model } from "../src/wire/types";

const MODEL = { id: "m", diffusion: { mask_token: "<|mask|>", chat: true } } as Model;
const [A, B] = SETUP.decodings;
const TURNS: Setup["turns"] = [
  { role: "user", content: "a & b?\n" },
  { role: "assistant", content: '"é" <s>' },
];

describe("gaps", () => {
  it("hides what is selected, a token for about four characters", () => {
    expect(hide("a red fox", 2, 5)).toEqual({ text: "a ▯ fox", mark: "▯" });
    expect(hide("ab", 1, 1).text).toBe("a▯▯▯▯b");
    expect(guessTokens("twelve chars")).toBe(3);
    expect(guessTokens("▯▯ and")).toBe(3);
  });

  it("finds and resizes gaps", () => {
    const text = "a▯▯ b▯";
    expect(findGaps(text)).toEqual([
      { start: 1, length: 2 },
      { start: 5, length: 1 },
    ]);
    expect(resize(text, { start: 1, length: 2 }, 3)).toBe("a▯▯▯ b▯");
    expect(resize(text, { start: 5, length: 1 }, 0)).toBe("a▯▯ b");
  });
});

describe("requests", () => {
  it("names the settings as the server does", () => {
    const { body, path } = makeRequest({ ...SETUP, prompt: "Once" }, 1, MODEL);
    expect(path).toBe("v1/completions");
    expect(body).toEqual({
      model: "m",
      prompt: "Once",
      max_tokens: 64,
      seed: 0,
      temperature: 0,
      stream: true,
      diffusion: { stream: "frames", threshold: 0.9 },
    });
  });

  it("sends one rule, and no order with a threshold", () => {
    const fields = (decoding: object) => diffusionFields({ ...A, ...decoding }, SETUP.shared, "masked");
    expect(fields({})).toEqual({ stream: "frames", remasking: "low_confidence" });
    expect(fields({ rule: "steps", remasking: "margin" })).toEqual({
      stream: "frames",
      remasking: "margin",
      steps: 32,
    });
    expect(fields({ rule: "tokens_per_step" })).toEqual({
      stream: "frames",
      remasking: "low_confidence",
      tokens_per_step: 4,
    });
    expect(fields({ rule: "threshold", remasking: "random" })).toEqual({ stream: "frames", threshold: 0.9 });
  });

  it("sends how revealed tokens are hidden again, but not with a threshold", () => {
    const fields = (decoding: object) => diffusionFields({ ...A, fraction: 0.3, ...decoding }, SETUP.shared, "masked");
    const plain = { stream: "frames", remasking: "low_confidence" };
    expect(fields({ again: "remask" })).toEqual({ ...plain, remask_fraction: 0.3 });
    expect(fields({ again: "revise" })).toEqual({ ...plain, revise: { eta: 0.3 } });
    expect(fields({ again: "remask", rule: "threshold" })).toEqual({ stream: "frames", threshold: 0.9 });
    const decodings = [A, { ...A, again: "remask" }, { ...B, again: "remask" }] as const;
    expect(decodings.map((each) => revises(each, "masked"))).toEqual([false, true, false]);
  });

  it("sends constraints, and refuses a schema that is not JSON", () => {
    const shared = { ...SETUP.shared, regex: "a+", schema: '{"type": "object"}' };
    expect(diffusionFields(A, shared, "masked").constraint).toBeUndefined();
    expect(diffusionFields(A, shared, "masked").top_forbidden).toBeUndefined();
    const fields = diffusionFields(A, { ...shared, constraint: "regex" }, "masked");
    expect([fields.constraint, fields.top_forbidden]).toEqual([{ regex: "a+" }, 5]);
    expect(diffusionFields(A, { ...shared, constraint: "json_schema" }, "masked").constraint).toEqual({
      json_schema: { type: "object" },
    });
    expect(() => diffusionFields(A, { ...shared, constraint: "json_schema", schema: "{" }, "masked")).toThrow(
      SettingError,
    );
  });

  it("sends the settings of a canvas of random tokens", () => {
    const model = { id: "m", diffusion: { ...MODEL.diffusion, noise: "uniform" } } as Model;
    const setup = { ...SETUP, prompt: "Once", decodings: [{ ...A, again: "remask", fraction: 0.3 }, B] } as Setup;
    const sent = ([0, 1] as const).map((which) => makeRequest(setup, which, model).body);
    expect(sent.map(({ temperature, diffusion }) => ({ temperature, diffusion }))).toEqual(
      [48, 16].map((steps) => ({
        temperature: 1,
        diffusion: { stream: "frames", max_denoising_steps: steps, entropy_bound: 0.1 },
      })),
    );
    const shared = { ...SETUP.shared, constraint: "regex", regex: "a+" } as const;
    expect(diffusionFields(A, shared, "uniform")).toMatchObject({ constraint: { regex: "a+" } });
    expect(revises(A, "uniform")).toBe(true);
    expect(describeDecoding({ ...A, heat: 0.5 }, "uniform")).toBe(
      "at most 48 steps, entropy bound 0.1, temperature 0.5",
    );
  });

  it("sends a conversation with its system prompt", () => {
    const setup: Setup = { ...SETUP, mode: "chat", prompt: "And?", system: "Be short.", turns: TURNS };
    const { body, path } = makeRequest(setup, 0, MODEL);
    expect(path).toBe("v1/chat/completions");
    expect(body.messages).toEqual([
      { role: "system", content: "Be short." },
      ...TURNS,
      { role: "user", content: "And?" },
    ]);
    expect(() => makeRequest({ ...setup, prompt: " " }, 0, MODEL)).toThrow(SettingError);
  });

  it("writes gaps as the model's mask token", () => {
    const setup: Setup = { ...SETUP, mode: "infill", document: "a▯▯b" };
    const { body, path } = makeRequest(setup, 0, MODEL);
    expect([path, body.text, "max_tokens" in body]).toEqual(["v1/infill", "a<|mask|><|mask|>b", false]);
    expect(() => makeRequest({ ...setup, document: "ab" }, 0, MODEL)).toThrow("has no gap");
  });
});

describe("share links", () => {
  it("come back as they were", () => {
    const setup: Setup = {
      mode: "infill",
      model: "a/b c",
      prompt: "a&b=c #1",
      system: "x\ny",
      turns: [],
      document: "é▯▯ 😀",
      compare: true,
      shared: { maxTokens: 7, seed: 3, constraint: "regex", regex: "[&=#]+", schema: "{}" },
      decodings: [
        { ...A, rule: "steps", steps: 5, temperature: 0.7, again: "revise", fraction: 0.35 },
        { ...B, threshold: 0.55, remasking: "entropy" },
      ],
    };
    expect(fromFragment(`#${toFragment(setup)}`)).toEqual(setup);
    expect(fromFragment(toFragment(SETUP))).toEqual(SETUP);
    expect(toFragment(SETUP)).toBe("mode=completion");
  });

  it("have the conversation of a chat, and of nothing else", () => {
    const setup: Setup = { ...SETUP, mode: "chat", prompt: "And?", turns: TURNS };
    expect(fromFragment(toFragment(setup))).toEqual(setup);
    expect(fromFragment(toFragment({ ...setup, mode: "infill" })).turns).toEqual([]);
    for (const turns of [
      "{",
      "3",
      "null",
      '[{"role":"system","content":"a"}]',
      '[{"role":"user","content":1}]',
      "[null]",
    ])
      expect(fromFragment(`mode=chat&turns=${encodeURIComponent(turns)}`).turns).toEqual([]);
  });

  it("of anything are a setup", () => {
    const fragment =
      "#mode=evil&seed=1e99&maxTokens=-3&a.steps=2.5&b.threshold=7&a.remasking=__proto__&compare=1&x=%F0%9F";
    expect(fromFragment(fragment)).toEqual(SETUP);
    expect(fromFragment("#mode=toString&a.again=constructor&a.fraction=1&maxTokens=&seed=-1")).toEqual(SETUP);
    expect(fromFragment("")).toEqual(SETUP);
  });
});

it("describes a decoding in a few words", () => {
  expect(describeDecoding(A, "masked")).toBe("one token a step");
  expect(describeDecoding({ ...A, rule: "steps", remasking: "left_to_right", temperature: 0.5 }, "masked")).toBe(
    "32 steps, left to right, temperature 0.5",
  );
  expect(describeDecoding({ ...B, remasking: "random", again: "remask" }, "masked")).toBe("threshold 0.9");
  expect(describeDecoding({ ...A, again: "revise" }, "masked")).toBe("one token a step, revise 0.2");
});
