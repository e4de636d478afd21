import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import type { Model } from "../wire/types";

interface Props {
  models: Model[];
  model: Model | null;
  hasKey: boolean;
  onModel(id: string): void;
  onKey(): void;
  onHelp(): void;
  onShare(): Promise<boolean>;
}

export function Header({ models, model, hasKey, onModel, onKey, onHelp, onShare }: Props) {
  return (
    <header class="header">
      <h1>
        <svg viewBox="0 0 16 16" width="18" height="18" aria-hidden="true" class="mark">
          <path d="M1 1h6v6H1zM9 9h6v6H9z" />
          <path class="faint" d="M9 1h6v6H9zM1 9h6v6H1z" />
        </svg>
        unmask <span>playground</span>
      </h1>
      {model && (
        <p class="model">
          {models.length > 1 ? (
            <label>
              <span class="visually-hidden">Model</span>
              <select value={model.id} onChange={(event) => onModel(event.currentTarget.value)}>
                {models.map(({ id }) => (
                  <option key={id} value={id}>
                    {id}
                  </option>
                ))}
              </select>
            </label>
          ) : (
            <b>{model.id}</b>
          )}
          <small>{facts(model)}</small>
        </p>
      )}
      <div class="header-buttons">
        <ShareButton onShare={onShare} />
        <button type="button" class="quiet" onClick={onKey}>
          {hasKey ? "Key set" : "Key"}
        </button>
        <ThemeButton />
        <button type="button" class="quiet" aria-label="Keys" title="Keys" onClick={onHelp}>
          ?
        </button>
      </div>
    </header>
  );
}

function facts({ diffusion }: Model): string {
  const block = diffusion.block_size && diffusion.attention !== "causal" ? `, blocks of ${diffusion.block_size}` : "";
  const context = diffusion.context_length
    ? ` · ${diffusion.context_length.toLocaleString("en")} tokens of context`
    : "";
  const noise = diffusion.noise === "uniform" ? ", random tokens" : "";
  return diffusion.attention.replaceAll("_", "-") + block + noise + context;
}

function ShareButton({ onShare }: Pick<Props, "onShare">) {
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (!said) return;
    const timer = setTimeout(() => setSaid(""), 2000);
    return () => clearTimeout(timer);
  }, [said]);
  return (
    <button
      type="button"
      class="quiet"
      aria-live="polite"
      onClick={async () => setSaid((await onShare()) ? "Copied" : "In the address bar")}
    >
      {said || "Share link"}
    </button>
  );
}

type Theme = "light" | "dark";

function stored(): Theme | null {
  const theme = localStorage.getItem("theme");
  return theme === "light" || theme === "dark" ? theme : null;
}

/** Light or dark: as the system has it, until it is switched. */
function ThemeButton() {
  const [chosen, setChosen] = useState<Theme | null>(stored);
  const [system, setSystem] = useState<Theme>(() =>
    matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
  );
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setSystem(query.matches ? "dark" : "light");
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  useLayoutEffect(() => {
    if (!chosen) return;
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("theme", chosen);
  }, [chosen]);
  const other = (chosen ?? system) === "dark" ? "light" : "dark";
  return (
    <button
      type="button"
      class="quiet"
      aria-label={`Switch to ${other}`}
      title={`Switch to ${other}`}
      onClick={() => setChosen(other)}
    >
      <svg viewBox="0 0 16 16" width="15" height="15" aria-hidden="true" class="theme-icon">
        <circle cx="8" cy="8" r="6.25" />
        <path d="M8 1.75a6.25 6.25 0 0 1 0 12.5z" />
      </svg>
    </button>
  );
}
