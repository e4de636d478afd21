import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { findGaps } from "./core/gaps";
import type { Run } from "./core/run";
import { fromFragment, MODES, type Mode, type Setup, toFragment } from "./core/share";
import type { Colour } from "./core/tint";
import { Composer } from "./ui/composer";
import { HelpDialog, KeyDialog } from "./ui/dialogs";
import { Header } from "./ui/header";
import { Results } from "./ui/results";
import { SettingsPanel } from "./ui/settings-panel";
import { EmptyStage } from "./ui/stage";
import { usePlayer } from "./ui/use-player";
import { useRuns } from "./ui/use-runs";
import { useShortcuts } from "./ui/use-shortcuts";
import { ApiError, listModels } from "./wire/api";
import type { Message, Model } from "./wire/types";

const KEY = "unmask-api-key";

export function App() {
  const [setup, setSetup] = useState<Setup>(() => fromFragment(location.hash));
  const [key, setKey] = useState(() => sessionStorage.getItem(KEY) ?? "");
  const [dialog, setDialog] = useState<"key" | "help" | null>(null);
  const [models, setModels] = useState<Model[]>([]);
  const [problem, setProblem] = useState("");
  const [question, setQuestion] = useState("");
  const [colour, setColour] = useState<Colour>("probability");
  const [news, setNews] = useState("");
  const chosen = useRef(location.hash.length > 1); // a mode: by a link, or by hand
  const { runs, running, start, cancel, clear } = useRuns();
  const length = Math.max(0, ...runs.map((run) => run.recording?.length ?? 0));
  const player = usePlayer(length, running);
  const model = models.find(({ id }) => id === setup.model) ?? models[0] ?? null;

  useEffect(() => {
    const controller = new AbortController();
    listModels(key, controller.signal).then(
      (found) => {
        setModels(found);
        setProblem("");
        if (!chosen.current && found[0]?.diffusion.chat) setSetup((now) => ({ ...now, mode: "chat" }));
        chosen.current = true;
      },
      (error) => {
        if (controller.signal.aborted) return;
        setProblem(error instanceof ApiError ? error.message : "The server does not answer.");
        if (error instanceof ApiError && error.status === 401) setDialog("key");
      },
    );
    return () => controller.abort();
  }, [key]);

  useEffect(() => {
    const read = () => {
      clear();
      setQuestion("");
      setSetup(fromFragment(location.hash));
    };
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, [clear]);

  const latest = useRef({ setup, question, runs });
  latest.current = { setup, question, runs };

  const run = useCallback(async () => {
    if (!model) return;
    const { question, runs } = latest.current;
    const setup = withLastTurns(latest.current.setup, question, runs[0]);
    setProblem("");
    player.restart();
    try {
      const started = start(setup, model, key);
      setNews("Generating.");
      if (setup.mode === "chat") {
        setQuestion(setup.prompt);
        setSetup({ ...setup, prompt: "" });
      }
      const done = await started;
      setNews(done.map((each) => outcome(each.status, each.tokens, each.passes)).join(" "));
      if (setup.mode === "chat" && done[0]?.status !== "done")
        setSetup((now) => ({ ...now, prompt: now.prompt || setup.prompt }));
    } catch (error) {
      setProblem((error as Error).message);
      setNews("");
    }
  }, [model, key, start, player.restart]);

  const share = useCallback(async () => {
    const { setup, question, runs } = latest.current;
    const told = setup.prompt ? withLastTurns(setup, question, runs[0]) : { ...setup, prompt: question };
    history.replaceState(null, "", `#${toFragment(told)}`);
    return navigator.clipboard.writeText(location.href).then(
      () => true,
      () => false,
    );
  }, []);

  const clearAll = () => {
    clear();
    setSetup({ ...setup, turns: [] });
    setQuestion("");
  };
  const switchMode = (mode: Mode) => {
    setQuestion("");
    clear();
    setProblem("");
    chosen.current = true;
    setSetup({ ...withLastTurns(setup, question, runs[0]), mode });
  };

  useShortcuts({
    run: () => !running && run(),
    cancel: () => running && cancel(),
    play: () => length > 0 && player.toggle(),
    back: () => player.seek(Math.max(0, player.at - 1)),
    forward: () => player.seek(Math.min(length, player.at + 1)),
    order: () => setColour((now) => (now === "order" ? "probability" : "order")),
    help: () => setDialog("help"),
  });

  const noise = model?.diffusion.noise ?? "masked";
  const chatless = setup.mode === "chat" && model !== null && !model.diffusion.chat;
  const tokens =
    setup.mode === "infill"
      ? findGaps(setup.document).reduce((sum, gap) => sum + gap.length, 0)
      : setup.shared.maxTokens;
  const composer = (
    <Composer
      setup={setup}
      running={running}
      ready={model !== null && !chatless}
      hasTurns={question !== "" || setup.turns.length > 0}
      onChange={setSetup}
      onRun={run}
      onCancel={cancel}
      onClear={clearAll}
    />
  );
  return (
    <>
      <button type="button" class="skip" onClick={() => document.getElementById("main")?.focus()}>
        To the text
      </button>
      <Header
        models={models}
        model={model}
        hasKey={key !== ""}
        onModel={(model) => setSetup({ ...setup, model })}
        onKey={() => setDialog("key")}
        onHelp={() => setDialog("help")}
        onShare={share}
      />
      <nav class="modes" aria-label="Mode">
        {(Object.keys(MODES) as Mode[]).map((mode) => (
          <button
            type="button"
            key={mode}
            aria-current={mode === setup.mode ? "page" : undefined}
            onClick={() => switchMode(mode)}
          >
            {MODES[mode]}
          </button>
        ))}
      </nav>
      <div class="columns">
        <main id="main" tabIndex={-1}>
          {problem && (
            <p class="problem" role="alert">
              {problem}
            </p>
          )}
          {chatless && <p class="note">This model has no chat template. Completion and infill work with it.</p>}
          {setup.mode === "chat" ? null : composer}
          {setup.mode === "chat" && <Conversation turns={setup.turns} question={question} />}
          {runs.length ? (
            <Results runs={runs} player={player} length={length} colour={colour} onColour={setColour} />
          ) : (
            <EmptyStage tokens={tokens || 24} noise={noise} />
          )}
          {setup.mode === "chat" ? composer : null}
        </main>
        <SettingsPanel setup={setup} noise={noise} onChange={setSetup} />
      </div>
      <p class="visually-hidden" role="status">
        {news}
      </p>
      <KeyDialog
        open={dialog === "key"}
        apiKey={key}
        onSave={(saved) => {
          sessionStorage.setItem(KEY, saved);
          setKey(saved);
        }}
        onClose={() => setDialog(null)}
      />
      <HelpDialog open={dialog === "help"} onClose={() => setDialog(null)} />
    </>
  );
}

/** The setup with the question and the answer on the stage as turns; as it is if there is no answer. */
function withLastTurns(setup: Setup, question: string, run: Run | undefined): Setup {
  if (!question || run?.status !== "done") return setup;
  const last: Message[] = [
    { role: "user", content: question },
    { role: "assistant", content: run.text },
  ];
  return { ...setup, turns: [...setup.turns, ...last] };
}

function Conversation({ turns, question }: { turns: Message[]; question: string }) {
  const all: Message[] = question ? [...turns, { role: "user", content: question }] : turns;
  if (!all.length) return null;
  return (
    <ol class="turns" aria-label="Conversation">
      {all.map(({ role, content }, index) => (
        <li key={index} class={role}>
          <b>{role === "user" ? "You" : "Model"}</b>
          <p>{content.trim()}</p>
        </li>
      ))}
    </ol>
  );
}

function outcome(status: string, tokens: number, passes: number): string {
  if (status === "done") return `Done: ${tokens} tokens in ${passes} passes.`;
  return status === "canceled" ? "Canceled." : "Failed.";
}
