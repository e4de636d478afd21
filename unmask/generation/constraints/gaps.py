"""The gaps of a sequence that have to meet a constraint, and whether they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.constraints.automaton import End, TokenAutomaton
from unmask.generation.constraints.compiled import compile_constraint
from unmask.generation.constraints.vocabulary import read_vocabulary
from unmask.models.diffusion_lm import DiffusionLM


@dataclass(frozen=True, eq=False)
class Gap:
    """Neighbouring positions, hidden at first, whose tokens together have to meet a constraint."""

    start: int
    stop: int
    automaton: TokenAutomaton
    live_C: np.ndarray  # the classes with a token that may be produced


def constrained_gaps(lm: DiffusionLM, hidden: Sequence[bool], config: SamplerConfig, where: str, *, completion: bool) -> tuple[Gap, ...]:
    """The gaps of a sequence; none without a constraint. A completion is one gap, in which an end token may follow the text.

    Raises:
        ConfigError: outlines-core is not installed.
        GenerationError: the constraint is invalid, or no text that meets it has the length of a gap.
    """
    if config.constraint is None:
        return ()
    vocabulary, banned = read_vocabulary(lm), _banned(lm, config)
    end: End = "none" if not completion else "stops" if config.stop_at_eos else "filled"
    gaps, start = [], 0
    for is_hidden, run in groupby(hidden):
        stop = start + len(list(run))
        if is_hidden:
            at_start = completion or start == 0
            automaton = compile_constraint(config.constraint, vocabulary, end=end, at_start=at_start)
            gaps.append(Gap(start, stop, automaton, automaton.live_classes(banned)))
            _check_length(gaps[-1], where, completion=completion)
        start = stop
    return tuple(gaps)


def fitting_lengths(lm: DiffusionLM, config: SamplerConfig, longest: int, where: str, *, at_start: bool) -> list[int]:
    """The lengths from 1 to `longest` of a gap for which a text meets the constraint; without a constraint all. Errors as of
    `constrained_gaps`."""
    if config.constraint is None:
        return list(range(1, longest + 1))
    automaton = compile_constraint(config.constraint, read_vocabulary(lm), end="none", at_start=at_start)
    live_C = automaton.live_classes(_banned(lm, config))
    lengths = [length for length in range(1, longest + 1) if automaton.completable(length, live_C)[automaton.start]]
    if not lengths:
        shortest = automaton.shortest(live_C, 1)
        what = f"no text that meets it has 1 to {longest} tokens" + ("" if shortest is None else f": the shortest has {shortest}")
        remedy = "Allow more tokens, or change the constraint" if shortest is None else f"Set max_gap to {shortest} or more"
        raise GenerationError(what, where=f"constraint for {where}", remedy=remedy)
    return lengths


def _banned(lm: DiffusionLM, config: SamplerConfig) -> list[int]:
    """The tokens that may not be produced."""
    allowed = set(config.allowed_tokens or range(lm.config.vocab_size)) - set(config.forbidden_tokens or ())
    return [token for token in range(lm.config.vocab_size) if token not in allowed]


def _check_length(gap: Gap, where: str, *, completion: bool) -> None:
    automaton, live_C, length = gap.automaton, gap.live_C, gap.stop - gap.start
    if automaton.completable(length, live_C)[automaton.start]:
        return
    shortest, longer = automaton.shortest(live_C), automaton.shortest(live_C, length)
    where = f"constraint for {where}"
    if shortest is None:
        what = "no text meets it with the tokens that are allowed"
        raise GenerationError(what, where=where, remedy="Allow more tokens, or change the constraint")
    what = f"no text that meets it has {length} tokens: the shortest has {shortest}"
    if completion:
        raise GenerationError(what, where=where, remedy=f"Set max_new_tokens to {longer or shortest} or more")
    fits = f"{longer}" if longer else f"fewer, such as {shortest}"
    raise GenerationError(what, where=where, remedy=f"Write {fits} mask tokens for the gap")
