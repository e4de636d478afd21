/** Runs one or two requests, one after the other, so that neither takes time from the other. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { makeRequest } from "../core/requests";
import { Run } from "../core/run";
import type { Setup } from "../core/share";
import { stream } from "../wire/api";
import type { Model } from "../wire/types";

export interface Runs {
  runs: Run[];
  running: boolean;
  /** Begin; raises SettingError for a setup that cannot be sent. */
  start(setup: Setup, model: Model, key: string): Promise<Run[]>;
  cancel(): void;
  clear(): void;
}

export function useRuns(): Runs {
  const [runs, setRuns] = useState<Run[]>([]);
  const [, redraw] = useState(0);
  const abort = useRef<AbortController | null>(null);
  const scheduled = useRef(0);

  // Frames come faster than the page is drawn: at most one drawing for each picture of the screen.
  const changed = useCallback(() => {
    scheduled.current ||= requestAnimationFrame(() => {
      scheduled.current = 0;
      redraw((version) => version + 1);
    });
  }, []);

  useEffect(
    () => () => {
      abort.current?.abort();
      cancelAnimationFrame(scheduled.current);
    },
    [],
  );

  const start = useCallback(
    async (setup: Setup, model: Model, key: string) => {
      const which = setup.compare ? ([0, 1] as const) : ([0] as const);
      const requests = which.map((index) => makeRequest(setup, index, model));
      const { noise } = model.diffusion;
      const begun = requests.map(
        ({ body }, index) => new Run(model.id, setup.decodings[index === 0 ? 0 : 1], body, noise),
      );
      const controller = new AbortController();
      abort.current?.abort();
      abort.current = controller;
      setRuns(begun);
      for (const [index, run] of begun.entries()) {
        const { path, body } = requests[index] ?? { path: "", body: {} };
        await run.follow(stream(path, body, key, controller.signal), controller.signal, changed);
      }
      return begun;
    },
    [changed],
  );

  return {
    runs,
    running: runs.some((run) => run.active),
    start,
    cancel: useCallback(() => abort.current?.abort(), []),
    clear: useCallback(() => {
      abort.current?.abort();
      setRuns([]);
    }, []),
  };
}
