import { afterEach, describe, expect, it, vi } from "vitest";
import { Run } from "../src/core/run";
import { DECODING } from "../src/core/settings";
import { ApiError, eventsOf, listModels, stream } from "../src/wire/api";
import { eventData } from "../src/wire/sse";
import type { StreamEvent } from "../src/wire/types";

function body(...parts: (string | Uint8Array)[]): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder();
  return new ReadableStream({
    start(controller) {
      for (const part of parts) controller.enqueue(typeof part === "string" ? encoder.encode(part) : part);
      controller.close();
    },
  });
}

async function all<T>(items: AsyncIterable<T>): Promise<T[]> {
  const found: T[] = [];
  for await (const item of items) found.push(item);
  return found;
}

const answer = (value: BodyInit | null, init?: ResponseInit) =>
  vi.stubGlobal(
    "fetch",
    vi.fn(async () => new Response(value, init)),
  );
const chunk = (diffusion: object, finish_reason: string | null = null) =>
  `data: ${JSON.stringify({ choices: [{ index: 0, finish_reason }], diffusion })}\n\n`;

afterEach(() => vi.unstubAllGlobals());

describe("eventData", () => {
  it("reads events wherever the network cuts them", async () => {
    const bytes = new TextEncoder().encode(
      'data: {"a": "ü▯"}\r\n\r\n: comment\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n',
    );
    for (let size = 1; size < 12; size++) {
      const parts = Array.from({ length: Math.ceil(bytes.length / size) }, (_, at) =>
        bytes.slice(at * size, (at + 1) * size),
      );
      expect(await all(eventData(body(...parts)))).toEqual(['{"a": "ü▯"}', "one\ntwo", "[DONE]"]);
    }
  });
});

describe("stream", () => {
  it("gives canvas, frames and end", async () => {
    const frame = {
      step: 1,
      revealed: [{ position: 0, token: 9, text: " a", probability: 0.5 }],
      hidden: [],
      committed: 1,
    };
    const summary = { denoising_steps: 1, forward_passes: 1, tokens_per_pass: 1, text: " a" };
    const parts = [
      chunk({ canvas: { tokens: [null] } }),
      chunk({ frame }),
      chunk(summary, "length"),
      "data: [DONE]\n\n",
    ];
    answer(body(...parts));
    expect(await all(stream("v1/completions", {}, "", new AbortController().signal))).toEqual([
      { kind: "canvas", tokens: [null] },
      { kind: "frame", frame },
      { kind: "end", summary, finishReason: "length" },
    ]);
  });

  it("says what the server says is wrong", async () => {
    answer(JSON.stringify({ error: { message: "steps: lower it", param: "steps" } }), { status: 400 });
    const failed = all(stream("v1/completions", {}, "", new AbortController().signal));
    await expect(failed).rejects.toEqual(new ApiError(400, "steps: lower it", "steps"));
    answer(JSON.stringify({ error: { message: "The queue is full." } }), {
      status: 429,
      headers: { "retry-after": "3" },
    });
    await expect(listModels("")).rejects.toThrow("The queue is full. Try again in 3 s.");
    answer("<html>", { status: 502, statusText: "Bad Gateway" });
    await expect(listModels("")).rejects.toThrow("The server answered 502 Bad Gateway.");
  });

  it("tells an answer that broke off from one that ended", async () => {
    answer(body(chunk({ canvas: { tokens: [null] } })));
    await expect(all(stream("p", {}, "", new AbortController().signal))).rejects.toThrow("ended before the answer did");
    answer(body('data: {"error": {"message": "The server is ending."}}\n\n'));
    await expect(all(stream("p", {}, "", new AbortController().signal))).rejects.toThrow("The server is ending.");
  });

  it("says that nobody answers, and passes a cancellation on", async () => {
    vi.stubGlobal("fetch", () => Promise.reject(new TypeError("Failed to fetch")));
    await expect(listModels("")).rejects.toEqual(new ApiError(0, "The server does not answer."));
    const canceled = new DOMException("aborted", "AbortError");
    vi.stubGlobal("fetch", () => Promise.reject(canceled));
    await expect(listModels("")).rejects.toBe(canceled);
    const broken = new ReadableStream({ pull: (controller) => controller.error(new TypeError("network error")) });
    answer(broken);
    const reading = all(stream("p", {}, "", new AbortController().signal));
    await expect(reading).rejects.toThrow("The connection ended before the answer did.");
  });

  it("sends the key as a bearer token, and none without a key", async () => {
    answer(JSON.stringify({ data: [] }));
    await listModels("secret");
    await listModels("");
    const sent = vi.mocked(fetch).mock.calls.map(([, init]) => new Headers(init?.headers).get("authorization"));
    expect(sent).toEqual(["Bearer secret", null]);
  });

  it("reads a last frame and the end from one chunk", () => {
    const frame = { step: 1, revealed: [], hidden: [], committed: 0 };
    const events = eventsOf({ choices: [{ finish_reason: "stop" }], diffusion: { frame } });
    expect(events.map(({ kind }) => kind)).toEqual(["frame", "end"]);
  });
});

describe("Run", () => {
  const canvas: StreamEvent = { kind: "canvas", tokens: [null, null] };
  const reveal = (position: number, text: string): StreamEvent => ({
    kind: "frame",
    frame: { step: position + 1, revealed: [{ position, token: 0, text, probability: 1 }], hidden: [], committed: 0 },
  });
  async function* of(...events: (StreamEvent | Error)[]) {
    for (const event of events) {
      if (event instanceof Error) throw event;
      yield event;
    }
  }

  it("measures what it took", async () => {
    const run = new Run("m", DECODING, {}, "masked");
    let clock = 0;
    const summary = { denoising_steps: 2, forward_passes: 4, tokens_per_pass: 0.5, text: "ab" };
    const events = of(canvas, reveal(0, "a"), reveal(1, "b"), { kind: "end", summary, finishReason: "length" });
    await run.follow(
      events,
      new AbortController().signal,
      () => undefined,
      () => 500 * clock++,
    );
    expect(run.status).toBe("done");
    expect([run.passes, run.tokensPerPass, run.seconds, run.tokensPerSecond, run.text]).toEqual([4, 0.5, 2, 1, "ab"]);
    expect([run.tokens, run.end]).toEqual([2, 2]);
  });

  it("keeps what was revealed when it is canceled, and says why it failed", async () => {
    const controller = new AbortController();
    const canceled = new Run("m", DECODING, {}, "masked");
    controller.abort();
    await canceled.follow(of(canvas, reveal(0, "a"), new Error("aborted")), controller.signal, () => undefined);
    expect([canceled.status, canceled.text, canceled.error]).toEqual(["canceled", "a", ""]);
    const failed = new Run("m", DECODING, {}, "masked");
    await failed.follow(of(new ApiError(400, "no")), new AbortController().signal, () => undefined);
    expect([failed.status, failed.error, failed.text]).toEqual(["failed", "no", ""]);
  });
});
