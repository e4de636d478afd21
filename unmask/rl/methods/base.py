"""What a reinforcement-learning method is: its settings, the views of a rollout, and the loss of their
log-probabilities.

Shapes: B completions, M views, T positions of the canvas (prompt, completion and what is hidden after its
end). Methods compare log-probabilities of tokens [B, T] or of sequences [B, 1]. Of canvases of random tokens
each draw counts as a token, and T is M T: a position may be drawn in every view.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, dataclass_transform

import torch
from torch import Tensor

from unmask.config.user_code import load_class, naming_setting, refuse_file_alone
from unmask.diffusion.log_probs import sum_over_views
from unmask.diffusion.views import Drawn, MaskRNG, Views
from unmask.errors import ConfigError, TrainingError, did_you_mean
from unmask.generation.rollout import Rollout
from unmask.models.hooks.head import flat_indices
from unmask.rl.advantages import ScaleRewards
from unmask.rl.losses import Divergence, LossType, clipped_surrogate, kl_divergence
from unmask.rl.updates import learnable

EstimatorKind = Literal["token", "mean", "bound"]


@dataclass(frozen=True)
class LossInputs:
    """All that a loss reads. Log-probabilities [B, M, T] are of the same views, and 0 outside their targets.

    Attributes:
        policy_BMT: log-probabilities under the trained model, with gradients.
        old_BMT: log-probabilities under the model that sampled.
        reference_BMT: log-probabilities under the other model of the KL divergence (`kl_to`: the reference or
            the old policy); None: no divergence.
        rollout, views: the completions; what the views hide, their targets, and the weight of each.
        advantage_BT: the advantage of each token [B, T] or of each completion [B, 1].
        token_weight_BT: the weight of each token in the loss; 0 for tokens that are not trained on.
        importance_BT: the weight that corrects for a server's own log-probabilities; None: 1.
    """

    policy_BMT: Tensor
    old_BMT: Tensor
    reference_BMT: Tensor | None
    rollout: Rollout
    views: Views
    advantage_BT: Tensor
    token_weight_BT: Tensor
    importance_BT: Tensor | None = None

    def of_tokens(self, log_prob_BMT: Tensor) -> Tensor:
        """The weighted sum over views [B, T]; of draws each by itself."""
        if isinstance(self.views.replaced, Drawn):
            return (self.views.weight_BMT * log_prob_BMT).flatten(1)
        return sum_over_views(log_prob_BMT, self.views)

    def of_sequences(self, log_prob_BMT: Tensor) -> Tensor:
        """The weighted sum over views and tokens [B, 1]."""
        return self.of_tokens(log_prob_BMT).sum(1, keepdim=True)

    @property
    def num_targets_B1(self) -> Tensor:
        """The number of tokens of each completion that are targets; at least 1."""
        target_BT = per_token(self.views, self.views.target_BMT.any(1))
        return target_BT.sum(1, keepdim=True).clamp_min(1)

    @property
    def weight_B1(self) -> Tensor:
        """Weight of each completion in the loss."""
        return self.token_weight_BT.sum(1, keepdim=True)

    @property
    def advantage_B1(self) -> Tensor:
        """One advantage per completion: the weighted mean of its tokens' advantages."""
        tiny = torch.finfo(torch.float32).tiny
        return (self.advantage_BT * self.token_weight_BT).sum(1, keepdim=True) / self.weight_B1.clamp_min(
            tiny
        )

    @property
    def length_B1(self) -> Tensor:
        """The number of tokens of each completion, with the targets after its end; at least 1."""
        return learnable(self.rollout, self.views).sum(1, keepdim=True).clamp_min(1)


class Loss(NamedTuple):
    """A summed loss, and what to log of the elements (tokens or completions) with a weight above 0."""

    total: Tensor
    ratio: Tensor
    clipped: Tensor
    kl: Tensor


def weighted_sum(
    loss: Tensor,
    weight: Tensor,
    ratio: Tensor | None = None,
    clipped: Tensor | None = None,
    kl: Tensor | None = None,
) -> Loss:
    """The loss summed by weight. By default ratios are logged as 1, not clipped, and divergences as 0."""
    counted_N = flat_indices(weight > 0)
    ratio = torch.ones_like(weight) if ratio is None else ratio
    clipped = torch.zeros_like(weight, dtype=torch.bool) if clipped is None else clipped
    kl = torch.zeros_like(weight) if kl is None else kl.detach()
    return Loss((weight * loss).sum(), *(values.take(counted_N) for values in (ratio, clipped, kl)))


def loss_of(method: Method, inputs: LossInputs) -> Loss:
    """The method's summed loss. Raises TrainingError if the method returns something else."""
    loss = method.loss(inputs)
    if not isinstance(loss, Loss):
        raise TrainingError(
            f"returned {type(loss).__name__}, not Loss",
            where=f"loss of {method.name}",
            remedy="Return weighted_sum(loss_BT, inputs.token_weight_BT), of unmask.rl.methods",
        )
    return loss


def per_token(views: Views, value_BT: Tensor) -> Tensor:
    """What is known of each position [B, T] for each token of the loss: of draws [B, M T], where a position
    counts once in each view, and only if it is a target there."""
    if not isinstance(views.replaced, Drawn):
        return value_BT
    return torch.where(views.target_BMT, value_BT[:, None], torch.zeros_like(value_BT[:, None])).flatten(1)


def averaging_units(rollout: Rollout, views: Views, loss_type: str | None) -> Tensor:
    """The unit [B, T] over whose tokens `token_weights` averages: the view in which a token is a target, else
    the step that revealed it."""
    by_view = loss_type is not None and loss_type.startswith("view")
    if isinstance(views.replaced, Drawn):
        view_1M1 = torch.arange(views.count, device=views.target_BMT.device)[None, :, None]
        length = views.target_BMT.shape[2]
        unit_BMT = view_1M1 if by_view else view_1M1 * length + rollout.group_BT.clamp_min(0)[:, None]
        return unit_BMT.expand_as(views.target_BMT).flatten(1)
    return views.target_BMT.int().argmax(1) if by_view else rollout.step_BT.clamp_min(0)


def plan_setting(default: Any) -> Any:
    """A setting that only the method's own `plan` reads: refused where a masking strategy plans instead, and
    for causal models."""
    return field(default=default, metadata={"plan": True})


def fixed(value: Any) -> Any:
    """A setting of all methods for which this one accepts only one value."""
    return field(default=value, init=False)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A member of the GRPO family. Its fields are its settings and their defaults.

    `GRPOConfig` has each setting as a key of the same name, and documents it. An unset key has the method's
    default. A key that only other methods have is refused. Fields that are no such keys are set by
    `GRPOConfig(method_settings=...)`. To add a method, subclass this class or one below it, and decorate it
    with `register`.

    Attributes:
        name: as in `GRPOConfig(method=...)`.
        separable: whether the loss is a sum over views of losses of one view each; otherwise the gradient by
            the log-probabilities of all views is computed first, and then backpropagated one view at a time.
        biased_by: settings of rollouts and losses that the method refuses, because it promises a gradient
            without bias.
        estimator: what the weights of a masking strategy's views (`unmask.rl.methods.masking`) must estimate
            for the loss: "token" each token's log-probability, "mean" the mean over each view's targets,
            "bound" a bound on the sequence's likelihood.
        has_ratio: whether the loss compares the policy with the one that sampled (`LossInputs.old_BMT`),
            which corrects for completions of older weights (`max_staleness`).
        random_tokens: whether it also trains models of uniform noise, which have no masks: its plan reads
            `Rollout.canvas_steps` or `Rollout.random_tokens`.
        partial: whether `after_eos: noise` changes anything: views hide any part of a completion, rather than
            replay its sampling.
        loss_type: None: `for_attention` sets it.
    """

    name: ClassVar[str]
    separable: ClassVar[bool] = False
    estimator: ClassVar[EstimatorKind] = "token"
    has_ratio: ClassVar[bool] = False
    partial: ClassVar[bool] = True
    random_tokens: ClassVar[bool] = False
    biased_by: ClassVar[tuple[str, ...]] = ()

    scale_rewards: ScaleRewards = "none"
    loss_type: LossType | None = "dapo"
    difficulty: list[float] | None = None
    filter_zero_std_groups: bool = False
    num_iterations: int = 1
    remasking: str = "low_confidence"
    steps: int | None = None
    stop_at_eos: bool = True
    after_eos: str = "mask"

    def plan(self, rollout: Rollout, draw: MaskRNG) -> Views:
        """The views of one inner iteration, for the policy, the old policy and the reference; `draw` is the
        source of randomness."""
        raise NotImplementedError

    def loss(self, inputs: LossInputs) -> Loss:
        """The summed loss."""
        raise NotImplementedError

    def sums_over_views(self) -> bool:
        """Whether with these settings the loss is a sum over views."""
        return self.separable

    def for_attention(self, attention: str) -> Self:
        """The method with the settings that follow from the model's attention."""
        return self


@dataclass(frozen=True, kw_only=True)
class DivergenceMethod(Method):
    """A method whose loss may have a KL divergence from the reference or the old policy."""

    beta: float = 0.0
    kl: Divergence = "k3"
    kl_to: str = "reference"


@dataclass(frozen=True, kw_only=True)
class ClippedMethod(DivergenceMethod):
    """A method with PPO's clipped surrogate."""

    has_ratio = True

    epsilon: float = 0.5
    epsilon_high: float | None = None
    delta: float | None = None
    log_ratio_clamp: float | None = None

    def clamped(self, log_ratio: Tensor) -> Tensor:
        """The logarithm of a ratio within `log_ratio_clamp`."""
        return (
            log_ratio
            if self.log_ratio_clamp is None
            else log_ratio.clamp(-self.log_ratio_clamp, self.log_ratio_clamp)
        )

    def surrogate(
        self,
        log_ratio: Tensor,
        reference_log_ratio: Tensor | None,
        advantage: Tensor,
        weight: Tensor,
        *,
        importance: Tensor | None = None,
        kl_weight: Tensor | float = 1.0,
        use_bias_correction_kl: bool = False,
    ) -> Loss:
        """The clipped surrogate and the divergence of elements of any shape, summed by weight.

        Args:
            log_ratio: log-probability under the policy minus that under the old policy.
            reference_log_ratio: log-probability under the reference minus that under the policy; None: no
                divergence.
            importance: a factor of the surrogate.
            kl_weight: a factor of the divergence, in addition to `beta`.
            use_bias_correction_kl: multiply the divergence by the ratio, as the samples are the old policy's
                (DeepSeek-AI 2025, DeepSeek-V3.2).
        """
        log_ratio = self.clamped(log_ratio)
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        clipped = clipped_surrogate(
            log_ratio, advantage, epsilon=self.epsilon, epsilon_high=high, delta=self.delta
        )
        loss = clipped.loss if importance is None else importance * clipped.loss
        kl = torch.zeros_like(log_ratio)
        if reference_log_ratio is not None:
            # clamped: k3 is an exponential too
            kl = kl_divergence(self.clamped(reference_log_ratio), self.kl)
        if use_bias_correction_kl:
            kl = log_ratio.exp() * kl
        return weighted_sum(loss + self.beta * kl_weight * kl, weight, clipped.ratio, clipped.clipped, kl)


@dataclass(frozen=True, kw_only=True)
class TokenMethod(ClippedMethod):
    """The clipped surrogate of every token, and the divergence from the reference.

    Attributes:
        importance_sampling_level: "token": each token has its own. "sequence": all tokens of a completion
            have the geometric mean of theirs (GSPO, Zheng et al. 2025). "product": all have the ratio of the
            whole completion.
    """

    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = False
    vllm_importance_sampling_cap: float | None = 2.0

    def loss(self, inputs: LossInputs) -> Loss:
        return self.token_loss(inputs)

    def token_loss(self, inputs: LossInputs, kl_weight: Tensor | float = 1.0) -> Loss:
        """The loss; `kl_weight` [B, T] is a factor of the divergence."""
        policy_BT, old_BT = inputs.of_tokens(inputs.policy_BMT), inputs.of_tokens(inputs.old_BMT)
        log_ratio_BT = policy_BT - old_BT
        if self.importance_sampling_level != "token":
            whole_B1 = log_ratio_BT.sum(1, keepdim=True)
            if self.importance_sampling_level == "sequence":
                whole_B1 = whole_B1 / inputs.num_targets_B1
            log_ratio_BT = whole_B1.expand_as(log_ratio_BT)
        reference_BT = (
            None if inputs.reference_BMT is None else inputs.of_tokens(inputs.reference_BMT) - policy_BT
        )
        return self.surrogate(
            log_ratio_BT,
            reference_BT,
            inputs.advantage_BT,
            inputs.token_weight_BT,
            importance=inputs.importance_BT,
            kl_weight=kl_weight,
            use_bias_correction_kl=self.use_bias_correction_kl,
        )

    def sums_over_views(self) -> bool:
        return self.separable and self.importance_sampling_level == "token"


@dataclass(frozen=True, kw_only=True)
class PolicyGradientMethod(DivergenceMethod):
    """-advantage times the log-probability of every token, without a ratio: the policy is, or is assumed to
    be, the one that sampled."""

    vllm_importance_sampling_cap: float | None = 2.0

    def loss(self, inputs: LossInputs) -> Loss:
        loss_BT = -inputs.advantage_BT * inputs.of_tokens(inputs.policy_BMT)
        if inputs.importance_BT is not None:
            loss_BT = inputs.importance_BT * loss_BT
        if inputs.reference_BMT is None:
            return weighted_sum(loss_BT, inputs.token_weight_BT)
        # by view: weights may be far from 1
        kl_BT = inputs.of_tokens(kl_divergence(inputs.reference_BMT - inputs.policy_BMT, self.kl))
        return weighted_sum(loss_BT + self.beta * kl_BT, inputs.token_weight_BT, kl=kl_BT)


METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=Method)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def register(method: type[M]) -> type[M]:
    """Decorate a subclass of `Method`: makes it a frozen dataclass and lets `GRPOConfig(method=...)` name it.
    A method of the same name is replaced.

    Raises:
        ConfigError: it has no name, or a default was changed without an annotation, so that it would be no
            field.
    """
    if not hasattr(method, "name"):
        raise ConfigError(
            f"{method.__name__} has no name", where=method.__module__, remedy="Write name = ... in the class"
        )
    inherited = {
        setting.name for base in method.__mro__[1:] if issubclass(base, Method) for setting in fields(base)
    }
    for name in inherited & vars(method).keys() - method.__annotations__.keys():
        raise ConfigError(
            f"{method.__name__}.{name} has no annotation",
            where=method.__module__,
            remedy=f"Write {name}: TYPE = VALUE",
        )
    method = dataclass(frozen=True, kw_only=True)(method)
    METHODS[method.name] = method
    return method


def get_method(name: str) -> type[Method]:
    """The method of this name, or the class that `path/to/file.py:NAME` or `package.module:NAME` names.

    Raises:
        ConfigError: there is none, or the class cannot be loaded, or was not registered.
    """
    with naming_setting("method"):
        if ":" in name:
            method = load_class(name, Method)
            if "__dataclass_fields__" not in vars(method) or not hasattr(method, "name"):
                raise ConfigError(
                    f"{method.__name__} is not registered",
                    where=name,
                    remedy="Give it a name, and write @register above it (docs/rl.md has an example)",
                )
            return method
        refuse_file_alone(name, lambda value: isinstance(value, type) and issubclass(value, Method), "method")
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}", where="method", remedy=did_you_mean(name, METHODS))
    return METHODS[name]


def settings_of(method: type[Method], *, plan: bool = True) -> dict[str, Any]:
    """A method's settings and their defaults, with or without those that only its plan reads."""
    defaults = method()
    return {
        setting.name: getattr(defaults, setting.name)
        for setting in fields(method)
        if plan or not setting.metadata.get("plan")
    }


def fixed_settings(method: type[Method]) -> set[str]:
    """The settings for which a method accepts only one value."""
    return {setting.name for setting in fields(method) if not setting.init}
