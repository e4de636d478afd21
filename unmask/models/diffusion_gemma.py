"""DiffusionGemma of transformers as a DiffusionLM reads it: committed text and canvases in one pass.

A causal encoder reads the committed text, and a bidirectional decoder the canvases, with the encoder's keys.
Their weights are tied, and adapters on them are apart. The decoder also reads the mean embedding of what the
last denoising step has predicted (self-conditioning).

Shapes: B batch, T tokens of a row, C committed ones, K those of canvases, D hidden width, N rows of logits, V
vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import (
    DiffusionGemmaConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import DiffusionGemmaForBlockDiffusion as Published
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutput

from unmask.config.sampler import CANVAS_FIELDS
from unmask.models.attention import AttentionMask, LayerKeys
from unmask.models.kernels.log_softmax import at_least_float32

ADAPTED = (
    r"model\.(encoder\.language_model|decoder)\.layers\.\d+\."
    r"(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
)
"""The linear layers that get adapters, as in TRL: attention and the dense MLP of both stacks."""
TOWERS = r"model\.encoder\.(?!language_model\b).*"
"""The modules that are not of the text."""


class DiffusionGemmaForBlockDiffusion(Published):
    """The model under the name that config.json has, with the forward pass of `DiffusionLM.run_model`.

    Its vision tower is not read, and is saved as it was loaded.
    """

    @torch.compiler.disable(recursive=False)  # ranges of symbolic integers break it; the layers are compiled
    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        unmask_mask: AttentionMask | None = None,
        unmask_canvas: range | None = None,
        unmask_soft: Tensor | None = None,
        unmask_earlier: tuple[Tensor, Tensor] | None = None,
        **published: Any,
    ) -> Any:
        """Logits [B, T, V], with a soft cap, in float32.

        Args:
            unmask_mask: the keys of each query, all columns of the cache or all tokens of the pass; None: the
                forward pass of transformers.
            unmask_canvas: the columns of canvases, the first or the last ones; None: there are none.
            unmask_soft: the mean embeddings [B, K, D] of what was predicted last; None: nothing was.
            unmask_earlier: in its place the last hidden states [B, K, D] of an earlier pass, and which rows
                are conditioned on what they predict [B]. The gradient stops there, but not at the embeddings.
            published: arguments of transformers' class, of which Unmask's pass reads the cache.
        """
        if unmask_mask is None:
            return super().forward(input_ids, position_ids=position_ids, **published)
        # so `DiffusionLM.run_model` names it where, as here, the signature has neither name
        cache: Cache | None = published.get("past_key_values")
        assert input_ids is not None and position_ids is not None
        columns = range(input_ids.shape[1])
        canvas = range(0) if unmask_canvas is None else unmask_canvas
        first = bool(canvas) and canvas.start == 0
        clean = columns[len(canvas) :] if first else columns[: len(columns) - len(canvas)]
        if unmask_earlier is not None:
            unmask_soft = self._predicted(*unmask_earlier)
        kept: dict[int, tuple[Tensor, Tensor]] = {}

        def keep(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            kept[layer] = keys, values
            return keys, values

        def after(keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
            if layer not in kept:
                return keys, values
            return torch.cat([kept[layer][0], keys], 2), torch.cat([kept[layer][1], values], 2)

        parts: list[Tensor] = []
        for own, own_keys in ((clean, keep), (canvas, after)):
            if not own:
                continue
            keys: LayerKeys = own_keys
            if cache is not None:
                keys, mask = cache.part(own), unmask_mask.part(own)
            else:
                mask = unmask_mask.part(
                    own, *([clean] if clean else []), *([canvas] if own is canvas else [])
                )
            rows = slice(own.start, own.stop)
            parts.append(
                self._read(input_ids[:, rows], position_ids[:, rows], mask, keys, unmask_soft, own is canvas)
            )
        hidden_BTD = torch.cat(parts[::-1] if first else parts, 1)
        return CausalLMOutput(logits=self._capped(self.lm_head(hidden_BTD)))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.final_logit_softcapping
        return torch.tanh(at_least_float32(logits) / cap) * cap

    def _predicted(self, hidden_BKD: Tensor, is_on_B: Tensor) -> Tensor:
        """The mean embeddings [B, K, D] of what hidden states predict, 0 in rows that are not on. They are
        computed row by row, and again for the gradient."""

        def of_row(hidden_1KD: Tensor) -> Tensor:
            with torch.no_grad():
                # without the hooks of the head, which select rows of the present pass
                prob_KV = self._capped(self.lm_head.forward(hidden_1KD[0])).softmax(-1)
            return self.mean_embeddings(prob_KV)

        rows = [
            checkpoint(of_row, hidden_1KD, use_reentrant=False, preserve_rng_state=False)
            for hidden_1KD in hidden_BKD.split(1)
        ]
        return torch.stack(rows) * is_on_B[:, None, None]

    def _read(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        mask: AttentionMask,
        keys: LayerKeys,
        soft_BKD: Tensor | None,
        is_canvas: bool,
    ) -> Tensor:
        """The last hidden states [B, T, D] of committed text, or of canvases."""
        stack: Any = self.model.decoder if is_canvas else self.model.encoder.language_model
        hidden_BTD = stack.embed_tokens(ids_BT)
        if is_canvas:
            soft_BKD = torch.zeros_like(hidden_BTD) if soft_BKD is None else soft_BKD.to(hidden_BTD.dtype)
            hidden_BTD = stack.self_conditioning(hidden_BTD, soft_BKD)
        rotary = {kind: stack.rotary_emb(hidden_BTD, position_BT, kind) for kind in stack.unique_layer_types}
        kinds = self.config.text_config.layer_types
        for layer, twin, kind in zip(stack.layers, self.model.decoder.layers, kinds, strict=True):
            read = partial(
                layer,
                position_embeddings=rotary[kind],
                attention_mask=None,
                unmask_mask=mask,
                unmask_keys=keys,
            )
            if twin.gradient_checkpointing and twin.training and not is_canvas:
                # transformers checkpoints the layers of the decoder alone
                read = partial(twin._gradient_checkpointing_func, read)
            hidden_BTD = read(hidden_BTD)
        return stack.norm(hidden_BTD)

    def mean_embeddings(self, prob_NV: Tensor) -> Tensor:
        """The mean embeddings [N, D] of tokens with these probabilities."""
        table = self.model.decoder.embed_tokens
        return prob_NV.to(table.weight.dtype) @ table.weight * table.embed_scale.to(table.weight.dtype)


def canvas_pattern(config: PretrainedConfig) -> dict[str, Any]:
    """The settings of a DiffusionLM that a DiffusionGemma has; {}: the config is another model's."""
    if not isinstance(config, DiffusionGemmaConfig):
        return {}
    return {
        "attention": "block_causal",
        "block_size": config.canvas_length,
        "logit_shift": False,
        "causal_context": True,
        "noise": "uniform",
        "padding_idx": config.text_config.pad_token_id,
    }


def prepare(model: PreTrainedModel) -> None:
    """Let a DiffusionGemma, also one that transformers loaded, take the arguments of `DiffusionLM.run_model`,
    and leave what is not of the text as it is."""
    if type(model) is Published:
        model.__class__ = DiffusionGemmaForBlockDiffusion
    encoder: Any = model.model.encoder
    for name, part in encoder.named_children():
        if name != "language_model":
            part.requires_grad_(False)


def saved_sampler(config: GenerationConfig) -> dict[str, Any]:
    """The settings of the sampler that a model's generation config has, by Unmask's names."""
    found = {name: getattr(config, name, None) for name in CANVAS_FIELDS}
    found["entropy_bound"] = getattr(getattr(config, "sampler_config", None), "entropy_bound", None)
    return {name: value for name, value in found.items() if value is not None}
