"""Forward passes as CUDA graphs: the host launches a whole pass at once, where it would launch a thousand
kernels one by one.

A graph reads and writes the memory with which it was recorded. So a pass copies its inputs there, and the
logits out. A pass is recorded when its shapes occur for the second time. For few shapes the cache is read in
steps of `COLUMNS`, and logits are computed of a few rows more than were asked for.

Shapes: B sequences of a pass, Q queries, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unmask.errors import GenerationError, first_line
from unmask.generation.engine.kv_cache import CacheMemory, SlotCache
from unmask.models.attention import AttentionMask
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.kernels.flex import LEAST_QUERIES

COLUMNS = 64
GRAPHS_KEPT = 128


class Graph:
    """What a call launches on the GPU, to be launched again."""

    def __init__(self, call: Callable[[], object], pool: Any):
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            call()

    def replay(self) -> None:
        self._graph.replay()

    @staticmethod
    def supports(device: torch.device) -> bool:
        return device.type == "cuda"


def num_columns(lm: DiffusionLM, columns: int, cache: SlotCache) -> int:
    """The columns of the cache that a pass reads, rounded up so that few shapes occur."""
    return min(-columns // COLUMNS * -COLUMNS, cache.shape[1]) if lm.cuda_graphs else columns


def num_rows(count: int) -> int:
    """The rows of logits that are computed where `count` are needed: up to 8 exactly, else up to a quarter
    more."""
    step = 1 << max(count.bit_length() - 3, 0)
    return -count // step * -step


def check_graphs(*models: object) -> None:
    """Forget the graphs of models whose weights are elsewhere now, whose adapters are other ones, or whose
    layers were replaced.

    Raises GenerationError where such a model is not on a GPU.
    """
    for lm in models:
        if not isinstance(lm, DiffusionLM) or not lm.cuda_graphs:
            continue
        if not Graph.supports(lm.device):
            remedy = "Move it to a GPU, or leave cuda_graphs out"
            raise GenerationError(f"the model is on {lm.device.type}", where="cuda_graphs", remedy=remedy)
        weights = [weight.data_ptr() for weight in lm.model.parameters()]
        adapters = [
            (module.disable_adapters, str(module.active_adapters), str(module.merged_adapters))
            for module in lm.model.modules()
            if hasattr(module, "merged_adapters")
        ]
        forwards = [vars(module).get("forward") for module in lm.model.modules()]  # kernels are put there
        replaced = [forward and weakref.ref(getattr(forward, "__func__", forward)) for forward in forwards]
        made_for = weights, adapters, replaced
        if (known := _of_model.get(lm.model)) is None or known.made_for != made_for:
            _of_model[lm.model] = RecordedPasses(made_for)


def passes_of(lm: DiffusionLM) -> RecordedPasses:
    """The recorded passes of a model that an engine was made for."""
    return _of_model[lm.model]


def forward(lm: DiffusionLM, inputs: ForwardInputs, cache: SlotCache | None = None) -> Tensor:
    """`lm.forward` [N, V], as a CUDA graph where that is asked for and possible."""
    plain = inputs.mask.full or inputs.ids_BT.shape[1] < LEAST_QUERIES  # FlexAttention is compiled by itself
    # a graph has one order of slots and steps, and no mean embeddings of canvases
    plain = plain and not (lm.recurrent or lm.canvas)
    consecutive = cache is None or (isinstance(cache.index, slice) and bool(cache.stored))
    if (
        not (lm.cuda_graphs and plain and consecutive)
        or lm.quality_head is not None
        or lm.compile_options is not None
    ):
        return lm.forward(inputs, cache)
    return passes_of(lm).run(lm, inputs, cache)


class RecordedPasses:
    """The recorded passes of a model, the most recently used."""

    def __init__(self, made_for: object):
        self.made_for, self.memory = made_for, CacheMemory()
        self._passes: OrderedDict[Hashable, RecordedPass | None] = OrderedDict()  # None: it occurred once
        # [N, V] that all passes with this number of rows write to
        self._logits: dict[tuple[int, torch.dtype], Tensor] = {}
        self._pool: Any = None
        self._cache: SlotCache | None = None  # of the present pass: no graph keeps a cache

    def __len__(self) -> int:
        return sum(recorded is not None for recorded in self._passes.values())

    def run(self, lm: DiffusionLM, inputs: ForwardInputs, cache: SlotCache | None) -> Tensor:
        """The logits of a pass."""
        assert inputs.index_N is not None
        if cache is not None and cache.memory is self.memory:
            self.memory.keep(cache)
        key = _key(lm, inputs, cache)
        known = key in self._passes
        recorded = self._passes.setdefault(key, None)
        self._passes.move_to_end(key)
        if not known:
            while len(self._passes) > GRAPHS_KEPT:
                self._passes.popitem(last=False)
            return lm.forward(inputs, cache)
        fresh = recorded is None
        recorded = recorded or RecordedPass(inputs, cache)
        recorded.fill(inputs, cache)
        self._cache = cache
        try:
            if fresh:
                self._record(lm, recorded)
                self._passes[key] = recorded
            recorded.graph.replay()
        finally:
            self._cache = None
        return recorded.logits_NV[: len(inputs.index_N)].clone()

    def _record(self, lm: DiffusionLM, recorded: RecordedPass) -> None:
        rows, kind = len(recorded.index_N), lm.log_prob_dtype
        if (rows, kind) not in self._logits:
            self._logits[rows, kind] = torch.empty(
                rows, lm.vocab_size, dtype=kind, device=recorded.index_N.device
            )
        recorded.logits_NV = self._logits[rows, kind]
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()

        def call() -> None:
            with recorded.writing(self._cache):
                recorded.logits_NV.copy_(lm.forward(recorded.inputs(), self._cache))

        try:
            recorded.graph = Graph(call, self._pool)
        except RuntimeError as error:
            what = f"a pass of this model cannot be recorded: {first_line(error)}"
            raise GenerationError(
                what.rstrip("."), where="cuda_graphs", remedy="Leave cuda_graphs out"
            ) from error


class RecordedPass:
    """The tensors that a recorded pass reads."""

    graph: Graph
    logits_NV: Tensor

    def __init__(self, inputs: ForwardInputs, cache: SlotCache | None):
        assert inputs.index_N is not None
        self._like = inputs
        self._held = None if cache is None else list(cache.heads.values())  # which it reads too
        # what was copied last: a plan's tensors are the same in many passes
        self._latest: dict[str, Tensor] = {}
        self._parts = {name: torch.empty_like(part) for name, part in _parts(inputs, cache).items()}
        self.index_N = inputs.index_N.new_zeros(num_rows(len(inputs.index_N)))

    def inputs(self) -> ForwardInputs:
        """The inputs, in this memory; the mask is a new one, which computes again what it keeps."""
        parts, like = self._parts, self._like
        mask = like.mask
        if not mask.full:
            positions = (parts["query"], parts["key"]) if mask.positions is not None else None
            mask = AttentionMask(parts["allowed"], positions)
        layout = replace(like.layout, position_BT=parts["position"])
        return ForwardInputs(
            parts["ids"], layout, mask, self.index_N, parts.get("fraction"), pruned=like.pruned
        )

    @contextmanager
    def writing(self, cache: SlotCache | None) -> Iterator[None]:
        """Within the context, the cache is written where this memory says."""
        if cache is None:
            yield
            return
        before = cache.slot_B1Q, cache.column_B1Q
        cache.slot_B1Q, cache.column_B1Q = self._parts["slot"], self._parts["column"]
        try:
            yield
        finally:
            cache.slot_B1Q, cache.column_B1Q = before

    def fill(self, inputs: ForwardInputs, cache: SlotCache | None) -> None:
        """Copy the inputs of a pass here. Rows of logits that were not asked for are those of an earlier
        pass."""
        assert inputs.index_N is not None
        self.index_N[: len(inputs.index_N)] = inputs.index_N
        for name, part in _parts(inputs, cache).items():
            if name in CHANGING or self._latest.get(name) is not part:
                self._parts[name].copy_(part)
                self._latest[name] = part


CHANGING = ("ids", "fraction")


def _parts(inputs: ForwardInputs, cache: SlotCache | None) -> dict[str, Tensor]:
    """The tensors of a pass that its kernels read, except which rows of logits are asked for."""
    parts = {"ids": inputs.ids_BT, "position": inputs.layout.position_BT}
    if inputs.fraction_BT is not None:
        parts["fraction"] = inputs.fraction_BT
    if not inputs.mask.full:
        parts["allowed"] = inputs.mask.allowed_B1QK
        if inputs.mask.positions is not None:
            parts["query"], parts["key"] = inputs.mask.positions
    if cache is not None:
        parts["slot"], parts["column"] = cache.slot_B1Q, cache.column_B1Q
    return parts


def _key(lm: DiffusionLM, inputs: ForwardInputs, cache: SlotCache | None) -> Hashable:
    """What a recorded pass depends on beside the values of its tensors."""
    assert inputs.index_N is not None
    shapes = tuple((name, part.shape) for name, part in _parts(inputs, cache).items())
    memory: Hashable = None
    if cache is not None:
        assert isinstance(cache.index, slice)
        memory = (
            cache.shape,
            cache.index.start,
            cache.index.stop,
            cache.width,
            *(part.data_ptr() for pair in cache.stored for part in pair),
        )
    return num_rows(len(inputs.index_N)), shapes, lm.never_predicted, memory


_of_model: weakref.WeakKeyDictionary[nn.Module, RecordedPasses] = weakref.WeakKeyDictionary()
