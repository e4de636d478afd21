"""Requests to generate: sequences with hidden positions, and how many of these each step reveals.

Shapes: N hidden tokens of a block, S times of a schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.config.sampler import SamplerConfig
from unmask.data.encoding import encode_prompt
from unmask.diffusion.rng import RngStream, sequence_keys, uniform
from unmask.errors import GenerationError
from unmask.generation.canvas import CanvasSettings, check_canvas
from unmask.generation.constraints.gaps import Gap, constrained_gaps
from unmask.generation.revise import even_counts, loop_counts, plan_revisions
from unmask.generation.speculation import num_columns
from unmask.models.diffusion_lm import DiffusionLM

MOST_SPECULATIVE_COLUMNS = 8192
"""Positions of a pass of mode self-speculative beside the text."""

ONE_STATE = "a recurrent layer has one state a sequence, and not one for each draft"
LAST_TIME = 1e-3  # the last time of Dream's schedules, which begin at 1


@dataclass(frozen=True)
class Request:
    """One sequence to decode."""

    prompt: list[int]  # ids before the completion; for infilling, of the text with its mask tokens
    ids: list[int]  # of the whole sequence, with the mask token at hidden positions
    hidden: list[bool]  # True at positions to fill in
    # the first position of the result: that of the completion; for infilling 0, since the result is the whole
    # sequence
    start: int
    key: int  # of its random numbers
    # (start, stop) of each decoding block with hidden positions; none crosses the edge of an attention block
    blocks: list[tuple[int, int]]
    # for each block the number of tokens to reveal at each of its steps; None: the predictions decide
    counts: list[list[int]] | None
    stop_at_eos: bool  # whether decoding stops with the block that produces an end token
    gaps: tuple[Gap, ...] = ()  # what has to meet a constraint
    # for each block the most tokens that each step hides again; (): none
    revisions: tuple[list[int], ...] = ()
    limit: int | None = None  # where the result ends, before the last canvas does; None: at the end
    max_canvas_steps: int | None = None  # on canvases of random tokens the most denoising steps of a block

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return len(self.ids)

    @property
    def end(self) -> int:
        """The end of the result."""
        return self.length if self.limit is None else self.limit

    @property
    def most_steps(self) -> int:
        """The denoising steps that it takes at most."""
        if self.max_canvas_steps is not None:
            return self.max_canvas_steps * len(self.blocks)
        return sum(self.hidden) if self.counts is None else sum(map(len, self.counts))


def _request(
    lm: DiffusionLM,
    prompt: list[int] | None,
    ids: list[int],
    hidden: list[bool],
    key: int,
    blocks: list[tuple[int, int]],
    config: SamplerConfig,
    where: str,
) -> Request:
    """The request to complete a prompt, or if there is none to fill in the whole text."""
    completion = prompt is not None
    revisions: tuple[list[int], ...] = ()
    counts = step_counts([sum(hidden[a:b]) for a, b in blocks], config, key if completion else 0)
    max_canvas_steps = None
    if lm.noise == "uniform":
        counts, max_canvas_steps = None, CanvasSettings.of(lm, config).max_denoising_steps
    if config.revise is not None and counts is not None:
        planned = [plan_revisions(block, config.revise) for block in counts]
        counts, revisions = [reveals for reveals, _ in planned], tuple(hides for _, hides in planned)
    gaps = constrained_gaps(lm, ids, hidden, config, where, completion=completion)
    known, start = (ids, 0) if prompt is None else (prompt, len(prompt))
    stops = completion and config.stop_at_eos
    limit = start + config.max_new_tokens if completion else None
    return Request(
        *(known, ids, hidden, start, key, blocks, counts, stops, gaps, revisions, limit, max_canvas_steps)
    )


def make_requests(
    lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
) -> list[Request]:
    """Encode prompts into requests. Arguments and errors as in `unmask.generate`."""
    encoded = encode_all(lm.tokenizer, prompts, "prompts")
    attention_block = check_settings(lm, config)
    if (
        config.steps is not None
        and config.steps > config.max_new_tokens
        and config.schedule == "even"
        and not _in_loop(config)
    ):
        what = f"{config.steps} steps for {config.max_new_tokens} tokens"
        raise GenerationError(what, where="steps", remedy="Every step reveals at least one token: lower it")
    if attention_block is None and config.max_new_tokens % (config.block_size or 1):
        what = f"does not divide the {config.max_new_tokens} new tokens"
        raise GenerationError(what, where=f"block_size {config.block_size}", remedy="Change one of them")
    _check_blocks(len(_blocks(lm, 0, config.max_new_tokens, attention_block, config)), config, "steps")
    requests = []
    for index, (prompt, key) in enumerate(zip(encoded, checked_keys(encoded, keys), strict=True)):
        where, start = f"prompt {index}", len(prompt)
        stop = start + completion_length(lm, config.max_new_tokens)
        if lm.context_length is not None and stop > lm.context_length:
            what = (
                f"{start} prompt tokens and {stop - start} new ones exceed the context of {lm.context_length}"
            )
            fewer = config.max_new_tokens > completion_length(lm, 1)
            remedy = f"Shorten the prompt{' or lower max_new_tokens' * fewer}"
            remedy += f" (canvases are whole, of {lm.block_size} tokens)" if lm.canvas else ""
            raise GenerationError(what, where=where, remedy=remedy)
        check_ids(lm, prompt, where)
        if (lm.logit_shift or config.self_speculative) and not prompt:
            raise GenerationError(
                "the prompt is empty", where=where, remedy="Give at least one token (such as BOS)"
            )
        blocks = _blocks(lm, start, stop, attention_block, config)
        ids = [*prompt, *[lm.mask_token_id] * (stop - start)]
        hidden = [False] * start + [True] * (stop - start)
        requests.append(_request(lm, prompt, ids, hidden, key, blocks, config, where))
    return requests


def make_infill_requests(
    lm: DiffusionLM, texts: Sequence[Any], config: SamplerConfig, keys: Sequence[int] | None = None
) -> list[Request]:
    """Encode texts with mask tokens into requests. Arguments and errors as in `unmask.infill`."""
    encoded = encode_all(lm.tokenizer, texts, "texts", keep=[lm.tokenizer.mask_token])
    attention_block = check_settings(lm, config)
    if config.self_speculative:
        what = f"{config.mode!r} completes prompts, and the text after a gap would not be read"
        raise GenerationError(
            what, where="mode", remedy="Use mode 'denoise', or cut the text at its first gap and complete it"
        )
    requests = []
    for index, (ids, key) in enumerate(zip(encoded, checked_keys(encoded, keys), strict=True)):
        where, hidden = f"text {index}", [token == lm.mask_token_id for token in ids]
        if not any(hidden):
            remedy = (
                f"Write {lm.tokenizer.mask_token} for every token to fill in, or <gap> for a gap with "
                "length='auto' (--max-gap N)"
            )
            raise GenerationError("has no mask token", where=where, remedy=remedy)
        if lm.context_length is not None and len(ids) > lm.context_length:
            raise GenerationError(
                f"{len(ids)} tokens exceed the context of {lm.context_length}",
                where=where,
                remedy="Shorten the text",
            )
        check_ids(lm, [token for token in ids if token != lm.mask_token_id], where)
        if lm.logit_shift and hidden[0]:
            raise GenerationError(
                "the first token is hidden, and no token before it predicts it",
                where=where,
                remedy="Begin with BOS",
            )
        blocks = [
            (a, b)
            for a, b in _blocks(lm, hidden.index(True), len(ids), attention_block, config)
            if any(hidden[a:b])
        ]
        _check_blocks(len(blocks), config, f"steps and {where}")
        requests.append(_request(lm, None, ids, hidden, key, blocks, config, where))
    return requests


def completion_length(lm: DiffusionLM, tokens: int) -> int:
    """The tokens that are computed for a completion of `tokens`: DiffusionGemma's canvases are whole."""
    size = lm.block_size if lm.canvas and lm.block_size else 1
    return -(-tokens // size) * size


def without_ends(lm: DiffusionLM, config: SamplerConfig) -> SamplerConfig:
    """The settings with which texts are filled in: end tokens are forbidden unless `allowed_tokens` names
    them."""
    ends = [token for token in lm.eos_token_ids if token not in (config.allowed_tokens or [])]
    return config.model_copy(update={"forbidden_tokens": [*(config.forbidden_tokens or []), *ends] or None})


def check_settings(lm: DiffusionLM, config: SamplerConfig) -> int | None:
    """The attention block size, to which decoding blocks are aligned; None for a bidirectional model. Raises
    GenerationError for settings that do not fit the model."""
    check_canvas(lm, config)
    attention_block = {"causal": 1, "block_causal": lm.block_size, "bidirectional": None}[lm.attention]
    if config.self_speculative and (not lm.causal_context or attention_block == 1):
        what = (
            f"{config.mode!r} drafts blocks, and this one's are of one token"
            if lm.causal_context
            else f"{config.mode!r} needs a model"
        )
        what += "" if lm.causal_context else " that reads finished blocks from left to right"
        remedy = (
            "Use mode 'denoise', or a model of `unmask convert --recipe block` (block_causal with "
            "causal_context)"
        )
        raise GenerationError(what, where="mode", remedy=remedy)
    if config.self_speculative and lm.recurrent:
        raise GenerationError(
            ONE_STATE,
            where="mode",
            remedy="Use mode 'denoise' (num_speculative_tokens drafts there)",
        )
    if config.self_speculative and (columns := num_columns(lm, config)) > MOST_SPECULATIVE_COLUMNS:
        what = (
            f"a pass would have {columns:,} positions beside the text, more than {MOST_SPECULATIVE_COLUMNS:,}"
        )
        raise GenerationError(
            what, where="num_speculative_tokens and num_branches", remedy="Lower one of them"
        )
    if attention_block is not None and config.block_size not in (None, attention_block):
        what = f"decoding block {config.block_size} for an attention block of {attention_block}"
        remedy = "Leave it out for this model" + (
            ", or sample with sub_block_size" if config.block_size < attention_block else ""
        )
        raise GenerationError(what, where="block_size", remedy=remedy)
    if config.sub_block_size is not None and (lm.block_size is None or config.sub_block_size > lm.block_size):
        what = f"{config.sub_block_size} for {lm.attention} attention" + (
            f" by {lm.block_size} tokens" if lm.block_size else ""
        )
        remedy = "Use the attention block's size or less" if lm.block_size else "Leave it out for this model"
        remedy = "Use block_size in its place" if lm.attention == "bidirectional" else remedy
        raise GenerationError(what, where="sub_block_size", remedy=remedy)
    if attention_block is not None and config.cache != "exact":
        raise GenerationError(
            f"{config.cache} for a model whose cache is exact",
            where="cache",
            remedy="Leave it out for this model",
        )
    if config.num_speculative_tokens and (attention_block is None or attention_block == 1):
        what = (
            "blocks of one token have no states to draft"
            if attention_block
            else "a pass over a whole canvas is limited by arithmetic"
        )
        raise GenerationError(what, where="num_speculative_tokens", remedy="Leave it out for this model")
    if config.cfg_scale and lm.autoregressive:
        raise GenerationError(
            "a causal model has never seen a hidden prompt",
            where="cfg_scale",
            remedy="Leave it out for this model",
        )
    if config.revise is not None and 1 in (attention_block, config.block_size, config.sub_block_size):
        remedy = "Leave it out, or use larger blocks"
        raise GenerationError(
            "blocks of one token have no visible token to hide", where="revise", remedy=remedy
        )
    if config.revise is not None and config.revise.by == "quality" and lm.quality_head is None:
        remedy = "Train one with `unmask sft --recipe quality-head`, or revise by probability"
        raise GenerationError("the model has no quality head", where="revise.by", remedy=remedy)
    check_ids(lm, config.allowed_tokens or [], "allowed_tokens")
    check_ids(lm, config.forbidden_tokens or [], "forbidden_tokens")
    check_ids(lm, config.reveal_last or [], "reveal_last")
    impossible = {*lm.never_predicted, *(config.forbidden_tokens or ())}
    if config.allowed_tokens and impossible.issuperset(config.allowed_tokens):
        raise GenerationError(
            "all of them are forbidden", where="allowed_tokens", remedy="Allow some that are not forbidden"
        )
    if len(impossible) >= lm.vocab_size:
        raise GenerationError("every token is forbidden", where="forbidden_tokens", remedy="Leave some out")
    return attention_block


def check_verifier(lm: DiffusionLM, verifier: Any) -> None:
    """Raise GenerationError unless the second model, a `DiffusionLM` or a `RemoteLM`, can verify the drafts
    of the first: a causal one, with the same tokens."""
    here = verifier if isinstance(verifier, DiffusionLM) else None
    if here is not None and not here.autoregressive:
        remedy = "Give a causal model, or the causal reading (`.as_causal()`) of one with a causal context"
        raise GenerationError(f"is a model of {here.attention} attention", where="verifier", remedy=remedy)
    if here is not None and here.recurrent:
        remedy = "Give a model whose layers are all attention"
        raise GenerationError(ONE_STATE, where="verifier", remedy=remedy)
    differing = lm.tokenizer.get_vocab().items() ^ verifier.tokenizer.get_vocab().items()
    if count := sum(token != lm.tokenizer.mask_token for token, _ in differing):
        what = f"{count} entries differ from those of the drafting model's tokenizer"
        raise GenerationError(what, where="verifier", remedy="Give a model with the same tokenizer")
    if here is None:
        return
    sizes, other_sizes = ((each.vocab_size, each.mask_token_id) for each in (lm, here))
    if sizes != other_sizes:
        what = f"has the vocabulary size and mask token {other_sizes}, the drafting model {sizes}"
        raise GenerationError(what, where="verifier", remedy="Give a model with the same of both")
    if here.device != lm.device:
        what = f"is on {here.device}, and the drafting model on {lm.device}"
        raise GenerationError(what, where="verifier", remedy="Load both on one device")


def check_verified(verifier: Any, length: int, config: SamplerConfig) -> None:
    """Raise GenerationError for a request of `length` tokens that the model cannot verify."""
    if not config.self_speculative:
        raise GenerationError(
            f"has no effect with mode {config.mode!r}", where="verifier", remedy="Use mode 'self-speculative'"
        )
    if not isinstance(verifier, DiffusionLM):
        length += 1  # a server always writes a token after what it reads
        if config.repetition_penalty != 1:
            what = "changes logits, of which a server gives only the log-probabilities"
            where = "repetition_penalty and verifier"
            raise GenerationError(what, where=where, remedy="Leave one of them out")
    if verifier.context_length is not None and length > verifier.context_length:
        what = f"{length} tokens exceed its context of {verifier.context_length}"
        raise GenerationError(what, where="verifier", remedy="Shorten the prompt or lower max_new_tokens")


def check_ids(lm: DiffusionLM, ids: Sequence[int], where: str) -> None:
    """Raise GenerationError for an id that the model has no embedding for."""
    size = lm.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise GenerationError(
                f"token id {token} is outside the vocabulary of {size}",
                where=where,
                remedy="Use this model's tokenizer",
            )


def longest_first(requests: Sequence[Request]) -> list[int]:
    """The order in which requests run: the longest first, so that memory is allocated once, and equal prompts
    together, so that their keys are computed once."""
    return sorted(range(len(requests)), key=lambda i: (-requests[i].length, requests[i].prompt))


def _check_blocks(number: int, config: SamplerConfig, where: str) -> None:
    """Raise GenerationError for fewer steps than decoding blocks."""
    if config.steps is not None and config.steps < number:
        remedy = f"Every block takes a step: use at least {number}, or larger blocks"
        raise GenerationError(f"{config.steps} for {number} blocks", where=where, remedy=remedy)


def _in_loop(config: SamplerConfig) -> bool:
    return config.revise is not None and config.revise.schedule == "loop"


def step_counts(sizes: Sequence[int], config: SamplerConfig, key: int = 0) -> list[list[int]] | None:
    """Tokens to reveal at each step of each block: at least one step per block, and one token per step (none
    in some, with `revise` and its schedule loop). `sizes`: hidden tokens of each block; `key`: of the
    sequence's random numbers, for the schedule `ancestral`."""
    if config.parallel:
        return None
    counts, first = [], 0
    for index, size in enumerate(sizes):
        steps = -(-size // (config.tokens_per_step or 1))
        if config.steps is not None:
            steps = max(1, config.steps // len(sizes) + (index < config.steps % len(sizes)))
        match config.schedule:
            case "even" if config.revise is not None and _in_loop(config):
                counts.append(loop_counts(size, steps, config.revise))
                continue
            case "even":
                reveals = even_counts(size, min(size, steps))
            case "dream":
                reveals = _dream_counts(size, steps)
            case "ancestral":
                number_N = torch.arange(first, first + size)
                uniform_N = uniform(
                    config.seed, torch.tensor(key), position=number_N, stream=RngStream.REVEAL_STEP
                )
                reveals = _ancestral_counts(uniform_N, steps)
        counts.append([count for count in reveals if count])  # steps that reveal nothing are left out
        first += size
    return counts


def _dream_counts(size: int, steps: int) -> list[int]:
    """The number of tokens that each step reveals, possibly 0, by Dream's rule (Ye et al. 2025): a step from
    time t to s reveals the fraction 1 - s / t of the hidden tokens, rounded down, and the last step the rest.
    In float32, as published."""
    # whatever other threads make the default
    time_S = torch.linspace(1, LAST_TIME, steps + 1, dtype=torch.float32)
    counts: list[int] = []
    for fraction in (1 - time_S[1:] / time_S[:-1])[:-1]:
        counts.append(int((size - sum(counts)) * fraction))
    return [*counts, size - sum(counts)]


def _ancestral_counts(uniform_N: Tensor, steps: int) -> list[int]:
    """The number of tokens that each step reveals, possibly 0, if a hidden token stays hidden with
    probability s / t, independently of the others (Sahoo et al. 2024): it is revealed at the first time below
    its uniform number in [0, 1)."""
    time_S = torch.linspace(1, LAST_TIME, steps + 1, dtype=torch.float64)[1:-1]
    return torch.bincount((uniform_N[:, None] < time_S).sum(-1), minlength=steps).tolist()


def encode_all(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Any], where: str, keep: Collection[str | None] = ()
) -> list[list[int]]:
    """Token ids of strings, chat messages or lists of ids; `keep` as in `encode_prompt`.

    Raises:
        GenerationError: a single string, or anything but a list of them.
    """
    if isinstance(texts, (str, bytes, Mapping)) or not isinstance(texts, Iterable):
        what = "is one string" if isinstance(texts, str) else f"is of type {type(texts).__name__}"
        raise GenerationError(f"{where} {what}", where=where, remedy=f"Give a list of {where}")
    return [list(encode_prompt(tokenizer, text, keep)) for text in texts]


def checked_keys(encoded: Sequence[Sequence[int]], keys: Sequence[int] | None) -> Sequence[int]:
    """The user's keys, or hashes of the prompts. Raises GenerationError if their number is wrong, or one is
    not a 64-bit integer."""
    if keys is None:
        return sequence_keys(encoded)
    if len(keys) != len(encoded):
        raise GenerationError(
            f"{len(keys)} keys for {len(encoded)} prompts", where="keys", remedy="Give one key per prompt"
        )
    for key in keys:
        if not isinstance(key, int) or not -(2**63) <= key < 2**63:
            raise GenerationError(
                f"{key!r} is not a 64-bit integer",
                where="keys",
                remedy="Use integers from -2**63 to 2**63 - 1",
            )
    return keys


def block_start(lm: DiffusionLM, position: int) -> int:
    """The start of the attention block that a decoding block from this position on is in (without blocks
    every position is one). A canvas begins where it is decoded."""
    return position if lm.canvas else position - position % (lm.block_size or 1)


def _blocks(
    lm: DiffusionLM, start: int, stop: int, attention_block: int | None, config: SamplerConfig
) -> list[tuple[int, int]]:
    """The decoding blocks of the positions from start to stop: aligned to the attention blocks if there are
    any, else to the start."""
    size = attention_block or config.block_size or stop - start
    first = start if attention_block is None else block_start(lm, start)
    inside = (
        {0}
        if config.sub_block_size is None
        else {*range(0, size, config.sub_block_size), int(lm.logit_shift)}
    )
    edges = {block + offset for block in range(first, stop, size) for offset in inside}
    return list(pairwise(sorted({start, stop, *(edge for edge in edges if start < edge < stop)})))
