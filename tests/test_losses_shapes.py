"""A tensor that does not fit the others is refused by its name at every function of `unmask.losses`, never by
torch.

Shapes: B rows or completions, M views, T tokens, N responses or chosen tokens, P pairs, K tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import unmask
from tests.tiny import toy_lm
from unmask import losses
from unmask.errors import ConfigError, UnmaskError
from unmask.supervised.quality import FilledRows
from unmask.supervised.variable_length import Canvases
from unmask.tensor_checks import INTEGERS, MASKS

SIZES = {"B": 2, "M": 1, "T": 5, "N": 10, "P": 5, "K": 6}  # N: of all tokens of all views


class Tensors:
    """Makes tensors by their names, of these sizes, and remembers the names."""

    def __init__(self, **changed: list[int]):
        self.changed, self.names = changed, list[str]()

    def __getattr__(self, name: str) -> Tensor:
        self.names.append(name)
        kind, letters = name.rsplit("_", 1)
        shape = self.changed.get(name, [SIZES[letter] for letter in letters])
        if kind in MASKS:
            return torch.ones(shape, dtype=torch.bool)
        if kind in INTEGERS | {"attention_mask"}:
            return torch.full(shape, 0 if kind in ("group", "key", "rows_before") else 1)
        return torch.zeros(shape)


def views(t: Tensors) -> losses.Views:
    return losses.Views(t.hidden_BMT, t.target_BMT, t.weight_BMT)


def draw(t: Tensors) -> losses.MaskRNG:
    return losses.MaskRNG(0, t.key_B)


def rollout(t: Tensors) -> losses.Rollout:
    ids_BT = t.ids_BT
    completion_BT, zeros_BT = torch.ones_like(ids_BT, dtype=torch.bool), torch.zeros_like(ids_BT)
    return losses.Rollout(ids_BT, ids_BT, ~completion_BT, completion_BT, zeros_BT, zeros_BT, zeros_BT)


def policy_loss(t: Tensors) -> losses.Loss:
    more: Any = {"old_BMT": t.old_BMT, "reference_BMT": t.reference_BMT, "kept_B": t.kept_B}
    method = losses.get_method("cj-grpo")()
    return losses.policy_loss(
        method, rollout(t), views(t), t.log_prob_BMT, t.advantage_B, max_completion_length=8, **more
    )


def canvases(t: Tensors) -> Canvases:
    zeros_BT = torch.ones(2, 5).long()
    return Canvases(zeros_BT, zeros_BT, t.hidden_BT, zeros_BT)


def filled(t: Tensors) -> FilledRows:
    filled_BT = t.filled_BT
    ids_BT = torch.ones(filled_BT.shape)
    return FilledRows(ids_BT, ids_BT, filled_BT, filled_BT, None)


LM = toy_lm()
GAP_LM = losses.with_length_tokens(toy_lm(), 2)
NOISE = losses.Noise()
CALLS: dict[str, Callable[[Tensors], object]] = {
    "noise_groups": lambda t: losses.noise_groups(LM, t.maskable_BT, t.attention_mask_BT),
    "random_views": lambda t: losses.random_views(
        t.group_BT, losses.MaskRNG(0, t.key_B, rows_before_B=t.rows_before_B), NOISE, num_views=3
    ),
    "complementary_pair": lambda t: losses.complementary_pair(t.group_BT, draw(t), NOISE),
    "exact_count_views": lambda t: losses.exact_count_views(
        t.group_BT, draw(t), num_views=3, number_BT=t.number_BT
    ),
    "exact_count_pair": lambda t: losses.exact_count_pair(t.group_BT, draw(t)),
    "elbo_views": lambda t: losses.elbo_views(t.group_BT, draw(t), num_views=3, number_BT=t.number_BT),
    "exact_views": lambda t: losses.exact_views(t.group_BT, 5),
    "all_masked_views": lambda t: losses.all_masked_views(
        t.completion_BT, t.prompt_BT, draw(t), prompt_rate=0.5
    ),
    "cart_weights": lambda t: losses.cart_weights(views(t), t.segment_BT, t.document_BT, p=0.1),
    "view_log_probs": lambda t: losses.view_log_probs(LM, t.ids_BT, t.attention_mask_BT, views(t)),
    "sum_over_views": lambda t: losses.sum_over_views(t.log_prob_BMT, views(t)),
    "weighted_cross_entropy": lambda t: losses.weighted_cross_entropy(t.log_prob_BMT, views(t)),
    "elbo": lambda t: losses.elbo(LM, t.ids_BT, t.attention_mask_BT, t.maskable_BT, draw(t), samples=3),
    "exact_log_likelihood": lambda t: losses.exact_log_likelihood(
        LM, t.ids_BT, t.attention_mask_BT, t.maskable_BT
    ),
    "any_order": lambda t: losses.any_order(t.group_BT - 1, t.log_prob_BMT),
    "log_ratios": lambda t: losses.log_ratios(t.log_prob_N, t.reference_N, t.length_N),
    "margins": lambda t: losses.margins(t.log_ratio_N),
    "dpo": lambda t: losses.dpo(t.margin_P, beta=0.1),
    "ipo": lambda t: losses.ipo(t.margin_P, beta=0.1),
    "hinge": lambda t: losses.hinge(t.margin_P, beta=0.1),
    "bco_pair": lambda t: losses.bco_pair(t.log_ratio_N, beta=0.1),
    "divergence_scores": lambda t: losses.divergence_scores(t.log_ratio_N, "js_divergence"),
    "simpo": lambda t: losses.simpo(t.margin_P, beta=2.0, gamma=0.5),
    "kto": lambda t: losses.kto(t.log_ratio_N, t.desirable_N, torch.zeros(()), beta=0.1),
    "advantages": lambda t: losses.advantages(t.reward_B, t.group_B),
    "kept_groups": lambda t: losses.kept_groups(t.reward_B, t.group_B, 0.0, 1.0, spread=False),
    "overlong_penalty": lambda t: losses.overlong_penalty(t.length_B, 8, 2),
    "token_weights": lambda t: losses.token_weights(t.loss_mask_BT, "step", t.unit_BT, 8),
    "count_items": lambda t: losses.count_items(t.loss_mask_BT, "view", t.unit_BT),
    "policy_views": lambda t: losses.policy_views(LM, losses.get_method("spg")(), rollout(t), draw(t)),
    "policy_loss": policy_loss,
    "compare": lambda t: losses.compare(LM, LM.as_causal(), t.ids_BT, t.document_BT, views(t), top_k=2),
    "distillation_loss": lambda t: losses.distillation_loss(
        losses.TeacherComparison(t.log_prob_N, t.taught_N, t.divergence_N, t.distance_N),
        views(t),
        distillation=0.5,
    ),
    "forward_kl": lambda t: losses.forward_kl(t.log_p_NK, t.log_q_NK),
    "make_canvases": lambda t: losses.make_canvases(
        GAP_LM, {"input_ids": t.ids_BT, "documents": t.document_BT, "maskable": t.maskable_BT}, draw(t), 2
    ),
    "canvas_loss": lambda t: losses.canvas_loss(t.log_prob_N, canvases(t), t.items_B),
    "fill_in": lambda t: losses.fill_in(LM, t.ids_BT, t.document_BT, t.hidden_BT, draw(t), 2),
    "quality_loss": lambda t: losses.quality_loss(t.logits_N, filled(t), t.items_B),
}


@cache
def misfits(name: str) -> list[tuple[str, list[int]]]:
    """The arguments of a call, each with shapes of which one dimension is wrong."""
    fine = Tensors()
    CALLS[name](fine)  # is not refused
    found = []
    for argument in dict.fromkeys(fine.names):
        letters = argument.rsplit("_", 1)[1]
        shape = [SIZES[letter] for letter in letters]
        others = "".join(other.rsplit("_", 1)[1] for other in fine.names if other != argument)
        shared = [place for place, letter in enumerate(letters) if letter in others]
        found += [(argument, [*shape[:place], 1 + shape[place], *shape[place + 1 :]]) for place in shared]
        found += [(argument, [*shape, 1]), (argument, shape[1:])]
    return found


@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
def test_an_argument_with_a_wrong_dimension_is_refused_by_its_name(name, data):
    argument, shape = data.draw(st.sampled_from(misfits(name)))
    with pytest.raises(ConfigError) as refused:
        CALLS[name](Tensors(**{argument: shape}))
    assert argument in str(refused.value)


LEARNT_BT, UNIT_BT = torch.ones(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.long)
ROLLOUT, VIEWS, LOG_PROB_BMT = rollout(Tensors()), views(Tensors()), torch.zeros(2, 1, 5)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "advantages of completions, ratios of tokens": (
        lambda: losses.clipped_surrogate(torch.zeros(2, 5), torch.zeros(2), epsilon=0.2, epsilon_high=0.2),
        "advantage: has the shape [2], but log_ratio has [2, 5]",
    ),
    "a baseline of another batch": (
        lambda: losses.kto(torch.zeros(4), torch.ones(4).bool(), torch.zeros(3), beta=0.1),
        "baseline: has the shape [3]",
    ),
    "log-probabilities of other canvases": (
        lambda: losses.canvas_loss(torch.zeros(9), canvases(Tensors()), torch.ones(2)),
        "log_prob_N: has the shape [9], but [N] is expected",
    ),
    "logits of other rows": (
        lambda: losses.quality_loss(torch.zeros(9), filled(Tensors()), torch.ones(2)),
        "logits_N: has the shape [9], but [N] is expected",
    ),
    "an odd number of responses": (
        lambda: losses.margins(torch.zeros(3)),
        "log_ratio_N: 3 responses are no pairs",
    ),
    "labels that are numbers": (
        lambda: losses.kto(torch.zeros(4), torch.ones(4), torch.zeros(()), beta=0.1),
        "desirable_N: is of torch.float32, not torch.bool",
    ),
    "an unknown advantage": (
        lambda: losses.advantages(torch.zeros(2), torch.zeros(2).long(), "mean"),  # type: ignore[arg-type]
        "scale_rewards: there is no scaling 'mean'",
    ),
    "an unknown loss_type": (
        lambda: losses.token_weights(LEARNT_BT, "mean", UNIT_BT, 8),  # type: ignore[arg-type]
        "loss_type: there is no loss type 'mean'",
    ),
    "an unknown loss_type of a divisor": (
        lambda: losses.count_items(LEARNT_BT, "tokens", UNIT_BT),  # type: ignore[arg-type]
        "loss_type: there is no loss type 'tokens'",
    ),
    "an unknown divergence": (
        lambda: losses.kl_divergence(torch.zeros(2, 5), "K3"),  # type: ignore[arg-type]
        "kind: there is no divergence 'K3'",
    ),
    "the name of a schedule": (lambda: losses.Noise("cosine"), ("schedule: 'cosine' is not a schedule")),  # type: ignore[arg-type]
    "the name of a method": (
        lambda: losses.policy_views(LM, "spg", ROLLOUT, draw(Tensors())),  # type: ignore[arg-type]
        "method: 'spg' is not a method",
    ),
    "the class of a method": (
        lambda: losses.policy_loss(
            losses.get_method("spg"),  # type: ignore[arg-type]
            ROLLOUT,
            VIEWS,
            LOG_PROB_BMT,
            torch.zeros(2),
            max_completion_length=8,
        ),
        "method: <class 'unmask.rl.methods.spg.SPG'> is not a method",
    ),
    "margins in a list": (lambda: losses.dpo([0.5], beta=0.1), ("margin_P: is a list, not a tensor")),  # type: ignore[arg-type]
    "no random views": (
        lambda: losses.random_views(UNIT_BT, draw(Tensors()), NOISE, num_views=0),
        "num_views: 0 views",
    ),
    "no views of exact counts": (
        lambda: losses.exact_count_views(UNIT_BT, draw(Tensors()), num_views=-1),
        "num_views: -1 views",
    ),
    "no views of the bound": (
        lambda: losses.elbo_views(UNIT_BT, draw(Tensors()), num_views=0),
        "num_views: 0 views",
    ),
    "a divergence without a reference": (
        lambda: losses.policy_loss(
            losses.get_method("espo")(), ROLLOUT, VIEWS, LOG_PROB_BMT, torch.zeros(2), max_completion_length=8
        ),
        "reference_BMT: espo has a KL term (beta=0.001)",
    ),
    "an loss_type that depends on the model": (
        lambda: losses.policy_loss(
            losses.get_method("trace-rl")(),
            ROLLOUT,
            VIEWS,
            LOG_PROB_BMT,
            torch.zeros(2),
            max_completion_length=8,
        ),
        "loss_type: that of trace-rl follows from the model's attention",
    ),
    "a prompt to hide that is not given": (
        lambda: losses.all_masked_views(torch.ones(2, 5).bool(), prompt_rate=0.5),
        "prompt_rate: hides tokens of the prompt",
    ),
    "a model without a quality head": (
        lambda: losses.quality_logits(LM, filled(Tensors()), trained=False),
        "quality_head: the model has none",
    ),
    "completions without canvases": (
        lambda: losses.make_rollout(LM, unmask.generate(LM, ["ab"], unmask.SamplerConfig(max_new_tokens=2))),
        "generation: has no canvases",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_with_a_reason(name):
    call, says = REFUSED[name]
    with pytest.raises(UnmaskError) as refused:
        call()
    assert says in str(refused.value) and refused.value.remedy


def test_a_causal_model_has_one_view():
    rows = rollout(Tensors())
    found = losses.policy_views(
        toy_lm(attention=("causal", None, True)), losses.get_method("cj-grpo")(), rows, draw(Tensors())
    )
    assert torch.equal(found.target_BMT, rows.completion_BT[:, None]) and found.count == 1
