"""Time and memory of a training step on this machine: measured, or extrapolated from models with few layers.

Shapes: B batch, M views, T tokens.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from unmask.config.run import LoraSettings
from unmask.diffusion.log_probs import view_log_probs, weighted_cross_entropy
from unmask.diffusion.mixing import P_UNIFORM, Mixing, RandomTokens
from unmask.diffusion.schedules import Noise
from unmask.diffusion.views import MaskRNG, Views, mixed_views
from unmask.models.adapters import with_adapters
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.load import make_diffusion
from unmask.planning.blueprint import (
    WEIGHTS,
    ModelSpec,
    architecture,
    row_layout,
    row_mask,
    with_layers,
)
from unmask.planning.cost_model import Network, Workload, attention_flops, matmul_flops

CALIBRATION_FLOPS = 5e10
"""Largest FLOPs of a timed step: larger batches are halved until they fit, and their time is scaled up."""
CALIBRATION_TOKENS = 2**14
"""Most tokens of a timed step, likewise: narrow layers take long for few FLOPs."""
CALIBRATION_PARAMETERS = 6e7
"""Models with more parameters, even with few layers, are not built; only a matrix product is timed."""
MEASURED_SECONDS = 3.0
CALIBRATION_SECONDS = 1.0
"""Time for each of the two models after a warm-up; at least three steps."""


class Step:
    """A training step as in the trainers, on random tokens; of masked ones half are hidden."""

    def __init__(self, lm: DiffusionLM, work: Workload):
        self.lm, self.work = lm, work
        lm.model.train()
        if work.checkpointing:
            lm.model.activation_checkpointing_enable()
        self.parameters = [weight for weight in lm.model.parameters() if weight.requires_grad]
        # as transformers.Trainer's default
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        vocabulary = lm.vocab_size
        generator = torch.Generator().manual_seed(0)
        self.ids_BT = torch.randint(vocabulary, (work.batch, work.sequence_length), generator=generator).to(
            lm.device
        )
        document_T = (
            torch.arange(work.sequence_length, device=lm.device) // -(-work.sequence_length // work.documents)
            + 1
        )
        self.documents_BT = None if work.documents == 1 else document_T.expand_as(self.ids_BT)
        if not work.canvas:
            self.views = self._views(generator)

    def _views(self, generator: torch.Generator) -> Views:
        if self.lm.noise != "masked":
            draw = MaskRNG(0, torch.arange(self.work.batch, device=self.lm.device))
            return mixed_views(
                *(self.ids_BT, torch.zeros_like(self.ids_BT), draw, Noise()),
                *(Mixing.of(self.lm), RandomTokens.of(self.lm)),
                num_views=self.work.copies,
            )
        shape = (self.work.batch, 1, self.work.sequence_length)
        hidden_BMT = torch.rand(shape, generator=generator).argsort(-1) < self.work.sequence_length // 2
        if self.lm.autoregressive:
            hidden_BMT = torch.ones(shape, dtype=torch.bool)
        if self.work.copies == 2:
            hidden_BMT = torch.cat([hidden_BMT, ~hidden_BMT], 1)
        hidden_BMT = hidden_BMT.to(self.lm.device)
        return Views(hidden_BMT, hidden_BMT, hidden_BMT.float())

    def forward(self) -> Tensor:
        mixed = self.work.precision == "mixed"
        with torch.autocast(self.lm.device.type, torch.bfloat16) if mixed else contextlib.nullcontext():
            if self.work.canvas:
                return self._loss_of_canvases()
            log_prob_BMT = view_log_probs(self.lm, self.ids_BT, self.documents_BT, self.views)
            return weighted_cross_entropy(log_prob_BMT, self.views) / self.ids_BT.numel()

    def _loss_of_canvases(self) -> Tensor:
        """The loss of canvases that are conditioned on a first pass, and of the clean tokens after them."""
        lm, work, pattern = self.lm, self.work, {"block_size": self.lm.block_size}
        layout = row_layout(pattern, work, lm.device)
        mask = row_mask(pattern, work, layout, canvas=True)
        ids_BT = torch.cat([self.ids_BT[:, :1].expand(-1, work.canvas), self.ids_BT], 1)
        index_N = torch.arange(ids_BT.numel(), device=lm.device)
        inputs = ForwardInputs(ids_BT, layout, mask, index_N, canvas=range(work.canvas))
        inputs = lm.conditioned(inputs, torch.ones(len(ids_BT), dtype=torch.bool, device=lm.device))
        return -lm.log_probs(inputs, ids_BT.flatten()).mean()

    def __call__(self) -> tuple[float, float]:
        """Run a step. Returns the seconds of the forward and backward pass, and those of the update."""
        started = self._now()
        self.forward().backward()
        before_update = self._now()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return before_update - started, self._now() - before_update

    def _now(self) -> float:
        if self.lm.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak_bytes(self) -> float:
        """Peak memory of all tensors during a step. Call it after the first step, which creates the optimizer
        states."""
        if self.lm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self()
            return torch.cuda.max_memory_allocated()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            self()
        events: Any = record.profiler
        changes = [event.nbytes() for event in events.kineto_results.events() if event.name() == "[memory]"]
        tensors = [*self.lm.model.parameters(), *tree_leaves(list(self.optimizer.state.values()))]
        persistent = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))
        return persistent + max(itertools.accumulate(changes), default=0)


def measure(blueprint: ModelSpec, work: Workload, device: str) -> tuple[float, float]:
    """Run steps of the whole model, with random weights, for about three seconds (at least five steps).
    Returns the median time of a step, and the peak memory of all its tensors, including parameters and
    optimizer states."""
    step = Step(build_model(blueprint, work, device), work)
    times = median_times([step], MEASURED_SECONDS, at_least=5)[0]
    return sum(times), step.peak_bytes()


def calibrate(blueprint: ModelSpec, network: Network, work: Workload) -> float:
    """Seconds per step of a network on this CPU, extrapolated from models with fewer layers and, if
    necessary, a smaller batch."""
    shallow_layers, layers = blueprint.depths
    linears, experts = (
        parts[: layers * len(parts) // network.layers] for parts in (network.linears, network.experts)
    )
    few = dataclasses.replace(network, layers=layers, linears=linears, experts=experts)
    table = network.vocabulary * network.hidden * (1 if network.tied else 2)
    if table + few.linear_weights + few.expert_weights > CALIBRATION_PARAMETERS:
        return flops(network, work) / matmul_rate(network)
    small = dataclasses.replace(work, passes=1, forward_only_passes=0)
    while small.batch > 1 and (flops(few, small) > CALIBRATION_FLOPS or small.tokens > CALIBRATION_TOKENS):
        small = dataclasses.replace(small, batch=small.batch // 2)
    steps = [Step(build_model(blueprint, small, layers=layers), small) for layers in blueprint.depths]
    shallow, deeper = median_times(steps, CALIBRATION_SECONDS, at_least=3)
    passes, update = (
        low + (high - low) * (network.layers - shallow_layers) / (layers - shallow_layers)
        for low, high in zip(shallow, deeper, strict=True)
    )
    return passes * flops(network, work) / flops(network, small) + update


def flops(network: Network, work: Workload) -> float:
    """FLOPs of a step."""
    return work.rounds * (matmul_flops(network, work) + attention_flops(network, work))


def matmul_rate(network: Network) -> float:
    """FLOPs per second of the network's largest matrix product on this CPU, forward and backward."""
    width_in, width_out = max(network.linears, key=lambda shape: shape[0] * shape[1])
    linear = torch.nn.Linear(width_in, width_out, bias=False)
    tokens = torch.randn(256, width_in, requires_grad=True)

    def once() -> float:
        started = time.perf_counter()
        linear(tokens).sum().backward()
        return time.perf_counter() - started

    return 6 * tokens.shape[0] * width_in * width_out / min(once() for _ in range(5))


def median_times(steps: list[Step], seconds: float, *, at_least: int) -> list[tuple[float, float]]:
    """The median seconds of pass and update of each step. Steps take turns, so that other load on the machine
    affects all alike."""
    for step in steps:
        step()
    times: list[list[tuple[float, float]]] = [[] for _ in steps]
    started = time.perf_counter()
    while len(times[0]) < at_least or time.perf_counter() - started < seconds * len(steps):
        for taken, step in zip(times, steps, strict=True):
            taken.append(step())
    return [
        (statistics.median(passes), statistics.median(updates))
        for passes, updates in (zip(*taken, strict=True) for taken in times)
    ]


def build_model(
    blueprint: ModelSpec, work: Workload, device: str = "cpu", *, layers: int | None = None
) -> DiffusionLM:
    """Build the model with random weights; `layers` reduces its depth."""
    config = blueprint.config if layers is None else with_layers(blueprint.config, layers)
    model = architecture(config, WEIGHTS[work.precision]).to(device)
    lm = make_diffusion(model, copy.deepcopy(blueprint.tokenizer), **blueprint.settings_for(work.attention))
    if lm.noise != work.noise:
        # the cost does not depend on the probability
        lm = lm.with_noise(work.noise, P_UNIFORM if work.noise == "hybrid" else None)
    return with_adapters(lm, LoraSettings(r=work.lora_rank).to_peft()) if work.lora_rank else lm
