"""DiffusionLM: a causal language model of transformers, read as a diffusion language model.

Shapes: B batch, T tokens, V vocabulary, D hidden width, N rows asked for.
"""

from __future__ import annotations

import copy
import hashlib
import pathlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from unmask.errors import ModelError
from unmask.models.attention import AttentionMask, Layout, Pattern, check_pattern, make_mask, unpadded_mask

SETTINGS_KEY = "unmask"


class RowSelector:
    """Pre-hook of the output head that keeps only the rows asked for, so that no other logits are computed.

    It works inside any wrapper (DDP, PEFT, FSDP) and leaves what a model does after its head (soft caps, scaling) alone. All
    copies of a head share one selector: PEFT trains a deep copy of a head in `modules_to_save`.
    """

    def __init__(self) -> None:
        self.index_N: Tensor | None = None

    def __call__(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.index_N is None:
            return None
        hidden_BTD = args[0]
        return (hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[self.index_N][None],)

    def __deepcopy__(self, memo: dict) -> RowSelector:
        return self

    @classmethod
    def of(cls, model: PreTrainedModel) -> RowSelector:
        """The selector of this model's head, made on first use."""
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError("the model has no output head", where=type(model).__name__, remedy="Load a causal language model")
        for hook in head._forward_pre_hooks.values():
            if isinstance(hook, cls):
                return hook
        selector = cls()
        head.register_forward_pre_hook(selector)
        return selector


class DiffusionLM:
    """A Hugging Face causal language model with an attention pattern, a mask token and a logit shift.

    Attributes:
        model: the model (a PEFT or distributed wrapper of it is bound with `bind`).
        tokenizer: its tokenizer, which has the mask token.
        attention: "causal", "block_causal" or "bidirectional".
        block_size: the attention block of a block-causal model, else None.
        mask_token_id: the id that stands at hidden positions in the input; it is never predicted.
        logit_shift: whether the output at row i predicts token i + 1 (as in causal models) rather than token i.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        attention: Pattern,
        block_size: int | None,
        mask_token_id: int,
        logit_shift: bool,
    ):
        check_pattern(attention, block_size)
        self.model: Any = model  # the model itself, or a wrapper of it: PEFT, DDP, FSDP
        self.tokenizer = tokenizer
        self.attention: Pattern = attention
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        self.logit_shift = logit_shift
        self.config = model.config
        self._rows = RowSelector.of(model)

    def __repr__(self) -> str:
        block = f", block_size={self.block_size}" if self.block_size else ""
        return f"DiffusionLM({type(self.model).__name__}, {self.attention}{block}, logit_shift={self.logit_shift})"

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def autoregressive(self) -> bool:
        """Whether every row predicts the next token from the clean ones before it: one pass scores a whole sequence."""
        return self.attention == "causal" and self.logit_shift

    @property
    def score_dtype(self) -> torch.dtype:
        """Of logits and scores: float32, or float64 for a float64 model (proofs and golden tests)."""
        return torch.float64 if next(self.model.parameters()).dtype == torch.float64 else torch.float32

    @property
    def eos_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int:
        """What stands at padding: any valid id, as padding is never attended."""
        pad = self.tokenizer.pad_token_id
        return pad if pad is not None else 0

    @property
    def context_length(self) -> int | None:
        """The longest row the model was made for, or None where its config does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def settings(self) -> dict[str, str | int | bool | None]:
        """What the model's config must remember for `unmask.load`."""
        return {
            "attention": self.attention,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "logit_shift": self.logit_shift,
        }

    def bind(self, model: nn.Module) -> DiffusionLM:
        """The same recipe over a wrapper or a deep copy of the model."""
        bound = copy.copy(self)
        bound.model = model
        return bound

    def as_causal(self) -> DiffusionLM:
        """The same weights read as the causal model that they were."""
        causal = copy.copy(self)
        causal.attention, causal.block_size, causal.logit_shift = "causal", None, True
        return causal

    def frozen_copy(self) -> DiffusionLM:
        """An independent copy in eval mode that takes no gradients: a reference policy."""
        return self.bind(copy.deepcopy(self.model).eval().requires_grad_(False))

    def logits(self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None = None, rows_BT: Tensor | None = None) -> Tensor:
        """Logits aligned so that row i predicts token i.

        Args:
            input_ids_BT: token ids, with `mask_token_id` at the hidden positions.
            attention_mask_BT: 1 is real, 0 padding; packed rows number their documents 1, 2, ...
            rows_BT: boolean; the rows to compute, in row-major order. None: all.

        Returns:
            [B, T, V], or [N, V] at the chosen rows; float32 (float64 for a float64 model). The mask token has -inf. Row 0
            of a shifted model has no predecessor and is undefined.
        """
        layout, mask = self._layout(input_ids_BT, attention_mask_BT, noised_copy=False)
        if rows_BT is None:
            logits_BTV = self.forward(input_ids_BT, layout, mask)
            return torch.cat([logits_BTV[:, :1], logits_BTV[:, :-1]], 1) if self.logit_shift else logits_BTV
        index_N = rows_BT.flatten().nonzero().squeeze(1)
        return self.forward(input_ids_BT, layout, mask, index_N=(index_N - 1).clamp_min(0) if self.logit_shift else index_N)

    def noised_logits(self, noisy_BT: Tensor, clean_BT: Tensor, attention_mask_BT: Tensor | None, rows_BT: Tensor) -> Tensor:
        """Logits of a block-causal model at rows of the noised half of `[x_t ; x_0]`: one pass serves all blocks.

        Each block of x_t is predicted from itself and the clean blocks before it, as cached generation does it. With a
        logit shift the first row of a block is predicted by the last CLEAN row before it.

        Returns:
            [N, V] at the chosen rows of the noised half, row-major.
        """
        layout, mask = self._layout(clean_BT, attention_mask_BT, noised_copy=True)
        length = clean_BT.shape[1]
        batch_N, column_N = rows_BT.nonzero(as_tuple=True)
        if self.logit_shift:
            position_N = layout.position_BT.expand(len(clean_BT), -1)[batch_N, column_N]
            after_clean_N = position_N % (self.block_size or 1) == 0 if self.attention != "bidirectional" else position_N < 0
            column_N = (column_N - 1).clamp_min(0) + torch.where(after_clean_N, length, 0)
        return self.forward(torch.cat([noisy_BT, clean_BT], 1), layout, mask, index_N=batch_N * 2 * length + column_N)

    def forward(
        self, input_ids_BT: Tensor, layout: Layout, mask: AttentionMask, *, index_N: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """One forward pass, unaligned: [B, T, V], or [N, V] at flat indices into [B * T]. A cache is appended to."""
        self._rows.index_N = index_N
        try:
            out = self.model(
                input_ids=input_ids_BT,
                position_ids=layout.position_BT.expand(input_ids_BT.shape[0], -1),
                past_key_values=cache,
                use_cache=cache is not None,
                unmask_mask=mask,
            )
        finally:
            self._rows.index_N = None
        assert index_N is None or out.logits.shape[:2] == (1, len(index_N)), "the output head is not the one that the rows were asked of"
        logits = out.logits if index_N is None else out.logits[0]
        logits = logits.to(self.score_dtype)
        logits[..., self.mask_token_id] = -torch.inf
        return logits

    def save(self, path: str | pathlib.Path) -> None:
        """Write config, tokenizer and weights (safetensors only); `unmask.load` gives the same model back, bit for bit.

        Of a model with adapters only these are written; merge them first (as the trainers do)."""
        setattr(self.model.config, SETTINGS_KEY, self.settings)
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def _layout(self, input_ids_BT: Tensor, attention_mask_BT: Tensor | None, *, noised_copy: bool) -> tuple[Layout, AttentionMask]:
        length, device = input_ids_BT.shape[1], input_ids_BT.device
        if self.context_length is not None and length > self.context_length:
            raise ModelError(
                f"{length} tokens, but the model's context is {self.context_length}",
                where="input_ids",
                remedy="Shorten the prompt or max_new_tokens",
            )
        if attention_mask_BT is None:
            layout = Layout.full(length, device)
            mask = unpadded_mask(self.attention, self.block_size, length, noised_copy, device)
            return (layout.with_noised_copy() if noised_copy else layout), mask
        layout = Layout.of(attention_mask_BT)
        layout = layout.with_noised_copy() if noised_copy else layout
        return layout, make_mask(self.attention, self.block_size, layout, layout)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0: policy, old policy and reference must be the same function of their weights.

    Unlike eval mode this leaves gradient checkpointing on.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 (to mypy every attribute of a module is a tensor)


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights: tells whether stored scores belong to this model."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def evaluating(lm: DiffusionLM) -> Iterator[None]:
    """Dropout off inside, the module's own mode back after."""
    training = lm.model.training
    lm.model.eval()
    try:
        yield
    finally:
        lm.model.train(training)
