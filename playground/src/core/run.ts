/** One answer as it comes: its recording, and what it took. */

import type { Noise, StreamEvent, Summary } from "../wire/types";
import { Recording } from "./recording";
import { type Decoding, revises } from "./settings";

export type Status = "waiting" | "running" | "done" | "canceled" | "failed";

export class Run {
  status: Status = "waiting";
  recording: Recording | null = null;
  summary: Summary | null = null;
  finishReason = "";
  error = "";
  /** From the request to the last event, network included. */
  seconds = 0;

  /**
   * @param model The name of the model that was asked.
   * @param noise That model's.
   */
  constructor(
    readonly model: string,
    readonly decoding: Decoding,
    readonly request: object,
    readonly noise: Noise,
  ) {}

  get active(): boolean {
    return this.status === "waiting" || this.status === "running";
  }

  get passes(): number {
    return this.summary?.forward_passes ?? this.recording?.frames.at(-1)?.step ?? 0;
  }

  /** The tokens of a finished answer, up to its end token; null: it is not finished, or a text with gaps, which ends where it ended. */
  get end(): number | null {
    const given = this.recording?.initial.some((cell) => cell.text !== null);
    return this.summary && !given ? Math.round(this.summary.tokens_per_pass * this.summary.forward_passes) : null;
  }

  get tokens(): number {
    return this.end ?? this.recording?.revealed ?? 0;
  }

  get tokensPerPass(): number {
    return this.passes ? this.tokens / this.passes : 0;
  }

  get tokensPerSecond(): number {
    return this.seconds ? this.tokens / this.seconds : 0;
  }

  /** The final text, or that of the tokens so far. */
  get text(): string {
    const cells = this.recording?.cells(this.recording.length) ?? [];
    return this.summary?.text ?? cells.map((cell) => cell.text ?? "").join("");
  }

  /** Read a stream to its end. Never rejects: `status` and `error` say how it ended. */
  async follow(
    events: AsyncIterable<StreamEvent>,
    signal: AbortSignal,
    changed: () => void,
    now = () => performance.now(),
  ) {
    const start = now();
    this.status = "running";
    changed();
    try {
      for await (const event of events) {
        if (event.kind === "canvas") this.recording = new Recording(event.tokens, revises(this.decoding, this.noise));
        else if (event.kind === "frame") this.recording?.add(event.frame);
        else {
          this.summary = event.summary;
          this.finishReason = event.finishReason;
        }
        this.seconds = (now() - start) / 1000;
        changed();
      }
      this.status = "done";
    } catch (error) {
      this.status = signal.aborted ? "canceled" : "failed";
      if (!signal.aborted) this.error = error instanceof Error ? error.message : String(error);
    }
    changed();
  }
}
