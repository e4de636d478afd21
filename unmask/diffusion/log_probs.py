"""Log-probabilities of the targets of views, computed only at the rows that predict them.

Shapes: B batch, M views, T tokens, N target rows, R rows of a pass (B * M).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unmask.diffusion.mixing import Replaced, negative_divergence
from unmask.diffusion.views import Drawn, Views
from unmask.errors import ConfigError
from unmask.models.attention import AttentionMask, Layout, segments
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.hooks.head import Reduction, tempered
from unmask.tensor_checks import check_tensors

Pattern = tuple[Layout, AttentionMask]
TargetValue = Callable[[DiffusionLM, ForwardInputs, Tensor, float | Tensor], Tensor]
COPIES_AT_ONCE = 3
"""Noised copies per clean half. Each further copy saves less of the clean half's work, and the mask grows
with their square."""


def view_log_probs(
    lm: DiffusionLM,
    ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    views: Views,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    measure: TargetValue = DiffusionLM.log_probs,
) -> Tensor:
    """Log-probabilities [B, M, T] in nats, float32, of the targets; 0 elsewhere.

    Args:
        lm: a causal model reads one clean row (its conditionals do not depend on what is hidden), a
            block-causal one the layout `[x_t ; ... ; x_0]`, a bidirectional one the noised row.
        ids_BT: the clean tokens.
        attention_mask_BT: 1 is real, 0 padding; packed documents are numbered.
        views: the hidden tokens and the targets. A causal view needs a separate pass, unless the model's
            clean half is causal.
        temperature: the logits are divided by it (and by that of draws).
        chunk: noised rows per forward pass; None: all at once. It changes the result only by rounding.
        measure: what is computed at each target in place of its log-probability, such as `entropies`.
    """
    check_tensors(ids_BT=ids_BT, attention_mask_BT=attention_mask_BT, **views.tensors)
    together = lm.causal_context and views.count > 1 and views.replaced is None
    if views.causal and not together:
        noised, causal = views.split_causal()
        parts = [(lm, noised)] if noised.count else []
        parts.append((lm.as_causal(), replace(causal, causal=False)))
        more: Any = {"temperature": temperature, "chunk": chunk, "measure": measure}
        return torch.cat([view_log_probs(m, ids_BT, attention_mask_BT, v, **more) for m, v in parts], 1)
    passes = ViewPasses(lm, ids_BT, attention_mask_BT, views, temperature=temperature, measure=measure)
    return passes.all_log_probs(chunk)


def entropies(
    lm: DiffusionLM, inputs: ForwardInputs, target_N: Tensor, temperature: float | Tensor = 1.0
) -> Tensor:
    """The entropy [N] of each prediction, in nats, whichever its target."""
    temperature_N = torch.as_tensor(temperature, device=target_N.device, dtype=torch.float64).expand_as(
        target_N
    )
    return lm.reduced(inputs, Reduction(_entropies_at, (temperature_N,)))[0]


def _entropies_at(logits_NV: Tensor, temperature_N: Tensor, _: None) -> tuple[Tensor]:
    return (torch.special.entr(tempered(logits_NV, temperature_N).softmax(-1)).sum(-1),)


class Targets(NamedTuple):
    """The targets of a pass, the noised ones in row-major order, then the causal ones, as flat indices."""

    place_N: Tensor  # into [B, M, T], of all views
    token_N: Tensor  # into the pass's [B, T] clean tokens
    noised_N: Tensor  # into the pass's [B, M, T], without the causal ones


@dataclass
class ViewPasses:
    """The forward passes over the views of a batch: those over the same rows share a mask, and the host waits
    once to know all targets. Arguments as for `view_log_probs`; a causal view is in the pass of the first
    copies."""

    lm: DiffusionLM
    ids_BT: Tensor
    attention_mask_BT: Tensor | None
    views: Views
    temperature: float = 1.0
    measure: TargetValue = DiffusionLM.log_probs
    _patterns: dict[tuple[int, int, int], Pattern] = field(default_factory=dict)
    # the mean embeddings of what each step predicted, by the rows and the step
    _predicted: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.views.replaced is None) != (self.lm.noise == "masked"):
            kind = "behind masks" if self.views.replaced is None else "by random tokens"
            what = f"hide tokens {kind}, and the model's noise is {self.lm.noise}"
            raise ConfigError(what, where="views", remedy="Use mixed_views for random tokens alone")

    def all_log_probs(self, chunk: int | None) -> Tensor:
        """Log-probabilities [B, M, T] of all views, with at most `chunk` noised rows together."""
        target_BMT, places, log_probs = self.views.target_on_host, list[Tensor](), list[Tensor]()
        batch, count, _ = target_BMT.shape
        for rows, copies in passes(self.lm, batch, count - self.views.causal, chunk):
            causal = self.views.causal and copies.start == 0
            # With gradients no pass is left out, even for a loss of 0: all ranks must make the same passes.
            if causal or torch.is_grad_enabled() or target_BMT[rows, copies].any():
                targets = self._targets(rows, copies, causal=causal)
                places.append(targets.place_N)
                log_probs.append(self._log_probs(rows, copies, targets))
        return self._filled(target_BMT.shape, places, log_probs)

    def log_probs(self, rows: slice, copies: slice) -> Tensor:
        """Log-probabilities [B, M, T] of some copies of some rows, none of them causal, in one pass."""
        targets = self._targets(rows, copies, causal=False)
        return self._filled(
            self.views.target_on_host[rows, copies].shape,
            [targets.noised_N],
            [self._log_probs(rows, copies, targets)],
        )

    def _log_probs(self, rows: slice, copies: slice, targets: Targets) -> Tensor:
        ids_BT, views = self._part(self.ids_BT, rows), self.views
        hidden_BMT = self._part(views.hidden_BMT, rows)[:, copies]
        padding_BT = self._part(self.attention_mask_BT, rows)
        causal_N = targets.token_N[len(targets.noised_N) :]
        causal_target_N = causal_N if len(causal_N) else None
        seen_BMT = None
        if views.replaced is not None:
            seen_BMT = self._part(views.replaced.ids_BMT, rows)[:, copies]
        inputs = forward_inputs(
            *(self.lm, ids_BT, padding_BT, hidden_BMT, targets.noised_N, causal_target_N),
            pattern=self._pattern(rows, hidden_BMT.shape[1]),
            seen_BMT=seen_BMT,
        )
        if isinstance(views.replaced, Drawn):
            if self.lm.canvas:
                inputs = replace(inputs, soft_BKD=self._last_predictions(rows, copies))
            token_N, temperature_N = (plane_BMT.take(targets.place_N) for plane_BMT in views.replaced[1:3])
            return self.measure(self.lm, inputs, token_N, self.temperature * temperature_N)
        target_N = ids_BT.take(targets.token_N)
        if views.divergence:
            assert isinstance(views.replaced, Replaced)
            planes_N = (plane_BMT.take(targets.place_N) for plane_BMT in views.replaced)
            mask_token_id = -1 if self.lm.noise == "uniform" else self.lm.mask_token_id
            setting = (self.temperature, mask_token_id)
            reduction = Reduction(negative_divergence, (target_N, *planes_N), setting)
            return self.lm.reduced(inputs, reduction)[0]
        return self.measure(self.lm, inputs, target_N, self.temperature)

    def _pattern(self, rows: slice, copies: int) -> Pattern:
        """The attention of a pass over this number of copies of some rows."""
        key = (rows.start, rows.stop, copies)
        if key not in self._patterns:
            drawn = isinstance(self.views.replaced, Drawn)
            canvas_BMT = self._part(self.views.hidden_BMT if drawn else self.views.target_BMT, rows)
            ids_BT, padding_BT = (self._part(each, rows) for each in (self.ids_BT, self.attention_mask_BT))
            self._patterns[key] = attention_pattern(self.lm, ids_BT, padding_BT, copies, canvas_BMT.any(1))
        return self._patterns[key]

    def _last_predictions(self, rows: slice, copies: slice) -> Tensor:
        """The mean embeddings [B, M T, D] of what the step before that of each view predicted; 0 for first
        steps."""
        assert isinstance(self.views.replaced, Drawn)
        step_BM = self._part(self.views.replaced.step_BMT, rows)[:, copies, 0]
        steps = step_BM.unique().tolist()
        parts = {step: self._predictions(rows, step - 1) for step in steps if step > 0}
        like_BTD = next(iter(parts.values()), None)
        if like_BTD is None:
            like_BTD = self.lm.model.get_input_embeddings()(self._part(self.ids_BT, rows)).detach()
        soft_BMTD = like_BTD.new_zeros(*step_BM.shape, *like_BTD.shape[1:])
        for step, part_BTD in parts.items():
            soft_BMTD += (step_BM == step)[:, :, None, None] * part_BTD[:, None]
        return soft_BMTD.flatten(1, 2)

    @torch.no_grad()
    def _predictions(self, rows: slice, step: int) -> Tensor:
        """The mean embeddings [B, T, D] of what a step predicted, itself given those of the step before."""
        key = (rows.start, rows.stop, step)
        if key not in self._predicted:
            assert self.views.canvas_steps is not None
            canvases = self.views.canvas_steps.select(rows)
            ids_BT, hidden_B1T = self._part(self.ids_BT, rows), self._part(self.views.hidden_BMT, rows)[:, :1]
            seen_B1T = canvases.shown_BST[:, step, None]
            inputs = forward_inputs(
                *(self.lm, ids_BT, None, hidden_B1T, hidden_B1T),
                pattern=self._pattern(rows, 1),
                seen_BMT=seen_B1T,
            )
            if step > 0:
                inputs = replace(inputs, soft_BKD=self._predictions(rows, step - 1))
            at = hidden_B1T[:, 0].nonzero(as_tuple=True)
            temperature_N = canvases.temperature_BS[at[0], step]
            soft_ND = self.lm.mean_embeddings(tempered(self.lm.forward(inputs), temperature_N).softmax(-1))
            soft_BTD = soft_ND.new_zeros(*ids_BT.shape, soft_ND.shape[1])
            soft_BTD[at] = soft_ND
            self._predicted[key] = soft_BTD
        return self._predicted[key]

    def _part(self, each: Any, rows: slice) -> Any:
        return each if each is None or (rows.start == 0 and rows.stop >= len(each)) else each[rows]

    def _targets(self, rows: slice, copies: slice, *, causal: bool) -> Targets:
        target_BMT = self.views.target_on_host
        _, count, length = target_BMT.shape
        row_N, copy_N, column_N = target_BMT[rows, copies].nonzero()
        noised_N = (row_N * target_BMT[rows, copies].shape[1] + copy_N) * length + column_N
        row_C, column_C = target_BMT[rows, -1].nonzero() if causal else (noised_N[:0], noised_N[:0])
        row_N = np.concatenate([row_N, row_C])
        copy_N = np.concatenate([copies.start + copy_N, np.full_like(row_C, count - 1)])
        column_N = np.concatenate([column_N, column_C])
        places = (
            ((rows.start + row_N) * count + copy_N) * length + column_N,
            row_N * length + column_N,
            noised_N,
        )
        joined = torch.from_numpy(np.concatenate(places)).to(self.ids_BT.device, non_blocking=True)
        return Targets(*joined.split([len(each) for each in places]))

    def _filled(self, shape: tuple[int, ...], places: list[Tensor], log_probs: list[Tensor]) -> Tensor:
        """A tensor of zeros, but for these log-probabilities at these places."""
        out_N = torch.zeros(math.prod(shape), dtype=self.lm.log_prob_dtype, device=self.ids_BT.device)
        if places:
            out_N = out_N.index_put((torch.cat(places),), torch.cat(log_probs))
        return out_N.view(shape)


def forward_inputs(
    lm: DiffusionLM,
    clean_BT: Tensor,
    attention_mask_BT: Tensor | None,
    hidden_BMT: Tensor,
    target_BMT: Tensor,
    causal_target_BT: Tensor | None = None,
    pattern: Pattern | None = None,
    seen_BMT: Tensor | None = None,
) -> ForwardInputs:
    """The inputs with which a model predicts the targets (boolean, or flat indices) from the visible tokens
    (and, by blocks, the clean past). `pattern`: the `attention_pattern` of these arguments, if it is known;
    `seen_BMT`: what the model sees of each copy; None: the mask token at hidden positions."""
    copies = hidden_BMT.shape[1]
    pattern = pattern or attention_pattern(lm, clean_BT, attention_mask_BT, copies)
    if _stacks_copies(lm):
        return lm.stacked_inputs(
            clean_BT, hidden_BMT, None, target_BMT, causal_target_BT, known=pattern, seen_BMT=seen_BMT
        )
    clean_RT = _repeated(clean_BT, copies)
    if lm.autoregressive:
        return lm.noised_inputs(clean_RT, None, target_BMT, known=pattern)
    hidden_RT = hidden_BMT.flatten(0, 1)
    if seen_BMT is None:
        seen_RT = torch.where(hidden_RT, lm.mask_token_id, clean_RT)
    else:
        seen_RT = seen_BMT.flatten(0, 1)
    return lm.noised_inputs(seen_RT, None, target_BMT, hidden_RT, known=pattern)


def attention_pattern(
    lm: DiffusionLM,
    clean_BT: Tensor,
    attention_mask_BT: Tensor | None,
    copies: int,
    canvas_BT: Tensor | None = None,
) -> Pattern:
    """The layout and mask of a pass over this number of copies of each row. `canvas_BT` as of
    `DiffusionLM.layout_and_mask`."""
    if _stacks_copies(lm):
        return lm.layout_and_mask(clean_BT, attention_mask_BT, copies, canvas_BT)
    return lm.layout_and_mask(
        _repeated(clean_BT, copies),
        None if attention_mask_BT is None else _repeated(attention_mask_BT, copies),
    )


def _stacks_copies(lm: DiffusionLM) -> bool:
    """Whether the copies of a row stand beside its clean tokens."""
    return not (lm.autoregressive or lm.attention == "bidirectional")


def _repeated(rows_BT: Tensor, copies: int) -> Tensor:
    return rows_BT if copies == 1 else rows_BT.repeat_interleave(copies, 0)


def passes(lm: DiffusionLM, batch: int, count: int, chunk: int | None) -> Iterator[tuple[slice, slice]]:
    """The rows and copies of each forward pass: at most `chunk` noised rows together, and few copies per
    clean half."""
    chunk = chunk or batch * count
    copies = min(chunk, count, COPIES_AT_ONCE if lm.attention == "block_causal" else count)
    rows = max(1, chunk // max(copies, 1))
    for first in range(0, batch, rows):
        for copy in range(0, count, copies):
            yield slice(first, first + rows), slice(copy, min(copy + copies, count))


def noise_groups(lm: DiffusionLM, maskable_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """The segment [B, T] of each maskable token, -1 elsewhere: the tokens that are noised together.

    Args:
        lm: its attention decides: a bidirectional model has one segment for each document, a block-causal one
            for each block; those of a canvas model begin at the first maskable token.
        maskable_BT: boolean; the tokens that may be hidden.
        attention_mask_BT: 1 is real, 0 padding; packed documents are numbered. None: every row is one
            document.
    """
    check_tensors(maskable_BT=maskable_BT, attention_mask_BT=attention_mask_BT)
    document_BT = (
        torch.ones_like(maskable_BT, dtype=torch.long) if attention_mask_BT is None else attention_mask_BT
    )
    layout = Layout.of(document_BT)
    if lm.canvas and lm.block_size:
        layout = layout.with_canvases(maskable_BT, lm.block_size)
    return torch.where(maskable_BT, segments(layout, lm.attention, lm.block_size), -1)


def sum_over_views(log_prob_BMT: Tensor, views: Views) -> Tensor:
    """The weighted sum over views [B, T], in nats. With the weights of the ELBO, its sum over the tokens of a
    response estimates the lower bound on the log-likelihood of the response."""
    check_tensors(log_prob_BMT=log_prob_BMT, **views.tensors)
    return (views.weight_BMT * log_prob_BMT).sum(1)


def weighted_cross_entropy(log_prob_BMT: Tensor, views: Views) -> Tensor:
    """-sum(weight * log p), to be divided by the maskable tokens of the whole batch; with the weights of the
    ELBO, its negative (Sahoo et al. 2024, MDLM). A scalar, in nats."""
    check_tensors(log_prob_BMT=log_prob_BMT, **views.tensors)
    return -(views.weight_BMT * log_prob_BMT).sum()
