"""Pure functions of logits: which token to reveal at each position, and with which priority.

`_decide` orders the positions by `remasking`. `num_accepted` counts those that a threshold, a factor or a
bound accepts, and a step of the engine (`engine/steps.py`) reveals as many. A new order is a value of
`SamplerConfig.remasking` and a case of `_decide`.

Shapes: N hidden positions (rows of logits), V vocabulary, G groups of it, K entries of a group, L tokens that
are revealed last, B sequences, W positions of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple, assert_never

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.config.sampler import SamplerConfig
from unmask.diffusion.rng import RngStream, uniform
from unmask.errors import GenerationError

MOST_TOP = 20
"""Number of top log-probabilities recorded per position (the same for all sequences, which share tables)."""
GROUP = 256  # vocabulary entries per group: a draw first picks a group by its sum, then an entry of it
GPU_LOGITS_AT_ONCE = 2**28  # 1 GB in float32
CPU_LOGITS_AT_ONCE = 2**19  # these stay in the processor's cache between the passes over them


class Decision(NamedTuple):
    """The token that would be revealed at each position. The highest priorities are revealed first; of equal
    ones, the lower position."""

    token_N: Tensor
    log_prob_N: Tensor  # under the model at temperature 1
    priority_N: Tensor  # the order's confidence, float32 so that rounding does not separate equal ones
    # under the distribution that the token is drawn from; with a trace
    sampled_log_prob_N: Tensor | None = None
    # of the model's distribution, in nats; with a trace or if the order ranks by it
    entropy_N: Tensor | None = None
    # the model's most probable tokens, `MOST_TOP` or the whole vocabulary; with `top_log_probs`
    top_id_NK: Tensor | None = None
    top_log_prob_NK: Tensor | None = None
    # likewise, of tokens that a constraint forbids; with `top_forbidden`
    forbidden_id_NK: Tensor | None = None
    forbidden_log_prob_NK: Tensor | None = None  # -inf: it forbids fewer
    # between the model's two highest probabilities; if the order or an early commit needs it
    margin_N: Tensor | None = None


class GivenTokens(NamedTuple):
    """Tokens that were drawn together with those of other positions."""

    token_N: Tensor
    # given the others' condition, float64; NaN where that changes nothing; None: nowhere
    log_prob_N: Tensor | None
    # logits given the condition, for entropies and margins; None: nothing needs them
    believed_NV: Tensor | None
    # logits of the distribution that each is drawn from, before temperature, top_k, top_p and min_p
    drawn_from_NV: Tensor | None
    # the tokens that the condition leaves no text for; None: nothing records them
    forbidden_NV: Tensor | None = None

    def part(self, rows: slice) -> GivenTokens:
        """Some rows."""
        parts: Any = (None if values is None else values[rows] for values in self)
        return GivenTokens(*parts)


def decide(
    logits_NV: Tensor,
    config: SamplerConfig,
    key_N: Tensor,
    step_N: Tensor,
    position_N: Tensor,
    present_NV: Tensor | None = None,
    given: GivenTokens | None = None,
) -> Decision:
    """Draw a token for each position and rank it. All randomness is keyed by (seed, key, step, position).
    Raises GenerationError for NaN.

    Args:
        logits_NV: aligned logits at hidden positions.
        key_N, step_N, position_N: the sequence's key and denoising steps so far, and the position in it.
        present_NV: the tokens that occur in each row's sequence, for a repetition penalty.
        given: the tokens, if they are drawn already.
    """
    uniforms = {
        stream: uniform(config.seed, key_N, step=step_N, position=position_N, stream=stream)
        for stream in streams(config)
    }
    decision = decide_by(logits_NV, config, uniforms, present_NV, given)
    refuse_nan(decision.log_prob_N)  # one NaN makes its whole row NaN
    return decision


def streams(config: SamplerConfig) -> list[RngStream]:
    """The streams that a decision draws numbers from."""
    drawn = [RngStream.TOKEN] if config.temperature > 0 else []
    drawn += [RngStream.ORDER] if config.remasking == "random" else []
    return drawn + ([RngStream.ORDER_NOISE] if config.order_temperature > 0 else [])


def decide_by(
    logits_NV: Tensor,
    config: SamplerConfig,
    uniforms: dict[RngStream, Tensor],
    present_NV: Tensor | None = None,
    given: GivenTokens | None = None,
) -> Decision:
    """Decide like `decide`, by the numbers [N] of `streams`. For NaN the log-probabilities are NaN."""
    rows, vocabulary = logits_NV.shape
    rows_at_once = max(
        1, (CPU_LOGITS_AT_ONCE if logits_NV.device.type == "cpu" else GPU_LOGITS_AT_ONCE) // vocabulary
    )
    if rows <= rows_at_once:
        return _decide(logits_NV, config, uniforms, present_NV, given)
    chunks = []
    for first in range(0, rows, rows_at_once):
        chunk = slice(first, first + rows_at_once)
        present = None if present_NV is None else present_NV[chunk]
        drawn = None if given is None else given.part(chunk)
        uniforms_N = {stream: uniform_N[chunk] for stream, uniform_N in uniforms.items()}
        chunks.append(_decide(logits_NV[chunk], config, uniforms_N, present, drawn))
    columns = zip(*chunks, strict=True)
    parts: list[Any] = [None if values[0] is None else torch.cat(values) for values in columns]
    return Decision(*parts)


def _decide(
    logits_NV: Tensor,
    config: SamplerConfig,
    uniforms: dict[RngStream, Tensor],
    present_NV: Tensor | None,
    given: GivenTokens | None,
) -> Decision:
    weight_NV, total_N1, normalizer_N1, group_N1 = _normalized(logits_NV)
    sampled_N = None
    if given is None or given.believed_NV is None:
        entropy_N, margin_N = _certainty(logits_NV, weight_NV, total_N1, normalizer_N1, config)
    else:
        entropy_N, margin_N = _certainty(given.believed_NV, *_normalized(given.believed_NV)[:3], config)
    if given is None:
        token_N1, weight_NV = _draw_tokens(logits_NV, weight_NV, group_N1, config, uniforms, present_NV)
    else:
        token_N1 = given.token_N[:, None]
        if given.drawn_from_NV is not None:
            weight_NV = weights(
                given.drawn_from_NV, given.drawn_from_NV.amax(-1, keepdim=True), config.temperature or 1.0
            )
            weight_NV = keep_likely(weight_NV, config.top_k, config.top_p, config.min_p)
    token_N, log_prob_N = token_N1.squeeze(1), (logits_NV.gather(1, token_N1) - normalizer_N1).squeeze(1)
    if config.trace:  # at temperature 0 the most probable token has probability 1
        sampled_N = (
            torch.zeros_like(log_prob_N) if config.temperature == 0 else _log_fraction(weight_NV, token_N)
        )
    if config.reveal_last:
        last_L = torch.tensor(config.reveal_last, device=logits_NV.device)
        weight_NV = weight_NV.index_fill(1, last_L, 0.0)
    match config.remasking:
        case "random":
            priority_N = uniforms[RngStream.ORDER]
        case "left_to_right":
            priority_N = torch.zeros_like(log_prob_N)  # ties by the lower position
        case order if config.filtered_confidence:
            priority_N = _filtered_confidence(weight_NV, token_N, order)
        case "low_confidence":
            priority_N = (
                log_prob_N
                if given is None or given.log_prob_N is None
                else _confidence_given(log_prob_N, given.log_prob_N)
            )
        case "margin":
            assert margin_N is not None
            priority_N = margin_N
        case "entropy":
            assert entropy_N is not None
            priority_N = -entropy_N
        case _:
            assert_never(config.remasking)
    if config.order_temperature > 0:
        confidence_N = priority_N.exp() if config.remasking == "low_confidence" else priority_N
        # never of 0
        priority_N = (
            confidence_N / config.order_temperature
            - (-(uniforms[RngStream.ORDER_NOISE] + 2.0**-54).log()).log()
        )
    if config.reveal_last:
        priority_N = priority_N.masked_fill(torch.isin(token_N, last_L), -torch.inf)
    # -inf means a position without a row
    priority_N = priority_N.float().clamp_min(torch.finfo(torch.float32).min)
    top: tuple[Tensor | None, Tensor | None] = (None, None)
    forbidden: tuple[Tensor | None, Tensor | None] = (None, None)
    if config.top_log_probs:
        top = most_probable(logits_NV, normalizer_N1)
    if given is not None and given.forbidden_NV is not None:
        forbidden = most_probable(logits_NV.masked_fill(~given.forbidden_NV, -torch.inf), normalizer_N1)
    return Decision(token_N, log_prob_N, priority_N, sampled_N, entropy_N, *top, *forbidden, margin_N)


def normalizer(logits_NV: Tensor) -> Tensor:
    """The log of the sum of the exponentials of each row."""
    return _normalized(logits_NV)[2].squeeze(1)


def refuse_nan(value_N: Tensor) -> None:
    """Raise GenerationError for predictions that are NaN."""
    if value_N.isnan().any():
        raise nan_error()


def nan_error() -> GenerationError:
    """The error for predictions that are NaN."""
    remedy = (
        "Its weights are damaged (load an earlier checkpoint), or too large for their type (load it in "
        "float32)"
    )
    return GenerationError("the predictions are NaN", where="model", remedy=remedy)


def _normalized(logits_NV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weights of each row, their sum, the log of the sum of the exponentials, and the group of the first
    largest logit."""
    largest_N1, group_N1 = _by_group(logits_NV, torch.amax).max(-1, keepdim=True)
    weight_NV = weights(logits_NV, largest_N1)
    total_N1 = weight_NV.sum(-1, keepdim=True)
    return weight_NV, total_N1, largest_N1 + total_N1.log(), group_N1


def most_probable(logits_NV: Tensor, normalizer_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of the largest logits, and their log-probabilities."""
    top_NK, top_id_NK = logits_NV.topk(min(MOST_TOP, logits_NV.shape[1]))
    return top_id_NK, top_NK - normalizer_N1


def _certainty(
    logits_NV: Tensor, weight_NV: Tensor, total_N1: Tensor, normalizer_N1: Tensor, config: SamplerConfig
) -> tuple[Tensor | None, Tensor | None]:
    """The entropy and the margin of each row, as far as the settings need them."""
    entropy_N = margin_N = None
    if config.trace or (config.remasking == "entropy" and not config.filtered_confidence):
        mean_N1 = (weight_NV * logits_NV.clamp_min(torch.finfo(logits_NV.dtype).min)).sum(
            -1, keepdim=True
        ) / total_N1
        entropy_N = (normalizer_N1 - mean_N1).squeeze(1)
    if config.early_commit is not None or (config.remasking == "margin" and not config.filtered_confidence):
        best_N2 = (logits_NV.topk(2).values - normalizer_N1).exp()
        margin_N = best_N2[:, 0] - best_N2[:, 1]
    return entropy_N, margin_N


def _confidence_given(log_prob_N: Tensor, given_N: Tensor) -> Tensor:
    """Log-probabilities given a condition, where it changes them: in float32, and near 0 in steps of 2**-24.
    Positions that have one token left are then equally certain, whatever a machine rounds."""
    return torch.where(given_N.isnan(), log_prob_N, ((given_N - 1).float() + 1).to(log_prob_N))


def _draw_tokens(
    logits_NV: Tensor,
    weight_NV: Tensor,
    group_N1: Tensor,
    config: SamplerConfig,
    uniforms: dict[RngStream, Tensor],
    present_NV: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A token [N, 1] for each row, and the weights that it is drawn by: the model's `weight_NV` after
    penalty, bans, temperature and filters. `group_N1`: of the largest logits."""
    adjusted = config.repetition_penalty != 1 or bool(config.allowed_tokens or config.forbidden_tokens)
    if config.temperature == 0 and not config.filtered_confidence and not adjusted:
        return _best_of_group(logits_NV, group_N1), weight_NV
    if adjusted:
        logits_NV = penalize_and_ban(logits_NV, config, present_NV)
    if config.temperature == 0 and not config.filtered_confidence:
        return best(logits_NV)[:, None], weight_NV
    if adjusted or config.temperature not in (0, 1):
        weight_NV = weights(logits_NV, logits_NV.amax(-1, keepdim=True), config.temperature or 1.0)
    weight_NV = keep_likely(weight_NV, config.top_k, config.top_p, config.min_p)
    token_N = best(logits_NV) if config.temperature == 0 else draw(weight_NV, uniforms[RngStream.TOKEN])
    return token_N[:, None], weight_NV


def weights(logits_NV: Tensor, largest_N1: Tensor, temperature: float = 1.0) -> Tensor:
    """Probabilities relative to that of each row's largest logit."""
    below_NV = logits_NV - largest_N1
    return (below_NV if temperature == 1 else below_NV.div_(temperature)).exp_()


def _log_fraction(weight_NV: Tensor, token_N: Tensor) -> Tensor:
    """The log-probability of a token in each row, under the distribution proportional to the weights."""
    return (weight_NV.gather(1, token_N[:, None]).squeeze(1) / weight_NV.sum(-1)).log()


def _filtered_confidence(
    weight_NV: Tensor, token_N: Tensor, order: Literal["low_confidence", "margin", "entropy"]
) -> Tensor:
    """The confidence that an order (`remasking`) goes by, under the distribution proportional to the weights,
    from which tokens are drawn (Dream, Ye et al. 2025); -inf where none has a weight."""
    total_N = weight_NV.sum(-1)
    match order:
        case "low_confidence":
            confidence_N = _log_fraction(weight_NV, token_N)
        case "entropy":
            confidence_N = -torch.special.entr(weight_NV / total_N[:, None]).sum(-1)
        case "margin":
            best_N2 = (weight_NV / total_N[:, None]).topk(2).values
            confidence_N = best_N2[:, 0] - best_N2[:, 1]
        case _:
            assert_never(order)
    return confidence_N.masked_fill(total_N == 0, -torch.inf)


def guide(logits_NV: Tensor, unconditional_NV: Tensor, guidance: float | Tensor) -> Tensor:
    """Logits moved by `guidance` times their difference from those without the prompt (Nie et al. 2025); -inf
    stays."""
    return torch.where(
        logits_NV == -torch.inf, logits_NV, logits_NV + guidance * (logits_NV - unconditional_NV)
    )


def penalize_and_ban(logits_NV: Tensor, config: SamplerConfig, present_NV: Tensor | None = None) -> Tensor:
    """Logits after the repetition penalty (Keskar et al. 2019), and -inf for banned tokens."""
    if config.repetition_penalty != 1 and present_NV is not None:
        penalized_NV = torch.where(
            logits_NV > 0, logits_NV / config.repetition_penalty, logits_NV * config.repetition_penalty
        )
        logits_NV = torch.where(present_NV, penalized_NV, logits_NV)
    if config.allowed_tokens or config.forbidden_tokens:
        banned_V = torch.full(logits_NV.shape[1:], bool(config.allowed_tokens), device=logits_NV.device)
        banned_V[torch.tensor(config.allowed_tokens or [], dtype=torch.long)] = False
        banned_V[torch.tensor(config.forbidden_tokens or [], dtype=torch.long)] = True
        logits_NV = logits_NV.masked_fill(banned_V, -torch.inf)
    return logits_NV


def keep_likely(weight_NV: Tensor, top_k: int, top_p: float, min_p: float = 0.0) -> Tensor:
    """Weights that are zero except for the `top_k` largest (0: all), of these for the fewest whose sum
    reaches the fraction `top_p`, and of these for those of at least `min_p` times the largest. transformers
    filters in this order too."""
    if min_p > 0:
        weight_NV = keep_likely(weight_NV, top_k, top_p)
        return torch.where(weight_NV < min_p * weight_NV.amax(-1, keepdim=True), 0, weight_NV)
    if top_k == 0 and top_p == 1.0:
        return weight_NV
    sorted_NV, order_NV = weight_NV.sort(dim=-1, descending=True, stable=True)
    sorted_NV = sorted_NV[:, : top_k or None]
    mass_NV = sorted_NV.double().cumsum(-1)
    keep_NV = mass_NV - sorted_NV < top_p * mass_NV[:, -1:]
    return weight_NV * torch.zeros_like(weight_NV, dtype=torch.bool).scatter(
        1, order_NV[:, : keep_NV.shape[1]], keep_NV
    )


def best(logits_NV: Tensor) -> Tensor:
    """The argmax of each row, the first among equals. By groups, since argmax over a row takes 15 times as
    long as its maximum."""
    return _best_of_group(logits_NV, _by_group(logits_NV, torch.amax).argmax(-1, keepdim=True)).squeeze(1)


def _best_of_group(logits_NV: Tensor, group_N1: Tensor) -> Tensor:
    """The argmax [N, 1] of each row, given the first group that has it. Past the end of the vocabulary its
    last entry repeats."""
    inside_NK = logits_NV.gather(1, _columns(group_N1).clamp_max(logits_NV.shape[1] - 1))
    return torch.add(inside_NK.argmax(-1, keepdim=True), group_N1, alpha=GROUP)


def draw(weight_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Inverse-CDF sampling: one uniform number per row picks a token in proportion to its weight. First a
    group of the vocabulary, then a token of it, so that only the sums of groups are accumulated (in float64).
    Of NaN weights, some token."""
    uniform_N1, last = uniform_N[:, None], weight_NV.shape[1] - 1
    group_N1, before_N1, goal_N1 = _search(_by_group(weight_NV, torch.sum), uniform_N1, None)
    column_NK = _columns(group_N1)
    inside_NK = weight_NV.gather(1, column_NK.clamp_max(last)).masked_fill(column_NK > last, 0.0)
    index_N1, _, _ = _search(inside_NK, uniform_N1, goal_N1 - before_N1)
    return torch.add(index_N1, group_N1, alpha=GROUP).clamp_max(last).squeeze(1)


def _by_group(value_NV: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """The sums or maxima [N, G] of groups of the vocabulary; the last group has the remainder."""
    rest = value_NV.shape[1] % GROUP
    if rest == 0:
        return reduce(value_NV.unflatten(1, (-1, GROUP)), -1)
    whole_NV, rest_NV = value_NV.split((value_NV.shape[1] - rest, rest), 1)
    rest_N1 = reduce(rest_NV, -1, keepdim=True)
    return (
        torch.cat([reduce(whole_NV.unflatten(1, (-1, GROUP)), -1), rest_N1], 1)
        if whole_NV.shape[1]
        else rest_N1
    )


def _columns(group_N1: Tensor) -> Tensor:
    """The entries [N, K] of one group per row, some past the end of the vocabulary."""
    return torch.add(_inside(group_N1.device), group_N1, alpha=GROUP)


@cache
@torch.inference_mode(False)
def _inside(device: torch.device) -> Tensor:
    """The entries of the first group."""
    return torch.arange(GROUP, device=device)


def _search(weight_NK: Tensor, uniform_N1: Tensor, goal_N1: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The entry at which the cumulative sum exceeds the goal, the sum before it, and the goal (None: the
    uniform number times the total). Rounding never selects an entry of weight 0."""
    sum_NK = weight_NK.double().cumsum(-1)
    total_N1 = sum_NK[:, -1:].contiguous()
    goal_N1 = uniform_N1 * total_N1 if goal_N1 is None else goal_N1
    index_N1 = torch.searchsorted(sum_NK, goal_N1, right=True)
    # the last entry of positive weight
    index_N1 = torch.minimum(index_N1, torch.searchsorted(sum_NK, total_N1))
    return index_N1, F.pad(sum_NK, (1, 0)).gather(1, index_N1), goal_N1


def num_accepted(priority_BW: Tensor, config: SamplerConfig) -> Tensor:
    """The number of tokens [B] that a step reveals by threshold, factor or entropy bound, at least 1. Visible
    tokens have priority -inf."""
    sorted_BW = priority_BW.double().sort(dim=-1, descending=True).values
    hidden_BW = sorted_BW > -torch.inf
    if config.threshold is not None:
        accepted_BW = sorted_BW.exp() >= config.threshold
    elif config.factor is not None:
        accepted_BW = sorted_BW.exp() >= 1 - config.factor / torch.arange(2.0, sorted_BW.shape[1] + 2).to(
            sorted_BW
        )
    else:
        assert config.entropy_bound is not None
        sum_BW = (-sorted_BW).cumsum(-1)
        accepted_BW = sum_BW <= config.entropy_bound
        # the last one has the largest entropy; those of `reveal_last` wait
        if config.entropy_rule == "sum-minus-max":
            accepted_BW = (F.pad(sum_BW[:, :-1], (1, 0)) <= config.entropy_bound) & (
                sorted_BW > torch.finfo(torch.float32).min
            )
    return (accepted_BW & hidden_BW).sum(-1).clamp_min(1)


def first_by_priority(priority_BT: Tensor, count_B: Tensor) -> Tensor:
    """The `count` positions of highest priority in each row, as a boolean [B, T]; ties by the lower
    position."""
    order_BT = priority_BT.sort(dim=-1, descending=True, stable=True).indices
    rank_BT = torch.zeros_like(order_BT).scatter(
        1, order_BT, torch.arange(order_BT.shape[1], device=order_BT.device).expand_as(order_BT)
    )
    return (rank_BT < count_B[:, None]) & (priority_BT > -torch.inf)


def count_remasked(counts: list[int], step: int, remask: float) -> int:
    """The number of tokens that step `step` of a block hides again, and reveals beyond its count (ReMDM, Wang
    et al. 2025)."""
    return min(int(remask * sum(counts[:step])), sum(counts[step + 1 :]))
