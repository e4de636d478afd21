"""The output head at selected rows: only needed logits are computed, and a loss holds at most a chunk of
them.

Shapes: B batch, T tokens, V vocabulary, D hidden width, N selected rows, J targets of a row, K most probable
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from unmask.errors import ModelError
from unmask.models.hooks.last_layer import hook_owner
from unmask.models.kernels import fused_linear
from unmask.models.kernels.log_softmax import LogSoftmaxAt, at_least_float32

LOGITS_AT_ONCE = 2**24
"""Logits that a loss holds at once on a CPU. More rows are divided into chunks, whose logits are recomputed
for the gradient."""
GPU_LOGITS_AT_ONCE = 2**27
"""The same on a GPU, where smaller chunks do not fill it, and each reads and casts the whole head: 0.5 GB in
float32."""


def logits_at_once(device: torch.device) -> int:
    """Logits that a loss holds at once on this device."""
    return LOGITS_AT_ONCE if device.type == "cpu" else GPU_LOGITS_AT_ONCE


@dataclass(frozen=True)
class Reduction:
    """What is computed from each row of logits, `function(logits_NV, *rows, setting)`: tensors with one entry
    per row.

    `function` is a function of a module: a compiled model is compiled again for another one. The logits may
    be in 16 bits; those of forbidden tokens are -inf, and their gradient must be 0.
    """

    function: Callable[..., tuple[Tensor, ...]]
    rows: tuple[Tensor, ...] = ()  # with one entry per row of logits
    setting: Any = None

    def of(self, logits_NV: Tensor) -> tuple[Tensor, ...]:
        """The result for all these rows."""
        return self.function(logits_NV, *self.rows, self.setting)


def flat_indices(chosen: Tensor) -> Tensor:
    """The flat indices of the chosen elements of a boolean tensor, for which the host waits; or what it was
    given, if they are known."""
    return chosen.flatten().nonzero().squeeze(1) if chosen.dtype == torch.bool else chosen


class RowSelector:
    """Hooks of the output head that keep only the selected rows, or replace logits by what is computed from
    them.

    They work inside any wrapper (DDP, PEFT, FSDP) and change nothing before the head. All copies of a head
    share one selector: PEFT trains a deep copy of a head in `modules_to_save`.

    Attributes:
        index_N: the rows, flat indices into [B * T]; None: all.
        first_only: the head returns the first row's logits only.
        reduction: with `first_only`, what is computed from the logits of all rows, chunk by chunk; None:
            nothing.
        reduced: the result.
        first_row_V: the first row's logits in a pass with a reduction.
        hidden_ND: the head's input at the rows.
        captured: a list that collects the hidden states at the rows of every pass; None: not collected.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.after = AfterHead(config)
        self.index_N: Tensor | None = None
        self.first_only = False
        self.reduction: Reduction | None = None
        self.forbidden: tuple[int, ...] = ()
        self.reduced: tuple[Tensor, ...] | None = None
        self.hidden_ND: Tensor | None = None
        self.captured: list[Tensor] | None = None
        self.first_row_V: Tensor | None = None
        self._checked = False

    def __deepcopy__(self, memo: dict) -> RowSelector:
        return self

    def clear(self) -> None:
        """Release the tensors of the pass."""
        self.index_N = self.reduction = self.reduced = self.hidden_ND = self.first_row_V = None
        self.first_only = False

    @contextmanager
    def capturing(self) -> Iterator[list[Tensor]]:
        """Collect the hidden states at the rows."""
        seen: list[Tensor] = []
        self.captured = seen
        try:
            yield seen
        finally:
            self.captured = None

    def result(self, first_V: Tensor) -> tuple[Tensor, ...]:
        """What was computed in a pass whose model returned these logits of the first row.

        Raises ModelError if, on the first row, `AfterHead` does not reproduce what the model does to its
        head's logits (checked once).
        """
        assert self.reduced is not None and self.first_row_V is not None, (
            "another output head than the expected one was called"
        )
        if not self._checked and not torch.allclose(
            self.first_row_V.to(first_V.device).float(), first_V.float(), atol=1e-3
        ):
            raise ModelError(
                "the model changes the logits of its head in an unknown way",
                where="output head",
                remedy="Use fewer rows per pass (in training: logprob_batch_size)",
            )
        self._checked = True
        results = [each.to(first_V.device) for each in self.reduced]
        # Wrappers wait for the gradient of their output.
        return tuple(
            each + 0.0 * first_V[0].to(each.dtype) if each.requires_grad else each for each in results
        )

    @classmethod
    def of(cls, model: PreTrainedModel) -> RowSelector:
        """The selector of this model's head; created on first use."""
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(
                "the model has no output head",
                where=type(model).__name__,
                remedy="Load a causal language model",
            )
        # PEFT trains a copy of the head beside it, which `of_adapted` follows
        head = getattr(head, "original_module", head)
        if (existing := hook_owner(head, cls)) is not None:
            return existing
        selector = cls(model.config)
        selector.follow(head)
        return selector

    def follow(self, head: nn.Module) -> None:
        """Hook a head, such as one with adapters around the hooked one, which then computes the same rows."""
        for part in head.modules():
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                    del hooks[key]
        head.register_forward_pre_hook(self.select)
        head.register_forward_hook(self.reduce)

    def select(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Before the head."""
        if self.index_N is None:
            return None
        hidden_BTD = args[0]
        index_N = self.index_N.to(hidden_BTD.device)  # the head of a split model may be elsewhere
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[index_N]
        if self.captured is not None:
            self.captured.append(hidden_ND)
        if not self.first_only:
            return (hidden_ND[None],)
        self.hidden_ND = hidden_ND
        return (hidden_ND[None, :1],)

    def reduce(self, head: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """After the head: what is computed from the logits."""
        if self.reduction is None:
            return
        assert self.hidden_ND is not None
        self.first_row_V = self.after(out[0, 0].detach())
        if self._fused(head):
            self.reduced = (
                fused_linear.log_probs(
                    head, self.hidden_ND, self.reduction.rows[0].to(out.device), self.forbidden
                ),
            )
            return
        size = max(1, logits_at_once(out.device) // out.shape[-1])
        rows = (self.hidden_ND, *(each.to(out.device) for each in self.reduction.rows))
        settings = (self.forbidden, self.reduction.function, self.reduction.setting)
        parts = [
            checkpoint(
                self._reduce_chunk, head, *settings, *chunk, use_reentrant=False, preserve_rng_state=False
            )
            for chunk in zip(*(each.split(size) for each in rows), strict=True)
        ]
        self.reduced = tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _fused(self, head: nn.Module) -> bool:
        """Whether a fused kernel computes this: log-probabilities of one target per row, from logits that
        nothing changes."""
        assert self.hidden_ND is not None and self.reduction is not None
        plain = (
            self.reduction.function is log_probs_at
            and self.reduction.setting == 1.0
            and self.reduction.rows[0].dim() == 1
        )
        return plain and not self.after.changes and fused_linear.usable(head, self.hidden_ND)

    def _reduce_chunk(
        self,
        head: nn.Module,
        forbidden: tuple[int, ...],
        function: Callable[..., tuple[Tensor, ...]],
        setting: Any,
        hidden_ND: Tensor,
        *rows: Tensor,
    ) -> tuple[Tensor, ...]:
        logits_NV = self.after(head.forward(hidden_ND))
        # not by autograd, which would copy the gradient, where what has no probability has none
        for token in forbidden:
            logits_NV.detach().select(1, token).fill_(-torch.inf)
        return function(logits_NV, *rows, setting)


class AfterHead:
    """A model's changes of its head's logits: a soft cap (Gemma 2) or a scale (Granite, Cohere)."""

    def __init__(self, config: PretrainedConfig):
        text = config.get_text_config()
        # DiffusionGemma's is in float32
        self.exact = text.model_type == "diffusion_gemma_text"
        self.cap = getattr(text, "final_logit_softcapping", None)
        self.scale = (getattr(config, "logit_scale", None) or 1.0) / (
            getattr(config, "logits_scaling", None) or 1.0
        )

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.scale != 1.0 or self.cap is not None

    def __call__(self, logits: Tensor) -> Tensor:
        logits = at_least_float32(logits) if self.exact else logits
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def token_log_probs(logits_NV: Tensor, target_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids: [N], or [N, J] at J ids per row; at least in
    float32."""
    target_NJ = target_N.unsqueeze(-1) if target_N.dim() == 1 else target_N
    return LogSoftmaxAt.apply(logits_NV, target_NJ, temperature).view_as(target_N)


def log_probs_at(logits_NV: Tensor, target_N: Tensor, temperature: float) -> tuple[Tensor]:
    """`token_log_probs`, for a `Reduction`."""
    return (token_log_probs(logits_NV, target_N, temperature),)


def tempered_log_probs_at(
    logits_NV: Tensor, target_N: Tensor, temperature_N: Tensor, _: None
) -> tuple[Tensor]:
    """The same with a temperature for each row."""
    return (token_log_probs(tempered(logits_NV, temperature_N), target_N),)


def tempered(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """The logits of each row divided by its temperature, at least in float32."""
    logits_NV = at_least_float32(logits_NV)
    return logits_NV / temperature_N[:, None].to(logits_NV.dtype)
