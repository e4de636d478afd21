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
    vocabulary = read_vocabulary(lm)
    allowed = set(config.allowed_tokens or range(lm.config.vocab_size)) - set(config.forbidden_tokens or ())
    banned = [token for token in range(lm.config.vocab_size) if token not in allowed]
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
