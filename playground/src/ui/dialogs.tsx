import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef } from "preact/hooks";
import { setSingleKeys, singleKeys } from "./use-shortcuts";

interface DialogProps {
  title: string;
  open: boolean;
  onClose(): void;
  children: ComponentChildren;
}

function Dialog({ title, open, onClose, children }: DialogProps) {
  const id = useId();
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (open && !dialog.current?.open) dialog.current?.showModal();
    if (!open && dialog.current?.open) dialog.current.close();
  }, [open]);
  return (
    <dialog ref={dialog} aria-labelledby={id} onClose={onClose}>
      {open && (
        <>
          <h2 id={id}>{title}</h2>
          {children}
        </>
      )}
    </dialog>
  );
}

interface KeyProps {
  open: boolean;
  apiKey: string;
  onSave(key: string): void;
  onClose(): void;
}

/** The key is kept for this tab only, and is in no link and no export. */
export function KeyDialog({ open, apiKey, onSave, onClose }: KeyProps) {
  const id = useId();
  const input = useRef<HTMLInputElement>(null);
  return (
    <Dialog title="API key" open={open} onClose={onClose}>
      <form
        method="dialog"
        onSubmit={(event) => {
          event.preventDefault();
          onSave(input.current?.value.trim() ?? "");
          onClose();
        }}
      >
        <div class="text-field">
          <label for={id}>Key of this server</label>
          <input ref={input} id={id} type="password" autocomplete="off" class="mono" defaultValue={apiKey} />
        </div>
        <p class="hint">Kept until this tab is closed. It is in no link and no export.</p>
        <div class="actions">
          <button type="submit" class="primary">
            Save
          </button>
          <button type="button" class="quiet" onClick={onClose}>
            Close
          </button>
        </div>
      </form>
    </Dialog>
  );
}

const SHORTCUTS: [string, string][] = [
  ["Ctrl ↵", "run"],
  ["Esc", "cancel"],
  ["Ctrl G", "make the selection a gap"],
  ["P", "play or pause"],
  [", and .", "one frame back, one forward"],
  ["O", "colour by order or by probability"],
  ["← → ↑ ↓", "in the text: inspect its tokens"],
  ["?", "this list"],
];

export function HelpDialog({ open, onClose }: { open: boolean; onClose(): void }) {
  return (
    <Dialog title="Keys" open={open} onClose={onClose}>
      <dl class="shortcuts">
        {SHORTCUTS.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              <kbd>{keys}</kbd>
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <p class="hint">On a Mac, ⌘ works in place of Ctrl.</p>
      <label class="check">
        <input
          type="checkbox"
          defaultChecked={singleKeys()}
          onChange={(event) => setSingleKeys(event.currentTarget.checked)}
        />
        <span>Single letters are keys</span>
      </label>
      <div class="actions">
        <button type="button" class="primary" onClick={onClose}>
          Close
        </button>
      </div>
    </Dialog>
  );
}
