import { useEffect, useRef } from "preact/hooks";

export interface Actions {
  run(): void;
  cancel(): void;
  play(): void;
  back(): void;
  forward(): void;
  order(): void;
  help(): void;
}

/** Keys that work on the whole page; letters only where nothing is typed. */
export function useShortcuts(actions: Actions): void {
  const latest = useRef(actions);
  latest.current = actions;
  useEffect(() => {
    const onKeyDown = (event: KeyboardEvent) => {
      const name = action(event);
      if (!name) return;
      event.preventDefault();
      latest.current[name]();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, []);
}

const LETTERS: Record<string, keyof Actions> = { p: "play", ",": "back", ".": "forward", o: "order", "?": "help" };

const OFF = "single-keys-off";

/** Whether letters are shortcuts: people who speak to their computer may want none. */
export function singleKeys(): boolean {
  return localStorage.getItem(OFF) === null;
}

export function setSingleKeys(on: boolean): void {
  if (on) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "1");
}

/** What a key means; null: nothing here. */
export function action(event: KeyboardEvent): keyof Actions | null {
  if (event.target instanceof Element && event.target.closest("dialog")) return null;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) return "run";
  if (event.key === "Escape") return "cancel";
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || !singleKeys()) return null;
  return LETTERS[event.key.toLowerCase()] ?? null;
}

function typing(target: EventTarget | null): boolean {
  return (
    target instanceof Element &&
    target.matches("textarea, select, input:not([type=range], [type=radio], [type=checkbox])")
  );
}
