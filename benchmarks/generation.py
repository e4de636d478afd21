"""Time of generation, compared with the published samplers and with a sampler without a cache.

    python -m benchmarks.generation [--threads 1] [--rounds 2] [--steps 16] [--only small]

Float32, batch 8. Bidirectional: prompt 128, generation 128, decoding block 32; at temperature 0 equal
sequences are counted first (near-ties may differ in float32); at other temperatures the distributions are the
same (`tests/generation/test_parity.py`). Block-causal: compared with a sampler that computes the whole
sequence at every step, with the same tokens. Group: completions of one prompt, compared with an engine that
computes the prompt for each of them, with the same tokens. One: a sequence of a model so small that nearly
all time is that of the host, plain and compiled, with the same tokens.

Shapes: B batch, P prompt, T positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import unmask
from benchmarks import published
from benchmarks.harness import report, timed
from unmask.config.run import AttentionName
from unmask.data.characters import character_tokenizer
from unmask.generation.engine.cached_forward import cache_clean_tokens
from unmask.generation.engine.engine import Engine
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import BatchEntry
from unmask.generation.policies import decide, first_by_priority
from unmask.generation.requests import Request, block_start, make_requests
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

BATCH, PROMPT, LENGTH, BLOCK = 8, 128, 128, 32
# hidden width, layers, vocabulary; the bars at temperature 0, at 0.9, and with lengths of 15 to 100% of the
# canvas
SHAPES = {
    "small": (256, 32, 7_900, (1.25, 1.84, 1.65)),
    "middle": (512, 8, 32_000, (1.8, 4.2, 2.5)),
    "wide": (512, 8, 126_464, (3.1, 14.0, 4.4)),
}
PARTS = [*SHAPES, "block", "group", "one"]


def random_model(
    hidden: int, layers: int, vocabulary: int, attention: AttentionName, block_size: int | None = None
) -> DiffusionLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 2,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, max_position_embeddings=1024, initializer_range=0.1)
    ).eval()
    return make_diffusion(model, character_tokenizer("abcdef"), attention=attention, block_size=block_size)


def random_prompts(lm: DiffusionLM, length: int) -> Tensor:
    return torch.randint(20, 7_000, (BATCH, length), generator=torch.Generator().manual_seed(0))


class Ours:
    """A run of the engine."""

    def __init__(
        self,
        lm: DiffusionLM,
        prompt_BP: Tensor,
        config: unmask.SamplerConfig,
        make: Callable[[DiffusionLM], Engine] = Engine,
    ):
        self.lm, self.config, self.make = lm, config, make
        self.requests = make_requests(lm, prompt_BP.tolist(), config)
        self.engine = make(lm)

    def __call__(self) -> Tensor:
        self.engine = self.make(self.lm)
        for request in self.requests:
            self.engine.submit(request, self.config)
        traces = dict(self.engine.run())
        return torch.tensor(
            [self.requests[ticket].prompt + traces[ticket].canvas for ticket in sorted(traces)]
        )


class Planted(Engine):
    """An engine that ends sequences at fixed lengths, because random weights produce no end token."""

    def __init__(self, lm: DiffusionLM, lengths: Sequence[int]):
        super().__init__(lm)
        self.lengths = lengths

    def _stopped(self, sequences: list[SequenceState]) -> set[SequenceState]:
        return {
            s
            for s in sequences
            if s.request.start + self.lengths[s.ticket] <= s.request.blocks[s.block - 1][1]
        }


class Apart(Engine):
    """An engine that computes the prompt for each sequence."""

    def _prefill(self, entering: set[SequenceState]) -> None:
        for sequence in entering:
            sequence.num_cached = block_start(sequence.request.start, self.lm.block_size)
        entries = [
            BatchEntry(s.slots[0], s.num_cached, s.num_cached, s.num_cached)
            for s in self.running
            if s in entering
        ]
        cache_clean_tokens(self.lm, self.slots, entries)


def agree(one_BT: Tensor, other_BT: Tensor) -> str:
    """The number of equal sequences."""
    same = sum(torch.equal(a, b) for a, b in zip(one_BT, other_BT, strict=True))
    return f"{same} of {len(one_BT)} sequences equal"


def bidirectional(name: str, steps: int, rounds: int) -> list[tuple[str, str, str]]:
    hidden, layers, vocabulary, bars = SHAPES[name]
    lm = random_model(hidden, layers, vocabulary, "bidirectional")
    prompt_BP = random_prompts(lm, PROMPT)
    lengths = torch.linspace(0.15 * LENGTH, LENGTH, BATCH).round().long().tolist()
    rows = []
    shared: dict[str, Any] = {
        "max_new_tokens": LENGTH,
        "block_size": BLOCK,
        "steps": steps,
        "stop_at_eos": False,
    }
    greedy, drawn = (unmask.SamplerConfig(temperature=temperature, **shared) for temperature in (0.0, 0.9))
    equal = agree(Ours(lm, prompt_BP, greedy)(), published.generate(lm, prompt_BP, LENGTH, BLOCK, steps, 0.0))
    contenders: dict[str, Callable[[], Tensor | None]] = {
        "published, T=0": lambda: published.generate(lm, prompt_BP, LENGTH, BLOCK, steps, 0.0),
        "T=0": Ours(lm, prompt_BP, greedy),
        "T=0, lengths": Ours(lm, prompt_BP, greedy, partial(Planted, lengths=lengths)),
        "published, T=0.9": lambda: published.generate(lm, prompt_BP, LENGTH, BLOCK, steps, 0.9),
        "T=0.9": Ours(lm, prompt_BP, drawn),
        "passes": partial(passes_alone, lm, prompt_BP, steps),
    }
    seconds = timed(contenders, rounds)
    size = f"{hidden} wide, {layers} layers, vocabulary {vocabulary}"
    rows.append(
        (f"{size}: T=0", f"{seconds['published, T=0'] / seconds['T=0']:.3f}", f"at least {bars[0]}; {equal}")
    )
    rows.append(
        (f"{size}: T=0.9", f"{seconds['published, T=0.9'] / seconds['T=0.9']:.3f}", f"at least {bars[1]}")
    )
    most = (f"{seconds[f'published, {at}'] / seconds['passes']:.3f}" for at in ("T=0", "T=0.9"))
    rows.append(
        (f"{size}: published / the passes alone", " and ".join(most), "upper limit of an exact sampler")
    )
    rows.append(
        (
            f"{size}: lengths 15 to 100%",
            f"{seconds['published, T=0'] / seconds['T=0, lengths']:.3f}",
            f"at least {bars[2]}",
        )
    )
    return rows


@torch.no_grad()
def passes_alone(lm: DiffusionLM, prompt_BP: Tensor, steps: int) -> None:
    """The forward passes of a sampler without drawing: whole canvases, with logits at the hidden positions of
    a block."""
    inputs = lm.noised_inputs(torch.nn.functional.pad(prompt_BP, (0, LENGTH), value=lm.mask_token_id))
    first_B1 = torch.arange(BATCH)[:, None] * (PROMPT + LENGTH) + PROMPT
    per_block = steps * BLOCK // LENGTH
    for step in range(steps):
        hidden = BLOCK - BLOCK * (step % per_block) // per_block
        lm.forward(replace(inputs, index_N=(first_B1 + torch.arange(hidden)).flatten(), pruned=True))


@torch.no_grad()
def recomputed(lm: DiffusionLM, requests: list[Request], config: unmask.SamplerConfig) -> Tensor:
    """Decode by blocks without a cache: every step computes all tokens before the end of the block. Logits
    and drawing are Unmask's."""
    ids_BT = torch.tensor([request.ids for request in requests])
    hidden_BT = torch.tensor([request.hidden for request in requests])
    key_B = torch.tensor([request.key for request in requests])
    step = torch.tensor(0)
    for (start, stop), counts in zip(requests[0].blocks, requests[0].counts or [], strict=True):
        for count in counts:
            rows_BT = hidden_BT[:, :stop].clone()
            rows_BT[:, :start] = False
            logits_NV = lm.logits(ids_BT[:, :stop], None, rows_BT, hidden_BT[:, :stop])
            member_N, position_N = rows_BT.nonzero(as_tuple=True)
            decision = decide(logits_NV, config, key_B[member_N], step.expand_as(position_N), position_N)
            priority_BT = torch.full(rows_BT.shape, -torch.inf)
            priority_BT[member_N, position_N] = decision.priority_N
            chosen_N = first_by_priority(priority_BT, torch.full((len(ids_BT),), count))[member_N, position_N]
            ids_BT[member_N[chosen_N], position_N[chosen_N]] = decision.token_N[chosen_N]
            hidden_BT[member_N[chosen_N], position_N[chosen_N]] = False
            step = step + 1
    return ids_BT


def block_causal(
    block: int, prompt: int, tokens: int, bars: tuple[float, float], rounds: int
) -> list[tuple[str, str, str]]:
    hidden, layers, vocabulary, _ = SHAPES["middle"]
    lm = random_model(hidden, layers, vocabulary, "block_causal", block)
    rows = []
    for group, bar in zip((False, True), bars, strict=True):
        prompt_BP = random_prompts(lm, prompt)
        prompt_BP = prompt_BP[:1].expand_as(prompt_BP) if group else prompt_BP
        config = unmask.SamplerConfig(max_new_tokens=64, tokens_per_step=tokens, stop_at_eos=False)
        ours = Ours(lm, prompt_BP, config)
        theirs = partial(recomputed, lm, ours.requests, config)
        equal = agree(ours(), theirs())
        seconds = timed({"ours": ours, "recomputed": theirs}, rounds, warm=True)
        passes = ours.engine.num_forward_passes / sum(map(len, ours.requests[0].counts or []))
        name = (
            f"block {block}, prompt {prompt}{', one for all' if group else ''}, generation 64, {tokens} a "
            "step"
        )
        figure = f"{seconds['recomputed'] / seconds['ours']:.3f}"
        rows.append((name, figure, f"at least {bar}; {equal}; {passes:.3f} passes a step (bar: 1.1)"))
    return rows


def group(
    attention: AttentionName, block: int | None, tokens: int, rounds: int
) -> list[tuple[str, str, str]]:
    hidden, layers, vocabulary, _ = SHAPES["middle"]
    lm = random_model(hidden, layers, vocabulary, attention, block)
    prompt_BP = random_prompts(lm, 512)[:1].expand(BATCH, -1)
    config = unmask.SamplerConfig(
        max_new_tokens=64, tokens_per_step=tokens, temperature=1.0, stop_at_eos=False
    )
    shared, apart = Ours(lm, prompt_BP, config), Ours(lm, prompt_BP, config, Apart)
    equal = agree(shared(), apart())
    seconds = timed({"shared": shared, "apart": apart}, rounds, warm=True)
    name = (
        f"{f'block {block}' if block else attention}, prompt 512, group of {BATCH}, generation 64, "
        f"{tokens} a step"
    )
    figure = (
        f"{seconds['apart']:.2f} s / {seconds['shared']:.2f} s = {seconds['apart'] / seconds['shared']:.3f}"
    )
    return [(name, figure, f"{equal}; {shared.engine.prompt_reuse:.1%} of the prompts' tokens are reused")]


def one(temperature: float, rounds: int) -> list[tuple[str, str, str]]:
    plain, compiled = (random_model(64, 4, 7_900, "block_causal", 4) for _ in range(2))
    compiled.compile()
    prompt_BP = random_prompts(plain, 16)[:1]
    config = unmask.SamplerConfig(
        max_new_tokens=64, tokens_per_step=1, temperature=temperature, stop_at_eos=False
    )
    contenders = {"plain": Ours(plain, prompt_BP, config), "compiled": Ours(compiled, prompt_BP, config)}
    equal = agree(*(run() for run in contenders.values()))
    seconds = timed(contenders, 10 * rounds, warm=True)
    figure = (
        f"{1000 * seconds['plain'] / 64:.2f} / {1000 * seconds['compiled'] / 64:.2f} = "
        f"{seconds['plain'] / seconds['compiled']:.2f}"
    )
    return [(f"hidden 64, 4 layers, block 4, T={temperature}, ms a step", figure, equal)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in SHAPES:
        if name in options.only:
            report("Ours / published", bidirectional(name, options.steps, options.rounds))
    if "block" in options.only:
        report("Cached / recomputed", block_causal(4, 128, 1, (7.3, 7.5), options.rounds))
        for tokens in (4, 8):
            report("Cached / recomputed", block_causal(32, 512, tokens, (5.9, 6.8), options.rounds))
    if "group" in options.only:
        rows = group("block_causal", 32, 4, options.rounds) + group("causal", None, 1, options.rounds)
        report("Prompts computed separately / once", rows)
    if "one" in options.only:
        report("Plain / compiled", one(0.0, options.rounds) + one(1.0, options.rounds))


if __name__ == "__main__":
    main()
