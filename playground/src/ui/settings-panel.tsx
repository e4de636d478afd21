import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import {
  AGAIN,
  CONSTRAINTS,
  type Decoding,
  describe,
  diffusionFields,
  NUMBERS,
  type NumberSetting,
  REMASKING,
  RULES,
  type Shared,
} from "../core/settings";
import type { Setup } from "../core/share";
import type { Noise } from "../wire/types";
import { Choice, NumberField, RangeField, Select, TextField } from "./fields";

interface Props {
  setup: Setup;
  /** The model's. */
  noise: Noise;
  onChange(setup: Setup): void;
}

/** How to generate. On a narrow page it is folded under one line that says what is set. */
export function SettingsPanel({ setup, noise, onChange }: Props) {
  const [open, setOpen] = useState(false);
  const { shared, decodings, compare } = setup;
  const share = (change: Partial<Shared>) => onChange({ ...setup, shared: { ...shared, ...change } });
  const decode = (which: number, change: Partial<Decoding>) => {
    const changed = decodings.map((each, index) => (index === which ? { ...each, ...change } : each));
    onChange({ ...setup, decodings: changed as [Decoding, Decoding] });
  };
  const tokens = setup.mode === "infill" ? "" : `${shared.maxTokens} tokens, `;
  const summary = `${tokens}${describe(decodings[0], noise)}${compare ? ` against ${describe(decodings[1], noise)}` : ""}`;
  return (
    <section class={`settings${open ? " open" : ""}`} aria-label="Settings">
      <button
        type="button"
        class="settings-toggle"
        aria-expanded={open}
        aria-controls="settings-body"
        onClick={() => setOpen(!open)}
      >
        <span>Settings</span>
        <small>{summary}</small>
      </button>
      <div id="settings-body" class="settings-body">
        <h2>Text</h2>
        {setup.mode !== "infill" && <NumberOf name="maxTokens" values={shared} onChange={share} />}
        <NumberOf name="seed" values={shared} onChange={share}>
          <button
            type="button"
            class="icon-button"
            aria-label="Another seed"
            title="Another seed"
            onClick={() => share({ seed: Math.floor(Math.random() * 1e6) })}
          >
            <span aria-hidden="true">↻</span>
          </button>
        </NumberOf>
        {decodings.slice(0, compare ? 2 : 1).map((decoding, which) => (
          <DecodingFields
            key={which}
            letter={compare ? "AB".charAt(which) : ""}
            decoding={decoding}
            noise={noise}
            onChange={(change) => decode(which, change)}
          />
        ))}
        <ConstraintFields shared={shared} decoding={decodings[0]} noise={noise} onChange={share} />
      </div>
    </section>
  );
}

interface NumberOfProps<Name extends keyof typeof NUMBERS> {
  name: Name;
  values: Record<Name, number>;
  onChange(change: Record<Name, number>): void;
  children?: ComponentChildren;
}

/** The field of one of the numbers. */
function NumberOf<Name extends keyof typeof NUMBERS>({ name, values, onChange, children }: NumberOfProps<Name>) {
  const { slider, ...limits }: NumberSetting = NUMBERS[name];
  const Field = slider ? RangeField : NumberField;
  return (
    <Field
      {...limits}
      value={values[name]}
      onChange={(value) => onChange({ [name]: Number(value.toFixed(2)) } as Record<Name, number>)}
    >
      {children}
    </Field>
  );
}

interface DecodingProps {
  letter: string;
  decoding: Decoding;
  noise: Noise;
  onChange(change: Partial<Decoding>): void;
}

function DecodingFields({ letter, decoding, noise, onChange }: DecodingProps) {
  const number = { values: decoding, onChange };
  const title = <h2>{letter && <b class="letter">{letter}</b>} Decoding</h2>;
  if (noise === "uniform") {
    return (
      <>
        {title}
        <NumberOf name="denoisingSteps" {...number} />
        <NumberOf name="entropyBound" {...number} />
        <NumberOf name="heat" {...number} />
      </>
    );
  }
  return (
    <>
      {title}
      <Choice label="Reveal" value={decoding.rule} options={RULES} onChange={(rule) => onChange({ rule })} />
      {decoding.rule === "steps" && <NumberOf name="steps" {...number} />}
      {decoding.rule === "tokens_per_step" && <NumberOf name="tokensPerStep" {...number} />}
      {decoding.rule === "threshold" ? (
        <NumberOf name="threshold" {...number} />
      ) : (
        <>
          <Select
            label="Which first"
            value={decoding.remasking}
            options={REMASKING}
            onChange={(remasking) => onChange({ remasking })}
          />
          <Select label="Hide again" value={decoding.again} options={AGAIN} onChange={(again) => onChange({ again })} />
          {decoding.again !== "never" && <NumberOf name="fraction" {...number} />}
        </>
      )}
      <NumberOf name="temperature" {...number} />
    </>
  );
}

interface ConstraintProps {
  shared: Shared;
  decoding: Decoding;
  noise: Noise;
  onChange(change: Partial<Shared>): void;
}

function ConstraintFields({ shared, decoding, noise, onChange }: ConstraintProps) {
  return (
    <>
      <h2>Constraint</h2>
      <Choice
        label="The text has to match"
        hideLabel
        value={shared.constraint}
        options={CONSTRAINTS}
        onChange={(constraint) => onChange({ constraint })}
      />
      {shared.constraint === "regex" && (
        <TextField
          label="Regular expression"
          mono
          rows={2}
          value={shared.regex}
          placeholder="[A-Z][a-z]+( [a-z]+)*\."
          onChange={(regex) => onChange({ regex })}
        />
      )}
      {shared.constraint === "json_schema" && (
        <TextField
          label="JSON schema"
          mono
          rows={8}
          value={shared.schema}
          placeholder={'{"type": "object", "properties": {"name": {"type": "string"}}}'}
          invalid={schemaError(decoding, shared, noise)}
          onChange={(schema) => onChange({ schema })}
        />
      )}
    </>
  );
}

function schemaError(decoding: Decoding, shared: Shared, noise: Noise): string | undefined {
  try {
    diffusionFields(decoding, shared, noise);
  } catch (error) {
    return (error as Error).message;
  }
}
