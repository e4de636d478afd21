/** What the server sends, as far as the playground reads it. */

export interface Token {
  token: number;
  text: string;
  /** When the position was revealed. */
  probability: number;
}

export interface Revealed extends Token {
  position: number;
  /** With a constraint: the most probable tokens that it forbids there, the likeliest first. */
  forbidden?: Token[];
}

/** What changed in one look at a sequence: on a canvas of random tokens also the probabilities of tokens that are the same. `committed`: positions before it no longer change. */
export interface Frame {
  step: number;
  revealed: Revealed[];
  hidden: number[];
  committed: number;
}

export interface Summary {
  denoising_steps: number;
  forward_passes: number;
  tokens_per_pass: number;
  text: string;
}

/** What hides tokens: masks, random tokens, or either. */
export type Noise = "masked" | "uniform" | "hybrid";

export interface ModelFacts {
  attention: string;
  noise: Noise;
  block_size: number | null;
  context_length: number | null;
  mask_token: string;
  chat: boolean;
  causal: boolean;
  variable_length: boolean;
}

export interface Model {
  id: string;
  diffusion: ModelFacts;
}

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

/** What a stream says, in this order: one canvas, frames, one end. */
export type StreamEvent =
  | { kind: "canvas"; tokens: (string | null)[] }
  | { kind: "frame"; frame: Frame }
  | { kind: "end"; summary: Summary | null; finishReason: string };
