import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { download, toJson, toSvg } from "../core/export";
import { differences } from "../core/recording";
import type { Run } from "../core/run";
import { describe } from "../core/settings";
import { Choice } from "./fields";
import { type Colour, Stage } from "./stage";
import { Transport } from "./transport";
import type { Player } from "./use-player";

interface Props {
  runs: Run[];
  model: string;
  player: Player;
  length: number;
  colour: Colour;
  onColour(colour: Colour): void;
}

/** The texts of one or two runs, with what belongs to both. */
export function Results({ runs, model, player, length, colour, onColour }: Props) {
  const recordings = runs.flatMap((run) => run.recording ?? []);
  const [first, second] = runs;
  const finished = first?.status === "done" && second?.status === "done";
  const differing = useMemo(() => {
    return finished && first.recording && second.recording ? differences(first.recording, second.recording) : null;
  }, [finished, first, second]);
  const stages = useRef<HTMLDivElement>(null);
  // biome-ignore lint/correctness/useExhaustiveDependencies: a new run is looked at, wherever the page was scrolled to
  useEffect(() => stages.current?.scrollIntoView?.({ block: "nearest" }), [first]);
  return (
    <>
      <div class="view-options">
        <Choice
          label="Colour"
          value={colour}
          options={[
            ["probability", "Probability"],
            ["order", "Order"],
          ]}
          onChange={onColour}
        />
        <Legend colour={colour} />
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
      <Exports runs={runs} model={model} at={player.at} colour={colour} />
    </>
  );
}

function Legend({ colour }: { colour: Colour }) {
  const [from, to] = colour === "order" ? ["first", "last"] : ["certain", "unsure"];
  return (
    <p class="legend">
      <span>{from}</span>
      <i class={`ramp ${colour}`} aria-hidden="true" />
      <span>{to}</span>
      <span class="legend-item">
        <i class="cell hidden" aria-hidden="true" /> hidden
      </span>
      <span class="legend-item">
        <i class="cell draft" aria-hidden="true">
          abc
        </i>{" "}
        may change
      </span>
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

function Exports({ runs, model, at, colour }: { runs: Run[]; model: string; at: number; colour: Colour }) {
  const [copied, setCopied] = useState(false);
  const saveSvg = (run: Run, suffix: string) => {
    if (!run.recording) return;
    const shown = Math.min(at, run.recording.length);
    const caption = `${model}, ${describe(run.decoding)}, frame ${shown} of ${run.recording.length}, ${run.passes} passes`;
    const figure = toSvg(run.recording.cells(shown), run.recording.length, colour, caption);
    download(`unmask${suffix}.svg`, "image/svg+xml", figure);
  };
  if (!runs.some((run) => run.recording)) return null;
  return (
    <div class="exports">
      <span>Export</span>
      <button
        type="button"
        class="quiet"
        onClick={() => download("unmask.json", "application/json", toJson(model, runs))}
      >
        JSON
      </button>
      {runs.map((run, index) => {
        const letter = runs.length > 1 ? "AB".charAt(index) : "";
        return (
          <button
            type="button"
            class="quiet"
            key={letter}
            disabled={!run.recording}
            onClick={() => saveSvg(run, letter && `-${letter.toLowerCase()}`)}
          >
            SVG{letter && ` ${letter}`}
          </button>
        );
      })}
      <button
        type="button"
        class="quiet"
        onClick={async () => {
          await navigator.clipboard.writeText(runs.map((run) => run.text).join("\n\n"));
          setCopied(true);
          setTimeout(() => setCopied(false), 2000);
        }}
      >
        {copied ? "Copied" : "Copy text"}
      </button>
    </div>
  );
}
