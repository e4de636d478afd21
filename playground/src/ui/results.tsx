import { useEffect, useMemo, useRef } from "preact/hooks";
import { differences, type Recording } from "../core/recording";
import type { Run } from "../core/run";
import type { Colour } from "../core/tint";
import { Exports } from "./exports";
import { Choice } from "./fields";
import { Stage } from "./stage";
import { Transport } from "./transport";
import type { Player } from "./use-player";

interface Props {
  runs: Run[];
  player: Player;
  length: number;
  colour: Colour;
  onColour(colour: Colour): void;
}

/** The texts of one or two runs, with what belongs to both. */
export function Results({ runs, player, length, colour, onColour }: Props) {
  const recordings = runs.flatMap((run) => run.recording ?? []);
  const [first, second] = runs;
  const finished = first?.status === "done" && second?.status === "done";
  const differing = useMemo(() => {
    return finished && first.recording && second.recording ? differences(first.recording, second.recording) : null;
  }, [finished, first, second]);
  const stages = useRef<HTMLDivElement>(null);
  // biome-ignore lint/correctness/useExhaustiveDependencies: a new run is looked at, wherever the page was scrolled to
  useEffect(() => stages.current?.scrollIntoView?.({ block: "nearest" }), [first]);
  if (first && !recordings.length && runs.every((run) => run.status === "failed" && run.error === first.error)) {
    return (
      <p class="problem" role="alert">
        {first.error}
      </p>
    );
  }
  return (
    <>
      <div class="view-options">
        <Choice
          label="Colour"
          value={colour}
          options={{ probability: "Probability", order: "Order" }}
          onChange={onColour}
        />
        <Legend colour={colour} recordings={recordings} />
      </div>
      <div ref={stages} class={runs.length > 1 ? "stages two" : "stages"}>
        {runs.map((run, index) => (
          <Stage
            key={index}
            letter={runs.length > 1 ? "AB".charAt(index) : ""}
            run={run}
            at={player.at}
            colour={colour}
            differing={index === 1 ? differing : null}
          />
        ))}
      </div>
      {finished && differing && <Verdict first={first} second={second} differing={differing.size} />}
      {recordings.length > 0 && <Transport player={player} recordings={recordings} length={length} />}
      {recordings.length > 0 && <Exports runs={runs} player={player} colour={colour} />}
    </>
  );
}

function Legend({ colour, recordings }: { colour: Colour; recordings: Recording[] }) {
  const [from, to] = colour === "order" ? ["first", "last"] : ["certain", "unsure"];
  return (
    <p class="legend">
      <span>{from}</span>
      <i class={`ramp ${colour}`} aria-hidden="true" />
      <span>{to}</span>
      <span class="legend-item">
        <i class="cell hidden" aria-hidden="true" /> hidden
      </span>
      {recordings.some((recording) => recording.revises) && (
        <span class="legend-item">
          <i class="cell draft" aria-hidden="true">
            abc
          </i>{" "}
          may change
        </span>
      )}
      {recordings.some((recording) => recording.constrained) && (
        <span class="legend-item">
          <i class="cell overruled" aria-hidden="true">
            abc
          </i>{" "}
          a likelier token is forbidden
        </span>
      )}
    </p>
  );
}

/** What the second setting gains, and what it costs. */
function Verdict({ first, second, differing }: { first: Run; second: Run; differing: number }) {
  const ratio = second.passes ? first.passes / second.passes : 0;
  const gain = ratio >= 1 ? `${ratio.toFixed(1)} times fewer` : `${(1 / ratio).toFixed(1)} times more`;
  const text = differing
    ? `${differing} ${differing === 1 ? "token differs" : "tokens differ"}`
    : "the text is the same";
  return (
    <p class="verdict">
      <b class="letter">B</b> takes <strong>{second.passes}</strong> passes where <b class="letter">A</b> takes{" "}
      <strong>{first.passes}</strong>
      {ratio === 1 ? "" : `, ${gain}`}; {text}.
    </p>
  );
}
