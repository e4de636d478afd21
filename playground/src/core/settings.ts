/** Settings of a generation, and the fields of a request that they become. */

export const POLICIES = ["confidence", "margin", "entropy", "random", "left_to_right"] as const;
export const RULES = ["one", "steps", "tokens_per_step", "threshold"] as const;
export const CONSTRAINTS = ["none", "regex", "json_schema"] as const;

export type Policy = (typeof POLICIES)[number];
export type Rule = (typeof RULES)[number];
export type ConstraintKind = (typeof CONSTRAINTS)[number];

/** How tokens are revealed: what two settings that are compared differ in. */
export interface Decoding {
  rule: Rule;
  steps: number;
  tokensPerStep: number;
  threshold: number;
  policy: Policy;
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
  policy: "confidence",
  temperature: 0,
};

export const SHARED: Shared = { maxTokens: 64, seed: 0, constraint: "none", regex: "", schema: "" };

/** A setting that cannot be sent. */
export class SettingError extends Error {}

/** The fields of `diffusion`. Raises SettingError for a schema that is not JSON. */
export function diffusionFields(decoding: Decoding, shared: Shared): Record<string, unknown> {
  const fields: Record<string, unknown> = { stream: "frames" };
  if (decoding.rule === "threshold")
    fields.threshold = decoding.threshold; // orders by confidence, and takes no policy
  else fields.policy = decoding.policy;
  if (decoding.rule === "steps") fields.steps = decoding.steps;
  if (decoding.rule === "tokens_per_step") fields.tokens_per_step = decoding.tokensPerStep;
  if (shared.constraint === "regex" && shared.regex) fields.constraint = { regex: shared.regex };
  if (shared.constraint === "json_schema" && shared.schema.trim())
    fields.constraint = { json_schema: parseSchema(shared.schema) };
  return fields;
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
  const policy =
    decoding.rule === "threshold" || decoding.policy === "confidence"
      ? ""
      : `, ${decoding.policy.replaceAll("_", " ")}`;
  const temperature = decoding.temperature ? `, temperature ${decoding.temperature}` : "";
  return rules[decoding.rule] + policy + temperature;
}
