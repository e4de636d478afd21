"""The gaps of a sequence that have to meet a constraint, and whether they can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.constraints.automaton import End, Reach, TokenAutomaton
from unmask.generation.constraints.compiled import compile_constraint
from unmask.generation.constraints.vocabulary import Vocabulary, read_vocabulary
from unmask.models.diffusion_lm import DiffusionLM

MOST_EDGES = 2**24
"""Edges of the automaton at each hidden position of a text as a whole, and states at each given one: about
half a gigabyte."""


@dataclass(frozen=True, eq=False)
class Gap:
    """Neighbouring positions whose tokens together have to meet a constraint: all hidden at first, or with
    text between the hidden ones."""

    start: int
    stop: int
    automaton: TokenAutomaton
    live_C: np.ndarray  # the classes with a token that may be produced
    # the tokens of the text, None where hidden; None: all are hidden
    given: tuple[int | None, ...] | None = None

    def completable(self, position: int) -> np.ndarray:
        """The states [S] from which the tokens from a position on can lead to an accepting one, if those
        hidden at first are free."""
        if self.given is None:
            return self._reach.states(self.stop - position)
        return self._completable[position - self.start]

    @cached_property
    def _reach(self) -> Reach:
        """Kept here as well: the automaton keeps only those of the last requests."""
        return self.automaton.reach(self.live_C)

    @cached_property
    def _completable(self) -> list[np.ndarray]:
        """The states of each position, and of the end."""
        automaton, found = self.automaton, [self.automaton.accepts_S]
        source_E, target_E = automaton.edges(self.live_C)
        for token in reversed(self.given or ()):
            if token is None:
                before_S = np.zeros_like(automaton.accepts_S)
                before_S[source_E[found[-1][target_E]]] = True
            else:
                before_S = found[-1][automaton.next_SC[:, automaton.class_V[token]]]
            found.append(before_S)
        return found[::-1]


def constrained_gaps(
    lm: DiffusionLM,
    ids: Sequence[int],
    hidden: Sequence[bool],
    config: SamplerConfig,
    where: str,
    *,
    completion: bool,
) -> tuple[Gap, ...]:
    """The gaps of a sequence; none without a constraint. A completion is one gap, of `max_new_tokens`, in
    which an end token may follow the text; what the last canvas has beyond it is free. If the constraint is
    over the text, that is one gap without the special tokens on either side.

    Raises:
        ConfigError: outlines-core is not installed.
        GenerationError: the constraint is invalid, or no text that meets it has the length of a gap.
    """
    if config.constraint is None:
        return ()
    vocabulary = read_vocabulary(lm)
    if config.constraint.over == "text":
        if completion:
            remedy = "Leave it out, or fill in a text (unmask.infill)"
            raise GenerationError(
                "a completion is met as a whole, without its prompt", where="constraint.over", remedy=remedy
            )
        return (_whole_text(lm, vocabulary, ids, hidden, config, where),)
    banned = _banned(lm, config)
    ends: End = "none" if not completion else "stops" if config.stop_at_eos else "filled"
    gaps, start = [], 0
    for is_hidden, run in groupby(hidden):
        stop = start + len(list(run))
        if is_hidden:
            end = start + config.max_new_tokens if completion else stop
            has_text = any(hidden[at] or vocabulary.bytes_V[ids[at]] is not None for at in range(start))
            automaton = compile_constraint(config.constraint, vocabulary, end=ends, at_start=not has_text)
            gaps.append(Gap(start, end, automaton, automaton.live_classes(banned)))
            _check_length(gaps[-1], where, completion=completion)
        start = stop
    return tuple(gaps)


def _whole_text(
    lm: DiffusionLM,
    vocabulary: Vocabulary,
    ids: Sequence[int],
    hidden: Sequence[bool],
    config: SamplerConfig,
    where: str,
) -> Gap:
    """The text of a sequence as a gap in which only some tokens are hidden."""
    assert config.constraint is not None
    known = [
        is_hidden or vocabulary.bytes_V[token] is not None
        for token, is_hidden in zip(ids, hidden, strict=True)
    ]
    inside = [at for at, token in enumerate(ids) if known[at] or token == lm.tokenizer.unk_token_id]
    start, stop = inside[0], inside[-1] + 1
    if not all(known[start:stop]):
        at = known.index(False, start)
        what = f"the token {lm.tokenizer.convert_ids_to_tokens(ids[at])!r} at position {at} is no text"
        raise GenerationError(what, where=f"constraint.over for {where}", remedy="Leave it out of the text")
    automaton = compile_constraint(config.constraint, vocabulary, end="none", at_start=True)
    known_tokens = stop - start - sum(hidden)
    if sum(hidden) * len(automaton.edge_table.source_E) + known_tokens * len(automaton.next_SC) > MOST_EDGES:
        what = (
            f"{stop - start:,} tokens are too many for a constraint of "
            f"{len(automaton.edge_table.source_E):,} edges"
        )
        raise GenerationError(
            what,
            where=f"constraint.over for {where}",
            remedy="Shorten the text, or bound the constraint's repetitions",
        )
    given = tuple(None if hidden[at] else ids[at] for at in range(start, stop))
    gap = Gap(start, stop, automaton, automaton.live_classes(_banned(lm, config)), given)
    if not gap.completable(start)[automaton.start]:
        what = "no tokens in its gaps make the text meet it"
        remedy = "Change the text, the number of mask tokens in its gaps, or the constraint"
        raise GenerationError(what, where=f"constraint for {where}", remedy=remedy)
    return gap


def fitting_lengths(
    lm: DiffusionLM, config: SamplerConfig, longest: int, where: str, *, at_start: bool
) -> list[int]:
    """The lengths from 1 to `longest` of a gap for which a text meets the constraint; without a constraint
    all. Errors as of `constrained_gaps`."""
    if config.constraint is None:
        return list(range(1, longest + 1))
    if config.constraint.over == "text":
        what = "the text as a whole is not searched for lengths"
        raise GenerationError(
            what, where="constraint.over", remedy="Write mask tokens for its gaps, or use over 'gap'"
        )
    automaton = compile_constraint(config.constraint, read_vocabulary(lm), end="none", at_start=at_start)
    live_C = automaton.live_classes(_banned(lm, config))
    lengths = [
        length for length in range(1, longest + 1) if automaton.completable(length, live_C)[automaton.start]
    ]
    if not lengths:
        shortest = automaton.shortest(live_C, 1)
        what = f"no text that meets it has 1 to {longest} tokens" + (
            "" if shortest is None else f": the shortest has {shortest}"
        )
        remedy = (
            "Allow more tokens, or change the constraint"
            if shortest is None
            else f"Set max_gap to {shortest} or more"
        )
        raise GenerationError(what, where=f"constraint for {where}", remedy=remedy)
    return lengths


def _banned(lm: DiffusionLM, config: SamplerConfig) -> list[int]:
    """The tokens that may not be produced."""
    allowed = set(config.allowed_tokens or range(lm.vocab_size)) - set(config.forbidden_tokens or ())
    return [token for token in range(lm.vocab_size) if token not in allowed]


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
    raise GenerationError(
        what,
        where=where,
        remedy=f"Write {fits} mask tokens for the gap, or let its length be found (--max-gap)",
    )
