/** What a link says: the mode, its text and the settings, in the fragment, which browsers do not send to the server. */

import { CONSTRAINTS, DECODING, type Decoding, POLICIES, RULES, SHARED, type Shared } from "./settings";

export const MODES = ["chat", "completion", "infill"] as const;
export type Mode = (typeof MODES)[number];

/** Everything that makes a run, but for the key. */
export interface Setup {
  mode: Mode;
  prompt: string;
  system: string;
  document: string;
  compare: boolean;
  shared: Shared;
  decodings: [Decoding, Decoding];
}

export const SETUP: Setup = {
  mode: "completion",
  prompt: "",
  system: "",
  document: "",
  compare: false,
  shared: SHARED,
  decodings: [DECODING, { ...DECODING, rule: "threshold" }],
};

/** The setup as a fragment without `#`; what has its default is left out. */
export function toFragment(setup: Setup): string {
  const fields = new URLSearchParams({ mode: setup.mode });
  const put = (prefix: string, values: object, defaults: object) => {
    for (const [name, value] of Object.entries(values)) {
      if (value !== defaults[name as keyof typeof defaults]) fields.set(prefix + name, String(value));
    }
  };
  const { prompt, system, document, compare } = setup;
  const { prompt: noPrompt, system: noSystem, document: noDocument, compare: noCompare } = SETUP;
  put(
    "",
    { prompt, system, document, compare },
    { prompt: noPrompt, system: noSystem, document: noDocument, compare: noCompare },
  );
  put("", setup.shared, SHARED);
  put("a.", setup.decodings[0], SETUP.decodings[0]);
  if (setup.compare) put("b.", setup.decodings[1], SETUP.decodings[1]);
  return fields.toString();
}

/** The setup that a fragment describes. What is missing, unknown or out of range has its default. */
export function fromFragment(fragment: string): Setup {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const text = (name: string) => fields.get(name) ?? "";
  const choice = <T extends string>(name: string, values: readonly T[], otherwise: T): T => {
    return values.find((value) => value === fields.get(name)) ?? otherwise;
  };
  const number = (name: string, otherwise: number, least: number, most: number, whole = true): number => {
    const value = Number(fields.get(name) ?? Number.NaN);
    return value >= least && value <= most && (!whole || Number.isInteger(value)) ? value : otherwise;
  };
  const decoding = (prefix: string, otherwise: Decoding): Decoding => ({
    rule: choice(`${prefix}rule`, RULES, otherwise.rule),
    steps: number(`${prefix}steps`, otherwise.steps, 1, 1e5),
    tokensPerStep: number(`${prefix}tokensPerStep`, otherwise.tokensPerStep, 1, 1e5),
    threshold: number(`${prefix}threshold`, otherwise.threshold, 1e-6, 1, false),
    policy: choice(`${prefix}policy`, POLICIES, otherwise.policy),
    temperature: number(`${prefix}temperature`, otherwise.temperature, 0, 100, false),
  });
  return {
    mode: choice("mode", MODES, SETUP.mode),
    prompt: text("prompt"),
    system: text("system"),
    document: text("document"),
    compare: fields.get("compare") === "true",
    shared: {
      maxTokens: number("maxTokens", SHARED.maxTokens, 1, 1e5),
      seed: number("seed", SHARED.seed, -(2 ** 53), 2 ** 53),
      constraint: choice("constraint", CONSTRAINTS, SHARED.constraint),
      regex: text("regex"),
      schema: text("schema"),
    },
    decodings: [decoding("a.", SETUP.decodings[0]), decoding("b.", SETUP.decodings[1])],
  };
}
