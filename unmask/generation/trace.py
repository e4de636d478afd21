"""Requests and results of generation: what to decode in which order, what came out, and what was revealed when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from unmask.config import SamplerConfig
from unmask.data.chat import encode_prompt
from unmask.diffusion.noise import sequence_keys
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids.
        key: of its random numbers.
        blocks: (start, stop) of each decoding block, in positions of the whole sequence.
        counts: for each block the number of tokens to reveal at each of its steps.
    """

    prompt: list[int]
    key: int
    blocks: list[tuple[int, int]]
    counts: list[list[int]]

    @property
    def length(self) -> int:
        """Of prompt and completion."""
        return self.blocks[-1][1]


@dataclass
class Trace:
    """The whole canvas of a completion, also behind its end: what reinforcement learning and the playground read.

    Attributes:
        canvas: token ids; the mask token where decoding stopped before.
        steps: the step at which each position was revealed, -1 for never.
        log_probs: of each revealed token under the model at temperature 1, 0 where never revealed.
    """

    canvas: list[int]
    steps: list[int]
    log_probs: list[float]
    forward_passes: int = 0

    @classmethod
    def hidden(cls, length: int, mask_token_id: int) -> Trace:
        return cls([mask_token_id] * length, [-1] * length, [0.0] * length)


@dataclass(frozen=True)
class Generation:
    """Completions, one entry per prompt.

    Attributes:
        prompts: token ids, as the model saw them.
        texts: decoded, without special tokens.
        tokens: completion ids, up to and including the first EOS.
        log_probs: of these tokens when they were revealed, in nats, at temperature 1.
        steps: the denoising step at which each of them was revealed.
        forward_passes: how often the model saw each sequence.
        trace: the whole canvases, when the config asks for them.
    """

    prompts: list[list[int]] = field(repr=False)
    texts: list[str]
    tokens: list[list[int]]
    log_probs: list[list[float]]
    steps: list[list[int]]
    forward_passes: list[int]
    trace: list[Trace] | None = field(default=None, repr=False)


def make_requests(lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None) -> list[Request]:
    """Encode prompts and plan their decoding.

    Args:
        prompts: strings, chat messages or lists of token ids.
        keys: of the random numbers; None: a hash of each prompt and its repeat number.

    Raises:
        GenerationError: a prompt that is empty or too long, or a decoding block that does not lie on the attention grid.
    """
    if isinstance(prompts, str):
        raise GenerationError("prompts is one string", where="prompts", remedy="Give a list of prompts")
    encoded = [list(encode_prompt(lm.tokenizer, prompt)) for prompt in prompts]
    grid = {"causal": 1, "block_causal": lm.block_size, "bidirectional": None}[lm.attention]
    if grid is not None and config.block_size not in (None, grid):
        raise GenerationError(
            f"decoding block {config.block_size} for an attention block of {grid}", where="block_size", remedy="Leave it out for this model"
        )
    if keys is not None and len(keys) != len(encoded):
        raise GenerationError(f"{len(keys)} keys for {len(encoded)} prompts", where="keys", remedy="Give one key per prompt")
    requests = []
    for index, (prompt, key) in enumerate(zip(encoded, sequence_keys(encoded) if keys is None else keys, strict=True)):
        start, stop = len(prompt), len(prompt) + config.max_new_tokens
        if lm.context_length is not None and stop > lm.context_length:
            raise GenerationError(
                f"{start} prompt tokens and {config.max_new_tokens} new ones pass the context of {lm.context_length}",
                where=f"prompt {index}",
                remedy="Shorten the prompt or lower max_new_tokens",
            )
        check_ids(lm, prompt, f"prompt {index}")
        if lm.logit_shift and not prompt:
            raise GenerationError("the prompt is empty", where=f"prompt {index}", remedy="Give at least one token (such as BOS)")
        size = grid or config.block_size or config.max_new_tokens
        first = start if grid is None else start - start % grid
        edges = [start, *(edge for edge in range(first, stop, size) if edge > start), stop]
        blocks = list(pairwise(edges))
        requests.append(Request(prompt, key, blocks, step_counts([b - a for a, b in blocks], config.steps)))
    return requests


def check_ids(lm: DiffusionLM, ids: Sequence[int], where: str) -> None:
    """Raise GenerationError for an id that the model has no embedding for."""
    rows = lm.model.get_input_embeddings().num_embeddings
    for token in ids:
        if not 0 <= token < rows:
            raise GenerationError(f"token id {token} is outside the vocabulary of {rows}", where=where, remedy="Use this model's tokenizer")


def step_counts(sizes: list[int], steps: int | None) -> list[list[int]]:
    """Tokens to reveal at each step of each block: as even as possible, larger counts first, at least one step a block."""
    if steps is None:
        return [[1] * size for size in sizes]
    counts = []
    for index, size in enumerate(sizes):
        share = min(size, max(1, steps // len(sizes) + (index < steps % len(sizes))))
        counts.append([size // share + (i < size % share) for i in range(share)])
    return counts


def make_generation(lm: DiffusionLM, requests: list[Request], traces: list[Trace], config: SamplerConfig) -> Generation:
    """Cut the canvases at their first EOS and decode them."""
    ends = []
    for trace in traces:
        shown = next((i for i, step in enumerate(trace.steps) if step < 0), len(trace.steps))
        stops = [i + 1 for i in range(shown) if trace.canvas[i] == lm.eos_token_id] if config.stop_at_eos else []
        ends.append(stops[0] if stops else shown)
    tokens = [trace.canvas[:end] for trace, end in zip(traces, ends, strict=True)]
    return Generation(
        prompts=[request.prompt for request in requests],
        texts=[lm.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
        tokens=tokens,
        log_probs=[trace.log_probs[:end] for trace, end in zip(traces, ends, strict=True)],
        steps=[trace.steps[:end] for trace, end in zip(traces, ends, strict=True)],
        forward_passes=[trace.forward_passes for trace in traces],
        trace=traces if config.trace else None,
    )
