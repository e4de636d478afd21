"""Continuous batching: sequences enter and leave between steps, and share forward passes even if they are at
different positions.

Shapes: B running sequences, S slots, C columns (positions), W positions of a block, N hidden positions of all
blocks, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.engine.cached_forward import cache_clean_tokens
from unmask.generation.engine.canvas_steps import begin_canvases, denoise_canvases, read_canvas_steps
from unmask.generation.engine.drafts import denoise_with_drafts
from unmask.generation.engine.forward import buckets, predict
from unmask.generation.engine.guidance import guided_predictions, show_in_copies
from unmask.generation.engine.host import moved
from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.engine.lossy_cache import stale_positions
from unmask.generation.engine.noise import num_numbers
from unmask.generation.engine.recorded_passes import check_graphs, passes_of
from unmask.generation.engine.revision import hide_and_reveal, predict_with_quality
from unmask.generation.engine.sequence import SequenceState
from unmask.generation.engine.slots import BatchEntry, BatchState, Predictions
from unmask.generation.engine.speculate import Verifier, begin, speculate
from unmask.generation.engine.steps import reveal
from unmask.generation.output import Trace
from unmask.generation.policies import MOST_TOP, nan_error
from unmask.generation.requests import Request, block_start, check_settings, check_verified, check_verifier
from unmask.generation.speculation import num_columns
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating


class SequenceView(NamedTuple):
    """What can be seen of a sequence between two steps.

    Attributes:
        ids: with the mask token at hidden positions. On a canvas of random tokens, which none of them ends,
            the most probable tokens: the last ones are committed.
        hidden: the positions without a token to show.
        log_probs: of revealed tokens, when they were revealed.
        steps: denoising steps so far.
        num_final: positions from the first one on that no later step changes.
        forbidden: the ids and log-probabilities of the tokens that the constraint forbids, of each position;
            None: they are not recorded.
    """

    ids: list[int]
    hidden: list[bool]
    log_probs: list[float]
    steps: int
    num_final: int
    forbidden: tuple[list[list[int]], list[list[float]]] | None


class Engine:
    """Samples sequences of one model, each with its own settings. The result of one does not depend on the
    others.

    Call `submit`, then `step` until it returns the ticket; or `run`, for all requests. Not thread-safe.

    Args:
        batch_size: the most sequences that run at once, at least 1.
        verifier: in mode self-speculative, the causal model that verifies drafts, here or on a server; None:
            the model itself.
        max_batch_tokens: bound of the running sequences (with guidance twice) times the longest of them,
            drafts included; None: no bound.

    Attributes:
        num_forward_passes: passes so far, of any number of sequences.
        prompt_tokens: tokens before the first hidden one, of all sequences so far (with guidance twice); only
            with an exact cache.
        prompt_tokens_shared: those whose keys and values were copied from a sequence with the same prompt.

    Raises:
        GenerationError: batch_size is below 1, cuda_graphs without a GPU, or a verifier that does not fit the
            model.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        *,
        batch_size: int = 64,
        max_batch_tokens: int | None = None,
        verifier: Verifier | None = None,
    ):
        self.lm, self.verifier = lm, verifier
        self.batch_size, self.max_batch_tokens = batch_size, max_batch_tokens
        if batch_size < 1:
            raise GenerationError(f"{batch_size} is below 1", where="batch_size", remedy="Use 1 or more")
        check_graphs(lm, verifier)
        self.exact_cache, self.random_tokens = lm.attention != "bidirectional", lm.noise == "uniform"
        self.slots = BatchState(lm.device, lm.mask_token_id, random_tokens=self.random_tokens)
        if lm.canvas and lm.block_size:
            self.slots.create_soft(lm.block_size, lm.model.get_input_embeddings().weight)
        if self.exact_cache:
            self.slots.create_cache(passes_of(lm).memory if lm.cuda_graphs else None)
        if verifier is not None:
            check_verifier(lm, verifier)
        self._verifier = verifier if isinstance(verifier, DiffusionLM) else None  # which has its keys here
        if self._verifier is not None:
            self.slots.verifier_cache = SlotCache()
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self.finished: deque[tuple[int, Trace]] = deque()  # not returned yet
        self.num_forward_passes = 0
        self.prompt_tokens = self.prompt_tokens_shared = 0
        # equal ones are one object
        self._settings: WeakValueDictionary[str, SamplerConfig] = WeakValueDictionary()
        self._tickets = 0

    @property
    def prompt_reuse(self) -> float | None:
        """The fraction of prompt tokens whose keys and values were copied; None without an exact cache or
        prompts."""
        return self.prompt_tokens_shared / self.prompt_tokens if self.prompt_tokens else None

    def submit(self, request: Request, config: SamplerConfig) -> int:
        """Accept a request, and return its ticket.

        Raises:
            GenerationError: it alone exceeds max_batch_tokens, or was made for other settings or another
                model.
        """
        check_settings(self.lm, config)
        if self.verifier is not None:
            check_verified(self.verifier, request.length, config)
        given = (request.counts is None, bool(request.gaps), bool(request.revisions))
        decided = config.parallel or self.random_tokens
        if given != (decided, config.constraint is not None, config.revise is not None):
            raise GenerationError(
                "the request was made with other settings", where="config", remedy="Make it with these"
            )
        config = self._settings.setdefault(config.model_dump_json(), config)
        texts = [request.ids]
        if config.cfg_scale:
            texts.append([self.lm.mask_token_id] * request.length)
        sequence = SequenceState(self._tickets, request, config, texts, request.length)
        if config.self_speculative:
            sequence.num_columns += num_columns(self.lm, config)
            sequence.speculation = begin(self.lm, request, config)
        else:
            sequence.num_columns += config.num_speculative_tokens * (self.lm.block_size or 1)
            if not self.random_tokens:
                self.slots.create_noise(num_numbers(request, config))
        columns = sequence.num_columns
        if self.max_batch_tokens is not None and len(sequence.texts) * columns > self.max_batch_tokens:
            what = (
                f"{columns} tokens{' twice, for guidance,' if config.cfg_scale else ''} exceed "
                f"{self.max_batch_tokens}"
            )
            raise GenerationError(what, where="max_batch_tokens", remedy="Raise it, or shorten the request")
        if config.cache != "exact":
            self.slots.create_cache()
        if config.top_log_probs:
            self.slots.create_top("top", min(MOST_TOP, self.lm.vocab_size))
        if config.top_forbidden:
            self.slots.create_top("forbidden", min(MOST_TOP, self.lm.vocab_size))
        self._tickets += 1
        self.waiting.append(sequence)
        return sequence.ticket

    def cancel(self, ticket: int) -> bool:
        """Drop a request and free its slot; False if it is unknown or finished."""
        sequence = next((each for each in [*self.waiting, *self.running] if each.ticket == ticket), None)
        if sequence in self.running:
            self._leave(sequence)
        elif sequence is not None:
            self.waiting.remove(sequence)
        return sequence is not None

    def state(self, ticket: int) -> SequenceView | None:
        """What can be seen of a running sequence; of others None."""
        sequence = next((each for each in self.running if each.ticket == ticket), None)
        if sequence is None:
            return None
        at = (sequence.slots[0], slice(0, sequence.request.length))
        ids, hidden = self.slots.ids_SC[at].tolist(), self.slots.hidden_SC[at].tolist()
        config, forbidden = sequence.config, None
        if sequence.speculation is not None:
            num_final = sequence.speculation.position
        elif sequence.hides_again or self.random_tokens:
            num_final = sequence.span[0]
        else:
            num_final = [*hidden, True].index(True)
        if self.random_tokens and sequence.step:
            block = slice(*sequence.span)
            best = self.slots.best_SC[at][block].tolist()
            ids[block] = [
                each if is_hidden else token
                for token, each, is_hidden in zip(ids[block], best, hidden[block], strict=True)
            ]
            hidden[block] = [False] * len(best)
        if config.top_forbidden:
            forbidden = self.slots.most_probable("forbidden", at, config.top_forbidden)
        log_probs = self.slots.log_prob_SC[at].tolist()
        return SequenceView(ids, hidden, log_probs, sequence.steps_done, num_final, forbidden)

    def run(self) -> Iterator[tuple[int, Trace]]:
        """All accepted requests, in the order in which they finish."""
        while self.waiting or self.running or self.finished:
            with evaluating(self.lm), evaluating(self._verifier or self.lm):
                while not self.finished:
                    self._denoise()
            while self.finished:
                yield self.finished.popleft()

    def step(self) -> list[tuple[int, Trace]]:
        """Run `_denoise` once. Returns the tickets and traces of the finished requests that neither `run` nor
        `step` has returned yet.

        Raises:
            GenerationError: predictions are NaN. `run` raises it where a sequence finishes, or a block at
                which it may stop.
        """
        with evaluating(self.lm), evaluating(self._verifier or self.lm):
            self._denoise()
        if any(map(math.isnan, self.slots.sum_S[: self.slots.count].tolist())):
            raise nan_error()
        finished, self.finished = list(self.finished), deque()
        return finished

    @torch.no_grad()
    def _denoise(self) -> None:
        """The body of `step` and `run`: admit waiting sequences, predict, decide and reveal, advance. Those
        of mode self-speculative have a round of their own."""
        # NaN, or interrupted
        self._finish([each for each in self.running if each.block == len(each.request.blocks)])
        self._admit()
        if sequences := [each for each in self.running if each.speculation is None]:
            predictions = self._predict(sequences)
            if any(each.config.num_speculative_tokens for each in sequences):
                denoise_with_drafts(self.slots, sequences, predictions, self._reveal)
            else:
                self._reveal(sequences, predictions)
        if speculative := [each for each in self.running if each.speculation is not None]:
            self.num_forward_passes += 1
            self._finish(speculate(self.lm, self.verifier, self.slots, speculative, alone=self._alone))

    def _admit(self) -> None:
        """Start waiting requests in their order, as long as there is room."""
        entering: list[SequenceState] = []
        limit, reserved = self.max_batch_tokens or math.inf, tuple(self.slots.ids_SC.shape)
        needed = self.slots.count, max((sequence.num_columns for sequence in self.running), default=0)
        while self.waiting and len(self.running) + len(entering) < self.batch_size:
            first = self.waiting[0]
            grown = needed[0] + len(first.texts), max(needed[1], first.num_columns)
            if grown[0] * grown[1] > limit:
                break
            entering.append(self.waiting.popleft())
            needed = grown
        if not entering:
            return
        grown = max(needed[0], reserved[0]), max(needed[1], reserved[1])
        if grown != reserved:
            self.slots.reserve(*(grown if grown[0] * grown[1] <= limit else needed))
        texts = [(ids, each.request.hidden) for each in entering for ids in each.texts]
        added = iter(self.slots.add_all(texts))
        for sequence in entering:
            sequence.slots = list(islice(added, len(sequence.texts)))
            self.running.append(sequence)
        for cache in self.slots.caches:
            cache.clear([slot for sequence in entering for slot in sequence.slots])
        if self.exact_cache:
            self._prefill(set(entering))

    def _prefill(self, entering: set[SequenceState]) -> None:
        """Cache the keys and values of the prompts. Each is computed once; if a running sequence has the same
        prompt, they are copied."""
        assert self.slots.cache is not None
        known: dict[tuple[bool, bool, tuple[int, ...]], int] = {}
        # by whether they are read as by the causal model
        uncached: dict[bool, list[BatchEntry]] = {False: [], True: []}
        copies: dict[tuple[int, int], list[int]] = {}
        for sequence in self.running:
            base, causal = self._prefix(sequence), sequence.config.self_speculative
            if base == 0 or (sequence not in entering and sequence.num_cached < base):
                continue
            for slot, ids in zip(sequence.slots, sequence.texts, strict=True):
                if self.lm.recurrent and self.slots.cache.num_read[slot] > base - int(self.lm.logit_shift):
                    continue  # its states have read more than the prompt, perhaps in an interrupted step
                source = known.setdefault((sequence.config.deterministic, causal, tuple(ids[:base])), slot)
                if sequence not in entering:
                    continue
                if source == slot:
                    uncached[causal].append(BatchEntry(slot, base, base, base))
                else:
                    copies.setdefault((source, base), []).append(slot)
        for causal, entries in uncached.items():
            for bucket in buckets([entry.start for entry in entries], self._alone):
                members = [entries[index] for index in bucket]
                cache_clean_tokens(self.lm.as_causal() if causal else self.lm, self.slots, members)
                if causal and self._verifier is not None:
                    cache_clean_tokens(self._verifier, self.slots, members, self.slots.verifier_cache)
                self.num_forward_passes += 1
        for (source, base), targets in copies.items():
            for cache in self.slots.caches:
                cache.copy(source, moved(np.array(targets), self.lm.device), base)
            self.prompt_tokens_shared += base * len(targets)
        for sequence in entering:  # only now does the cache hold them
            sequence.num_cached = self._prefix(sequence)
            self.prompt_tokens += sequence.request.blocks[0][0] * len(sequence.texts)

    def _prefix(self, sequence: SequenceState) -> int:
        """The number of tokens whose keys do not depend on what is revealed: those before the first block, or
        before the completion."""
        first = sequence.request.blocks[0][0]
        return first if sequence.config.self_speculative else block_start(self.lm, first)

    @property
    def _alone(self) -> bool:
        """Whether every sequence has passes of its own."""
        return any(sequence.config.deterministic for sequence in self.running)

    def _predict(self, sequences: list[SequenceState]) -> Predictions:
        """Logits at every hidden position of the current blocks, after guidance."""
        entries = [self._entry(sequence, sequence.slots[0]) for sequence in sequences]
        entries += [self._entry(each, slot) for each in sequences for slot in each.slots[1:]]
        if self.random_tokens:
            begin_canvases(self.lm, self.slots, sequences, entries)
        run = predict_with_quality if any(entry.revise == "quality" for entry in entries) else predict
        predictions = run(self.lm, self.slots, entries, alone=self._alone)
        self.num_forward_passes += 1
        for sequence in sequences:
            sequence.num_forward_passes += 1
        is_guided = len(entries) > len(sequences)
        return guided_predictions(sequences, entries, predictions) if is_guided else predictions

    def _reveal(self, sequences: list[SequenceState], predictions: Predictions) -> None:
        """Decide on tokens, reveal the best, and advance."""
        if self.random_tokens:
            denoise_canvases(self.lm, self.slots, sequences, predictions)
        else:
            step = hide_and_reveal if any(sequence.hides_again for sequence in sequences) else reveal
            step(self.slots, sequences, predictions)
        if guided := [sequence for sequence in sequences if sequence.config.cfg_scale]:
            show_in_copies(self.slots, guided)
        self._advance(sequences)

    def _entry(self, sequence: SequenceState, slot: int) -> BatchEntry:
        (start, stop), length, config = sequence.span, sequence.request.length, sequence.config
        revise = config.revise.by if config.revise is not None and sequence.num_revised else None
        num_predicted = sequence.block_size if revise else sequence.num_hidden
        entry = BatchEntry(slot, length, start, stop, num_predicted, sequence.num_cached, revise=revise)
        if config.cache != "exact":
            return entry._replace(recompute=stale_positions(sequence))
        if self.exact_cache or self.random_tokens:
            return entry._replace(draft=sequence.draft)
        is_copy = slot != sequence.slots[0]
        state = tuple(sequence.request.prompt), is_copy, start, stop, sequence.steps_done, revise
        return entry._replace(state=state)

    def _advance(self, sequences: list[SequenceState]) -> None:
        """Advance to the next step or block; finished sequences leave."""
        ended = [sequence for sequence in sequences if sequence.num_hidden == 0]
        for sequence in sequences:
            sequence.num_cached = max(sequence.num_cached, block_start(self.lm, sequence.span[0]))
            sequence.step, sequence.steps_done = sequence.step + 1, sequence.steps_done + 1
        for sequence in ended:
            sequence.begin_block(sequence.block + 1)
        gone = self._stopped(ended) | {each for each in ended if each.block == len(each.request.blocks)}
        self._finish([sequence for sequence in sequences if sequence in gone])

    def _stopped(self, sequences: list[SequenceState]) -> set[SequenceState]:
        """The sequences that have produced an end token, in the block that ended now, and stop at it."""
        stopping = [each for each in sequences if each.request.stop_at_eos and self.lm.eos_token_ids]
        if not stopping:
            return set()
        at = self.slots.blocks(
            tuple((each.slots[0], *each.request.blocks[each.block - 1]) for each in stopping)
        )
        end_token_ids = moved(np.array(self.lm.eos_token_ids), self.lm.device)
        ended, nan = torch.stack(
            (torch.isin(self.slots.ids_SC[at], end_token_ids).any(1), self.slots.sum_S[at[0][:, 0]].isnan())
        ).tolist()
        return {each for each, *reasons in zip(stopping, ended, nan, strict=True) if any(reasons)}

    def _finish(self, sequences: list[SequenceState]) -> None:
        """Sequences leave with their traces. Raises GenerationError if predictions of some were NaN; these
        stay."""
        if not sequences:
            return
        sum_S = self.slots.sum_S.tolist()
        finished = [sequence for sequence in sequences if not math.isnan(sum_S[sequence.slots[0]])]
        traces = self.slots.traces([(each.slots[0], each.request, each.config) for each in finished])
        for sequence, trace in zip(finished, traces, strict=True):
            trace.forward_passes = sequence.num_forward_passes
            trace.canvas_steps = read_canvas_steps(sequence)
            if sequence.speculation is not None:
                trace.num_drafted = sequence.speculation.num_drafted
                trace.num_accepted = sequence.speculation.num_accepted
            self.finished.append((sequence.ticket, trace))
        # the last ones first: then none has to move
        for sequence in sorted(finished, key=lambda sequence: -sequence.slots[-1]):
            self._leave(sequence)
        if len(finished) < len(sequences):
            raise nan_error()

    def _leave(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        for slot in sorted(sequence.slots, reverse=True):
            moved = self.slots.remove(slot)
            for other in self.running if moved != slot else ():
                other.slots = [slot if each == moved else each for each in other.slots]
        # the cache of adjacent slots is read without a copy
        self.running.sort(key=lambda other: other.slots[0])
