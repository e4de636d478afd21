"""Time of a training step and of a pass of generation on a GPU, by formula, and what bounds it.

docs/planning.md explains the formula and compares it with measurements. Units are bytes, seconds and FLOPs; 1
GB is 1e9 bytes.

A launch is an operation that PyTorch dispatches and that starts a kernel: all but views, allocations and
questions about a tensor. Traffic is what operations read and write, without products of matrices and
attention, whose time is that of their arithmetic.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from unmask.config.run import AttentionName, DeviceConfig, NoiseName
from unmask.planning.cost_model import (
    HIDDEN_FRACTION,
    WEIGHT_BYTES,
    Network,
    Workload,
    attention_flops,
    host_seconds,
    matmul_flops,
    weight_bytes,
)

BoundBy = Literal["arithmetic", "memory", "launches", "reads", "link"]

BOUNDS: dict[BoundBy, str] = {
    "arithmetic": "products of matrices",
    "memory": (
        "memory bandwidth: fuse kernels (`use_liger_kernel` in training), or larger batches in generation"
    ),
    "launches": (
        "launches of operations, which take the host longer than the operations themselves: compile, or "
        "larger batches"
    ),
    "reads": "the host, for whose reads of values the GPU waits: larger batches",
    "link": "the link between devices, or to the host: accumulate gradients over more batches",
}
"""What bounds a step, in words, and what helps."""

# Constants of machines.
MATMUL_EFFICIENCY = 0.5  # fraction of the vendor's dense figure that matrix products reach in training
ATTENTION_EFFICIENCY = 0.25  # the same for fused attention with a mask
BANDWIDTH_EFFICIENCY = 0.8  # fraction of the vendor's figure that traffic reaches; 0.9 in a copy on an H100
PASSES_OVER_LOGITS = 8  # their float32 is written and read that often for a loss and its gradient
CPU_LAUNCH_SECONDS = 25e-6  # of an operation on almost no data: one core of the test machine
# the same on a GPU, whose host runs Python and PyTorch: passes of one sequence on an H100 and an H200
LAUNCH_SECONDS = 22e-6
READ_SECONDS = 50e-6  # a GPU without work while the host reads a value and launches again: an assumption

# Launches, counted on real steps and passes. `tests/planning/test_launches.py` counts them again: change them
# here when it fails.
LAUNCHES_OF_STEP = 75
"""Launches of a training step: metrics, clipping and the update, which a fused optimizer launches for all
parameters together."""
LAUNCHES_OF_NOISE = 225
"""Launches that draw the views of a batch of noised rows."""
LAUNCHES_OF_HEAD = 47
"""Launches of every pass of training: inputs, mask, head and loss."""
LAUNCHES_OF_ADAPTER = {"float32": 10, "mixed": 16, "bfloat16": 16}
"""Launches of the adapter of one matrix, forward and backward, by precision."""
LAUNCHES_PER_PARAMETER = {"adamw": 0, "adamw_8bit": 1}
"""Launches of an update, for each tensor of parameters."""
LAUNCHES_OF_CACHE = 3
"""Launches of a layer's cache of keys and values in a pass of generation."""
LAUNCHES_OF_SAMPLER = 55
"""Launches of a pass of generation: inputs, head, choice of tokens and bookkeeping."""
LAUNCHES_OF_DRAW = 25
"""Launches of a pass of generation above temperature 0."""
LAUNCHES_OF_CANVAS = 350
"""The same of a pass over a canvas of random tokens, in place of these two."""

TRAFFIC_OF_ADAPTER = {"float32": (12, 32), "mixed": (12, 24), "bfloat16": (18, 38)}
"""Bytes of the adapter of one matrix for each token and column of its input, and of its output, forward and
backward."""


@dataclass(frozen=True)
class PassCost:
    """Launches and traffic of a forward or backward pass up to the output head."""

    launches: float = 0.0
    fixed_bytes: float = 0.0  # of weights: casts
    token_bytes: float = 0.0  # of each token

    def traffic(self, tokens: float) -> float:
        """Bytes read and written in a pass of this many tokens."""
        return self.fixed_bytes + self.token_bytes * tokens


@dataclass(frozen=True)
class PassCosts:
    """The costs of a forward pass, and of its backward pass, without adapters."""

    forward: PassCost
    backward: PassCost


@dataclass(frozen=True, kw_only=True)
class DenoisingPass:
    """A forward pass of generation, and the tokens that it reveals."""

    context: int  # tokens of a sequence: prompt and completion
    # tokens of an attention block; None: bidirectional attention reads the whole sequence in every pass
    block: int | None = None
    attention: AttentionName = "bidirectional"
    noise: NoiseName = "masked"
    # of DiffusionGemma, which also computes the mean embedding of what it predicts
    conditioned: bool = False
    batch: int = 1  # sequences
    drawn: bool = False  # whether tokens are drawn at random: temperature above 0

    @property
    def cached(self) -> bool:
        """Whether keys and values of earlier tokens are kept."""
        return self.attention != "bidirectional"

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that the pass reads."""
        return {"bidirectional": self.context, "block_causal": self.block or 1, "causal": 1}[self.attention]

    @property
    def predicted(self) -> float:
        """Tokens of a sequence for which the pass computes logits."""
        fraction = HIDDEN_FRACTION if self.noise == "masked" else 1
        if self.attention == "bidirectional":  # half of the context is the completion
            return self.context / 2 * fraction
        return 1 if self.attention == "causal" else self.tokens * fraction

    @property
    def reads(self) -> float:
        """Host reads: at the end of a block, whether a sequence has ended. A pass reveals one token; one over
        random tokens may be the last of its canvas."""
        if self.noise == "uniform":
            return 1.0
        return 1 / self.tokens if self.cached else 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of the time of a step on a GPU, in seconds. The host launches kernels while the GPU computes;
    the rest is in sum."""

    arithmetic: float  # products of matrices
    memory: float  # traffic to and from the GPU's memory that does not overlap with the products
    launches: float  # the host's time for all launches
    reads: float = 0.0  # the GPU waits while the host reads values
    link: float = 0.0  # exchange between devices, or with host memory

    @property
    def seconds(self) -> float:
        return max(self.arithmetic + self.memory, self.launches) + self.reads + self.link

    @property
    def bound(self) -> BoundBy:
        """The part that takes most of the time; launches only if they take longer than the GPU."""
        parts: dict[BoundBy, float] = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "reads": self.reads,
            "link": self.link,
        }
        if self.launches > self.arithmetic + self.memory:
            parts["launches"] = self.launches
        return max(parts, key=parts.__getitem__)

    def describe(self) -> str:
        """Milliseconds and the bound."""
        return f"{1e3 * self.seconds:.3g}, {self.bound}"

    def to_dict(self) -> dict[str, Any]:
        """The parts, their sum and the bound, in JSON types."""
        return dataclasses.asdict(self) | {"seconds": self.seconds, "bound": self.bound}


def step_launches(network: Network, costs: PassCosts, work: Workload) -> float:
    """Launches of a training step."""
    forward, backward = costs.forward.launches, costs.backward.launches
    noise = 0 if work.attention == "causal" else LAUNCHES_OF_NOISE * work.plans
    if work.lora_rank:
        backward += LAUNCHES_OF_ADAPTER[work.precision] * network.stacks * len(network.adapted_linears)
    both = forward * (2 if work.checkpointing else 1) + backward + LAUNCHES_OF_HEAD
    update = LAUNCHES_PER_PARAMETER[work.optimizer] * network.tensors
    # the second time to compare its predictions
    teacher = forward + 2 * LAUNCHES_OF_HEAD if work.teacher else 0
    return (
        LAUNCHES_OF_STEP
        + noise
        + work.passes * both
        + work.forward_only_passes * (forward + LAUNCHES_OF_HEAD)
        + teacher
        + update
    )


def step_traffic(network: Network, costs: PassCosts, work: Workload) -> float:
    """Bytes that a training step reads and writes in a device's memory, besides products of matrices."""
    forward, backward = costs.forward.traffic(work.tokens), costs.backward.traffic(work.tokens)
    if work.lora_rank:
        of_input, of_output = TRAFFIC_OF_ADAPTER[work.precision]
        backward += work.tokens * sum(
            of_input * width_in + of_output * width_out for width_in, width_out in network.adapted_linears
        )
    logits = 4 * PASSES_OVER_LOGITS * work.predicted * network.vocabulary
    both = forward * (2 if work.checkpointing else 1) + backward + logits
    return work.passes * both + work.forward_only_passes * forward + 2 * sum(weight_bytes(network, work))


def step_reads(work: Workload) -> int:
    """Host reads of a training step: its numbers, and the targets of every plan of views. A reference in a
    table is looked up by ids of rows, tokens and documents; a teacher is compared at tokens that masks
    choose. Copies to the host count too: a GPU waits for them, although a CPU does not dispatch them."""
    of_plan = 4 if work.stored_reference else 1
    return 1 + work.plans * of_plan + (6 if work.teacher else 0)


def step_time(
    network: Network, costs: PassCosts, work: Workload, device: DeviceConfig, interconnect_gb_s: float | None
) -> StepTime | None:
    """The time of a step on every device in parallel. None if the device has no figures, and for float32,
    which they do not cover."""
    if device.tflops is None or device.bandwidth_gb_s is None or work.precision == "float32":
        return None
    peak = device.tflops * 1e12
    products = matmul_flops(network, work) / (peak * MATMUL_EFFICIENCY) + attention_flops(network, work) / (
        peak * ATTENTION_EFFICIENCY
    )
    link = host_seconds(network, work)
    if interconnect_gb_s:
        parameters, gradients, _ = weight_bytes(network, work)
        # DDP moves gradients out and back; FSDP gathers the parameters twice and scatters gradients once.
        moved = work.shards * (2 * parameters + gradients) if work.shards > 1 else 2 * gradients
        link += moved / (interconnect_gb_s * 1e9)
    return StepTime(
        arithmetic=work.rounds * products,
        memory=step_traffic(network, costs, work) / (device.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY),
        launches=step_launches(network, costs, work) * LAUNCH_SECONDS,
        reads=step_reads(work) * READ_SECONDS,
        link=link,
    )


def pass_launches(network: Network, cost: PassCost, work: DenoisingPass) -> float:
    """Launches of a pass of generation."""
    cache = LAUNCHES_OF_CACHE * network.attention_layers if work.cached else 0
    draw = LAUNCHES_OF_DRAW if work.drawn else 0
    sampler = LAUNCHES_OF_CANVAS if work.noise == "uniform" else LAUNCHES_OF_SAMPLER + draw
    return cost.launches + cache + sampler


def pass_time(network: Network, cost: PassCost, work: DenoisingPass, device: DeviceConfig) -> StepTime | None:
    """The time of a pass of generation on one device; None if it has no figures. `cost`: with bfloat16
    weights. Products read weights while they compute, so that the longer of the two counts."""
    if device.tflops is None or device.bandwidth_gb_s is None:
        return None
    tokens, predicted = work.batch * work.tokens, work.batch * work.predicted
    peak, head = device.tflops * 1e12, network.hidden * network.vocabulary * (2 if work.conditioned else 1)
    multiplied = network.multiplied_weights + network.canvas_weights
    products = 2 * (tokens * multiplied + predicted * head) / (peak * MATMUL_EFFICIENCY)
    products += (
        4
        * tokens
        * work.context
        * network.attention_width
        * network.attention_layers
        / (peak * ATTENTION_EFFICIENCY)
    )
    experts = network.expert_weights * min(1.0, network.expert_fraction * tokens)
    keys = 2 * work.batch * work.context * network.key_width * network.attention_layers if work.cached else 0
    bandwidth = device.bandwidth_gb_s * 1e9 * BANDWIDTH_EFFICIENCY
    weights = WEIGHT_BYTES["bfloat16"] * (
        (network.linear_weights + network.canvas_weights + experts + head + keys) / bandwidth
    )
    return StepTime(
        arithmetic=products if products > weights else 0.0,
        memory=cost.traffic(tokens) / bandwidth + (weights if weights >= products else 0.0),
        launches=pass_launches(network, cost, work) * LAUNCH_SECONDS,
        reads=work.reads * READ_SECONDS,
    )
