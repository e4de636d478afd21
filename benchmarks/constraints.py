"""What a constraint costs: the compiling of five schemas, and a denoising step with and without one.

    python -m benchmarks.constraints

The model has random weights and a vocabulary of 32,000 tokens: bytes, pieces of JSON, and random words. Time
is that of whole completions of 128 tokens in a few steps, with the engine, divided by their steps.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import unmask
from benchmarks.harness import heading, report, timed
from unmask.config.constraint import ConstraintConfig
from unmask.data.decoding import BYTES
from unmask.generation.constraints.compiled import compile_constraint
from unmask.generation.constraints.vocabulary import read_vocabulary
from unmask.models.load import make_diffusion

VOCABULARY, TOKENS, PROMPT, STEPS = 32_000, 128, 64, 4
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
SPECIAL = ["<s>", "</s>", "<pad>", "<mask>"]


def object_of(**properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMAS = {
    "person": object_of(name=STRING, age=INTEGER, email={"type": "string", "format": "email"}),
    "address": object_of(
        street=STRING,
        city=STRING,
        postcode={"type": "string", "pattern": "^[0-9]{5}$"},
        country={"enum": ["DE", "FR", "US", "GB"]},
    ),
    "tool call": {
        "anyOf": [
            object_of(name={"const": "search"}, arguments=object_of(query=STRING, limit=INTEGER)),
            object_of(name={"const": "weather"}, arguments=object_of(city=STRING, unit={"enum": ["C", "F"]})),
        ]
    },
    "review": object_of(
        title=STRING,
        rating={"enum": [1, 2, 3, 4, 5]},
        tags={"type": "array", "items": STRING, "maxItems": 3},
        date={"type": "string", "format": "date"},
    ),
    "order": object_of(
        id={"type": "string", "format": "uuid"},
        lines={
            "type": "array",
            "items": object_of(item=STRING, count=INTEGER, price={"type": "number"}),
            "minItems": 1,
        },
        ship={"type": "string", "format": "date-time"},
        paid={"type": "boolean"},
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, pieces of JSON, and random words, with and without a space before them, as byte-level BPE writes
    them."""
    rng, written = random.Random(0), {byte: character for character, byte in BYTES.items()}
    words = dict.fromkeys(written.values())
    while len(words) < 30_000:
        word = rng.choice(["", " "]) + "".join(
            rng.choices(LETTERS, weights=range(26, 0, -1), k=rng.randint(2, 8))
        )
        words["".join(written[byte] for byte in word.encode())] = None
    while len(words) < VOCABULARY - len(SPECIAL):
        words[
            "".join(
                written[byte] for byte in bytes(rng.choices(b'"{}[]:, .0123456789\n-_', k=rng.randint(2, 4)))
            )
        ] = None
    backend = Tokenizer(
        models.BPE({word: number for number, word in enumerate([*SPECIAL, *words])}, merges=[])
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    bos, eos, pad, mask = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, mask_token=mask
    )


def model(hidden: int, layers: int) -> unmask.DiffusionLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    shape = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "tie_word_embeddings": True,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, initializer_range=0.05)
    return make_diffusion(LlamaForCausalLM(config), tokenizer(), attention="bidirectional")


def compiled(lm: unmask.DiffusionLM) -> dict[str, int]:
    """Compile every schema, print what it takes, and return the number of states of each."""
    vocabulary, states = read_vocabulary(lm), {}
    print(f"\nCompiling, for {VOCABULARY:,} tokens\n{heading()}\n")
    print(f"  {'schema':<10} {'states':>7} {'classes':>8} {'edges':>7} {'MB':>6} {'s':>6}")
    for name, schema in SCHEMAS.items():
        begun = time.perf_counter()
        automaton = compile_constraint(ConstraintConfig(json_schema=schema), vocabulary)
        seconds, edges = time.perf_counter() - begun, len(automaton.edge_table.source_E)
        states[name], classes = automaton.next_SC.shape
        print(
            f"  {name:<10} {states[name]:>7} {classes:>8} {edges:>7} {automaton.nbytes / 1e6:>6.2f} "
            f"{seconds:>6.2f}"
        )
    return states


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=896, help="width of the model")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lm = model(options.hidden, options.layers)
    states = compiled(lm)
    name = min(states, key=lambda each: abs(states[each] - 200))
    prompt, rows = [list(range(10, 10 + PROMPT))], []
    for temperature in (0.0, 1.0, 0.7):
        free = unmask.SamplerConfig(
            max_new_tokens=TOKENS, steps=STEPS, temperature=temperature, stop_at_eos=False
        )
        given = free.model_copy(
            update={"constraint": ConstraintConfig(json_schema=SCHEMAS[name]), "stop_at_eos": True}
        )
        json.loads(unmask.generate(lm, prompt, given).texts[0])
        seconds = timed(
            {
                "free": lambda c=free: unmask.generate(lm, prompt, c),
                "given": lambda c=given: unmask.generate(lm, prompt, c),
            },
            options.rounds,
        )
        step, more = seconds["free"] / STEPS, (seconds["given"] - seconds["free"]) / STEPS
        rows.append(
            (
                f"temperature {temperature}: {1e3 * more:.0f} ms beside {1e3 * step:,.0f} ms",
                f"{more / step:.1%} of a step",
                "at most 10%",
            )
        )
    million = sum(each.numel() for each in lm.model.parameters()) / 1e6
    report(
        (
            f"A step of {TOKENS} positions of a model of {million:.0f} million parameters, with the schema "
            f"{name!r}, {states[name]} states"
        ),
        rows,
    )


if __name__ == "__main__":
    main()
