"""Completing and infilling with the engine. What a step reveals: `engine/steps.py` (`reveal`, `choose`), in
the order that `policies.py` gives; `naive.py` defines which tokens come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Literal

from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.engine.engine import Engine
from unmask.generation.engine.speculate import Verifier
from unmask.generation.gap_lengths import DEFAULT_MAX_GAP, find_lengths
from unmask.generation.output import Generation, make_generation
from unmask.generation.requests import (
    Request,
    checked_keys,
    longest_first,
    make_infill_requests,
    make_requests,
    without_ends,
)
from unmask.generation.variable_length import fill_gaps, trained_max_gap
from unmask.models.diffusion_lm import DiffusionLM


def generate(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    config: SamplerConfig | None = None,
    keys: Sequence[int] | None = None,
    verifier: Verifier | None = None,
) -> Generation:
    """Complete prompts by denoising.

    Args:
        lm: any attention pattern; a causal model decodes token by token.
        prompts: strings, chat messages or lists of token ids, of any lengths.
        config: remasking, steps, temperature, ...
        keys: of the random numbers, one per prompt; None: a hash of each prompt and its repeat number.
        verifier: in mode self-speculative, a causal model with the same tokenizer, whose text it shall be,
            here or on a server (`RemoteLM`); None: `lm.as_causal()`.

    Returns:
        One completion per prompt, in order. It does not depend on the other prompts.

    Raises:
        GenerationError: an empty or too long prompt, or settings that do not fit the model.
    """
    config = config or SamplerConfig()
    return complete(lm, make_requests(lm, prompts, config, keys), config, verifier)


def infill(
    lm: DiffusionLM,
    texts: Sequence[Any],
    config: SamplerConfig | None = None,
    keys: Sequence[int] | None = None,
    *,
    length: Literal["auto", "search"] | None = None,
    max_gap: int | None = None,
    gap_mark: str = "<gap>",
) -> Generation:
    """Fill in the mask tokens of texts. A bidirectional model sees the text before and after them, a
    block-causal model the text up to the end of their block, a causal model the text before them.

    Args:
        lm: any attention pattern.
        texts: strings, chat messages or lists of token ids, with the tokenizer's mask token for every token
            to fill in.
        config: remasking, steps (over all hidden tokens), temperature, ...; max_new_tokens is not read.
        keys: as for `generate`.
        length: "auto": a mark in a text stands for a gap of unknown length; bidirectional models only. A
            model that was trained for it finds the length while it fills the gap (`variable_length.py`); for
            others it is searched (`gap_lengths.py`). "search": it is searched in any case. Mask tokens still
            stand for one token each. None: there are only mask tokens.
        max_gap: the longest gap, in tokens; the shortest has one. None: that of the model's training, and 64
            where lengths are searched.
        gap_mark: the mark. A text is cut at its marks before it is tokenized. In place of token ids with
            marks, give the lists of ids between the gaps.

    Returns:
        The whole texts. End tokens are filled in only if `allowed_tokens` names them. With lengths that were
        searched the tokens are those for the same text with as many mask tokens as were found.
        `Generation.gaps` says what was found.

    Raises:
        GenerationError: a text without mask tokens (or marks), or too long, or a mark without text after it,
            or settings that do not fit the model, such as a longer gap than it was trained on.
    """
    config = without_ends(lm, config or SamplerConfig())
    if length is None:
        return complete(lm, make_infill_requests(lm, texts, config, keys), config)
    if length not in ("auto", "search"):
        raise GenerationError(
            f"{length!r}",
            where="length",
            remedy="Use 'auto' or 'search', or None and a mask token for every missing token",
        )
    if length == "auto" and lm.expand_token_id is not None:
        return fill_gaps(lm, texts, config, keys, trained_max_gap(lm, max_gap), gap_mark)
    if keys is not None:
        checked_keys(texts, keys)
    found = find_lengths(lm, texts, config, DEFAULT_MAX_GAP if max_gap is None else max_gap, gap_mark)
    generation = complete(lm, make_infill_requests(lm, [text.ids for text in found], config, keys), config)
    return replace(generation, gaps=[text.gaps for text in found])


def complete(
    lm: DiffusionLM, requests: Sequence[Request], config: SamplerConfig, verifier: Verifier | None = None
) -> Generation:
    """Complete requests; with lossy settings also measure their agreement with the exact sampler."""
    generation = _run(lm, requests, config, verifier)
    if config.lossy is None or not config.agreement_prompts or not requests:
        return generation
    some = requests[: config.agreement_prompts]
    exact = config.model_copy(update={"cache": "exact", "refresh_interval": None, "early_commit": None})
    return replace(
        generation, agreement=agreement(_filled_in(_run(lm, some, exact), some), _filled_in(generation, some))
    )


def agreement(exact: Sequence[Sequence[int]], lossy: Sequence[Sequence[int]]) -> float:
    """The fraction of equal tokens over pairs of completions, each counted up to the end of the longer one; 1
    if all are empty."""
    pairs = list(zip(exact, lossy, strict=False))
    same = sum(sum(a == b for a, b in zip(one, other, strict=False)) for one, other in pairs)
    total = sum(max(len(one), len(other)) for one, other in pairs)
    return same / total if total else 1.0


def _filled_in(generation: Generation, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens at the requests' hidden positions."""
    pairs = zip(generation.tokens, requests, strict=False)
    return [list(compress(tokens, request.hidden[request.start :])) for tokens, request in pairs]


def _run(
    lm: DiffusionLM, requests: Sequence[Request], config: SamplerConfig, verifier: Verifier | None = None
) -> Generation:
    """Run requests through an engine."""
    engine = Engine(
        lm, batch_size=config.batch_size, max_batch_tokens=config.max_batch_tokens, verifier=verifier
    )
    index = {engine.submit(requests[i], config): i for i in longest_first(requests)}
    traces = {index[ticket]: trace for ticket, trace in engine.run()}
    generation = make_generation(lm, requests, [traces[i] for i in range(len(requests))], config)
    return replace(generation, prompt_reuse=engine.prompt_reuse)
