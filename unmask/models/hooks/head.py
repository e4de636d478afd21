"""The output head at selected rows: only needed logits are computed, and a loss holds at most a chunk of them.

Shapes: B batch, T tokens, V vocabulary, D hidden width, N selected rows, J targets of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from unmask.errors import ModelError
from unmask.models.hooks.last_layer import hook_owner

LOGITS_AT_ONCE = 2**24
"""Logits that a loss holds at once on a CPU. More rows are divided into chunks, whose logits are recomputed for the gradient."""
GPU_LOGITS_AT_ONCE = 2**27
"""The same on a GPU, where smaller chunks do not fill it, and each reads and casts the whole head: 0.5 GB in float32."""


def logits_at_once(device: torch.device) -> int:
    """Logits that a loss holds at once on this device."""
    return LOGITS_AT_ONCE if device.type == "cpu" else GPU_LOGITS_AT_ONCE


class RowSelector:
    """Hooks of the output head that keep only the selected rows, or replace logits by log-probabilities of targets.

    They work inside any wrapper (DDP, PEFT, FSDP) and change nothing before the head. All copies of a head share one selector: PEFT trains
    a deep copy of a head in `modules_to_save`.

    Attributes:
        index_N: the rows, flat indices into [B * T]; None: all.
        target_N: targets [N] or [N, J], whose log-probabilities are computed chunk by chunk; the head then returns the first row's logits.
        log_prob_N: the result, of the shape of the targets.
        hidden_ND: the head's input at the rows.
        captured: a list that collects the hidden states at the rows of every pass; None: not collected.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        self.after = AfterHead(config)
        self.index_N: Tensor | None = None
        self.target_N: Tensor | None = None
        self.forbidden: tuple[int, ...] = ()
        self.temperature = 1.0
        self.log_prob_N: Tensor | None = None
        self.hidden_ND: Tensor | None = None
        self.captured: list[Tensor] | None = None
        self._first_V: Tensor | None = None
        self._checked = False

    def __deepcopy__(self, memo: dict) -> RowSelector:
        return self

    def clear(self) -> None:
        """Release the tensors of the pass."""
        self.index_N = self.target_N = self.log_prob_N = self.hidden_ND = self._first_V = None

    def check(self, first_V: Tensor) -> None:
        """Check once, on the first row, that `AfterHead` reproduces what the model does to its head's logits. Raises ModelError if not."""
        if not self._checked and self._first_V is not None:
            expected_V = self._first_V.to(first_V.device)
            if not torch.allclose(expected_V.float(), first_V.float(), atol=1e-3):
                what = "the model changes the logits of its head in an unknown way"
                raise ModelError(what, where="output head", remedy="Use fewer rows per pass (in training: score_chunk)")
        self._checked = True

    @classmethod
    def of(cls, model: PreTrainedModel) -> RowSelector:
        """The selector of this model's head; created on first use."""
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError("the model has no output head", where=type(model).__name__, remedy="Load a causal language model")
        if (existing := hook_owner(head, cls)) is not None:
            return existing
        selector = cls(model.config)
        head.register_forward_pre_hook(selector.select)
        head.register_forward_hook(selector.compute_log_probs)
        return selector

    def select(self, head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Before the head."""
        if self.index_N is None:
            return None
        hidden_BTD = args[0]
        index_N = self.index_N.to(hidden_BTD.device)  # the head of a split model may be elsewhere
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])[index_N]
        if self.captured is not None:
            self.captured.append(hidden_ND)
        if self.target_N is None:
            return (hidden_ND[None],)
        self.hidden_ND = hidden_ND
        return (hidden_ND[None, :1],)

    def compute_log_probs(self, head: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """After the head: log-probabilities of the targets."""
        if self.target_N is None:
            return
        assert self.hidden_ND is not None
        self._first_V = self.after(out[0, 0].detach())
        rows = max(1, logits_at_once(out.device) // out.shape[-1])
        chunks = zip(self.hidden_ND.split(rows), self.target_N.to(out.device).split(rows), strict=True)
        settings = (self.forbidden, self.temperature)
        self.log_prob_N = torch.cat([checkpoint(self._chunk_log_probs, head, *chunk, *settings, use_reentrant=False) for chunk in chunks])

    def _chunk_log_probs(
        self, head: nn.Module, hidden_ND: Tensor, target_N: Tensor, forbidden: tuple[int, ...], temperature: float
    ) -> Tensor:
        logits_NV = self.after(head.forward(hidden_ND))
        logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        forbidden_V = torch.zeros(logits_NV.shape[1], dtype=torch.bool, device=logits_NV.device)
        for token in forbidden:
            forbidden_V[token] = True
        logits_NV = logits_NV.masked_fill(forbidden_V, -torch.inf)
        return token_log_probs(logits_NV, target_N, temperature)


class AfterHead:
    """A model's changes of its head's logits: a soft cap (Gemma 2) or a scale (Granite, Cohere)."""

    def __init__(self, config: PretrainedConfig):
        self.cap = getattr(config, "final_logit_softcapping", None)
        self.scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def token_log_probs(logits_NV: Tensor, target_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the target ids: [N], or [N, J] at J ids per row."""
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    target_NJ = target_N.unsqueeze(-1) if target_N.dim() == 1 else target_N
    return _LogSoftmaxAt.apply(logits_NV, target_NJ).view_as(target_N)


class _LogSoftmaxAt(torch.autograd.Function):
    """Cross-entropy whose gradient is computed in place, in one copy of the logits: autograd needs three."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_NJ: Tensor) -> Tensor:
        norm_N1 = logits_NV.logsumexp(1, keepdim=True)
        ctx.save_for_backward(logits_NV, target_NJ, norm_N1)
        return logits_NV.gather(1, target_NJ) - norm_N1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NJ: Tensor) -> tuple[Tensor, None]:
        logits_NV, target_NJ, norm_N1 = ctx.saved_tensors
        probability_NV = (logits_NV - norm_N1).exp_()
        return probability_NV.mul_(-grad_NJ.sum(1, keepdim=True)).scatter_add_(1, target_NJ, grad_NJ), None
