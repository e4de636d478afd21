import { useState } from "preact/hooks";
import { type Decoding, describe, diffusionFields, POLICIES, type Rule, type Shared } from "../core/settings";
import type { Setup } from "../core/share";
import { Choice, NumberField, RangeField, Select, TextField } from "./fields";

const RULES: [Rule, string][] = [
  ["one", "One"],
  ["steps", "Steps"],
  ["tokens_per_step", "Per step"],
  ["threshold", "Threshold"],
];

interface Props {
  setup: Setup;
  onChange(setup: Setup): void;
}

/** How to generate. On a narrow page it is folded under one line that says what is set. */
export function SettingsPanel({ setup, onChange }: Props) {
  const [open, setOpen] = useState(false);
  const { shared, decodings, compare } = setup;
  const share = (change: Partial<Shared>) => onChange({ ...setup, shared: { ...shared, ...change } });
  const decode = (which: 0 | 1, change: Partial<Decoding>) => {
    const changed = decodings.map((each, index) => (index === which ? { ...each, ...change } : each));
    onChange({ ...setup, decodings: changed as [Decoding, Decoding] });
  };
  const tokens = setup.mode === "infill" ? "" : `${shared.maxTokens} tokens, `;
  const summary = `${tokens}${describe(decodings[0])}${compare ? ` against ${describe(decodings[1])}` : ""}`;
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
        {setup.mode === "infill" ? null : (
          <NumberField
            label="Tokens"
            value={shared.maxTokens}
            min={1}
            max={8192}
            onChange={(maxTokens) => share({ maxTokens })}
          />
        )}
        <NumberField label="Seed" value={shared.seed} min={0} max={2 ** 31 - 1} onChange={(seed) => share({ seed })}>
          <button
            type="button"
            class="icon-button"
            aria-label="Another seed"
            title="Another seed"
            onClick={() => share({ seed: Math.floor(Math.random() * 1e6) })}
          >
            <span aria-hidden="true">↻</span>
          </button>
        </NumberField>
        {compare ? (
          <>
            <h2>
              <b class="letter">A</b> Decoding
            </h2>
            <DecodingFields decoding={decodings[0]} onChange={(change) => decode(0, change)} />
            <h2>
              <b class="letter">B</b> Decoding
            </h2>
            <DecodingFields decoding={decodings[1]} onChange={(change) => decode(1, change)} />
          </>
        ) : (
          <>
            <h2>Decoding</h2>
            <DecodingFields decoding={decodings[0]} onChange={(change) => decode(0, change)} />
          </>
        )}
        <ConstraintFields shared={shared} decoding={decodings[0]} onChange={share} />
      </div>
    </section>
  );
}

function DecodingFields({ decoding, onChange }: { decoding: Decoding; onChange(change: Partial<Decoding>): void }) {
  return (
    <>
      <Choice label="Reveal" value={decoding.rule} options={RULES} onChange={(rule) => onChange({ rule })} />
      {decoding.rule === "steps" && (
        <NumberField
          label="Steps in all"
          value={decoding.steps}
          min={1}
          max={8192}
          onChange={(steps) => onChange({ steps })}
        />
      )}
      {decoding.rule === "tokens_per_step" && (
        <NumberField
          label="Tokens a step"
          value={decoding.tokensPerStep}
          min={1}
          max={8192}
          onChange={(tokensPerStep) => onChange({ tokensPerStep })}
        />
      )}
      {decoding.rule === "threshold" ? (
        <RangeField
          label="Probability"
          value={decoding.threshold}
          min={0.05}
          max={1}
          step={0.05}
          onChange={(threshold) => onChange({ threshold: Number(threshold.toFixed(2)) })}
        />
      ) : (
        <Select
          label="Which first"
          value={decoding.policy}
          options={POLICIES.map((policy) => [policy, policy.replaceAll("_", " ")] as const)}
          onChange={(policy) => onChange({ policy })}
        />
      )}
      <RangeField
        label="Temperature"
        value={decoding.temperature}
        min={0}
        max={2}
        step={0.1}
        onChange={(temperature) => onChange({ temperature: Number(temperature.toFixed(1)) })}
      />
    </>
  );
}

interface ConstraintProps {
  shared: Shared;
  decoding: Decoding;
  onChange(change: Partial<Shared>): void;
}

function ConstraintFields({ shared, decoding, onChange }: ConstraintProps) {
  return (
    <>
      <h2>Constraint</h2>
      <Choice
        label="The text has to match"
        hideLabel
        value={shared.constraint}
        options={[
          ["none", "None"],
          ["regex", "Regex"],
          ["json_schema", "JSON schema"],
        ]}
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
          invalid={schemaError(decoding, shared)}
          onChange={(schema) => onChange({ schema })}
        />
      )}
    </>
  );
}

function schemaError(decoding: Decoding, shared: Shared): string | undefined {
  try {
    diffusionFields(decoding, shared);
  } catch (error) {
    return (error as Error).message;
  }
}
