"""Fine-tuning DiffusionGemma: canvases of an answer, whose tokens are replaced at random, and the committed
text before them.

It is the recipe of TRL's `sft_diffusion_gemma.py`. A canvas has the tokens of an answer from some multiple of
its length on, and end tokens after the answer. A fraction t of its tokens, drawn uniformly, is replaced by
random ones. With some probability the decoder is conditioned on what it predicts itself in a pass without
gradients. The loss is the mean cross-entropy of all tokens of canvases, replaced or not (uniform noise has a
flat bound), and that of the encoder's next tokens.

With `mean_loo` the logits are those of a prediction that does not see the token itself. The denoiser that is
trained adds log(1 + V (1 - t) / t) at this token (Gourevitch et al. 2026, arXiv 2605.22765).

Shapes: B batch, T tokens, M canvases of a row, K tokens of a canvas, N rows of logits, V vocabulary, D width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.diffusion.mixing import RandomTokens
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, columns
from unmask.models.attention import Layout, make_mask
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.hooks.head import Reduction, flat_indices
from unmask.models.kernels.log_softmax import at_least_float32
from unmask.models.model_state import training_only
from unmask.supervised.extra_objective import Objective, ObjectiveLoss, Plan

SAFETY = 1e-4
"""Times are between this and 1 - this, as in the published recipe."""
ONLY_ON_CANVASES = ("canvases", "self_conditioning_p", "encoder_loss_weight", "model_prediction_type")
"""Settings of this objective."""
NOT_ON_CANVASES = (
    *("views", "schedule", "weighting", "num_timesteps", "exact_count", "noise", "canvas_length"),
    *("logprob_batch_size", "loss_type"),
)
"""Settings of noised copies of rows, which it does not make."""


@dataclass(frozen=True)
class AnswerCanvases:
    """Canvases of the answers in a batch.

    Attributes:
        start_BM: the column where each begins.
        token_BMK: its clean tokens.
        target_BMK: False after a cut answer, and in canvases that a row does not have.
    """

    start_BM: Tensor
    token_BMK: Tensor
    target_BMK: Tensor


def answer_canvases(lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG, *, every: bool) -> AnswerCanvases:
    """A random canvas of each row, or every one.

    Args:
        batch: `input_ids`, `documents` (0 is padding) and `maskable`, the learned tokens [B, T].
        draw: chooses the canvas.
    """
    assert lm.block_size is not None
    size, ids_BT, learned_BT = lm.block_size, batch["input_ids"], batch["maskable"]
    column_BT, document_BT = columns(ids_BT), batch["documents"].long()
    before_BT = F.pad(learned_BT, (1, 0))[:, :-1] & (F.pad(document_BT, (1, 0))[:, :-1] == document_BT)
    begins_BT = learned_BT & ~before_BT
    answer_BT = begins_BT.cumsum(1)  # its number
    first_BT = torch.where(begins_BT, column_BT, 0).cummax(1).values
    starts_BT = learned_BT & ((column_BT - first_BT) % size == 0)
    count_B = starts_BT.sum(1)
    if every:
        number_BM = torch.arange(int(count_B.max()), device=ids_BT.device).expand(len(ids_BT), -1)
    else:
        number_BM = (draw.per_sequence(1, RngStream.CANVAS) * count_B[:, None]).long()
    start_BM = (starts_BT.cumsum(1)[:, None] == number_BM[:, :, None] + 1).int().argmax(2)
    place_BMK = start_BM[..., None] + torch.arange(size, device=ids_BT.device)
    inside_BMK = place_BMK < ids_BT.shape[1]
    place_BMK = place_BMK.clamp_max(ids_BT.shape[1] - 1)

    def at(each_BT: Tensor) -> Tensor:
        return each_BT.gather(1, place_BMK.flatten(1)).view(place_BMK.shape)

    own_BMK = inside_BMK & at(learned_BT) & (at(answer_BT) == answer_BT.gather(1, start_BM)[..., None])
    token_BMK = torch.where(own_BMK, at(ids_BT), lm.eos_token_id or 0)
    last_BM1 = token_BMK.gather(2, (own_BMK.sum(2, keepdim=True) - 1).clamp_min(0))
    # what follows a cut answer is not known
    ended_BM1 = torch.isin(last_BM1, torch.tensor(lm.eos_token_ids, device=ids_BT.device))
    there_BM1 = (number_BM < count_B[:, None])[..., None]
    return AnswerCanvases(start_BM, token_BMK, (own_BMK | ended_BM1) & there_BM1)


def canvas_inputs(
    lm: DiffusionLM, batch: dict[str, Any], canvases: AnswerCanvases, seen_BMK: Tensor
) -> ForwardInputs:
    """The inputs of one pass over canvases that show these tokens, then the clean rows. Each canvas is read
    after the clean tokens of its document before it."""
    ids_BT, layout = batch["input_ids"], Layout.of(batch["documents"])
    start_BM, count = canvases.start_BM, seen_BMK.shape[2]
    document_BM, first_BM = (each.gather(1, start_BM) for each in (layout.document_BT, layout.position_BT))
    copy_M = torch.arange(1, start_BM.shape[1] + 1, device=ids_BT.device)
    offset_K = torch.arange(count, device=ids_BT.device)

    document_BMK, copy_BMK, start_BMK = (
        each.expand_as(seen_BMK)
        for each in (document_BM[..., None], copy_M[None, :, None], first_BM[..., None])
    )
    whole = Layout(
        with_clean(document_BMK, layout.document_BT),
        with_clean(start_BMK + offset_K, layout.position_BT),
        with_clean(copy_BMK, layout.copy_BT),
        with_clean(start_BMK, layout.position_BT),  # a clean token is a block of its own
    )
    mask = make_mask("block_causal", lm.block_size, whole, whole, causal_context=True, windows=True)
    canvas = range(seen_BMK[0].numel())
    return ForwardInputs(with_clean(seen_BMK, ids_BT), whole, mask, canvas=canvas)


def with_clean(of_canvases_BMK: Tensor, clean_BT: Tensor) -> Tensor:
    """Values of the tokens of canvases, then of clean rows, in the order of a pass [B, M * K + T]."""
    return torch.cat([of_canvases_BMK.flatten(1), clean_BT], 1)


class CanvasObjective(Objective):
    """Canvases of random tokens in place of noised copies.

    Attributes:
        next_token_weight: the tokens of canvases, by which the summed loss is to be divided, per next token:
            of a whole step, or of all held-out rows; None: of the batch.
    """

    next_token_weight: Tensor | None = None

    def prepared(self, lm: DiffusionLM) -> DiffusionLM:
        return lm

    def training(self, lm: DiffusionLM) -> AbstractContextManager[None]:
        """Routers of experts stay as they are, as in the published recipe."""
        trained = {
            weight
            for name, weight in lm.model.named_parameters()
            if weight.requires_grad and ".router." not in name
        }
        return training_only(lm, trained)

    def canvases(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG) -> AnswerCanvases:
        """The canvases of a batch."""
        return answer_canvases(lm, batch, draw, every=self.args.canvases == "all")

    def items(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG) -> Tensor:
        return self.canvases(lm, batch, draw).target_BMK.sum()

    def loss(self, lm: DiffusionLM, batch: dict[str, Any], draw: MaskRNG, plan: Plan) -> ObjectiveLoss:
        canvases, causal_BT = self.canvases(lm, batch, draw), next_tokens(batch)
        seen_BMK, time_BM = self.noised(lm, batch, canvases, draw)
        inputs = canvas_inputs(lm, batch, canvases, seen_BMK)
        if self.args.self_conditioning_p > 0:
            is_on_B = draw.per_sequence(1, RngStream.CONDITION)[:, 0] < self.args.self_conditioning_p
            inputs = lm.conditioned(inputs, is_on_B)
        is_canvas_BW = with_clean(canvases.target_BMK, torch.zeros_like(causal_BT))
        chosen_N = flat_indices(is_canvas_BW | with_clean(torch.zeros_like(canvases.target_BMK), causal_BT))
        is_canvas_N = is_canvas_BW.take(chosen_N)
        token_N = with_clean(canvases.token_BMK, batch["input_ids"]).take(chosen_N)
        # a clean token is predicted in the row before it
        inputs = replace(inputs, index_N=torch.where(is_canvas_N, chosen_N, chosen_N - 1))
        if self.args.model_prediction_type == "mean":
            log_prob_N = lm.log_probs(inputs, token_N)
        else:
            more_BM1 = torch.log1p(lm.vocab_size * (1 - time_BM) / time_BM)[..., None]
            more_BW = with_clean(more_BM1.expand(seen_BMK.shape), torch.zeros_like(causal_BT).to(more_BM1))
            rows = (token_N, inputs.ids_BT.take(chosen_N), more_BW.take(chosen_N).to(lm.log_prob_dtype))
            [log_prob_N] = lm.reduced(inputs, Reduction(_denoiser_log_probs, rows))
        count, num_causal = canvases.target_BMK.sum(), causal_BT.sum()
        ratio = self.next_token_weight
        ratio = count.double() / num_causal.clamp_min(1) if ratio is None else ratio
        canvas_loss, causal_loss = (
            -torch.where(chosen, log_prob_N, 0).sum() for chosen in (is_canvas_N, ~is_canvas_N)
        )
        metrics = {
            "cross_entropy": (canvas_loss.detach() / count.clamp_min(1), count),
            "lm_cross_entropy": (causal_loss.detach() / num_causal.clamp_min(1), num_causal),
        }
        loss = canvas_loss + self.args.encoder_loss_weight * ratio * causal_loss
        return ObjectiveLoss(loss, metrics=metrics)

    def noised(
        self, lm: DiffusionLM, batch: dict[str, Any], canvases: AnswerCanvases, draw: MaskRNG
    ) -> tuple[Tensor, Tensor]:
        """What canvases show, and their times."""
        low = self.args.min_time if "min_time" in self.args.given else SAFETY
        high = min(self.args.max_time, 1 - SAFETY)
        number_BM = columns(canvases.start_BM)
        time_BM = low + (high - low) * draw.uniform(number_BM, 1, RngStream.TIME)[:, 0]
        place_BMK = canvases.start_BM[..., None] + torch.arange(canvases.token_BMK.shape[2], device=lm.device)

        def numbers(stream: RngStream) -> Tensor:
            return draw.uniform(place_BMK.flatten(1), 1, stream)[:, 0].view(place_BMK.shape)

        replaced_BMK = numbers(RngStream.MASK) < time_BM[..., None]
        random_BMK = RandomTokens.of(lm).drawn(numbers(RngStream.NOISE))
        return torch.where(replaced_BMK, random_BMK, canvases.token_BMK), time_BM


def next_tokens(batch: dict[str, Any]) -> Tensor:
    """The tokens [B, T] that the encoder predicts: all but the first of each document."""
    document_BT = batch["documents"]
    return (document_BT > 0) & (F.pad(document_BT, (1, 0))[:, :-1] == document_BT)


def _denoiser_log_probs(
    logits_NV: Tensor, target_N: Tensor, seen_N: Tensor, more_N: Tensor, _: None
) -> tuple[Tensor]:
    """Log-probabilities of targets, where the logits of the tokens that are seen are raised."""
    raised_NV = at_least_float32(logits_NV).scatter_add(1, seen_N[:, None], more_N[:, None])
    return (raised_NV.log_softmax(-1).gather(1, target_N[:, None]).squeeze(1),)
