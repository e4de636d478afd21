/** What a link says: the mode, its text or conversation, the model and the settings, in the fragment, which browsers do not send to the server. */

import type { Message } from "../wire/types";
import {
  AGAIN,
  CONSTRAINTS,
  DECODING,
  type Decoding,
  NUMBERS,
  REMASKING,
  RULES,
  SHARED,
  type Shared,
} from "./settings";

export const MODES = { chat: "Chat", completion: "Completion", infill: "Infill" } as const;
export type Mode = keyof typeof MODES;

/** Everything that makes a run, but for the key. */
export interface Setup {
  mode: Mode;
  /** Its name; empty: the first one of the server. */
  model: string;
  prompt: string;
  system: string;
  /** Of the chat, before the prompt. */
  turns: Message[];
  document: string;
  compare: boolean;
  shared: Shared;
  decodings: [Decoding, Decoding];
}

export const SETUP: Setup = {
  mode: "completion",
  model: "",
  prompt: "",
  system: "",
  turns: [],
  document: "",
  compare: false,
  shared: SHARED,
  decodings: [DECODING, { ...DECODING, rule: "threshold", denoisingSteps: 16 }],
};

/** The setup as a fragment without `#`; what has its default is left out. */
export function toFragment({ mode, shared, decodings, turns, ...others }: Setup): string {
  const fields = new URLSearchParams({ mode });
  const put = <T extends object>(prefix: string, values: T, defaults: T) => {
    for (const name of Object.keys(values) as (string & keyof T)[]) {
      if (values[name] !== defaults[name]) fields.set(prefix + name, String(values[name]));
    }
  };
  const { model, prompt, system, document, compare } = SETUP;
  put("", others, { model, prompt, system, document, compare });
  if (mode === "chat" && turns.length) fields.set("turns", JSON.stringify(turns));
  put("", shared, SHARED);
  put("a.", decodings[0], SETUP.decodings[0]);
  if (others.compare) put("b.", decodings[1], SETUP.decodings[1]);
  return fields.toString();
}

/** The setup that a fragment describes. What is missing, unknown or out of range has its default. */
export function fromFragment(fragment: string): Setup {
  const fields = new URLSearchParams(fragment.replace(/^#/, ""));
  const read = <T extends object>(prefix: string, defaults: T): T => {
    const values = Object.entries(defaults).map(([name, otherwise]) => [
      name,
      meaningOf(name, fields.get(prefix + name), otherwise),
    ]);
    return Object.fromEntries(values);
  };
  const { shared, decodings, ...others } = SETUP;
  return {
    ...read("", others),
    shared: read("", shared),
    decodings: [read("a.", decodings[0]), read("b.", decodings[1])],
  };
}

const CHOICES: Record<string, object> = {
  mode: MODES,
  rule: RULES,
  remasking: REMASKING,
  again: AGAIN,
  constraint: CONSTRAINTS,
};

/** The turns that a text means; none if it means something else. */
function turnsOf(text: string): Message[] {
  try {
    const turns: Message[] = JSON.parse(text);
    const ours = turns.every(({ role, content }) => /^(user|assistant)$/.test(role) && typeof content === "string");
    return ours ? turns.map(({ role, content }) => ({ role, content })) : [];
  } catch {
    return [];
  }
}

/** The value that a text means for a setting. */
function meaningOf(name: string, text: string | null, otherwise: unknown): unknown {
  if (text === null) return otherwise;
  if (name in NUMBERS) {
    const { min, max, step } = NUMBERS[name as keyof typeof NUMBERS];
    const value = text === "" ? Number.NaN : Number(text);
    return value >= min && value <= max && (step < 1 || Number.isInteger(value)) ? value : otherwise;
  }
  if (name === "turns") return turnsOf(text);
  if (name in CHOICES) return Object.hasOwn(CHOICES[name] ?? {}, text) ? text : otherwise;
  return typeof otherwise === "boolean" ? text === "true" : text;
}
