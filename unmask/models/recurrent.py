"""Recurrent layers (Gated DeltaNet, Mamba 2, short convolutions) under a block-causal pattern.

Such a layer reads every document from left to right. A noised block starts from the state that the clean text
before it has left, as in cached generation (Nemotron TwoTower, NVIDIA 2026). So rows are read in steps: the
first step has the first block of every document with its noised copies, and each later step starts from the
states after the clean blocks of the one before. Where that would be many short steps, longer steps over the
clean text come first, and the blocks between their ends are read side by side.

The layers are those of transformers, called once a step with a cache that gives and takes their states.

Shapes: B batch, L tokens of a row, R sequences of a step, Q tokens of each, N = R * Q of all steps, D hidden
width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK = 64
"""Tokens of a step where rows have no noised copies, the chunk of transformers' own kernels."""
MANY_STEPS = 16
"""Steps above which clean text is read twice, in order to have few of them."""
States = dict[str, Tensor]
"""The states of one layer and several sequences, convolutional and recurrent."""


class StateTable(Protocol):
    """Where the states of running sequences are kept between passes."""

    def read_states(self, layer: int, slot_S: Tensor) -> States: ...

    def write_states(self, layer: int, slot_S: Tensor, states: States) -> None: ...


class ReadingStep(NamedTuple):
    """Sequences that a layer reads at once. A shorter one ends with tokens that are not used."""

    index_RQ: np.ndarray  # of the tokens, in a row
    # where the first states are among the last ones of the step before, or among those of the slots; None:
    # they are zero
    source_R: np.ndarray | None = None
    kept: bool = False  # the last states are those of the slots from now on


class Recurrence:
    """How recurrent layers read the rows of a batch.

    Args:
        steps: in order.
        place_L: where the output of each token is, among those of all steps.
        rows: the rows of the batch that count as one; 1: all rows are alike.
        slot_S: the slots of a table of states, of running sequences; None: rows begin from zero states.
        ahead: the number of first steps that only give states. The next step starts from a zero state (0), or
            from the last states of all of them (1, 2, ...).
    """

    def __init__(
        self,
        steps: Sequence[ReadingStep],
        place_L: np.ndarray,
        device: torch.device,
        rows: int = 1,
        slot_S: np.ndarray | None = None,
        ahead: int = 0,
    ):
        self.steps, self.place_L, self.rows, self.ahead = steps, place_L, rows, ahead
        self._given_slots = slot_S

        def moved(array: np.ndarray) -> Tensor:
            return torch.tensor(array, device=device)

        self._index_N = moved(np.concatenate([step.index_RQ.ravel() for step in steps]))
        self._sources = [None if step.source_R is None else moved(step.source_R) for step in steps]
        self._outputs_L = moved(place_L)
        self._slot_S = None if slot_S is None else moved(slot_S)

    def to(self, device: torch.device) -> Recurrence:
        return Recurrence(self.steps, self.place_L, device, self.rows, self._given_slots, self.ahead)

    def shortened(self, ahead: int, others: int) -> Recurrence:
        """With at most these numbers of steps, in order to count what a step takes. Tokens that are not read
        have the outputs of others."""
        first, then = self.steps[: self.ahead][:ahead], self.steps[self.ahead :][:others]
        place_L = self.place_L % sum(step.index_RQ.size for step in then)
        return Recurrence([*first, *then], place_L, self._outputs_L.device, self.rows, ahead=len(first))

    def run(self, layer: RecurrentLayer, hidden_BLD: Tensor, table: StateTable | None) -> Tensor:
        """The output [B, L, D] of a layer."""
        shape = hidden_BLD.shape
        hidden_BLD = hidden_BLD.reshape(-1, self.rows * shape[1], shape[2])
        batch, outs, ahead = len(hidden_BLD), list[Tensor](), list[States]()
        of_slots, last = States(), States()
        if table is not None and self._slot_S is not None:
            of_slots = table.read_states(layer.number, self._slot_S)
        sizes = [step.index_RQ.size for step in self.steps]
        parts = hidden_BLD.index_select(1, self._index_N).split(sizes, 1)
        for number, (part_BND, step, source_R) in enumerate(
            zip(parts, self.steps, self._sources, strict=True)
        ):
            first = States()
            if source_R is not None:
                known = last if self._slot_S is None else of_slots
                if number == self.ahead and ahead:
                    known = _joined(ahead, batch)
                first = {
                    name: state.unflatten(0, (batch, -1)).index_select(1, source_R).flatten(0, 1)
                    for name, state in known.items()
                }
            hidden_RQD = part_BND.unflatten(1, step.index_RQ.shape).flatten(0, 1)
            if number < self.ahead:  # only the states are kept for a gradient
                _, last = checkpoint(layer.read, hidden_RQD, first, use_reentrant=False)
                ahead.append(last)
                continue
            out, last = layer.read(hidden_RQD, first)
            outs.append(out.unflatten(0, (batch, -1)).flatten(1, 2))
            if step.kept and self._slot_S is not None and source_R is not None:
                for name, state in last.items():
                    if name not in of_slots:
                        of_slots[name] = state.new_zeros(len(self._slot_S), *state.shape[1:])
                    of_slots[name][source_R] = state
        if table is not None and self._slot_S is not None:
            table.write_states(layer.number, self._slot_S, of_slots)
        return torch.cat(outs, 1).index_select(1, self._outputs_L).reshape(shape)


def _joined(parts: Sequence[States], batch: int) -> States:
    """A zero state, then those of several steps."""
    joined = States()
    for name, state in parts[0].items():
        zero_BR = state.new_zeros(batch, 1, *state.shape[1:])
        joined[name] = torch.cat(
            [zero_BR, *(part[name].unflatten(0, (batch, -1)) for part in parts)], 1
        ).flatten(0, 1)
    return joined


def recurrence(
    document_BT: Tensor, position_BT: Tensor, copy_BT: Tensor, block_size: int | None, copies: int
) -> Recurrence:
    """How rows of a layout are read that have noised copies before the clean tokens, or none: all documents
    side by side, block after block."""
    size = (block_size or 1) if copies else CHUNK
    document_L, position_L, copy_L = (
        part.cpu().numpy().reshape(-1) for part in (document_BT, position_BT, copy_BT)
    )
    rows, length = document_BT.shape
    real_N = np.flatnonzero(document_L > 0)
    # a document ends where the number changes: it may come again
    number_RMT = document_L.reshape(rows, copies + 1, -1)
    changed_RMT = np.diff(number_RMT, axis=2, prepend=number_RMT[..., :1]) != 0
    text_L = np.arange(rows).repeat(length) * length + changed_RMT.cumsum(2).reshape(-1)
    tokens = _Tokens(real_N, text_L[real_N], position_L[real_N], copy_L[real_N])
    ahead, begun = list[ReadingStep](), None
    steps_alone = -(-(int(position_L.max()) + 1) // size)
    if copies and steps_alone > MANY_STEPS:
        part = size * math.ceil(math.sqrt(steps_alone))
        ahead, tokens, begun = _read_ahead(tokens, part)
    steps, rank = _steps(tokens, size, copies)
    if begun is not None:
        source_R = np.zeros(len(rank), dtype=int)
        source_R[rank] = begun
        steps[0] = steps[0]._replace(source_R=np.tile(source_R, copies + 1))
    place_L, start = np.zeros(rows * length, dtype=int), 0
    for step in steps:
        at = np.flatnonzero(step.index_RQ >= 0)
        place_L[step.index_RQ.ravel()[at]] = start + at
        start += step.index_RQ.size
    steps = [step._replace(index_RQ=step.index_RQ.clip(0)) for step in [*ahead, *steps]]
    steps = steps or [ReadingStep(np.zeros((1, 1), dtype=int))]  # all is padding
    return Recurrence(steps, place_L, document_BT.device, rows, ahead=len(ahead))


class _Tokens(NamedTuple):
    """Tokens of rows that count as one: index, text, position in the text and copy of each."""

    index_N: np.ndarray
    text_N: np.ndarray
    position_N: np.ndarray
    copy_N: np.ndarray


def _steps(tokens: _Tokens, size: int, copies: int) -> tuple[list[ReadingStep], np.ndarray]:
    """Steps that read all texts side by side, block after block, and the place of each text in the first of
    them (texts in the order of their numbers). Where a sequence is shorter, the index is -1."""
    _, text_N = np.unique(tokens.text_N, return_inverse=True)
    block_N, offset_N = tokens.position_N // size, tokens.position_N % size
    num_blocks = np.zeros(text_N.max(initial=-1) + 1, dtype=int)
    np.maximum.at(num_blocks, text_N, block_N + 1)
    rank = np.empty_like(num_blocks)  # longer texts first: a step has the first ones of the step before
    rank[np.argsort(-num_blocks, kind="stable")] = np.arange(len(num_blocks))
    table = np.full((num_blocks.max(initial=0), copies + 1, len(num_blocks), size), -1)
    table[block_N, tokens.copy_N, rank[text_N], offset_N] = tokens.index_N
    steps = list[ReadingStep]()
    for number, index_MRQ in enumerate(table):
        count = int((num_blocks > number).sum())
        width = max(int((index_MRQ >= 0).any((0, 1)).sum()), min(2, size))
        source_R = np.tile(np.arange(count), copies + 1) if number else None
        steps.append(ReadingStep(index_MRQ[:, :count, :width].reshape(-1, width), source_R))
    return steps, rank


def _read_ahead(tokens: _Tokens, size: int) -> tuple[list[ReadingStep], _Tokens, np.ndarray]:
    """Steps over the clean text that give its states after every `size` tokens; the tokens of its parts, as
    texts of their own; and where the first state of each part is: 0 is zero, then the last states of these
    steps."""
    part_N = tokens.position_N // size
    last = np.zeros(tokens.text_N.max() + 1, dtype=int)
    np.maximum.at(last, tokens.text_N, part_N)
    chosen_N = (tokens.copy_N == 0) & (part_N < last[tokens.text_N])
    steps, rank = _steps(_Tokens(*(each[chosen_N] for each in tokens)), size, 0)
    texts, rank_of = np.unique(tokens.text_N[chosen_N]), np.zeros(len(last), dtype=int)
    rank_of[texts] = rank
    start = np.cumsum([1] + [len(step.index_RQ) for step in steps])
    number_N = tokens.text_N * (last.max() + 1) + part_N
    _, first_N = np.unique(number_N, return_index=True)
    text, part = tokens.text_N[first_N], part_N[first_N]
    begun = np.where(part > 0, start[np.maximum(part - 1, 0)] + rank_of[text], 0)
    return steps, _Tokens(tokens.index_N, number_N, tokens.position_N % size, tokens.copy_N), begun


class RecurrentLayer:
    """The forward method of a recurrent layer, in place of its own."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.cache_name = cache_name(module)

    @property
    def number(self) -> int:
        number: Any = self.module.layer_idx
        return int(number)

    def __call__(self, hidden_states: Tensor, *args: Any, unmask_mask: Any = None, **named: Any) -> Tensor:
        # which of a model that is split over devices is where the first layer is
        reading: Recurrence | None = unmask_mask and unmask_mask.to(hidden_states.device).recurrence
        if reading is None:  # a row is one text, from its beginning
            return type(self.module).forward(self.module, hidden_states, *args, **named)
        return reading.run(self, hidden_states, named.get(self.cache_name))

    def read(self, hidden_RQD: Tensor, states: States) -> tuple[Tensor, States]:
        """Read sequences from these states on; empty: from the beginning. Returns the outputs and the last
        states."""
        cache, width = OneStep(states), hidden_RQD.shape[1]
        single = width == 1
        with _chunk(self.module, width) as named, _saving_copies(single), _limited(self.module, single):
            out = type(self.module).forward(self.module, hidden_RQD, **{self.cache_name: cache}, **named)
        return out, cache.states


@contextmanager
def _chunk(module: Any, width: int) -> Iterator[dict[str, int]]:
    """Do not pad to the usual chunk of a layer's kernel where fewer tokens are read. It is an attribute of
    some layers, and an argument of others, which the context gives."""
    usual = getattr(module, "chunk_size", None)
    if usual is None:
        yield {"chunk_size": min(CHUNK, width)}
        return
    module.chunk_size = min(usual, width)
    try:
        yield {}
    finally:
        module.chunk_size = usual


@contextmanager
def _limited(module: Any, single: bool) -> Iterator[None]:
    """With a single token Mamba 2 does not limit its time step, softplus(dt + bias), as it does with more."""
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    if not single or (low, high) == (0.0, math.inf):
        yield
        return

    def limit(in_proj: nn.Module, inputs: Any, projected_BQC: Tensor) -> Tensor:
        heads = len(module.dt_bias)
        scale_H = getattr(module, "mup_vector", projected_BQC.new_ones(heads))[..., -heads:]
        one, other = ((_inverse_softplus(step) - module.dt_bias) / scale_H for step in (low, high))
        dt_BQH = projected_BQC[..., -heads:].clamp(torch.minimum(one, other), torch.maximum(one, other))
        return torch.cat([projected_BQC[..., :-heads], dt_BQH], -1)

    hook = module.in_proj.register_forward_hook(limit)
    try:
        yield
    finally:
        hook.remove()


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value)) if value > 0 else -math.inf


def _saving_copies(single: bool) -> AbstractContextManager[object]:
    """With a single token Mamba 2 overwrites the state, which its gradient needs."""
    if not (single and torch.is_grad_enabled()):
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)


class OneStep:
    """What a layer sees of a cache of transformers (`transformers.Cache`) in one step."""

    def __init__(self, states: States):
        self.states = dict(states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: then no layer overwrites the state of its convolution."""
        return True

    def has_previous_state(self, layer_idx: int | None = None) -> bool:
        return bool(self.states)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"conv {state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(f"recurrent {state_idx}")

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """The inputs of the convolution [R, C, K + Q], with the K of the state before them."""
        name = f"conv {state_idx}"
        before = self.states.get(name)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], conv_kernel_size)
        both = torch.cat([before, conv_states], -1)
        self.states[name] = both[..., -conv_kernel_size:]
        return both

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.states[f"recurrent {state_idx}"] = recurrent_states
        return recurrent_states


def cache_name(module: nn.Module) -> str:
    """The argument by which a recurrent layer takes its cache, whose name depends on the version of
    transformers; "": it is no recurrent layer."""
    # PEFT wraps a convolution that is trained
    parts = (getattr(part, "original_module", part) for part in module.children())
    convolves = any(isinstance(part, nn.Conv1d) for part in parts)
    if not (convolves and hasattr(module, "layer_idx")) or hasattr(module, "is_causal"):
        return ""  # attention is causal or not
    names = signature(type(module).forward).parameters
    return next((name for name in ("cache_params", "cache", "past_key_values") if name in names), "")


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The recurrent layers of a model of transformers, in order."""
    return [module for module in model.modules() if cache_name(module)]


def read_in_blocks(model: nn.Module) -> bool:
    """Let the recurrent layers of a model read rows as the mask says (`AttentionMask.recurrence`). Returns
    whether there are some."""
    layers = recurrent_layers(model)
    for module in layers:
        # accelerate's hooks, which place weights and inputs, stay around it
        setattr(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward", RecurrentLayer(module))
    return bool(layers)
