import { useId, useMemo } from "preact/hooks";
import type { Recording } from "../core/recording";
import { type Player, SPEEDS } from "./use-player";

interface Props {
  player: Player;
  recordings: Recording[];
  length: number;
}

/** Play, pause, and a slider over a graph of how many tokens each frame reveals. */
export function Transport({ player, recordings, length }: Props) {
  const id = useId();
  const { at, playing } = player;
  const step = Math.max(
    0,
    ...recordings.map((recording) => recording.frames[Math.min(at, recording.length) - 1]?.step ?? 0),
  );
  return (
    <section class="transport" aria-label="Replay">
      <div class="buttons">
        <button
          type="button"
          class="icon-button"
          aria-label="One frame back"
          disabled={at === 0}
          onClick={() => player.seek(at - 1)}
        >
          <Icon path="M10 3 5 8l5 5" />
        </button>
        <button type="button" class="icon-button play" aria-label={playing ? "Pause" : "Play"} onClick={player.toggle}>
          <Icon path={playing ? "M5.5 3v10M10.5 3v10" : "M5 3l8 5-8 5z"} filled={!playing} />
        </button>
        <button
          type="button"
          class="icon-button"
          aria-label="One frame forward"
          disabled={at >= length}
          onClick={() => player.seek(Math.min(length, at + 1))}
        >
          <Icon path="M6 3l5 5-5 5" />
        </button>
      </div>
      <div class="track">
        <div class="graphs">
          {recordings.map((recording, index) => (
            <Graph key={index} recording={recording} length={length} at={at} />
          ))}
        </div>
        <label for={id} class="visually-hidden">
          Frame
        </label>
        <input
          id={id}
          type="range"
          min={0}
          max={Math.max(1, length)}
          step={1}
          value={at}
          aria-valuetext={`frame ${at} of ${length}`}
          onInput={(event) => player.seek(event.currentTarget.valueAsNumber)}
        />
      </div>
      <p class="counter">
        <b>{at}</b> / {length}
        <small>step {step}</small>
      </p>
      <label class="speed">
        <span class="visually-hidden">Frames a second</span>
        <select value={String(player.speed)} onChange={(event) => player.setSpeed(Number(event.currentTarget.value))}>
          {SPEEDS.map((speed) => (
            <option key={speed} value={String(speed)}>
              {speed} / s
            </option>
          ))}
        </select>
      </label>
    </section>
  );
}

function Icon({ path, filled }: { path: string; filled?: boolean }) {
  return (
    <svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true" class={filled ? "filled" : undefined}>
      <path d={path} />
    </svg>
  );
}

const HEIGHT = 24;

/** Bars of the tokens that each frame writes; those of frames that were shown are in ink. */
function Graph({ recording, length, at }: { recording: Recording; length: number; at: number }) {
  const bars = useMemo(() => barPaths(recording, length), [recording, recording.length, length]);
  const shown = Math.min(at, bars.length);
  return (
    <svg class="graph" viewBox={`0 0 ${Math.max(1, length)} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      <path class="coming" d={bars.slice(shown).join("")} />
      <path class="shown" d={bars.slice(0, shown).join("")} />
    </svg>
  );
}

function barPaths(recording: Recording, length: number): string[] {
  const gap = length > 120 ? 0 : length > 40 ? 0.15 : 0.32;
  const { written } = recording;
  const most = Math.max(1, ...written);
  return written.map((count, index) => {
    const height = 2 + (HEIGHT - 2) * (count / most);
    return `M${index + gap} ${HEIGHT}v-${height.toFixed(2)}h${1 - 2 * gap}V${HEIGHT}z`;
  });
}
