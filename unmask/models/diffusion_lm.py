"""DiffusionLM: a causal language model of transformers, read as a diffusion language model.

Shapes: B batch, T tokens, V vocabulary, D hidden width, N selected rows, C of them clean, J targets of a row,
S segments.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cache_utils import Cache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils.hub import hf_api

from unmask.artifacts import share
from unmask.config.run import AttentionName, NoiseName
from unmask.errors import ConfigError, ModelError, require_known
from unmask.models.attention import (
    AttentionMask,
    Layout,
    check_pattern,
    clear_mask_cache,
    hidden_fraction,
    make_mask,
    stacked_rows,
    unpadded_mask,
)
from unmask.models.auto_config import READ_AS, SETTINGS_KEY, publish_config, publish_when_saved
from unmask.models.chat_template import (
    TEMPLATES,
    accept_generation_config,
    as_ids,
    eos_first,
    set_end_tokens,
    turn_end,
)
from unmask.models.compiled import compile_model, taken_apart
from unmask.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion, canvas_pattern, saved_sampler
from unmask.models.hooks import head
from unmask.models.hooks.head import Reduction, RowSelector, flat_indices, log_probs_at, tempered_log_probs_at
from unmask.models.hooks.last_layer import LastLayer
from unmask.models.hooks.quality_head import add_quality_head, quality_head_of
from unmask.models.hooks.time_embedding import HiddenFraction, add_time_embedding
from unmask.models.hub import upload_model
from unmask.models.kernels import flash
from unmask.models.model_card import CardFields, card_fields, write_card
from unmask.models.model_paths import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from unmask.models.module_methods import ModuleMethods
from unmask.models.recurrent import read_in_blocks

SHARD = "50GB"  # as in transformers
SAVED_ANYWAY = ("safe_serialization", "save_peft_format", "save_original_format")
UNSAVED = {
    "state_dict": "the weights of the model itself are written",
    "variant": "weights are written as model.safetensors",
    "distributed_checkpoint": "whole weights are written",
    "safe_serialization": "weights are written as safetensors",
    "save_peft_format": "adapters are written as PEFT reads them",
    "save_original_format": "weights are written under the names that transformers publishes",
}
"""Arguments of `save_pretrained` of transformers that do not act here, with the reasons."""


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of one forward pass."""

    ids_BT: Tensor  # token ids, with the mask token at hidden positions
    layout: Layout
    mask: AttentionMask
    index_N: Tensor | None = None  # flat indices into [B * T] of the rows to compute; None: all
    # of hidden tokens in each document or block; None: nothing is hidden, or no time embedding
    fraction_BT: Tensor | None = None
    # of a canvas model, the columns of canvases, first or last; None: there are none
    canvas: range | None = None
    # the mean embeddings [B, K, D] of what was predicted last in these columns; None: nothing was
    soft_BKD: Tensor | None = None
    # in their place the last hidden states [B, K, D] of an earlier pass, and the rows [B] that read them
    earlier: tuple[Tensor, Tensor] | None = None
    # Whether the last layer computes only those rows. For sampling only: another shape changes the last bits,
    # and in training the ratio of a policy to itself must be 1.
    pruned: bool = False


def check_noise(noise: str, p_uniform: float | None, attention: str) -> None:
    """Raise ConfigError for an unknown kind of noise, for a probability that it does not have, and for noise
    of a causal model."""
    if noise not in get_args(NoiseName):
        remedy = f"Use one of {', '.join(get_args(NoiseName))}"
        raise ConfigError(f"unknown noise {noise!r}", where="noise", remedy=remedy)
    if noise != "masked" and attention == "causal":
        remedy = "Use attention: bidirectional or block_causal"
        raise ConfigError(f"{noise} noise in a causal model", where="noise", remedy=remedy)
    if (noise == "hybrid") != (p_uniform is not None):
        what = "needs a probability of random tokens" if noise == "hybrid" else f"has none with {noise} noise"
        remedy = "Give one between 0 and 1, such as 0.1" if noise == "hybrid" else "Leave it out"
        raise ConfigError(what, where="p_uniform", remedy=remedy)
    if p_uniform is not None and not 0 < p_uniform < 1:
        remedy = "Use a number between 0 and 1, such as 0.1"
        raise ConfigError(f"{p_uniform} is not between 0 and 1", where="p_uniform", remedy=remedy)


def _of_canvases(inputs: ForwardInputs) -> dict[str, Any]:
    """The arguments of a canvas model."""
    return {
        "unmask_canvas": inputs.canvas,
        "unmask_soft": inputs.soft_BKD,
        "unmask_earlier": inputs.earlier,
    }


class DiffusionLM(ModuleMethods):
    """A Hugging Face causal language model with an attention pattern, a mask token and a logit shift.

    It is no module, but has methods of its `model` by their names: `eval`, `parameters`, `half`.

    Attributes:
        model: the model (`bind` replaces it by a PEFT or distributed wrapper).
        tokenizer: its tokenizer, which has the mask token.
        attention: "causal", "block_causal" or "bidirectional".
        block_size: the attention block of a block-causal model, else None.
        mask_token_id: the input id at hidden positions.
        expand_token_id, delete_token_id, max_gap: of a model that fills gaps of unknown length, of up to
            max_gap tokens; else None. The two and the mask token are `never_predicted`: their logits are
            -inf.
        eos_token_ids: all tokens that end a text: a completion is cut at the first. The tokenizer's EOS is
            first; it fills canvases.
        logit_shift: whether the output at row i predicts token i + 1 (as in causal models) rather than token
            i.
        causal_context: whether a block-causal model reads finished blocks from left to right, as a causal
            model does, and only the current block in both directions (NBDiff, Tian et al. 2025).
        noise: what stands for tokens that are not known yet: masked, uniform (random tokens) or hybrid
            (`unmask.diffusion.mixing`). Text is generated with masks, unless it is uniform.
        p_uniform: of hybrid noise, the greatest probability of a random token; else None.
        canvas: whether the model is DiffusionGemma, whose blocks are canvases: the first begins where the
            prompt ends, and each step is conditioned on the last prediction
            (`unmask.models.diffusion_gemma`). Its mask token only marks hidden tokens in texts.
        canvas_settings: of such a model, the settings of its generation_config.json for the sampler.
        first_position: the model's number of the first token of a text: 0, except for RoBERTa's kind.
        config: of the unwrapped model.
        quality_head: estimates whether visible tokens are right; None: the model has none.
        padding_idx: the token whose embedding is never trained, in released models that have one
            (docs/models.md); else None.
        flash_attention: whether rows without blocks use FlashAttention 2, on a GPU in 16 bits.
        processor: files of the model's folder that say how it reads images, by name.
        recurrent: whether some layers read from left to right (Gated DeltaNet, Mamba, convolutions).
        cuda_graphs: whether the sampler records its passes as CUDA graphs (docs/generation.md).
    """

    flash_attention = cuda_graphs = False
    processor: dict[str, bytes]

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        attention: AttentionName,
        block_size: int | None,
        mask_token_id: int,
        eos_token_ids: Sequence[int],
        logit_shift: bool,
        causal_context: bool = False,
        time_embedding: bool = False,
        quality_head: bool = False,
        expand_token_id: int | None = None,
        delete_token_id: int | None = None,
        max_gap: int | None = None,
        first_position: int = 0,
        noise: NoiseName = "masked",
        p_uniform: float | None = None,
    ):
        check_pattern(attention, block_size, causal_context)
        model, compile_options = taken_apart(model)
        self.recurrent = read_in_blocks(model)
        self._model: Any = model
        self.tokenizer = tokenizer
        self.attention: AttentionName = attention
        self.block_size = block_size
        self.processor = {}
        self.canvas = bool(canvas_pattern(model.config))
        self.canvas_settings = saved_sampler(model.generation_config) if self.canvas else {}
        self.mask_token_id = mask_token_id
        self.expand_token_id, self.delete_token_id, self.max_gap = expand_token_id, delete_token_id, max_gap
        own = (None if self.canvas else mask_token_id, expand_token_id, delete_token_id)
        self.never_predicted = tuple(token for token in own if token is not None)
        self.eos_token_ids = tuple(eos_token_ids)
        self.logit_shift = logit_shift
        self.causal_context = causal_context
        self.noise: NoiseName = noise
        self.p_uniform = p_uniform
        self.first_position = first_position
        self.config = model.config
        self.padding_idx: int | None = model.get_input_embeddings().padding_idx
        # transformers before 5.24, and code of models for it, name it otherwise
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        self._head = RowSelector.of(model)
        self._last = LastLayer.of(model)
        self._time = add_time_embedding(model) if time_embedding else None
        self.quality_head = add_quality_head(model) if quality_head else None
        self._fraction = HiddenFraction() if self._time is None else self._time.fraction
        self._annealing: tuple[float, int] | None = None
        self._check_noise()
        self.compile_options: dict[str, Any] | None = None
        if compile_options is not None:
            self.compile(**compile_options)
        if not self.stock:
            self.publish_when_saved()
        setattr(model, READ_AS, self.pattern)

    def publish_when_saved(self) -> None:
        """Let the model's own methods save it, and of a model of the Auto classes also call it, as this one
        reads it."""
        adapted = hasattr(self.model, "merge_and_unload")
        base = self.model.get_base_model() if adapted else self.model
        publish_when_saved(base, None if self.stock else self.settings)
        if hasattr(base, "diffusion_lm"):
            base.diffusion_lm = self.bind(base) if adapted else self

    @property
    def model(self) -> Any:
        """The model, or a wrapper of it: PEFT, DDP, FSDP. One that torch.compile returned is compiled in
        place when it is assigned."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model, options = taken_apart(model)
        if options is not None:
            self.compile(**options)

    def __repr__(self) -> str:
        block = f", block_size={self.block_size}" if self.block_size else ""
        return (
            f"DiffusionLM({type(self.model).__name__}, {self.attention}{block}, "
            f"logit_shift={self.logit_shift})"
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights (of a quantized model, of those that are not quantized)."""
        return next(weight.dtype for weight in self.model.parameters() if weight.is_floating_point())

    @property
    def autoregressive(self) -> bool:
        """Whether every row predicts the next token from the clean ones before it: one pass gives the
        likelihood of a sequence."""
        return self.attention == "causal" and self.logit_shift

    @property
    def stock(self) -> bool:
        """Whether transformers reads the model as it is: an ordinary causal one, or DiffusionGemma."""
        return self.canvas or (self.autoregressive and not self.has_time_embedding)

    @property
    def has_time_embedding(self) -> bool:
        """Whether the model has an embedding of the fraction of hidden tokens."""
        return self._time is not None

    @property
    def log_prob_dtype(self) -> torch.dtype:
        """The dtype of logits and log-probabilities: float32, or float64 for a float64 model."""
        return torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token, the only one that fills canvases."""
        return self.tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int:
        """The id at padding. Any valid one serves, since no token attends to padding."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else 0

    @property
    def vocab_size(self) -> int:
        """The rows of the embedding table."""
        return self.config.get_text_config().vocab_size

    @property
    def context_length(self) -> int | None:
        """The longest row that the model supports; None: its config does not say."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return positions and positions - self.first_position

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that `unmask.load` reads from the model's config."""
        own = {
            "eos_token_ids": list(self.eos_token_ids),
            "padding_idx": self.padding_idx,
            "max_gap": self.max_gap,
        }
        return self.pattern | own | {"quality_head": self.quality_head is not None}

    @property
    def pattern(self) -> dict[str, str | float | bool | None]:
        """The settings that log-probabilities depend on."""
        return {
            "attention": self.attention,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "logit_shift": self.logit_shift,
            "causal_context": self.causal_context,
            "time_embedding": self.has_time_embedding,
            "expand_token_id": self.expand_token_id,
            "delete_token_id": self.delete_token_id,
            "noise": self.noise,
            "p_uniform": self.p_uniform,
        }

    def set_chat_template(self, template: str, *, ends: bool = True) -> None:
        """Set the chat template: a text, or Unmask's `simple`. Unless `ends` is False, the token that ends
        turns becomes an end token."""
        self.tokenizer.chat_template = TEMPLATES.get(template, template)
        if ends:
            self.eos_token_ids = eos_first(
                self.tokenizer, {*self.eos_token_ids, *as_ids(turn_end(self.tokenizer))}
            )
            set_end_tokens(self.model, self.eos_token_ids)
            if not self.stock:
                self.publish_when_saved()

    def bind(self, model: nn.Module) -> DiffusionLM:
        """The same settings with a wrapper or a deep copy of the model."""
        bound = copy.copy(self)
        bound.model, bound.quality_head = (
            model,
            quality_head_of(model) if self.quality_head is not None else None,
        )
        return bound

    def select_rows_of(self, *heads: nn.Module) -> None:
        """Make these the heads that compute the selected rows only: adapters can be around, or in the place
        of, the first one."""
        for each in heads:
            self._head.follow(each)

    def compile(self, **options: Any) -> None:
        """Compile the model as it is now, with these options of torch.compile: one graph for all lengths and
        numbers of rows."""
        compile_model(self.model, options)
        self.compile_options = options

    def compile_as(self, other: DiffusionLM) -> DiffusionLM:
        """This model, compiled with the options of another one if that is compiled."""
        if other.compile_options is not None:
            self.compile(**other.compile_options)
        return self

    def as_causal(self) -> DiffusionLM:
        """The same weights as a causal model."""
        causal = copy.copy(self)
        causal.attention, causal.block_size, causal.logit_shift = "causal", None, True
        causal.causal_context, causal._time, causal._fraction, causal._annealing = (
            False,
            None,
            HiddenFraction(),
            None,
        )
        causal.noise, causal.p_uniform = "masked", None
        return causal

    def with_noise(self, noise: NoiseName | None, p_uniform: float | None = None) -> DiffusionLM:
        """The same model with another kind of noise; None: as it is. Raises ConfigError if it cannot have
        it."""
        if noise is None:
            return self
        other = copy.copy(self)
        other.noise, other.p_uniform = noise, p_uniform
        other._check_noise()
        if not other.stock:
            other.publish_when_saved()
        return other

    def _check_noise(self) -> None:
        check_noise(self.noise, self.p_uniform, self.attention)
        if self.canvas and self.noise != "uniform" and self.attention != "causal":
            what = f"{self.noise} noise in a model of canvases of random tokens"
            raise ConfigError(what, where="noise", remedy="Leave it out, or use noise: uniform")
        if self.noise != "masked" and (self.has_time_embedding or self.quality_head or self.max_gap):
            raise ConfigError(
                "a time embedding, a quality head and gaps know which tokens are hidden, which random tokens "
                "do not show",
                where="noise",
                remedy="Use noise: masked, or leave them out",
            )

    def annealed(self, visible_fraction: float, key: int) -> DiffusionLM:
        """The same model in which each key after a query is also visible with this probability (DiffuLLaMA,
        Gong et al. 2025). `key` selects them."""
        annealed = copy.copy(self)
        annealed._annealing = (visible_fraction, key)
        return annealed

    def frozen_copy(self) -> DiffusionLM:
        """An independent copy in eval mode without gradients: a reference policy."""
        return self.bind(copy.deepcopy(self.model).eval().requires_grad_(False)).compile_as(self)

    def logits(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        rows_BT: Tensor | None = None,
        hidden_BT: Tensor | None = None,
        first_B: Tensor | None = None,
        soft_BTD: Tensor | None = None,
    ) -> Tensor:
        """Logits aligned so that row i predicts token i.

        Args:
            input_ids_BT: token ids, with `mask_token_id` at the hidden positions.
            attention_mask_BT: 1 is real, 0 padding; packed rows number their documents 1, 2, ...
            rows_BT: boolean; the rows to compute, in row-major order. None: all.
            hidden_BT: boolean; the hidden positions, for a model with a causal context or a time embedding.
                None: nowhere.
            first_B: of a canvas model, the column where the canvases of each row begin; None: 0.
            soft_BTD: of a canvas model, the mean embeddings of what was predicted last (`mean_embeddings`);
                None: nothing was.

        Raises:
            ModelError: a row is too long, or hidden_BT is missing for a model that needs it.

        Returns:
            [B, T, V], or [N, V] at the chosen rows; float32 (float64 for a float64 model). The mask token has
            -inf. Row 0 of a shifted model has no predecessor and is undefined.
        """
        if (
            hidden_BT is None
            and (self.causal_context or self.has_time_embedding)
            and (input_ids_BT == self.mask_token_id).any()
        ):
            raise ModelError(
                "the model reads the current block differently from the others",
                where="hidden_BT",
                remedy="Give hidden_BT (all False where the mask token is part of the text)",
            )
        target_BT = None if rows_BT is None else rows_BT.bool()
        if self.canvas and self.attention != "causal":  # every token is one of a canvas after clean ones
            every_B1T = torch.ones_like(input_ids_BT, dtype=torch.bool)[:, None]
            target_B1T = every_B1T if target_BT is None else target_BT[:, None]
            column_BT = torch.arange(input_ids_BT.shape[1], device=input_ids_BT.device).expand_as(
                input_ids_BT
            )
            later_BT = None if first_B is None else column_BT >= first_B[:, None]
            known = self.layout_and_mask(input_ids_BT, attention_mask_BT, 1, later_BT)
            inputs = self.stacked_inputs(
                *(input_ids_BT, every_B1T, None, target_B1T), known=known, seen_BMT=input_ids_BT[:, None]
            )
            inputs = replace(inputs, soft_BKD=soft_BTD)
        else:
            inputs = self.noised_inputs(input_ids_BT, attention_mask_BT, target_BT, hidden_BT)
        # a backward pass may run the layer again
        logits = self.forward(replace(inputs, pruned=not torch.is_grad_enabled()))
        if rows_BT is None and self.logit_shift:
            return torch.cat([logits[:, :1], logits[:, :-1]], 1)
        return (
            logits if inputs.canvas is None or rows_BT is not None else logits.view(*input_ids_BT.shape, -1)
        )

    def conditioned(self, inputs: ForwardInputs, is_on_B: Tensor) -> ForwardInputs:
        """The inputs of a canvas model, conditioned in some rows [B] on what a pass without gradient predicts
        for its canvases, the first columns."""
        ids_BT, canvas = inputs.ids_BT, inputs.canvas
        assert canvas is not None and canvas.start == 0
        at_BK = torch.arange(ids_BT.numel(), device=ids_BT.device).view_as(ids_BT)[:, : canvas.stop]
        with torch.no_grad():
            hidden_ND = self.hidden_states(replace(inputs, index_N=at_BK.flatten()))
        return replace(inputs, earlier=(hidden_ND.view(*at_BK.shape, -1), is_on_B))

    def mean_embeddings(self, prob_NV: Tensor) -> Tensor:
        """The mean embeddings [N, D] of tokens with these probabilities, in a canvas model."""
        modules = self.model.modules()  # read up to the wrapped model: every denoising step asks
        model = next(each for each in modules if isinstance(each, DiffusionGemmaForBlockDiffusion))
        return model.mean_embeddings(prob_NV)

    def noised_inputs(
        self,
        ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        target_BT: Tensor | None = None,
        hidden_BT: Tensor | None = None,
        known: tuple[Layout, AttentionMask] | None = None,
    ) -> ForwardInputs:
        """The inputs of one pass over rows that mix hidden and visible tokens. Arguments as for `logits`;
        `target_BT` is `rows_BT`, or the flat indices of its tokens. `known`: the `layout_and_mask` of these
        rows, if they are."""
        layout, mask = known or self.layout_and_mask(ids_BT, attention_mask_BT)
        fraction_BT = None
        if hidden_BT is not None and (self.causal_context or self._time is not None):
            fraction_BT = hidden_fraction(hidden_BT, layout, self.attention, self.block_size)
            if self.causal_context:  # current blocks are read in both directions
                layout = replace(layout, copy_BT=(fraction_BT > 0).long())
                mask = replace(
                    make_mask(self.attention, self.block_size, layout, layout, causal_context=True),
                    recurrence=mask.recurrence,
                )
        index_N = None if target_BT is None else flat_indices(target_BT)
        if index_N is not None and self.logit_shift:
            index_N = (index_N - 1).clamp_min(0)
        return ForwardInputs(ids_BT, layout, mask, index_N, fraction_BT)

    def stacked_inputs(
        self,
        clean_BT: Tensor,
        hidden_BMT: Tensor,
        attention_mask_BT: Tensor | None,
        target_BMT: Tensor,
        causal_target_BT: Tensor | None = None,
        known: tuple[Layout, AttentionMask] | None = None,
        seen_BMT: Tensor | None = None,
    ) -> ForwardInputs:
        """The inputs of one pass over `[x_t ; ... ; x_0]`: M noised copies of each row, then its clean
        tokens. One pass predicts all blocks of a block-causal model.

        Each block of a copy is predicted from itself and the clean blocks before it, as in cached generation.
        With a logit shift the last CLEAN row before a block predicts its first token.

        Args:
            clean_BT: the clean tokens; `attention_mask_BT` as for `logits`.
            hidden_BMT: True at the hidden positions of each copy.
            target_BMT: the tokens of the copies to predict, in row-major order; boolean, or their flat
                indices.
            causal_target_BT: with a causal context, tokens that the causal model predicts from earlier clean
                ones; their rows come last.
            known: the `layout_and_mask` of these copies, if they are.
            seen_BMT: the tokens of the copies; None: the mask token at the hidden positions.
        """
        copies, length = hidden_BMT.shape[1:]
        noisy_BMT = seen_BMT
        if noisy_BMT is None:
            noisy_BMT = torch.where(hidden_BMT, self.mask_token_id, clean_BT[:, None])
        layout, mask = known or self.layout_and_mask(clean_BT, attention_mask_BT, copies)
        index_N = stacked_rows(
            flat_indices(target_BMT), layout, copies, self.block_size, logit_shift=self.logit_shift
        )
        if causal_target_BT is not None:
            assert self.causal_context, "in other models a clean row attends to the tokens after it"
            target_C, width = flat_indices(causal_target_BT), (copies + 1) * length
            index_N = torch.cat(
                [index_N, target_C // length * width + copies * length + (target_C % length - 1).clamp_min(0)]
            )
        fraction_BT = None
        if self._time is not None:
            hidden_BT = torch.cat([hidden_BMT.flatten(1), torch.zeros_like(clean_BT, dtype=torch.bool)], 1)
            fraction_BT = hidden_fraction(hidden_BT, layout, self.attention, self.block_size)
        canvas = range(copies * length) if self.canvas else None
        ids_BT = torch.cat([noisy_BMT.flatten(1), clean_BT], 1)
        return ForwardInputs(ids_BT, layout, mask, index_N, fraction_BT, canvas)

    def forward(self, inputs: ForwardInputs, cache: Cache | None = None) -> Tensor:
        """The logits of one forward pass, before the logit shift is undone: [B, T, V], or [N, V] at the
        selected rows. Keys and values are written to the cache, if there is one."""
        with self._passing(inputs):
            out = self.run_model(inputs, cache)
        count = None if inputs.index_N is None else len(inputs.index_N)
        assert count is None or out.shape[:2] == (1, count), (
            "another output head than the expected one was called"
        )
        logits = (out if count is None else out[0]).to(self.log_prob_dtype)
        for token in self.never_predicted:  # one at a time: a GPU waits for a list
            logits.select(-1, token).fill_(-torch.inf)
        return logits

    def log_probs(self, inputs: ForwardInputs, target_N: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """log softmax(logits / temperature) [N] of the targets, in nats, at the selected rows (or [N, J] of J
        targets per row). `temperature`: of all rows, or of each [N]."""
        if isinstance(temperature, Tensor):
            return self.reduced(inputs, Reduction(tempered_log_probs_at, (target_N, temperature)))[0]
        return self.reduced(inputs, Reduction(log_probs_at, (target_N,), temperature))[0]

    def reduced(self, inputs: ForwardInputs, reduction: Reduction) -> tuple[Tensor, ...]:
        """What is computed from the logits of each selected row, in chunks of rows, so that memory does not
        grow with the vocabulary."""
        assert inputs.index_N is not None
        if len(inputs.index_N) * self.vocab_size <= head.logits_at_once(inputs.index_N.device):
            return reduction.of(self.forward(inputs))
        with self._passing(inputs, reduction, first_only=True) as rows:
            return rows.result(self.run_model(inputs)[0, 0])

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        """The hidden states [N, D] that the head reads at the selected rows."""
        with self.capturing() as seen, self._passing(inputs, first_only=True):
            self.run_model(inputs)
        return seen[0]

    def capturing(self) -> AbstractContextManager[list[Tensor]]:
        """Collect the hidden states [N, D] that the head reads at the selected rows, one tensor per pass."""
        return self._head.capturing()

    @contextmanager
    def calling_all_modules(self) -> Iterator[None]:
        """Let every pass call the same modules, for processes that synchronize at each module."""
        self._fraction.in_every_pass = True
        try:
            yield
        finally:
            self._fraction.in_every_pass = False

    @contextmanager
    def _passing(
        self, inputs: ForwardInputs, reduction: Reduction | None = None, *, first_only: bool = False
    ) -> Iterator[RowSelector]:
        """Set the hooks of the model for the pass."""
        rows = self._head
        rows.index_N, rows.reduction, rows.first_only, rows.forbidden = (
            inputs.index_N,
            reduction,
            first_only,
            self.never_predicted,
        )
        if inputs.pruned and inputs.index_N is not None:
            row_N, column_N = (
                inputs.index_N // inputs.ids_BT.shape[1],
                inputs.index_N % inputs.ids_BT.shape[1],
            )
            self._last.at = row_N, column_N if inputs.canvas is None else column_N - inputs.canvas.start
        self._fraction.value_BT = inputs.fraction_BT
        try:
            yield rows
        finally:
            rows.clear()
            self._last.at = self._fraction.value_BT = None

    def run_model(self, inputs: ForwardInputs, cache: Cache | None = None) -> Tensor:
        """What one forward pass of the network returns as logits."""
        return self.model(
            input_ids=inputs.ids_BT,
            position_ids=self.first_position + inputs.layout.position_BT.expand(len(inputs.ids_BT), -1),
            use_cache=cache is not None,
            unmask_mask=inputs.mask,
            **(_of_canvases(inputs) if self.canvas else {}),
            **{self._cache_name: cache},
        ).logits

    @classmethod
    def from_pretrained(cls, path_or_id: str | pathlib.Path, **arguments: Any) -> DiffusionLM:
        """`unmask.load`, which has all arguments."""
        from unmask.models.load import load

        return load(path_or_id, **arguments)

    def save_pretrained(
        self,
        save_directory: str | pathlib.Path,
        *,
        max_shard_size: int | str = SHARD,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        is_main_process: bool = True,
        **named: Any,
    ) -> None:
        """`save`, by its name in transformers. `push_to_hub` also uploads the model, as `repo_id` or by the
        name of the folder; `named`: arguments of the method `push_to_hub`. Unless `is_main_process`, nothing
        is written.

        Raises:
            ConfigError: an argument of transformers that does not act here, or an unknown one.
        """
        for name, reason in UNSAVED.items():
            if named.pop(name, None) not in (None, name in SAVED_ANYWAY):
                remedy = "Leave it out, or give it to lm.model.save_pretrained"
                raise ConfigError(reason, where=name, remedy=remedy)
        fields = CardFields.__dataclass_fields__.keys()
        known = {*signature(self.push_to_hub).parameters, *fields} - {"card"}
        for name in named:
            require_known(name, known, "argument", where="save_pretrained")
        if not is_main_process:
            return
        card = CardFields(**{name: named[name] for name in named.keys() & fields})
        self.save(save_directory, max_shard_size=max_shard_size, card=card)
        if push_to_hub:
            name = repo_id or pathlib.Path(save_directory).absolute().name
            self.push_to_hub(name, max_shard_size=max_shard_size, **named)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model",
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = SHARD,
        merge_adapters: bool = False,
        **card: Any,
    ) -> CommitInfo:
        """Upload the model, its tokenizer and its card to the hub, as models of transformers do.

        Args:
            repo_id: owner/name, or a name of the owner of the token. The repository is created if need be.
            commit_message, commit_description, private, token, revision, create_pr, max_shard_size: as in
                transformers.
            merge_adapters: upload the whole model; False: of a model with adapters, these.
            card: license, tags, language, dataset and further fields of the card
                (`transformers.Trainer.create_model_card`).
        """
        from unmask.models.adapters import merged

        fields = card_fields(repo_id, card)
        whole = merged(self) if merge_adapters and hasattr(self.model, "merge_and_unload") else self
        name = hf_api().create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        with TemporaryDirectory() as folder:
            whole.save(folder, max_shard_size=max_shard_size, card=replace(fields, repo_id=name))
            found: Any = upload_model(
                folder,
                name,
                revision=revision,
                token=token,
                commit_message=commit_message,
                commit_description=commit_description,
                create_pr=create_pr,
            )
        return found

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        input_ids: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Prompts and their completions as token ids, as models of transformers write them
        (`unmask.generation.token_ids.generate_ids`, which has all arguments). `unmask.generate` takes texts,
        and gives steps and log-probabilities besides."""
        from unmask.generation.token_ids import generate_ids

        prompts = inputs if input_ids is None else input_ids
        return generate_ids(self, prompts, generation_config=generation_config, **arguments)

    def to(self, *arguments: Any, **named: Any) -> DiffusionLM:
        """Move the model to a device, or its weights to a type, as `torch.nn.Module.to` does."""
        self.model.to(*arguments, **named)
        return self

    def publish_config(self, folder: str | pathlib.Path) -> None:
        """Give the config.json of this model in a folder the type of a diffusion model, unless it is a causal
        model, which every library reads as it is."""
        if not self.stock:
            publish_config(folder)

    def save(
        self, path: str | pathlib.Path, *, max_shard_size: int | str = SHARD, card: CardFields | None = None
    ) -> None:
        """Write config, tokenizer, weights (safetensors) and a model card; `unmask.load` restores the model
        bit for bit. Of a model with adapters (of PEFT, or its own) only these are written, and their base is
        read again from where it was. `max_shard_size`: of a file of weights, in bytes or as "5GB"; `card`:
        further fields of the card."""
        setattr(self.model.config, SETTINGS_KEY, self.settings)
        if hasattr(self.model, "merge_and_unload"):
            self.model.save_pretrained(str(path), save_embedding_layers=False)
            self.model.config.save_pretrained(path)
        else:
            accept_generation_config(self.model.generation_config)
            if getattr(self.model, "_hf_peft_config_loaded", False):  # by its own `add_adapter`
                self.model.config.save_pretrained(path)
            else:
                for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):  # of an earlier save, which would be read
                    pathlib.Path(path, name).unlink(missing_ok=True)
            type(self.model).save_pretrained(self.model, path, max_shard_size=max_shard_size)
        self.publish_config(path)
        self.write_processor(path)
        share(path)
        self.tokenizer.save_pretrained(path)
        write_card(self, path, card)

    def write_processor(self, path: str | pathlib.Path) -> None:
        """Write the settings with which images were read before the model was loaded."""
        for name, content in self.processor.items():
            pathlib.Path(path, name).write_bytes(content)

    def clear_mask_cache(self) -> None:
        """Empty the cache of attention masks, which all models share (`unmask.clear_mask_cache`)."""
        clear_mask_cache()

    def layout_and_mask(
        self,
        like_BT: Tensor,
        attention_mask_BT: Tensor | None,
        copies: int = 0,
        canvas_BT: Tensor | None = None,
    ) -> tuple[Layout, AttentionMask]:
        """The layout of rows of this shape, after noised copies of them, and their attention mask: the same
        for all passes over them. `canvas_BT`: of a canvas model, the tokens that may be hidden, with the
        first of which canvases begin; None: all."""
        length, device = like_BT.shape[1], like_BT.device
        document_BT = attention_mask_BT
        if document_BT is None:
            document_BT = torch.ones(1, length, dtype=torch.long, device=device)
        layout = Layout.of(document_BT)
        if self.canvas and self.block_size:
            canvas_BT = torch.ones_like(like_BT, dtype=torch.bool) if canvas_BT is None else canvas_BT
            layout = layout.with_canvases(canvas_BT, self.block_size)
        context = self.context_length or length
        if length > context and (longest := int(layout.position_BT.max()) + 1) > context:  # of a document
            raise ModelError(
                f"{longest} tokens, but the model's context is {context}",
                where="input_ids",
                remedy="Shorten the prompt or max_new_tokens",
            )
        layout = layout.with_noised_copies(copies) if copies else layout
        if attention_mask_BT is None and not self.canvas:
            mask = unpadded_mask(
                self.attention,
                self.block_size,
                length,
                copies,
                device,
                self.causal_context,
                self.recurrent,
            )
        else:
            mask = make_mask(
                *(self.attention, self.block_size, layout, layout),
                causal_context=self.causal_context,
                windows=self.canvas,
            )
            if self.recurrent:
                mask = replace(mask, recurrence=layout.recurrence(self.block_size, copies))
        if self.flash_attention and self.attention != "block_causal":
            mask = replace(
                mask,
                documents=flash.documents(
                    layout.document_BT.expand(len(like_BT), -1), causal=self.attention == "causal"
                ),
            )
        return layout, mask if self._annealing is None else mask.annealed(*self._annealing)
