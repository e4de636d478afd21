/** Labeled inputs. */

import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";

interface NumberFieldProps {
  label: string;
  value: number;
  min: number;
  max: number;
  step?: number;
  hint?: string;
  onChange(value: number): void;
  children?: ComponentChildren;
}

/** A number; what is out of range is not taken over, which the field says. */
export function NumberField({ label, value, min, max, step = 1, hint, onChange, children }: NumberFieldProps) {
  const id = useId();
  const [refused, setRefused] = useState<number | null>(null); // the value that stays
  const take = (number: number) => {
    const valid = number >= min && number <= max && (step < 1 || Number.isInteger(number));
    setRefused(valid ? null : value);
    if (valid) onChange(number);
  };
  const range = `${min.toLocaleString("en")} to ${max.toLocaleString("en")}`;
  const said = refused === value ? `A ${step < 1 ? "" : "whole "}number from ${range}. It stays ${value}.` : hint;
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <span class="field-input">
        <input
          id={id}
          type="number"
          inputMode="decimal"
          value={value}
          min={min}
          max={max}
          step={step}
          aria-invalid={refused === value ? "true" : undefined}
          aria-describedby={said ? `${id}-hint` : undefined}
          onInput={(event) => take(event.currentTarget.valueAsNumber)}
          onBlur={(event) => {
            event.currentTarget.value = String(value);
          }}
        />
        {children}
      </span>
      {said && (
        <small id={`${id}-hint`} class={refused === value ? "hint error-hint" : "hint"} aria-live="polite">
          {said}
        </small>
      )}
    </div>
  );
}

interface RangeFieldProps extends NumberFieldProps {
  step: number;
}

/** A number with a slider. */
export function RangeField({ label, value, min, max, step, onChange }: RangeFieldProps) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <span class="field-input">
        <input
          id={id}
          type="range"
          value={value}
          min={min}
          max={max}
          step={step}
          onInput={(event) => onChange(event.currentTarget.valueAsNumber)}
        />
        <output for={id}>{value}</output>
      </span>
    </div>
  );
}

/** The options of a choice, and what they are called. */
function entries<T extends string>(options: Readonly<Record<T, string>>): [T, string][] {
  return Object.entries(options) as [T, string][];
}

interface ChoiceProps<T extends string> {
  label: string;
  value: T;
  options: Readonly<Record<T, string>>;
  onChange(value: T): void;
  hideLabel?: boolean;
}

/** One of a few, all of them visible. */
export function Choice<T extends string>({ label, value, options, onChange, hideLabel }: ChoiceProps<T>) {
  const name = useId();
  return (
    <fieldset class="choice">
      <legend class={hideLabel ? "visually-hidden" : undefined}>{label}</legend>
      <div class="choice-options">
        {entries(options).map(([option, text]) => (
          <label key={option} class="choice-option">
            <input
              type="radio"
              name={name}
              value={option}
              checked={value === option}
              onChange={() => onChange(option)}
            />
            <span>{text}</span>
          </label>
        ))}
      </div>
    </fieldset>
  );
}

interface SelectProps<T extends string> {
  label: string;
  value: T;
  options: Readonly<Record<T, string>>;
  disabled?: boolean;
  onChange(value: T): void;
}

export function Select<T extends string>({ label, value, options, disabled, onChange }: SelectProps<T>) {
  const id = useId();
  return (
    <div class="field of-words">
      <label for={id}>{label}</label>
      <span class="field-input">
        <select
          id={id}
          value={value}
          disabled={disabled}
          onChange={(event) => onChange(event.currentTarget.value as T)}
        >
          {entries(options).map(([option, text]) => (
            <option key={option} value={option}>
              {text}
            </option>
          ))}
        </select>
      </span>
    </div>
  );
}

interface TextFieldProps {
  label: string;
  value: string;
  rows: number;
  placeholder?: string;
  mono?: boolean;
  invalid?: string;
  onChange(value: string): void;
}

export function TextField({ label, value, rows, placeholder, mono, invalid, onChange }: TextFieldProps) {
  const id = useId();
  return (
    <div class="text-field">
      <label for={id}>{label}</label>
      <textarea
        id={id}
        class={mono ? "mono" : undefined}
        rows={rows}
        value={value}
        placeholder={placeholder}
        spellcheck={!mono}
        aria-invalid={invalid ? "true" : undefined}
        aria-describedby={invalid ? `${id}-error` : undefined}
        onInput={(event) => onChange(event.currentTarget.value)}
      />
      {invalid && (
        <small id={`${id}-error`} class="hint error-hint">
          {invalid}
        </small>
      )}
    </div>
  );
}
