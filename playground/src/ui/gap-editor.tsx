import { useId, useRef } from "preact/hooks";
import { findGaps, HIDDEN, hide, resize } from "../core/gaps";

interface Props {
  value: string;
  onChange(value: string): void;
}

/** A text in which selections become gaps: one ▯ for each hidden token. */
export function GapEditor({ value, onChange }: Props) {
  const id = useId();
  const area = useRef<HTMLTextAreaElement>(null);
  const gaps = findGaps(value);

  const makeGap = () => {
    const element = area.current;
    if (!element) return;
    const { selectionStart: start, selectionEnd: end } = element;
    const { text, mark } = hide(element.value, start, end);
    element.focus();
    // Typed, so that the browser can undo it; this is the only way to do so, and one that some browsers lack.
    if (!document.execCommand?.("insertText", false, mark)) element.value = text;
    element.setSelectionRange(start, start + mark.length);
    onChange(element.value);
  };

  const onKeyDown = (event: KeyboardEvent) => {
    if ((event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "g") {
      event.preventDefault();
      makeGap();
    }
  };

  return (
    <div class="gap-editor">
      <label for={id}>Text</label>
      <div class="overlay">
        <div class="overlay-back" aria-hidden="true">
          {value
            .split(/(▯+)/u)
            .map((part, index) => (part.startsWith(HIDDEN) ? <mark key={`${index}`}>{part}</mark> : part))}
          {"\n"}
        </div>
        <textarea
          id={id}
          ref={area}
          class="mono"
          rows={6}
          value={value}
          spellcheck={false}
          placeholder="Write or paste a text, select a part of it, and make it a gap."
          aria-describedby={`${id}-hint`}
          onInput={(event) => onChange(event.currentTarget.value)}
          onKeyDown={onKeyDown}
          onScroll={(event) => {
            const back = event.currentTarget.previousElementSibling;
            if (back) back.scrollTop = event.currentTarget.scrollTop;
          }}
        />
      </div>
      <div class="gap-tools">
        <button type="button" onClick={makeGap}>
          Make gap <kbd>Ctrl G</kbd>
        </button>
        <p id={`${id}-hint`} class="hint">
          Each {HIDDEN} is one token for the model to fill.
        </p>
      </div>
      {gaps.length > 0 && (
        <ul class="gap-list" aria-label="Gaps">
          {gaps.map((gap, index) => (
            <li key={`${index}`}>
              <span>
                Gap {index + 1} · {gap.length} {gap.length === 1 ? "token" : "tokens"}
              </span>
              <button
                type="button"
                class="icon-button"
                aria-label={`Gap ${index + 1}: one token less`}
                onClick={() => onChange(resize(value, gap, gap.length - 1))}
              >
                <span aria-hidden="true">−</span>
              </button>
              <button
                type="button"
                class="icon-button"
                aria-label={`Gap ${index + 1}: one token more`}
                onClick={() => onChange(resize(value, gap, gap.length + 1))}
              >
                <span aria-hidden="true">+</span>
              </button>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}
