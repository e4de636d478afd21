"""Memory and FLOPs of a training step, by formula, as printed by `unmask inspect`. Its time: `step_time.py`.

docs/planning.md explains the formula and compares it with measurements. Units are bytes, seconds and FLOPs; 1
GB is 1e9 bytes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from unmask.config.run import AttentionName, NoiseName
from unmask.models.hooks.head import LOGITS_AT_ONCE
from unmask.models.load import Quantization

Precision = Literal["float32", "mixed", "bfloat16"]
Optimizer = Literal["adamw", "adamw_8bit"]

# Constants of the implementation. Measure them again when the attention function or the output head changes.
HIDDEN_FRACTION = 0.5  # of the tokens, predicted in a row with masks; other rows predict all
# float32 copies of a chunk of logits in the backward pass of its softmax, and one more of capped logits; half
# as many in that of the head
LOGIT_COPIES = 2
# activation gradients within a layer's backward pass, as a fraction of the bytes the layer saved
LAYER_WORKSPACE = 0.2
# FLOPs relative to the forward pass: a fused kernel recomputes the attention logits
BACKWARD_OF_ATTENTION = 2.5

# Constants of the libraries.
WEIGHT_BYTES = {"float32": 4, "mixed": 4, "bfloat16": 2}
EIGHT_BIT_STATE = 1 + 4 / 256  # bitsandbytes: a byte, and a float32 scale for every block of 256
QUANTISED_WEIGHT = {"4bit": 0.5 + 0.127 / 8, "8bit": 1.0}
"""Bytes; NF4 with double quantization has 0.127 bits of scale a weight (Dettmers et al. 2023)."""

# Constants of machines, used where nothing is measured.
MARGIN = 0.92  # usable fraction of the memory; the rest is lost to fragmentation
# interpreter and libraries; on a GPU, the context and the workspace of libraries
RUNTIME_BYTES = {"cpu": 0.5e9, "gpu": 1.0e9}
HOST_LINK = 20e9  # bytes a second between a GPU and the host, one way: PCIe 4.0 of 16 lanes
# bytes a second of host memory in an update: a desktop's two channels; a server has more
HOST_BANDWIDTH = 40e9


@dataclass(frozen=True, kw_only=True)
class Network:
    """The properties of an architecture that the formula needs, at one sequence length, attention pattern and
    precision."""

    parameters: int  # all of them, tied ones counted once
    tensors: int  # that hold them
    # input and output width of every matrix except the output head and experts
    linears: tuple[tuple[int, int], ...]
    layers: int
    hidden: int  # hidden width
    vocabulary: int  # rows of the embedding table
    attention_width: float  # number of heads times head width, the mean of all layers with attention
    attention_layers: int  # those with keys and values: not recurrent ones
    key_width: float  # number of key heads times head width, likewise
    tied: bool  # whether the output head is the embedding table
    saved_fixed: int  # bytes saved for the backward pass independently of the batch: masks, casts of weights
    saved_per_row: int  # bytes saved for the backward pass per row of the batch
    experts: tuple[tuple[int, int], ...] = ()  # input and output width of every matrix of every expert
    expert_fraction: float = 1.0  # fraction of the experts that process a token
    capped: bool = False  # whether the logits have a soft cap
    frozen: int = 0  # parameters that are never trained: those of vision towers
    # stacks of layers that share these weights: in DiffusionGemma one for clean tokens, one for canvases
    stacks: int = 1
    # input and output width of every matrix of a stack that gets adapters; None: of `linears` and `experts`
    adapted: tuple[tuple[int, int], ...] | None = None
    canvas_weights: int = 0  # of matrices that only the tokens of canvases are multiplied with

    @property
    def linear_weights(self) -> int:
        return sum(width_in * width_out for width_in, width_out in self.linears)

    @property
    def expert_weights(self) -> int:
        return sum(width_in * width_out for width_in, width_out in self.experts)

    @property
    def multiplied_weights(self) -> float:
        """Number of weights that a token is multiplied with."""
        return self.linear_weights + self.expert_fraction * self.expert_weights

    def adapter_parameters(self, rank: int) -> int:
        """Number of parameters of low-rank adapters, which every stack has of its own."""
        adapted = (*self.linears, *self.experts) if self.adapted is None else self.adapted
        return self.stacks * rank * sum(width_in + width_out for width_in, width_out in adapted)

    @property
    def adapted_linears(self) -> tuple[tuple[int, int], ...]:
        """Input and output width of every linear layer of a stack that gets adapters."""
        return self.linears if self.adapted is None else self.adapted


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How a network is trained."""

    sequence_length: int  # clean tokens in a sequence
    batch: int = 1  # sequences per device and step
    # block-causal rows also hold the clean tokens, `[x_t ; ... ; x_0]`
    attention: AttentionName = "bidirectional"
    noise: NoiseName = "masked"
    copies: int = 1  # noised copies of a sequence: 2 for complementary masks
    # of DiffusionGemma, tokens of the canvases of a sequence, in place of its noised copies; the encoder's
    # next tokens are predicted, too
    canvas: int = 0
    # mixed: float32 weights, matrix products in bfloat16; bfloat16: weights and states too
    precision: Precision = "float32"
    checkpointing: bool = False  # save only each layer's input, and recompute the rest
    optimizer: Optimizer = "adamw"
    lora_rank: int | None = None  # train adapters of this rank; None: train the weights
    quantization: Quantization | None = None  # of the frozen weights of linear layers (QLoRA)
    shards: int = 1  # devices over which parameters, gradients and states are spread (ZeRO-3, FSDP)
    # devices over which the layers of one model are spread (device_map); they work one after another
    split: int = 1
    offload: bool = False  # keep gradients and optimizer states in host memory
    # keep optimizer states, float32 weights and gradients in host memory, and update them there
    host_optimizer: bool = False
    accumulate: bool = False  # gradients of earlier micro-batches occupy memory during the forward pass
    teacher: bool = False  # every device also holds a frozen copy of the model, which reads the clean tokens
    # every device also holds a frozen copy of the model; `forward_only_passes` includes its passes
    reference: bool = False
    stored_reference: bool = False  # its log-probabilities are looked up in a table on the host
    plans: int = 1  # batches of a step whose views are drawn
    documents: int = 1  # equal parts of a sequence that do not see one another
    passes: int = 1  # forward and backward passes of a step, whose gradients add up
    logits_at_once: int = LOGITS_AT_ONCE  # that a loss holds
    forward_only_passes: int = 0  # those of a step without a backward pass, each as large as one of `passes`

    def describe(self) -> str:
        """The workload in words."""
        words = [
            f"{self.sequence_length} tokens",
            self.attention,
            f"{self.copies} noised copies" if self.copies > 1 else "",
            f"canvases of {self.canvas}" if self.canvas else "",
            f"LoRA of rank {self.lora_rank}" if self.lora_rank else "",
            f"{self.quantization} weights" if self.quantization else "",
        ]
        return ", ".join(filter(None, words))

    @property
    def rows(self) -> int:
        """Rows of a forward pass."""
        return self.batch * (1 if self.attention == "block_causal" else self.copies)

    @property
    def noised_length(self) -> int:
        """Noised tokens of a row, besides its clean ones."""
        if self.attention != "block_causal":
            return 0
        return self.canvas or self.sequence_length * self.copies

    @property
    def row_length(self) -> int:
        return self.sequence_length + self.noised_length

    @property
    def tokens(self) -> int:
        """Tokens of a forward pass."""
        return self.rows * self.row_length

    @property
    def rounds(self) -> float:
        """FLOPs of a step, relative to one forward and backward pass."""
        return self.passes + self.forward_only_passes * 2 / self.flops_per_weight

    @property
    def flops_per_weight(self) -> int:
        """FLOPs of a forward and backward pass per token and matrix weight: 2 forward, 2 for the gradient of
        the input, 2 for that of a trained weight, 2 to recompute the forward pass."""
        return (4 if self.lora_rank else 6) + (2 if self.checkpointing else 0)

    @property
    def predicted(self) -> float:
        """Number of predicted tokens, that is rows of logits."""
        masked = self.attention != "causal" and self.noise == "masked"
        fraction = HIDDEN_FRACTION if masked else 1
        if self.canvas:
            return self.batch * self.row_length
        return self.batch * self.copies * self.sequence_length * fraction


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of a device at the peak of a step, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def peak_memory(network: Network, work: Workload) -> Memory:
    """The memory at the largest of four moments of the backward pass: at the logits, the output head, the
    last layer (all activations exist) and the first layer (all gradients exist). Between the last two, memory
    changes linearly, so the peak is at one of them."""
    parameters, trained, state = weight_bytes(network, work)
    gradients = 0.0 if work.offload else trained
    activations, layer = _activations(network, work)
    table = 0.0 if work.lora_rank else network.vocabulary * network.hidden * WEIGHT_BYTES[work.precision]
    chunk = 4 * min(work.predicted * network.vocabulary, work.logits_at_once)
    backward = layer * LAYER_WORKSPACE + (layer if work.checkpointing else 0.0)
    gathered = 0.0
    if work.shards > 1:  # the weights of the current layer and the next one
        in_layers = network.linear_weights + network.expert_weights
        gathered = 2 * in_layers / network.layers * WEIGHT_BYTES[work.precision]
    copies = LOGIT_COPIES + (1 if network.capped else 0)
    held = gradients if work.accumulate or work.passes > 1 else 0.0
    moments = [  # gradients, activations, logits, workspace
        (held, activations, copies * chunk, 0.0),
        (max(held, table / work.shards), activations, LOGIT_COPIES / 2 * chunk, 0.0),
        (max(held, table / work.shards), activations, 0.0, backward),
        (gradients, activations / network.layers, 0.0, max(backward, table if network.tied else 0.0)),
    ]
    gradients, activations, logits, workspace = max(moments, key=sum)
    if work.split > 1:  # each device has its own workspace, and may end half a layer early
        workspace += (work.split - 1) * (
            logits + workspace + (parameters + gradients + state + activations) / network.layers
        )
    workspace += gathered
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        logits=logits,
        workspace=workspace,
    )


def weight_bytes(network: Network, work: Workload) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer states on each device."""
    width = WEIGHT_BYTES[work.precision]
    stored = float(network.parameters * width)
    trained = trained_parameters(network, work)
    trained_width = 4 if work.lora_rank else width  # PEFT keeps adapters in float32
    if work.lora_rank:
        stored += trained * trained_width
        if work.quantization:
            stored -= network.linear_weights * (width - QUANTISED_WEIGHT[work.quantization])
    state = 2 * trained * (EIGHT_BIT_STATE if work.optimizer == "adamw_8bit" else trained_width)
    frozen_copy = network.parameters * width if work.teacher or work.reference else 0.0
    if work.offload or work.host_optimizer:
        state = 0.0
    return stored / work.shards + frozen_copy, trained * trained_width / work.shards, state / work.shards


def host_bytes(network: Network, work: Workload) -> float:
    """Bytes in host memory with a host optimizer: float32 weights, gradients and two states of every trained
    parameter."""
    return 16.0 * trained_parameters(network, work) if work.host_optimizer else 0.0


def host_seconds(network: Network, work: Workload) -> float:
    """Seconds of an update in host memory: gradients and weights cross the link; weights and states are read
    and written there."""
    _, gradients, _ = weight_bytes(network, work)
    if not work.host_optimizer:
        return 0.0
    return 2 * gradients / HOST_LINK + 28.0 * trained_parameters(network, work) / HOST_BANDWIDTH


def trained_parameters(network: Network, work: Workload) -> int:
    """Number of trained parameters: all weights, or those of adapters."""
    if work.lora_rank:
        return network.adapter_parameters(work.lora_rank)
    return network.parameters - network.frozen


def _activations(network: Network, work: Workload) -> tuple[float, float]:
    """Bytes saved by the whole forward pass, and bytes that one layer saves for its own backward pass."""
    layer = network.saved_per_row * work.rows / network.layers
    if not work.checkpointing:
        return network.saved_fixed + network.saved_per_row * work.rows, layer
    # it has the type of the embeddings
    residual = work.tokens * network.hidden * WEIGHT_BYTES[work.precision]
    return network.saved_fixed + residual * network.layers, layer


def matmul_flops(network: Network, work: Workload) -> float:
    """FLOPs of the matrix products of a forward and backward pass: 6 per weight and token, 8 with
    checkpointing, 2 fewer if frozen."""
    chunked = work.predicted * network.vocabulary > work.logits_at_once
    table, weights = network.hidden * network.vocabulary, network.multiplied_weights
    head = work.predicted * table * ((4 if work.lora_rank else 6) + (2 if chunked else 0))
    adapters = network.adapter_parameters(work.lora_rank or 0) / network.stacks
    adapters *= 8 if work.checkpointing else 6
    of_canvases = work.rows * work.noised_length * network.canvas_weights * work.flops_per_weight
    teacher = 2 * work.batch * work.sequence_length * (weights + table) if work.teacher else 0
    return work.tokens * (weights * work.flops_per_weight + adapters) + of_canvases + head + teacher


def attention_flops(network: Network, work: Workload) -> float:
    """FLOPs of the attention of a forward and backward pass: two products over the full square of the row
    length, even under a mask. Clean tokens with a stack of their own read one another alone."""
    pairs = work.row_length**2
    if network.stacks > 1:
        pairs -= work.sequence_length * work.noised_length
    forward = 4 * work.rows * pairs * network.attention_width * network.attention_layers
    return forward * (1 + BACKWARD_OF_ATTENTION + (1 if work.checkpointing else 0))
