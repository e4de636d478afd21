/** Calls of the server, whose addresses are relative to the page. */

import { eventData } from "./sse";
import type { Model, StreamEvent } from "./types";

/** An answer of the server that is no result. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

function headers(key: string): Record<string, string> {
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

/** The error that an answer describes, in OpenAI's format or any other. */
async function errorOf(response: Response): Promise<ApiError> {
  const text = await response.text().catch(() => "");
  const wait = response.headers.get("retry-after");
  const later = wait && response.status === 429 ? ` Try again in ${wait} s.` : "";
  try {
    const { error } = JSON.parse(text);
    if (typeof error?.message === "string")
      return new ApiError(response.status, error.message + later, error.param ?? null);
  } catch {
    // not JSON: said below
  }
  return new ApiError(response.status, `The server answered ${response.status} ${response.statusText}.${later}`);
}

/** `fetch`, with an error that says what went wrong in place of the browser's. */
async function ask(path: string, init: RequestInit): Promise<Response> {
  const response = await fetch(path, init).catch((error) => {
    throw error instanceof TypeError ? new ApiError(0, "The server does not answer.") : error;
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

export async function listModels(key: string, signal?: AbortSignal): Promise<Model[]> {
  const response = await ask("v1/models", { headers: headers(key), signal });
  return (await response.json()).data;
}

/** The events of one request. Aborting the signal ends the request, and frees its place on the server. */
export async function* stream(
  path: string,
  body: object,
  key: string,
  signal: AbortSignal,
): AsyncGenerator<StreamEvent> {
  const response = await ask(path, { method: "POST", headers: headers(key), body: JSON.stringify(body), signal });
  let ended = false;
  for await (const data of unbroken(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message ?? "The server ended the answer.");
    for (const event of eventsOf(chunk)) {
      ended ||= event.kind === "end";
      yield event;
    }
  }
  if (!ended) throw new ApiError(0, "The connection ended before the answer did.");
}

/** The data of an answer's events; an error where the connection breaks. */
async function* unbroken(response: Response): AsyncGenerator<string> {
  try {
    if (response.body) yield* eventData(response.body);
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(0, "The connection ended before the answer did.") : error;
  }
}

/** What a chunk says. One chunk may hold a canvas, a frame and the end. */
// biome-ignore lint/suspicious/noExplicitAny: parsed JSON
export function eventsOf(chunk: any): StreamEvent[] {
  const { diffusion } = chunk;
  const reason: string | null = chunk.choices?.[0]?.finish_reason ?? null;
  const events: StreamEvent[] = [];
  if (diffusion?.canvas) events.push({ kind: "canvas", tokens: diffusion.canvas.tokens });
  if (diffusion?.frame) events.push({ kind: "frame", frame: diffusion.frame });
  if (reason) {
    const summary = typeof diffusion?.forward_passes === "number" ? diffusion : null;
    events.push({ kind: "end", summary, finishReason: reason });
  }
  return events;
}
