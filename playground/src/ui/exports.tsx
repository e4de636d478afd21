import { useEffect, useState } from "preact/hooks";
import { download, toJson, toSvg } from "../core/export";
import type { Run } from "../core/run";
import { describe } from "../core/settings";
import type { Colour } from "../core/tint";
import { makeGif } from "../view/gif";
import type { Player } from "./use-player";

interface Props {
  runs: Run[];
  player: Player;
  colour: Colour;
}

/** What can be taken along: the runs as files, and their text. */
export function Exports({ runs, player, colour }: Props) {
  const [drawing, setDrawing] = useState("");
  const [news, setNews] = useState("");
  useEffect(() => {
    if (!news) return;
    const timer = setTimeout(() => setNews(""), 4000);
    return () => clearTimeout(timer);
  }, [news]);

  const saveSvg = (run: Run, name: string) => {
    const { recording } = run;
    if (!recording) return;
    const shown = Math.min(player.at, recording.length);
    const caption = `${captionOf(run)}, frame ${shown} of ${recording.length}, ${run.passes} passes`;
    const figure = toSvg(recording.cells(shown), recording.length, colour, caption);
    download(`${name}.svg`, new Blob([figure], { type: "image/svg+xml" }));
  };
  const saveGif = async (run: Run, name: string) => {
    if (!run.recording) return;
    const { initial, frames } = run.recording;
    const canvas = initial.map((cell) => cell.text);
    const caption = `${captionOf(run)}, ${run.passes} passes`;
    const loops = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    setDrawing(name);
    try {
      download(`${name}.gif`, await makeGif({ canvas, frames, colour, caption, speed: player.speed, loops }));
    } catch (error) {
      setNews((error as Error).message);
    } finally {
      setDrawing("");
    }
  };
  return (
    <div class="exports">
      <span>Export</span>
      <button
        type="button"
        class="quiet"
        onClick={() => download("unmask.json", new Blob([toJson(runs)], { type: "application/json" }))}
      >
        JSON
      </button>
      {runs.map((run, index) => {
        const letter = runs.length > 1 ? ` ${"AB".charAt(index)}` : "";
        const name = `unmask${letter.toLowerCase().replace(" ", "-")}`;
        const missing = !run.recording;
        return (
          <span key={letter}>
            <button type="button" class="quiet" disabled={missing} onClick={() => saveSvg(run, name)}>
              SVG{letter}
            </button>
            <button
              type="button"
              class="quiet"
              disabled={missing || run.active || drawing !== ""}
              onClick={() => saveGif(run, name)}
            >
              {drawing === name ? "Drawing" : `GIF${letter}`}
            </button>
          </span>
        );
      })}
      <button
        type="button"
        class="quiet"
        onClick={async () => {
          await navigator.clipboard.writeText(runs.map((run) => run.text).join("\n\n"));
          setNews("Copied.");
        }}
      >
        Copy text
      </button>
      <span role="status">{news}</span>
    </div>
  );
}

function captionOf(run: Run): string {
  return `${run.model}, ${describe(run.decoding, run.noise)}`;
}
