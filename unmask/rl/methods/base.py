"""What a reinforcement-learning method is: which views score a rollout, and how their scores become a loss.

Shapes: B completions, M views, T positions of the canvas (prompt, completion and what is hidden behind its end).
`value`s are log-probabilities as a method compares them: of tokens [B, T], or of sequences [B, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unmask.diffusion.views import Draw, Views
from unmask.errors import TrainingError
from unmask.rl.losses import clipped_surrogate, divergence


@dataclass(frozen=True)
class Rollout:
    """Completions as they were sampled.

    Attributes:
        ids_BT: the canvas: prompt, completion, and the mask token where nothing was revealed.
        documents_BT: 1 on the canvas, 0 on padding.
        prompt_BT: True on the prompt.
        completion_BT: True on the completion, up to and including its first EOS.
        steps_BT: the denoising step at which a position was revealed; -1 for the prompt, padding and what stayed hidden.
        group_BT: the tokens that are noised together: one canvas, or an attention block of it; -1 on the prompt and padding.
        block_BT: the decoding block, from 0; -1 on the prompt and padding.
        sampled_BT: log-probabilities of the completion where it was sampled, if that was not here; None: here.
        one_document: whether there is no padding, known beforehand: attention then finds its mask among those that are kept.
    """

    ids_BT: Tensor
    documents_BT: Tensor
    prompt_BT: Tensor
    completion_BT: Tensor
    steps_BT: Tensor
    group_BT: Tensor
    block_BT: Tensor
    sampled_BT: Tensor | None = None
    one_document: bool = False

    @property
    def beyond_BT(self) -> Tensor:
        """The canvas behind the end of the completion."""
        return (self.documents_BT > 0) & ~self.prompt_BT & ~self.completion_BT

    @property
    def revealed_BT(self) -> Tensor:
        """The canvas as far as it was denoised: the completion, and what came with it behind its end."""
        return self.completion_BT | (self.beyond_BT & (self.steps_BT >= 0))

    def rows(self, at: slice) -> Rollout:
        """Some of the completions."""
        parts: dict[str, Any] = {name: part[at] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **parts)

    def whole(self) -> Rollout:
        """The rollout whose completions are all that was revealed, what is behind their ends too."""
        return replace(self, completion_BT=self.revealed_BT)

    def hiding(self, target_BMT: Tensor, weight_BMT: Tensor) -> Views:
        """Views that hide what they score, and behind the end what none of them scores, as when the text was sampled."""
        rest_BT = self.beyond_BT & ~target_BMT.any(1)
        return Views(target_BMT | rest_BT[:, None], target_BMT, weight_BMT.float())

    def groups_of(self, chosen_BT: Tensor) -> Tensor:
        """The groups [B, T] of some tokens; -1 elsewhere."""
        return torch.where(chosen_BT, self.group_BT, -1)


@dataclass(frozen=True)
class Scores:
    """All that a loss reads: log-probabilities [B, M, T] on the same views, 0 where not scored, and what they are worth.

    Attributes:
        policy_BMT: of the model that is trained, with gradients.
        old_BMT: of the model that sampled.
        reference_BMT: of the model that the policy is held to; None: it is held to none.
        rollout, views: what was sampled; what is hidden, scored, and weighs what.
        advantage_BT: of each token, or of each completion [B, 1].
        share_BT: how much each token counts in the loss; 0 where it teaches nothing.
        importance_BT: the weight that corrects for another sampler; None: 1.
    """

    policy_BMT: Tensor
    old_BMT: Tensor
    reference_BMT: Tensor | None
    rollout: Rollout
    views: Views
    advantage_BT: Tensor
    share_BT: Tensor
    importance_BT: Tensor | None = None

    def of_tokens(self, log_prob_BMT: Tensor) -> Tensor:
        """The weighted sum over views [B, T]."""
        return (self.views.weight_BMT * log_prob_BMT).sum(1)

    def of_sequences(self, log_prob_BMT: Tensor) -> Tensor:
        """The weighted sum over views and tokens [B, 1]."""
        return self.of_tokens(log_prob_BMT).sum(1, keepdim=True)

    @property
    def share_B1(self) -> Tensor:
        """How much each completion counts."""
        return self.share_BT.sum(1, keepdim=True)

    @property
    def advantage_B1(self) -> Tensor:
        """One advantage a completion: of advantages by tokens the mean over what counts."""
        return (self.advantage_BT * self.share_BT).sum(1, keepdim=True) / self.share_B1.clamp_min(torch.finfo(torch.float32).tiny)

    @property
    def length_B1(self) -> Tensor:
        """The tokens of each completion, and what is scored behind its end."""
        return learnable(self.rollout, self.views).sum(1, keepdim=True).clamp_min(1)


class Loss(NamedTuple):
    """A summed loss, and what to log of the elements (tokens or completions) that count."""

    total: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def learnable(rollout: Rollout, views: Views) -> Tensor:
    """The tokens [B, T] that a loss is about: of the completion, and what is scored behind its end."""
    return rollout.completion_BT | views.target_BMT.any(1)


def parts_of(rollout: Rollout, views: Views, kind: str) -> Tensor:
    """The part [B, T] of its completion that a token counts in (`shares`): the view that scores it, else the step that revealed it."""
    return views.target_BMT.int().argmax(1) if kind.startswith("view") else rollout.steps_BT.clamp_min(0)


def plan_views(plan: Callable[[Rollout], Views], rollout: Rollout, beyond_eos: str) -> Views:
    """Views of a plan, in which what was sampled behind the end is hidden, or `shown`: noised as the completion is, but not scored.
    (Where it is to be learnt, the rollout is `whole` already.)"""
    if beyond_eos != "shown":
        return plan(rollout)
    views, own_B1T = plan(rollout.whole()), rollout.completion_BT[:, None]
    return replace(views, target_BMT=views.target_BMT & own_B1T, weight_BMT=views.weight_BMT * own_B1T)


def check_views(views: Views, rollout: Rollout, where: str) -> None:
    """Refuse a plan that a loss cannot read: of another shape, or that scores what is shown, or what is not the completion's canvas.

    Raises:
        TrainingError: it is one; names `where` it is from.
    """
    batch, length = rollout.ids_BT.shape
    remedy = "Return Views of hidden and scored (boolean) and weights (floating), [batch, views, tokens]; `weighed` makes them"
    if not isinstance(views, Views):
        raise TrainingError(f"{type(views).__name__} is no plan of views", where=where, remedy=remedy)
    parts = (views.hidden_BMT, views.target_BMT, views.weight_BMT)
    kinds = [part.dtype if part.dtype == torch.bool else part.is_floating_point() for part in parts]
    shapes = [tuple(part.shape) for part in parts]
    count = shapes[0][1] if len(shapes[0]) == 3 else 0
    if kinds != [torch.bool, torch.bool, True] or count == 0 or shapes != [(batch, count, length)] * 3:
        told = ", ".join(f"{part.dtype} {list(part.shape)}" for part in parts)
        raise TrainingError(f"tensors of {told}, for {batch} rows of {length} tokens", where=where, remedy=remedy)
    noised = slice(-1 if views.causal else None)
    if (views.target_BMT & ~views.hidden_BMT)[:, noised].any():
        raise TrainingError("tokens are scored that the model is shown", where=where, remedy="Hide what is scored")
    if (views.target_BMT & ~(rollout.completion_BT | rollout.beyond_BT)[:, None]).any():
        raise TrainingError("tokens are scored that are not the completion's", where=where, remedy="Score what completion_BT says")


Plan = Callable[[Rollout, Draw, Any], Views]
Weighing = Literal["token", "mean", "bound"]
SURROGATE = ("epsilon", "epsilon_high", "dual_clip", "log_ratio_clamp")
"""The settings of a clipped ratio."""
GRADIENT = ("beta", "importance_cap")
"""Those that `policy_gradient` reads."""


def token_loss(scores: Scores, config: Any, kl_weight: Tensor | float = 1.0) -> Loss:
    """The clipped surrogate of every token, and the divergence from the reference, of another weight [B, T] if it is given.

    With `config.ratio` "sequence" all tokens of a completion have the geometric mean of their ratios (GSPO, Zheng et al. 2025), with
    "product" the ratio of the whole.
    """
    policy_BT, old_BT = scores.of_tokens(scores.policy_BMT), scores.of_tokens(scores.old_BMT)
    gap_BT = policy_BT - old_BT
    if config.ratio != "token":
        scored_B1 = scores.views.target_BMT.any(1).sum(1, keepdim=True) if config.ratio == "sequence" else torch.ones_like(gap_BT[:, :1])
        gap_BT = (gap_BT.sum(1, keepdim=True) / scored_B1.clamp_min(1)).expand_as(gap_BT)
    reference_BT = None if scores.reference_BMT is None else scores.of_tokens(scores.reference_BMT) - policy_BT
    return surrogate(gap_BT, reference_BT, scores.advantage_BT, scores.share_BT, config, scores.importance_BT, kl_weight)


def surrogate(
    gap: Tensor,
    reference_gap: Tensor | None,
    advantage: Tensor,
    share: Tensor,
    config: Any,
    importance: Tensor | None = None,
    kl_weight: Tensor | float = 1.0,
) -> Loss:
    """The clipped surrogate and the divergence of elements of any shape, weighted by their share.

    Args:
        gap: log-probability of the policy less that of the old policy.
        reference_gap: log-probability of the reference less that of the policy.
        importance: weight of the surrogate.
        kl_weight: of the divergence, beside `config.beta`.
    """
    if config.log_ratio_clamp is not None:  # k3 is an exponential too
        gap = gap.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
        reference_gap = None if reference_gap is None else reference_gap.clamp(-config.log_ratio_clamp, config.log_ratio_clamp)
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    made = clipped_surrogate(gap, advantage, clip_low=config.epsilon, clip_high=high, dual_clip=config.dual_clip)
    loss = made.loss if importance is None else importance * made.loss
    kl = torch.zeros_like(gap) if reference_gap is None else divergence(reference_gap, config.kl)
    if config.kl_unbiased:  # of samples of the old policy, and with the gradient of the ratio (DeepSeek-AI 2025, DeepSeek-V3.2)
        kl = gap.exp() * kl
    return of_elements(loss + config.beta * kl_weight * kl, share, made.ratio, made.clipped, kl)


def of_elements(loss: Tensor, share: Tensor, ratio: Tensor | None = None, clipped: Tensor | None = None, kl: Tensor | None = None) -> Loss:
    """The sum of what counts. What is not given was 1, not clipped, and 0."""
    counts = share > 0
    ratio = torch.ones_like(share) if ratio is None else ratio
    clipped = torch.zeros_like(counts) if clipped is None else clipped
    kl = torch.zeros_like(share) if kl is None else kl.detach()
    return Loss((share * loss).sum(), ratio[counts], clipped[counts], kl[counts])


def policy_gradient(scores: Scores, config: Any) -> Loss:
    """-advantage times the log-probability of every token, without a ratio: the sampler is, or is taken for, the policy itself."""
    policy_BT = scores.of_tokens(scores.policy_BMT)
    loss_BT = -scores.advantage_BT * policy_BT
    if scores.importance_BT is not None:
        loss_BT = scores.importance_BT * loss_BT
    if scores.reference_BMT is None:
        return of_elements(loss_BT, scores.share_BT)
    kl_BT = scores.of_tokens(divergence(scores.reference_BMT - scores.policy_BMT, config.kl))  # weights may be far from 1
    return of_elements(loss_BT + config.beta * kl_BT, scores.share_BT, kl=kl_BT)


@dataclass(frozen=True)
class Method:
    """A member of the GRPO family.

    Attributes:
        name: as in `GRPOConfig(method=...)`.
        plan: (rollout, source of randomness, config) -> views. Made once per rollout and inner iteration; the same views score
            the policy, the old policy and the reference.
        loss: (scores, config) -> the summed loss, from scores on all views.
        separable: whether the loss is the sum over views of losses of each view's scores alone; else it is found from all
            scores before any view is gone through with gradients.
        on_policy: whether a rollout can be learnt from once only.
        weighs: what the loss takes the weights of a masking strategy's views (`unmask.rl.methods.masking`) to give: a value for each token,
            the mean over each view's tokens, or a bound on the likelihood.
        uses, plan_uses: the settings that its loss and its plan read, of those that not all methods read. Where they are given for
            another method they are refused. `beta` stands for the divergence, `importance_cap` for weights that correct for a server.
        defaults: the settings that make the method what it is, where they are not those of diffu-GRPO.
        by_attention: those that follow from the model's attention; None among the defaults.
        partial: whether `beyond_eos: shown` means something: its views hide any part of a completion, and not as it was sampled.
        fixed: the settings that its plan relies on: other values than by default are refused.
    """

    name: str
    plan: Plan
    loss: Callable[[Scores, Any], Loss] = token_loss
    separable: bool = False
    on_policy: bool = False
    uses: tuple[str, ...] = (*SURROGATE, "ratio", "kl_unbiased", *GRADIENT)
    plan_uses: tuple[str, ...] = ()
    weighs: Weighing = "token"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    by_attention: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    partial: bool = True
    fixed: tuple[str, ...] = ()
