import { useEffect, useId, useRef } from "preact/hooks";
import type { Setup } from "../core/share";
import { TextField } from "./fields";
import { GapEditor } from "./gap-editor";

interface Props {
  setup: Setup;
  running: boolean;
  ready: boolean;
  hasTurns: boolean;
  onChange(setup: Setup): void;
  onRun(): void;
  onCancel(): void;
  onClear(): void;
}

const VERBS = { chat: "Send", completion: "Complete", infill: "Fill" };

/** Where the text is written from which the model generates. */
export function Composer({ setup, running, ready, hasTurns, onChange, onRun, onCancel, onClear }: Props) {
  return (
    <form
      class="composer"
      aria-label="Input"
      onSubmit={(event) => {
        event.preventDefault();
        if (!running) onRun();
      }}
    >
      {setup.mode === "infill" ? (
        <GapEditor value={setup.document} onChange={(document) => onChange({ ...setup, document })} />
      ) : (
        <Prompt setup={setup} onChange={onChange} />
      )}
      <div class="actions">
        {running ? (
          <button type="button" class="primary" onClick={onCancel}>
            Cancel <kbd>Esc</kbd>
          </button>
        ) : (
          <button type="submit" class="primary" disabled={!ready}>
            {VERBS[setup.mode]} <kbd>Ctrl ↵</kbd>
          </button>
        )}
        <label class="check">
          <input
            type="checkbox"
            checked={setup.compare}
            onChange={(event) => onChange({ ...setup, compare: event.currentTarget.checked })}
          />
          <span>Compare two settings</span>
        </label>
        {setup.mode === "chat" && hasTurns && (
          <button type="button" class="quiet" onClick={onClear}>
            New conversation
          </button>
        )}
      </div>
    </form>
  );
}

function Prompt({ setup, onChange }: Pick<Props, "setup" | "onChange">) {
  const id = useId();
  const area = useRef<HTMLTextAreaElement>(null);
  const chat = setup.mode === "chat";
  // biome-ignore lint/correctness/useExhaustiveDependencies: the height follows the text
  useEffect(() => {
    if (!area.current) return;
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(320, area.current.scrollHeight + 2)}px`;
  }, [setup.prompt]);
  return (
    <>
      {chat && (
        <details class="system" open={setup.system !== ""}>
          <summary>System prompt</summary>
          <TextField
            label="How the model shall answer"
            rows={2}
            value={setup.system}
            onChange={(system) => onChange({ ...setup, system })}
          />
        </details>
      )}
      <div class="text-field">
        <label for={id}>{chat ? "Message" : "Prompt"}</label>
        <textarea
          id={id}
          ref={area}
          rows={chat ? 2 : 3}
          value={setup.prompt}
          placeholder={chat ? "Ask something." : "Begin a text. The model goes on from here."}
          onInput={(event) => onChange({ ...setup, prompt: event.currentTarget.value })}
        />
      </div>
    </>
  );
}
