/** From a setup to the request that runs it. */

import type { Message, Model } from "../wire/types";
import { findGaps, withMasks } from "./gaps";
import { diffusionFields, SettingError, temperatureOf } from "./settings";
import type { Setup } from "./share";

export interface ApiRequest {
  path: string;
  body: Record<string, unknown>;
}

/** The request of one of the two decodings. Raises SettingError for a setup that cannot be sent. */
export function makeRequest(setup: Setup, which: 0 | 1, model: Model): ApiRequest {
  const decoding = setup.decodings[which];
  const { maxTokens, seed } = setup.shared;
  const { noise } = model.diffusion;
  const body: Record<string, unknown> = {
    model: model.id,
    stream: true,
    seed,
    temperature: temperatureOf(decoding, noise),
    diffusion: diffusionFields(decoding, setup.shared, noise),
  };
  if (setup.mode === "chat") {
    if (!setup.prompt.trim()) throw new SettingError("Write a message first.");
    const system: Message[] = setup.system ? [{ role: "system", content: setup.system }] : [];
    const messages: Message[] = [...system, ...setup.turns, { role: "user", content: setup.prompt }];
    return { path: "v1/chat/completions", body: { ...body, messages, max_completion_tokens: maxTokens } };
  }
  if (setup.mode === "completion") {
    return { path: "v1/completions", body: { ...body, prompt: setup.prompt, max_tokens: maxTokens } };
  }
  if (!findGaps(setup.document).length)
    throw new SettingError("The text has no gap: select what to hide, then press Make gap.");
  return { path: "v1/infill", body: { ...body, text: withMasks(setup.document, model.diffusion.mask_token) } };
}
