import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { type Cell, overruled, type Recording } from "../core/recording";
import type { Run } from "../core/run";
import { describe } from "../core/settings";
import { type Colour, percent } from "../core/tint";
import { CellGrid } from "../view/cell-grid";
import type { Noise } from "../wire/types";

interface StageProps {
  letter: string;
  run: Run;
  at: number;
  colour: Colour;
  differing: ReadonlySet<number> | null;
}

/** The least probability that is not written as 0.0 %. */
const NOTICEABLE = 0.0005;
const NOTHING: ReadonlySet<number> = new Set();

/** One run: its text at the frame that is shown, and its figures. */
export function Stage({ letter, run, at, colour, differing }: StageProps) {
  const { recording, end } = run;
  return (
    <article class="stage" aria-label={letter ? `Run ${letter}` : "Run"}>
      {letter && (
        <h2 class="stage-title">
          <b class="letter">{letter}</b> {describe(run.decoding, run.noise)}
        </h2>
      )}
      {recording ? (
        <Text
          recording={recording}
          at={at}
          colour={colour}
          differing={differing ?? NOTHING}
          live={run.active}
          end={end}
          letter={letter}
        />
      ) : (
        run.active && <p class="stage-waiting">Waiting for the first frame.</p>
      )}
      {run.status === "failed" && (
        <p class="problem" role="alert">
          {run.error}
        </p>
      )}
      {run.status === "canceled" && (
        <p class="note">{recording ? "Canceled. What had been revealed stays." : "Canceled before the first frame."}</p>
      )}
      {(recording || run.active) && <Figures run={run} />}
      {recording?.constrained && <Forbidden recording={recording} end={end} />}
    </article>
  );
}

interface TextProps {
  recording: Recording;
  at: number;
  colour: Colour;
  differing: ReadonlySet<number>;
  live: boolean;
  /** Tokens of the answer; those after them follow its end. */
  end: number | null;
  letter: string;
}

function Text({ recording, at, colour, differing, live, end, letter }: TextProps) {
  const root = useRef<HTMLDivElement>(null);
  const grid = useRef<CellGrid | null>(null);
  const cursor = useRef(-1);
  const [pointed, setPointed] = useState(-1);
  const cell = pointed < 0 ? null : recording.cells(at)[pointed];

  useLayoutEffect(() => {
    if (!root.current) return;
    grid.current ??= new CellGrid(root.current);
    grid.current.load(recording);
    cursor.current = -1;
    setPointed(-1);
  }, [recording]);

  useLayoutEffect(() => {
    grid.current?.show(at);
    grid.current?.mark(differing);
    grid.current?.endAt(end ?? recording.size);
    root.current?.style.setProperty("--frames", String(Math.max(1, recording.length)));
  });

  const point = (position: number) => {
    cursor.current = position;
    grid.current?.point(position);
    setPointed(position);
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const step = steps[event.key];
    if (step === undefined) return;
    event.preventDefault();
    point(Math.max(0, Math.min(recording.size - 1, cursor.current + step)));
  };

  return (
    <>
      {/* biome-ignore lint/a11y/useSemanticElements: a group of tokens, not of inputs */}
      <div
        ref={root}
        class={`text${live ? " live" : ""}`}
        data-colour={colour}
        role="group"
        // biome-ignore lint/a11y/noNoninteractiveTabindex: arrow keys inspect its tokens, and it may scroll
        tabIndex={0}
        aria-label={`${letter ? `Text of ${letter}` : "Text"}. Arrow keys inspect its tokens.`}
        onKeyDown={onKeyDown}
        onPointerOver={(event) => {
          const position = (event.target as HTMLElement).dataset.position;
          if (position !== undefined) point(Number(position));
        }}
        onPointerLeave={(event) => event.pointerType === "mouse" && point(-1)} // a finger that taps leaves at once
        onBlur={() => point(-1)}
      />
      <output class={recording.constrained ? "inspector constrained" : "inspector"}>
        {cell && <Inspected position={pointed} cell={cell} draft={pointed >= recording.settled(at)} />}
      </output>
    </>
  );
}

/** What is known of one token. */
function Inspected({ position, cell, draft }: { position: number; cell: Cell; draft: boolean }) {
  if (cell.text === null) return <span>Token {position + 1} · hidden</span>;
  const facts = [`token ${position + 1}`];
  if (cell.probability === null) facts.push("given");
  else facts.push(percent(cell.probability), `frame ${cell.frame}`, ...(draft ? ["may change"] : []));
  const forbidden = cell.forbidden.filter(({ probability }) => probability >= NOTICEABLE);
  return (
    <>
      <q>{visible(cell.text)}</q>
      <span>{facts.join(" · ")}</span>
      {forbidden.length > 0 && (
        <span class="forbidden">
          forbidden:{" "}
          {forbidden.map(({ token, text, probability }) => (
            <span key={token}>
              <s>{visible(text)}</s> {percent(probability)}
            </span>
          ))}
        </span>
      )}
    </>
  );
}

function visible(text: string): string {
  return text.replaceAll("\n", "↵");
}

/** How often the constraint stood in the model's way. */
function Forbidden({ recording, end }: { recording: Recording; end: number | null }) {
  const cells = Array.from({ length: end ?? recording.size }, (_, position) => recording.final(position));
  const revealed = cells.filter((cell) => cell.probability !== null);
  return (
    <p class="note">
      The constraint forbade a likelier token at {revealed.filter(overruled).length} of {revealed.length}{" "}
      {revealed.length === 1 ? "position" : "positions"}.
    </p>
  );
}

/** What the run took. */
function Figures({ run }: { run: Run }) {
  const figures: [string, string][] = [
    ["passes", String(run.passes)],
    ["tokens", String(run.tokens)],
    ["per pass", run.tokensPerPass.toFixed(run.tokensPerPass < 10 ? 2 : 1)],
    ["per second", run.tokensPerSecond.toFixed(run.tokensPerSecond < 10 ? 1 : 0)],
  ];
  return (
    <dl class="figures">
      {figures.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Before the first run: the canvas. */
export function EmptyStage({ tokens, noise }: { tokens: number; noise: Noise }) {
  return (
    <div class="stage empty-stage">
      <div class="text" aria-hidden="true">
        {Array.from({ length: Math.min(tokens, 160) }, (_, index) => (
          <span key={index} class="cell hidden" />
        ))}
      </div>
      <p class="note">
        {noise === "uniform"
          ? "This model begins with random tokens. Each step predicts all of them again, until they stay."
          : "A diffusion model begins with every token hidden, and reveals them in the order of its confidence."}
      </p>
    </div>
  );
}
