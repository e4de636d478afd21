"""A model without its weights, described by its config and tokenizer alone.

The architecture is built of fake tensors, which have shapes and types but no memory, so that a laptop can
analyze an 8B model.

Shapes: B batch, T tokens, N tokens of all rows, K experts chosen per token, C = N * K token-expert pairs, D
hidden width, I inner width of an expert.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

from unmask.config.run import AttentionName, ModelConfig
from unmask.errors import ConfigError
from unmask.models.attention import (
    ATTENTION_NAME,
    DEFAULT_BLOCK,
    AttentionMask,
    Layout,
    attention_layers,
    make_mask,
)
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.diffusion_gemma import (
    ADAPTED,
    TOWERS,
    DiffusionGemmaForBlockDiffusion,
    canvas_pattern,
    prepare,
)
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import (
    NO_NOISE,
    Quantization,
    check_recurrent,
    check_vocabulary,
    make_diffusion,
    pattern_settings,
    refuse_quantized,
)
from unmask.models.model_files import read_config, read_tokenizer, reading
from unmask.models.model_paths import fetched
from unmask.models.recurrent import Recurrence, read_in_blocks, recurrent_layers
from unmask.planning.cost_model import Network, Workload
from unmask.planning.step_time import PassCost, PassCosts

DEFAULT_LENGTH = 512
BALANCED = "unmask_balanced"
WEIGHTS = {"float32": torch.float32, "mixed": torch.float32, "bfloat16": torch.bfloat16}
"""The data type of the weights, by precision."""
SHALLOW, DEEPER = 1, 3
FEW_STEPS = 2
"""In which recurrent layers read the rows that are counted: the first one has no states before it, and
further ones are alike."""
_RECURRENT = "{} layers, which read each block from the state before it"


@dataclass(frozen=True)
class ModelSpec:
    """The contents of a model folder or hub repository without the weights."""

    path: str  # the folder or hub id
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    settings: dict[str, Any]  # attention pattern, block size and logit shift, as saved or overridden

    @classmethod
    def read(cls, model: ModelConfig) -> ModelSpec:
        """Read config and tokenizer. Raises ModelError if one is missing, or the tokenizer has tokens without
        an embedding."""
        code = model.trust_remote_code
        folder = fetched(model.path, weights=False, revision=model.revision, trust_remote_code=code)
        config, family = read_config(folder, trust_remote_code=code)
        tokenizer = read_tokenizer(folder, config, family, trust_remote_code=code)
        with reading("cannot use the model", model.path, "Check config.json and the tokenizer's files"):
            check_vocabulary(tokenizer, config.get_text_config().vocab_size, model.path)
            return cls(
                model.path,
                config,
                tokenizer,
                pattern_settings(config, model.attention, model.block_size, model.logit_shift),
            )

    @property
    def stock(self) -> bool:
        """Whether it is a causal model that Unmask has not converted."""
        return getattr(self.config, SETTINGS_KEY, None) is None and not self.canvas

    @property
    def canvas(self) -> bool:
        """Whether it is DiffusionGemma."""
        return bool(canvas_pattern(self.config))

    @property
    def recurrent(self) -> bool:
        """Whether some layers are recurrent."""
        return self._fake_lm[0].recurrent

    @property
    def context(self) -> int | None:
        """The model's maximum number of positions; None if its config has none."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    def facts(self) -> dict[str, str]:
        """Properties of the model, by name. Raises ModelError for an architecture that cannot take a mask."""
        lm, vocabulary = self._fake_lm
        model = lm.model
        mask = lm.tokenizer.convert_ids_to_tokens(lm.mask_token_id)
        return {
            "architecture": type(model).__name__,
            "parameters": describe_size(model),
            "vocabulary": f"{vocabulary:,}",
            "tied embeddings": "yes" if is_tied(model) else "no",
            "context": f"{lm.context_length:,} tokens" if lm.context_length else "-",
            "attention": lm.attention,
            "attention block": str(lm.block_size or "-"),
            "mask token": "-"
            if lm.canvas
            else f"{mask} ({lm.mask_token_id})"
            + ("" if self.tokenizer.mask_token_id is not None else ", to be added"),
            "noise": lm.noise,
            "logit shift": "yes: the output at position i - 1 predicts token i" if lm.logit_shift else "no",
        }

    def changes(self) -> dict[str, str]:
        """The changes that a conversion would make, by name; empty: the model is not converted."""
        if self.canvas:
            return {}
        lm, vocabulary = self._fake_lm
        table = lm.model.get_input_embeddings().weight.shape[0]
        new = self.tokenizer.mask_token_id is None
        window = getattr(self.config.get_text_config(), "sliding_window", None)  # of layers that name none
        windows = sum(
            getattr(module, "sliding_window", window) is not None for module in attention_layers(lm.model)
        )
        tied = ", which is the output head too" if is_tied(lm.model) else " and a row of the output head"
        grows = (
            f"full: they grow from {vocabulary:,} to {table:,} rows"
            if table > vocabulary
            else f"no: {vocabulary:,} rows have room"
        )
        return {
            "mask token": f"added, with an embedding row{tied}" if new else "already there",
            "embeddings": grows,
            "attention": f"{len(attention_layers(lm.model))} layers, to "
            + ("block_causal" if lm.recurrent else "bidirectional or block_causal"),
            **({"recurrent": _RECURRENT.format(len(recurrent_layers(lm.model)))} if lm.recurrent else {}),
            "sliding windows": f"dropped in {windows} layers" if windows else "none to drop",
            "logit shift": "off, unless the recipe keeps it (training.logit_shift=true)",
        }

    def workload(
        self,
        attention: AttentionName | None,
        sequence_length: int | None,
        copies: int,
        lora_rank: int | None,
        *,
        quantization: Quantization | None = None,
        canvases: int = 0,
    ) -> Workload:
        """The workload to estimate. `attention` None: as saved; for a stock model, a conversion to
        bidirectional attention, or to block-causal attention if it has recurrent layers. `canvases`: of
        DiffusionGemma, those of a sequence that are noised in place of copies, and conditioned on what a
        first pass predicts.

        Raises:
            ModelError: bidirectional attention for such a model, or a quantized DiffusionGemma.
            ConfigError: rows longer than the model's context, quantized weights without adapters, or copies
                and canvases.
        """
        if quantization and lora_rank is None:
            raise ConfigError(
                "quantized weights take no gradients",
                where="quantization",
                remedy="Train adapters (LoRA), or leave it out",
            )
        if quantization:
            refuse_quantized(self.config)
        if self.canvas and canvases and copies > 1:
            what = "a DiffusionGemma has canvases in place of noised copies"
            raise ConfigError(what, where="copies", remedy="Leave it out")
        sequence_length = sequence_length or min(DEFAULT_LENGTH, self.context or DEFAULT_LENGTH)
        if self.context is not None and sequence_length > self.context:
            raise ConfigError(
                f"{sequence_length:,} tokens, but the model's context is {self.context:,}",
                where="sequence_length",
                remedy=f"Use at most {self.context}",
            )
        lm, _ = self._fake_lm
        converted: AttentionName = "block_causal" if lm.recurrent else "bidirectional"
        chosen: AttentionName = attention or (converted if self.stock else self.settings["attention"])
        check_recurrent(lm.model, chosen)
        return Workload(
            sequence_length=sequence_length,
            attention=chosen,
            noise=self.settings_for(chosen).get("noise", "masked"),
            copies=copies,
            canvas=canvases * (self.settings["block_size"] or 0) if self.canvas else 0,
            forward_only_passes=int(self.canvas and canvases > 0),
            lora_rank=lora_rank,
            quantization=quantization,
        )

    def settings_for(self, attention: AttentionName) -> dict[str, Any]:
        """Attention pattern, block size, logit shift and noise: the saved ones, or those of a conversion to
        `attention`."""
        if attention == self.settings["attention"]:
            return self.settings
        noise = {name: self.settings[name] for name in NO_NOISE if name in self.settings}
        return {
            **(noise if attention != "causal" else {}),
            "attention": attention,
            "block_size": DEFAULT_BLOCK if attention == "block_causal" else None,
            "logit_shift": None,
        }

    def network(self, work: Workload) -> Network:
        """The numbers that the formula needs, from forward passes of fake tensors with one and two rows."""
        lm, _ = self._fake_lm  # raises ModelError for an architecture that cannot take a mask
        saved = self._counted(saved_bytes, work)
        one_row, two_rows = map(round, saved.tolist())
        model, text = lm.model, self.config.get_text_config()
        return Network(
            parameters=sum(weight.numel() for weight in model.parameters()),
            tensors=sum(1 for _ in model.parameters()),
            linears=tuple(linear_shapes(model)),
            experts=tuple(expert_shapes(model)),
            expert_fraction=expert_fraction(model),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            vocabulary=model.get_input_embeddings().weight.shape[0],
            attention_width=mean(width for width, _ in attention_widths(model)),
            attention_layers=len(attention_layers(model)) if lm.recurrent else text.num_hidden_layers,
            key_width=mean(width for _, width in attention_widths(model)),
            tied=is_tied(model),
            saved_fixed=2 * one_row - two_rows,
            saved_per_row=two_rows - one_row,
            capped=getattr(text, "final_logit_softcapping", None) is not None,
            **(_of_two_stacks(model) if lm.canvas else {}),
        )

    def pass_costs(self, work: Workload) -> PassCosts:
        """Launches and traffic, counted with one and two rows: the difference is that of a row."""
        costs = []
        for (launches, one_row), (_, two_rows) in self._counted(count_passes, work).tolist():
            token_bytes = (two_rows - one_row) / work.row_length
            costs.append(PassCost(launches, 2 * one_row - two_rows, token_bytes))
        return PassCosts(*costs)

    def _counted(self, count: Callable[..., Sequence[Any]], work: Workload) -> np.ndarray:
        """What is counted of a workload with one layer of each kind, and few of the steps in which recurrent
        layers read its rows; then with one more of each, of which there are many."""
        pattern, model = self.settings_for(work.attention), self._fake_models(WEIGHTS[work.precision])
        kinds = layer_kinds(model)
        one_of_each = [kind[0] for kind in kinds]
        reading, whole = None, (0, 0)
        if self.recurrent and work.attention == "block_causal":
            layout = Layout.full(work.sequence_length, torch.device("cpu")).with_noised_copies(work.copies)
            reading = layout.recurrence(pattern["block_size"], work.copies)
            whole = reading.ahead, len(reading.steps) - reading.ahead
        ahead, others = (min(number, FEW_STEPS) for number in whole)

        def counted(layers: list[int], *steps: int) -> np.ndarray:
            read = reading and reading.shortened(*steps)
            with model.fake_mode, only_layers(model, sorted(layers)):
                return np.array(count(model, pattern, work, read), dtype=np.float64)

        first = counted(one_of_each, ahead, others)
        total = first.copy()
        for kind in kinds:
            if len(kind) > 1:
                total += (len(kind) - 1) * (counted([*one_of_each, kind[1]], ahead, others) - first)
        if reading:
            with only_layers(model, one_of_each):
                few = len(recurrent_layers(model))
            layers = len(recurrent_layers(model)) / few
            if further := whole[0] - ahead:
                total += further * layers * (counted(one_of_each, ahead + 1, others) - first)
            if further := whole[1] - others:
                total += further * layers * (counted(one_of_each, ahead, others + 1) - first)
        return total

    @cached_property
    def _fake_models(self) -> Callable[[torch.dtype], Any]:
        """The architecture as it is trained, by the type of its weights."""
        options = {"attn_implementation": ATTENTION_NAME, "experts_implementation": BALANCED}

        def make(dtype: torch.dtype) -> Any:
            with FakeTensorMode() as mode:
                model = architecture(self.config, dtype, **options).train()
                model.fake_mode = mode
                read_in_blocks(model)
            return model

        return cache(make)

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of two small models that are timed: their difference is that of a layer (of a group of
        layers, if they are of different kinds), the rest is independent of depth."""
        if not (self.recurrent or self.canvas):
            return SHALLOW, DEEPER
        text: Any = self.config.get_text_config()
        layers, kinds = text.num_hidden_layers, by_layer(text).values()
        repeats = (
            size
            for size in range(1, layers)
            if kinds and all(kind == (kind[:size] * layers)[:layers] for kind in kinds)
        )
        group = next(repeats, layers)
        return group, 2 * group

    @cached_property
    def _fake_lm(self) -> tuple[DiffusionLM, int]:
        """The model as `unmask.load` would build it, and the number of embedding rows before that."""
        with (
            reading("cannot use the model", self.path, "Check config.json and the tokenizer's files"),
            FakeTensorMode(),
        ):
            model = architecture(self.config, torch.float32)
            vocabulary = model.get_input_embeddings().weight.shape[0]
            return make_diffusion(model, copy.deepcopy(self.tokenizer), **self.settings), vocabulary


def architecture(config: PretrainedConfig, dtype: torch.dtype, **options: Any) -> Any:
    """Build the architecture of a config; inside a FakeTensorMode it takes no memory. Raises ModelError
    unless it is a causal model."""
    with reading("cannot build the model", config.model_type, "Give a causal language model"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, **options)
    if canvas_pattern(config):
        prepare(model)
    return model


def is_tied(model: Any) -> bool:
    """Whether the output head is the embedding table."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def read_by_tokens(model: Any) -> nn.Module:
    """What every token of a text passes through: the model, or of DiffusionGemma the layers of the decoder,
    which has those of the encoder."""
    return model.model.decoder.layers if isinstance(model, DiffusionGemmaForBlockDiffusion) else model


def attention_widths(model: Any) -> list[tuple[int, int]]:
    """Number of heads times head width, of the queries and of the keys, of one layer or of all."""
    text = model.config.get_text_config()
    if canvas_pattern(model.config):  # whose layers are unlike
        layers: Any = attention_layers(model.model.decoder)
        return [(layer.q_proj.out_features, layer.k_proj.out_features) for layer in layers]
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return [(heads * width, (getattr(text, "num_key_value_heads", None) or heads) * width)]


def _of_two_stacks(model: Any) -> dict[str, Any]:
    """The fields of a `Network` that DiffusionGemma has for its encoder and decoder."""
    adapted = (
        part for name, part in model.named_modules() if ".decoder." in name and re.fullmatch(ADAPTED, name)
    )
    return {
        "stacks": 2,
        "adapted": tuple(_shapes(adapted)),
        "canvas_weights": sum(map(math.prod, _shapes(model.model.decoder.self_conditioning.modules()))),
        "frozen": sum(weight.numel() for weight in model.parameters() if not weight.requires_grad),
    }


def linear_shapes(model: Any) -> list[tuple[int, int]]:
    """Input and output width of every matrix that a token is multiplied with, except the output head."""
    modules = [*read_by_tokens(model).modules()]
    shapes = _shapes(module for module in modules if module is not model.get_output_embeddings())
    return shapes + [tuple(module.weight.shape) for module in modules if isinstance(module, Conv1D)]


def _shapes(modules: Iterable[nn.Module]) -> list[tuple[int, int]]:
    """Input and output width of the linear layers."""
    return [(part.in_features, part.out_features) for part in modules if isinstance(part, nn.Linear)]


def expert_stacks(model: Any) -> list[Tensor]:
    """The weights of experts, which transformers stacks along a first dimension."""
    modules = [module for module in read_by_tokens(model).modules() if not isinstance(module, nn.Conv1d)]
    return [weight for module in modules for weight in module.parameters(recurse=False) if weight.dim() == 3]


def expert_shapes(model: Any) -> list[tuple[int, int]]:
    """Input and output width of every matrix of every expert."""
    return [(stack.shape[2], stack.shape[1]) for stack in expert_stacks(model) for _ in range(len(stack))]


def expert_fraction(model: Any) -> float:
    """The fraction of the experts that process a token; 1 without experts."""
    stacks, text = expert_stacks(model), model.config.get_text_config()
    chosen = ("num_experts_per_tok", "top_k_experts")[hasattr(text, "top_k_experts")]
    return getattr(text, chosen) / len(stacks[0]) if stacks else 1.0


def describe_size(model: Any) -> str:
    """The number of parameters and, for a mixture of experts, how many are active for a token of a text."""
    total = sum(weight.numel() for weight in model.parameters())
    idle = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)  # of towers
    idle += (1 - expert_fraction(model)) * sum(
        width_in * width_out for width_in, width_out in expert_shapes(model)
    )
    return f"{total:,}" + (f", {round(total - idle):,} active" if idle else "")


def balanced_experts(module: Any, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Stand-in for the grouped products of all experts: one expert processes all pairs, since fake tensors
    cannot be routed. It saves the same number of bytes for the backward pass."""
    first, last = (
        stack[0].T if module.is_transposed else stack[0] for stack in module.parameters(recurse=False)
    )
    with torch.autocast("cpu", enabled=False):  # grouped products ignore autocast
        chosen_CD = hidden_ND.repeat_interleave(index_NK.shape[1], 0).to(first.dtype)
        gated_CI = (
            module._apply_gate(chosen_CD @ first.T) if module.has_gate else module.act_fn(chosen_CD @ first.T)
        )
        out_CD = (gated_CI @ last.T) * weight_NK.reshape(-1, 1)
    return out_CD.view(*index_NK.shape, -1).sum(1).to(hidden_ND.dtype)


ExpertsInterface.register(BALANCED, balanced_experts)


def by_layer(text: PretrainedConfig) -> dict[str, list[Any]]:
    """The lists of a config that have an entry for each layer, by name."""
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == text.num_hidden_layers and "multipliers" not in name
    }


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of a config with fewer layers."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    for name, value in by_layer(text).items():
        setattr(text, name, (value * layers)[:layers])
    unlike, before = text.to_dict().get("per_layer_config"), text.num_hidden_layers
    text.num_hidden_layers = layers
    if unlike:
        sources = {number: str(number % before) for number in range(layers)}
        text.per_layer_config = {
            number: unlike[source] for number, source in sources.items() if source in unlike
        }
    return config


def layer_stacks(model: Any) -> dict[str, nn.ModuleList]:
    """The lists of layers, by name; a few architectures have one for each part of a layer."""
    layers, found = model.config.get_text_config().num_hidden_layers, dict[str, nn.ModuleList]()
    for name, module in model.base_model.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        tower = canvas_pattern(model.config) and re.fullmatch(TOWERS, f"model.{name}")
        if isinstance(module, nn.ModuleList) and len(module) == layers and not (within or tower):
            found[name] = module
    return found


def layer_kinds(model: Any) -> list[list[int]]:
    """The numbers of the layers of each kind: of the same modules and weights. Where no list holds them, each
    layer is a kind of its own."""
    kinds = dict[Any, list[int]]()
    for number, parts in enumerate(zip(*layer_stacks(model).values(), strict=True)):
        kind = tuple(
            (name, type(module), *(weight.shape for weight in module.parameters(recurse=False)))
            for part in parts
            for name, module in part.named_modules()
        )
        kinds.setdefault(kind, []).append(number)
    return [*kinds.values()] or [
        [number] for number in range(model.config.get_text_config().num_hidden_layers)
    ]


@contextmanager
def only_layers(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """The model has only these layers."""
    text, stacks = model.config.get_text_config(), layer_stacks(model)
    changed: dict[str, Any] = {
        name: [value[number] for number in layers] for name, value in by_layer(text).items()
    }
    changed["num_hidden_layers"] = len(layers)
    before = {name: getattr(text, name) for name in changed}

    def change(values: Mapping[str, Any], lists: Mapping[str, nn.ModuleList]) -> None:
        for name, value in values.items():
            setattr(text, name, value)
        for name, modules in lists.items():
            parent, _, own = name.rpartition(".")
            setattr(model.base_model.get_submodule(parent), own, modules)

    few = {name: nn.ModuleList([stack[number] for number in layers]) for name, stack in stacks.items()}
    change(changed, few)
    try:
        yield
    finally:
        change(before, stacks)


def saved_bytes(
    model: Any, pattern: Mapping[str, Any], work: Workload, reading: Recurrence | None
) -> list[int]:
    """Bytes that a forward pass up to the output head saves for the backward pass, without parameters: of one
    row, and of two."""
    model.requires_grad_(True)  # `count_passes` leaves it to adapters
    if work.lora_rank and canvas_pattern(model.config):  # its experts, which keep most, never have adapters
        model.requires_grad_(False)
        for name, module in model.named_modules():
            if re.fullmatch(ADAPTED, name) or isinstance(module, nn.Embedding):
                module.requires_grad_(True)
    return [_saved_bytes(model, pattern, work, reading, rows) for rows in (1, 2)]


def _saved_bytes(
    model: Any, pattern: Mapping[str, Any], work: Workload, reading: Recurrence | None, rows: int
) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    watch = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    hidden_states(model, pattern, work, reading, rows, watch)
    for weight in model.parameters():
        kept.pop(weight.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


def hidden_states(
    model: Any,
    pattern: Mapping[str, Any],
    work: Workload,
    reading: Recurrence | None,
    batch: int,
    watch: AbstractContextManager[Any],
) -> Tensor:
    """The hidden states before the output head, [B, T, D], of a pass of `batch` rows that is watched."""
    compute = torch.autocast("cpu", torch.bfloat16) if work.precision == "mixed" else contextlib.nullcontext()
    layout = row_layout(pattern, work, torch.device("cpu"))
    canvas = canvas_pattern(model.config)
    mask = row_mask(pattern, work, layout, canvas=bool(canvas))
    if reading:
        mask = replace(mask, recurrence=reading.to(torch.device("cpu")))  # as fake tensors
    position_BT = layout.position_BT.expand(batch, -1)
    inputs = {"input_ids": torch.zeros_like(position_BT), "position_ids": position_BT, "unmask_mask": mask}
    with watch, compute:
        if canvas:
            return _before_head(model, **inputs, unmask_canvas=range(work.noised_length))
        return model.base_model(use_cache=False, **inputs)[0]


def row_layout(pattern: Mapping[str, Any], work: Workload, device: torch.device) -> Layout:
    """The layout of a row: the last canvases of a text and the text, noised copies and clean tokens, or the
    tokens alone."""
    if not work.canvas:
        layout = Layout.full(work.sequence_length, device)
        return layout.with_noised_copies(work.copies) if work.attention == "block_causal" else layout
    number_T = torch.arange(work.canvas, device=device)
    first = max(0, work.sequence_length - work.canvas)
    position_T = torch.cat([first + number_T, torch.arange(work.sequence_length, device=device)])
    copy_T = F.pad(1 + number_T // pattern["block_size"], (0, work.sequence_length))
    return Layout(torch.ones_like(position_T)[None], position_T[None], copy_T[None])


def row_mask(pattern: Mapping[str, Any], work: Workload, layout: Layout, *, canvas: bool) -> AttentionMask:
    """The mask of a row. `canvas`: of DiffusionGemma."""
    return make_mask(
        *(work.attention, pattern["block_size"], layout, layout), causal_context=canvas, windows=canvas
    )


class _HeadReached(Exception):
    """Has the hidden states that the head would read."""


def _before_head(model: Any, **inputs: Any) -> Tensor:
    """The hidden states [B, T, D] of a pass that ends before the head."""

    def stop(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _HeadReached(given[0])

    hook = model.get_output_embeddings().register_forward_pre_hook(stop)
    try:
        model(**inputs)
    except _HeadReached as reached:
        found: Tensor = reached.args[0]
        return found
    finally:
        hook.remove()
    raise AssertionError("the head was not called")


WITHOUT_KERNEL = {
    *("aten::_unsafe_view", "aten::lift_fresh", "aten::empty", "aten::empty_like", "aten::empty_strided"),
    *("aten::new_empty", "aten::new_empty_strided", "prim::device"),
}

WITHOUT_TRAFFIC = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::embedding"}
"""Products, and rows of a table, of which few are read."""


class LaunchCounter(TorchDispatchMode):
    """Counts the launches and the traffic, in bytes, of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.traffic = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, out = func._schema.name, func(*args, **(kwargs or {}))
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.launches += 1
            if name not in WITHOUT_TRAFFIC and "attention" not in name:
                self.traffic += sum(
                    leaf.nbytes for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)
                )
        return out


def count_passes(
    model: Any, pattern: Mapping[str, Any], work: Workload, reading: Recurrence | None
) -> list[list[tuple[int, int]]]:
    """Launches and traffic of a forward pass, and of its backward pass: with one row, and with two."""
    model.requires_grad_(work.lora_rank is None)
    # gradients flow through all layers, to the adapters
    model.get_input_embeddings().requires_grad_(True)
    counts: list[list[tuple[int, int]]] = [[], []]
    for rows in (1, 2):
        out_BTD = hidden_states(model, pattern, work, reading, rows, ahead := LaunchCounter())
        gradient_BTD = torch.ones_like(out_BTD)
        # the checks of `--debug` read values
        with LaunchCounter() as back, torch.autograd.set_detect_anomaly(False):
            out_BTD.backward(gradient_BTD)
        model.zero_grad()  # else gradients would be added
        for direction, counter in zip(counts, (ahead, back), strict=True):
            direction.append((counter.launches, counter.traffic))
    return counts
