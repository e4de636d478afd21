/** Settings of a generation, and the fields of a request that they become. */

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
};

export const SHARED: Shared = { maxTokens: 64, seed: 0, constraint: "none", regex: "", schema: "" };

/** The most probable tokens that are asked for of those that a constraint forbids at each position. */
const FORBIDDEN = 5;

/** A setting that cannot be sent. */
export class SettingError extends Error {}

/** Whether revealed tokens may be hidden again. A threshold does not fix the number of steps, and hides none. */
export function revises(decoding: Decoding): boolean {
  return decoding.again !== "never" && decoding.rule !== "threshold";
}

/** The fields of `diffusion`. Raises SettingError for a schema that is not JSON. */
export function diffusionFields(decoding: Decoding, shared: Shared): Record<string, unknown> {
  const fields: Record<string, unknown> = { stream: "frames" };
  if (decoding.rule === "threshold")
    fields.threshold = decoding.threshold; // orders by confidence, and takes no remasking
  else fields.remasking = decoding.remasking;
  if (decoding.rule === "steps") fields.steps = decoding.steps;
  if (decoding.rule === "tokens_per_step") fields.tokens_per_step = decoding.tokensPerStep;
  if (revises(decoding) && decoding.again === "remask") fields.remask_fraction = decoding.fraction;
  if (revises(decoding) && decoding.again === "revise") fields.revise = { eta: decoding.fraction };
  const constraint = constraintOf(shared);
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
export function describe(decoding: Decoding): string {
  const rules: Record<Rule, string> = {
    one: "one token a step",
    steps: `${decoding.steps} steps`,
    tokens_per_step: `${decoding.tokensPerStep} tokens a step`,
    threshold: `threshold ${decoding.threshold}`,
  };
  const said = [rules[decoding.rule]];
  if (decoding.rule !== "threshold" && decoding.remasking !== "low_confidence")
    said.push(REMASKING[decoding.remasking]);
  if (revises(decoding)) said.push(`${decoding.again} ${decoding.fraction}`);
  if (decoding.temperature) said.push(`temperature ${decoding.temperature}`);
  return said.join(", ");
}
