"""The losses of Unmask's trainers as functions, for training loops of one's own (docs/losses.md has whole
loops).

A loss is made in three steps: views say which tokens of a row are hidden, which are scored, and with which
weight; the model gives the log-probabilities of the scored tokens; a function of these is the loss. The
trainers call the same functions.

Names of tensors end with their shapes: B rows or completions, M views, T tokens, N responses or chosen
tokens, P pairs. Log-probabilities are in nats. Masks are boolean. Every function raises ConfigError for a
tensor whose shape or kind does not fit the others, and names it.
"""

from unmask.convert.distillation import TeacherComparison, compare, distillation_loss, forward_kl
from unmask.diffusion.likelihood import Bound, any_order, elbo, exact_log_likelihood
from unmask.diffusion.log_probs import noise_groups, sum_over_views, view_log_probs, weighted_cross_entropy
from unmask.diffusion.mixing import Mixing, RandomTokens
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import (
    MaskRNG,
    Views,
    all_masked_views,
    cart_weights,
    complementary_pair,
    elbo_views,
    exact_count_pair,
    exact_count_views,
    exact_views,
    mixed_views,
    random_views,
)
from unmask.generation.rollout import Rollout, make_rollout
from unmask.preference.losses import (
    bco_pair,
    divergence_scores,
    dpo,
    hinge,
    ipo,
    kto,
    log_ratios,
    margins,
    simpo,
)
from unmask.rl.advantages import advantages, kept_groups, overlong_penalty
from unmask.rl.losses import clipped_surrogate, count_items, kl_divergence, token_weights
from unmask.rl.methods import Loss, LossInputs, Method, get_method
from unmask.rl.policy_loss import policy_loss, policy_views
from unmask.supervised.quality import fill_in, quality_logits, quality_loss, training_head, with_quality_head
from unmask.supervised.variable_length import canvas_log_probs, canvas_loss, make_canvases, with_length_tokens

__all__ = [
    "Bound",
    "Loss",
    "LossInputs",
    "MaskRNG",
    "Method",
    "Mixing",
    "Noise",
    "RandomTokens",
    "Rollout",
    "TeacherComparison",
    "Views",
    "advantages",
    "all_masked_views",
    "any_order",
    "bco_pair",
    "canvas_log_probs",
    "canvas_loss",
    "cart_weights",
    "clipped_surrogate",
    "compare",
    "complementary_pair",
    "count_items",
    "distillation_loss",
    "divergence_scores",
    "dpo",
    "elbo",
    "elbo_views",
    "exact_count_pair",
    "exact_count_views",
    "exact_log_likelihood",
    "exact_views",
    "fill_in",
    "forward_kl",
    "get_method",
    "get_schedule",
    "hinge",
    "ipo",
    "kept_groups",
    "kl_divergence",
    "kto",
    "log_ratios",
    "make_canvases",
    "make_rollout",
    "margins",
    "mixed_views",
    "noise_groups",
    "overlong_penalty",
    "policy_loss",
    "policy_views",
    "quality_logits",
    "quality_loss",
    "random_views",
    "simpo",
    "sum_over_views",
    "token_weights",
    "training_head",
    "view_log_probs",
    "weighted_cross_entropy",
    "with_length_tokens",
    "with_quality_head",
]
