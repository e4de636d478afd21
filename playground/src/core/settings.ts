/** Settings of a generation, and the fields of a request that they become. A canvas of random tokens, of uniform noise, has others than one of masks. */

import type { Noise } from "../wire/types";

/** The choices of a setting, and what the page calls them. */
export const REMASKING = {
  low_confidence: "confidence",
  margin: "margin",
  entropy: "entropy",
  random: "random",
  left_to_right: "left to right",
} as const;
export const RULES = { one: "One", steps: "Steps", tokens_per_step: "Per step", threshold: "Threshold" } as const;
export const AGAIN = { never: "nothing", remask: "improbable when revealed", revise: "improbable now" } as const;
export const CONSTRAINTS = { none: "None", regex: "Regex", json_schema: "JSON schema" } as const;

export type Remasking = keyof typeof REMASKING;
export type Rule = keyof typeof RULES;
export type Again = keyof typeof AGAIN;
export type ConstraintKind = keyof typeof CONSTRAINTS;

/** A number that can be set, on the page and by links. */
export interface NumberSetting {
  readonly label: string;
  readonly min: number;
  readonly max: number;
  readonly step: number;
  /** Whether the page has a slider for it. */
  readonly slider?: boolean;
}

export const NUMBERS = {
  maxTokens: { label: "Tokens", min: 1, max: 8192, step: 1 },
  seed: { label: "Seed", min: 0, max: 2 ** 31 - 1, step: 1 },
  steps: { label: "Steps in all", min: 1, max: 8192, step: 1 },
  tokensPerStep: { label: "Tokens a step", min: 1, max: 8192, step: 1 },
  threshold: { label: "Probability", min: 0.05, max: 1, step: 0.05, slider: true },
  fraction: { label: "Fraction hidden again", min: 0.05, max: 0.95, step: 0.05, slider: true },
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1, slider: true },
  denoisingSteps: { label: "Most steps", min: 1, max: 1024, step: 1 },
  entropyBound: { label: "Entropy bound", min: 0.05, max: 5, step: 0.05, slider: true },
  heat: { label: "Temperature", min: 0, max: 2, step: 0.1, slider: true },
} as const satisfies Record<string, NumberSetting>;

/** How tokens are revealed: what two settings that are compared differ in. */
export interface Decoding {
  rule: Rule;
  steps: number;
  tokensPerStep: number;
  threshold: number;
  remasking: Remasking;
  again: Again;
  fraction: number;
  temperature: number;
  /** On a canvas of random tokens the most steps of a block. */
  denoisingSteps: number;
  /** There, in nats: of the tokens that a step keeps. */
  entropyBound: number;
  /** There, by which the temperatures of all steps are multiplied. */
  heat: number;
}

/** What two settings that are compared share. */
export interface Shared {
  maxTokens: number;
  seed: number;
  constraint: ConstraintKind;
  regex: string;
  schema: string;
}

export const DECODING: Decoding = {
  rule: "one",
  steps: 32,
  tokensPerStep: 4,
  threshold: 0.9,
  remasking: "low_confidence",
  again: "never",
  fraction: 0.2,
  temperature: 0,
  denoisingSteps: 48,
  entropyBound: 0.1,
  heat: 1,
};

export const SHARED: Shared = { maxTokens: 64, seed: 0, constraint: "none", regex: "", schema: "" };

/** The most probable tokens that are asked for of those that a constraint forbids at each position. */
const FORBIDDEN = 5;

/** A setting that cannot be sent. */
export class SettingError extends Error {}

/** Whether revealed tokens may be hidden again. A threshold does not fix the number of steps, and hides none. */
function hidesAgain(decoding: Decoding): boolean {
  return decoding.again !== "never" && decoding.rule !== "threshold";
}

/** Whether revealed tokens may change, or be hidden again. */
export function revises(decoding: Decoding, noise: Noise): boolean {
  return noise === "uniform" || hidesAgain(decoding);
}

/** The temperature of a request. */
export function temperatureOf(decoding: Decoding, noise: Noise): number {
  return noise === "uniform" ? decoding.heat : decoding.temperature;
}

/** The fields of `diffusion`. Raises SettingError for a schema that is not JSON. */
export function diffusionFields(decoding: Decoding, shared: Shared, noise: Noise): Record<string, unknown> {
  const constraint = constraintOf(shared);
  const fields: Record<string, unknown> = { stream: "frames" };
  if (noise === "uniform") {
    fields.max_denoising_steps = decoding.denoisingSteps;
    fields.entropy_bound = decoding.entropyBound;
    return constraint ? { ...fields, constraint } : fields;
  }
  if (decoding.rule === "threshold")
    fields.threshold = decoding.threshold; // orders by confidence, and takes no remasking
  else fields.remasking = decoding.remasking;
  if (decoding.rule === "steps") fields.steps = decoding.steps;
  if (decoding.rule === "tokens_per_step") fields.tokens_per_step = decoding.tokensPerStep;
  if (hidesAgain(decoding) && decoding.again === "remask") fields.remask_fraction = decoding.fraction;
  if (hidesAgain(decoding) && decoding.again === "revise") fields.revise = { eta: decoding.fraction };
  return constraint ? { ...fields, constraint, top_forbidden: FORBIDDEN } : fields;
}

function constraintOf({ constraint, regex, schema }: Shared): Record<string, unknown> | null {
  if (constraint === "regex" && regex) return { regex };
  if (constraint === "json_schema" && schema.trim()) return { json_schema: parseSchema(schema) };
  return null;
}

function parseSchema(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingError(`The JSON schema is not JSON: ${(error as Error).message}`);
  }
}

/** The decoding in a few words. */
export function describe(decoding: Decoding, noise: Noise): string {
  if (noise === "uniform") {
    const { denoisingSteps, entropyBound, heat } = decoding;
    return `at most ${denoisingSteps} steps, entropy bound ${entropyBound}, temperature ${heat}`;
  }
  const rules: Record<Rule, string> = {
    one: "one token a step",
    steps: `${decoding.steps} steps`,
    tokens_per_step: `${decoding.tokensPerStep} tokens a step`,
    threshold: `threshold ${decoding.threshold}`,
  };
  const said = [rules[decoding.rule]];
  if (decoding.rule !== "threshold" && decoding.remasking !== "low_confidence")
    said.push(REMASKING[decoding.remasking]);
  if (hidesAgain(decoding)) said.push(`${decoding.again} ${decoding.fraction}`);
  if (decoding.temperature) said.push(`temperature ${decoding.temperature}`);
  return said.join(", ");
}
