/** Which frame is shown: the newest one of a live run, or where a replay or the slider is. */

import { useCallback, useEffect, useRef, useState } from "preact/hooks";

export const SPEEDS = [5, 15, 30] as const;

/** Frames that the picture may be behind a live run before it skips some. */
const LAG = 30;

export interface Player {
  at: number;
  playing: boolean;
  speed: number;
  seek(at: number): void;
  toggle(): void;
  setSpeed(speed: number): void;
  /** Follow a run from its beginning. */
  restart(): void;
}

export function usePlayer(length: number, live: boolean): Player {
  const [at, setAt] = useState(0);
  const [following, setFollowing] = useState(true);
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState<number>(15);
  const latest = useRef({ at, length });
  latest.current = { at, length };
  const moving = playing || (following && at < length);

  useEffect(() => {
    if (!moving) return;
    let due = performance.now();
    let request = requestAnimationFrame(function tick(now) {
      const { at: here, length: end } = latest.current;
      if (playing && now - due >= 1000 / speed) {
        const frames = Math.floor(((now - due) * speed) / 1000);
        due += (frames * 1000) / speed;
        setAt(Math.min(end, here + frames));
      } else if (!playing) {
        setAt(Math.min(end, here + Math.max(1, Math.ceil((end - here) / LAG))));
      }
      request = requestAnimationFrame(tick);
    });
    return () => cancelAnimationFrame(request);
  }, [moving, playing, speed]);

  useEffect(() => {
    if (playing && at >= length && !live) setPlaying(false);
  }, [playing, at, length, live]);

  return {
    at: Math.min(at, length),
    playing,
    speed,
    setSpeed,
    seek: useCallback((to: number) => {
      setFollowing(false);
      setPlaying(false);
      setAt(Math.max(0, to));
    }, []),
    toggle: useCallback(() => {
      setFollowing(false);
      setPlaying((before) => !before);
      if (!playing && latest.current.at >= length) setAt(0);
    }, [playing, length]),
    restart: useCallback(() => {
      setFollowing(true);
      setPlaying(false);
      setAt(0);
    }, []),
  };
}
