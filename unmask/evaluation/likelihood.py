"""Log-likelihoods of texts under any DiffusionLM.

Every pair of a prompt and a completion is computed in passes of its own, whose shapes depend on nothing else,
and with masks that depend on nothing else: its log-likelihood has the same bits in any list, batch or
process.

Shapes: B pairs, P differences of pairs of views, T tokens of one pair, V vocabulary, N its completion tokens
(in `is_greedy`: hidden tokens of a block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.data.encoding import encode_completion, encode_prompt
from unmask.diffusion.likelihood import Bound, elbo, exact_log_likelihood
from unmask.diffusion.rng import sequence_key
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, GenerationError
from unmask.evaluation.statistics import student_quantile
from unmask.generation.requests import check_ids, make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM, ForwardInputs
from unmask.models.model_state import evaluating

LikelihoodEstimator = Literal["elbo", "exact"]
ROWS_PER_PASS, TOKENS_PER_PASS = 128, 32_768
"""Noised rows of a forward pass at most: a function of the row's length alone."""
FEWEST_DIFFERENCES = 4
"""The fewest differences from which an interval is made."""
EXACT_BLOCK = 4
"""The largest attention block over whose orders `default_estimator` sums."""


@dataclass(frozen=True)
class LogLikelihoods:
    """Log-likelihoods of completions, or estimates of their lower bounds."""

    values: Tensor
    """[B], in nats, on the CPU."""
    differences: list[Tensor]
    """`Bound.difference_BP` of each pair [P]; empty where the value is exact."""

    @property
    def standard_errors(self) -> Tensor:
        """[B], in nats: of the estimates, over the random masks; 0 where a value is exact, NaN where the
        views are too few to tell."""
        return (
            torch.stack([difference_P.square().sum().sqrt() for difference_P in self.differences])
            if self.differences
            else self.values
        )

    def half_widths(self) -> Tensor:
        """[B], in nats: of 95% intervals around the values; 0 where a value is exact. They are infinite for
        fewer than `FEWEST_DIFFERENCES` (17 samples), whose intervals would hold the bound too rarely.

        They are Student's, with the degrees of freedom that the variances of the differences have together.

        Source: F. E. Satterthwaite, "An Approximate Distribution of Estimates of Variance Components" (1946).
        """
        return torch.tensor(
            [_half_width(difference_P.tolist()) for difference_P in self.differences], dtype=torch.float64
        )


def _half_width(differences: Sequence[float]) -> float:
    if not differences:
        return 0.0
    if len(differences) < FEWEST_DIFFERENCES:
        return math.inf
    squares = [difference**2 for difference in differences]
    variance = math.fsum(squares)
    # A fourth power estimates three times the square of a variance.
    degrees = 3 * variance**2 / math.fsum(square**2 for square in squares) - 2 if variance else math.inf
    return math.sqrt(variance) * student_quantile(min(max(degrees, 1), len(differences))) if variance else 0.0


def chosen_estimator(
    lm: DiffusionLM, estimator: LikelihoodEstimator | None, samples: int | None = None
) -> LikelihoodEstimator:
    """The estimator that is asked for; None: that of `default_estimator`. `samples`: the number that is asked
    for; None: none is. Raises ConfigError for an unknown estimator, one that the model does not have, and
    samples that it does not read."""
    if estimator not in ("elbo", "exact", None):
        raise ConfigError(f"{estimator!r} is not an estimator", where="estimator", remedy="Use elbo or exact")
    if estimator == "exact" and lm.noise != "masked":
        what = f"no exact likelihood is known with {lm.noise} noise"
        raise ConfigError(what, where="estimator", remedy="Leave it out, or use elbo")
    chosen = estimator or default_estimator(lm)
    if samples is not None and lm.autoregressive:
        what = "the likelihood of this model is exact"
        raise ConfigError(what, where="samples", remedy="Leave it out")
    if samples is not None and chosen == "exact":
        what = "an exact likelihood is not estimated from samples"
        raise ConfigError(what, where="samples", remedy="Leave it out, or set the estimator elbo")
    return chosen


def default_estimator(lm: DiffusionLM) -> LikelihoodEstimator:
    """exact for a causal model, and over the orders of masked blocks of at most 4 tokens; else elbo."""
    orders = lm.noise == "masked" and (lm.block_size or EXACT_BLOCK + 1) <= EXACT_BLOCK
    return "exact" if lm.autoregressive or orders else "elbo"


def log_likelihood(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[int]],
    estimator: LikelihoodEstimator | None = None,
    samples: int = 32,
    seed: int = 0,
) -> Tensor:
    """log p(completion | prompt) of each pair, in nats: the values of `log_likelihoods`, [B] on the CPU."""
    return log_likelihoods(lm, prompts, completions, estimator, samples, seed).values


@torch.no_grad()
def log_likelihoods(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[int]],
    estimator: LikelihoodEstimator | None = None,
    samples: int = 32,
    seed: int = 0,
    keys: Sequence[int] | None = None,
    shared: int | None = None,
) -> LogLikelihoods:
    """log p(completion | prompt) of each pair, with the standard error of each estimate.

    Args:
        prompts: strings, chat messages or lists of token ids.
        completions: strings or lists of token ids; no EOS is added.
        estimator: "elbo": an unbiased estimate of the lower bound (exact-count masks in complementary pairs);
            "exact": one pass for a causal model, otherwise any-order dynamic programming for at most 12
            tokens (or blocks of at most 12); None: of `default_estimator`.
        samples: noised views per pair at most (elbo).
        seed: of the masks.
        keys: of the masks, one per pair; None: a hash of each prompt. Masks depend only on the seed, the key,
            and the position in the completion. So completions of one prompt have common masks, and their
            difference is known better than each.
        shared: the number of first tokens that a completion has in common with those that it is compared
            with: their positions count from the beginning, those of the others from the end. None: the
            positions of its first half count from the beginning.

    Returns:
        0 for an empty completion.

    Raises:
        ConfigError: fewer than one sample, or an estimator as in `chosen_estimator`.
        GenerationError: the lists have different lengths, a pair exceeds the context, a model with a logit
            shift has an empty prompt, a token id is outside the vocabulary, or an exact likelihood would need
            groups of more than 12 tokens.
        DataError: a prompt or completion cannot be encoded.
    """
    estimator = chosen_estimator(lm, estimator)
    if samples < 1:
        raise ConfigError(f"{samples} samples", where="samples", remedy="Use 1 or more")
    if len({len(prompts), len(completions), len(prompts if keys is None else keys)}) > 1:
        what = f"{len(prompts)} prompts and {len(completions)} completions" + (
            "" if keys is None else f" with {len(keys)} keys"
        )
        raise GenerationError(what, where="log_likelihood", remedy="Give one completion per prompt")
    pairs = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids = encode_prompt(lm.tokenizer, prompt)
        ids = (
            encode_completion(lm.tokenizer, prompt_ids, completion)
            if isinstance(completion, str)
            else list(completion)
        )
        check_ids(lm, [*prompt_ids, *ids], f"pair {index}")
        _check_length(lm, index, len(prompt_ids), len(ids))
        pairs.append((prompt_ids, ids, sequence_key(prompt_ids) if keys is None else keys[index]))
    with evaluating(lm):
        draws = [MaskRNG(seed, torch.tensor([key])) for *_, key in pairs]
        found = [
            _of_pair(lm, *pair[:2], estimator, samples, draw, shared)
            for pair, draw in zip(pairs, draws, strict=True)
        ]
    values_B = torch.tensor([float(bound.value_B) for bound in found], dtype=lm.log_prob_dtype)
    return LogLikelihoods(values_B, [bound.difference_BP[0].cpu() for bound in found])


def _of_pair(
    lm: DiffusionLM,
    prompt: list[int],
    ids: list[int],
    estimator: LikelihoodEstimator,
    samples: int,
    draw: MaskRNG,
    shared: int | None,
) -> Bound:
    certain_BP = torch.zeros(1, 0, dtype=lm.log_prob_dtype)
    if not ids:
        return Bound(certain_BP.sum(1), certain_BP)
    ids_1T = torch.tensor([[*prompt, *ids]], device=lm.device)
    if lm.autoregressive:
        log_prob_N = lm.log_probs(causal_inputs(lm, ids_1T, len(ids)), ids_1T[0, len(prompt) :])
        return Bound(log_prob_N.double().sum()[None], certain_BP)
    maskable_1T = torch.arange(ids_1T.shape[1], device=lm.device)[None] >= len(prompt)
    chunk = max(1, min(ROWS_PER_PASS, TOKENS_PER_PASS // ids_1T.shape[1]))
    if estimator == "exact":
        return Bound(exact_log_likelihood(lm, ids_1T, None, maskable_1T, chunk=chunk), certain_BP)
    draw = replace(draw, key_B=draw.key_B.to(lm.device))
    found = elbo(lm, ids_1T, None, maskable_1T, draw, samples=samples, chunk=chunk, shared=shared)
    # Of two masked tokens, everything hidden and the two halves of a pair are all views that there are.
    most = 2 if samples > 2 else samples - 1
    certain = lm.noise == "masked" and min(len(ids), lm.block_size or len(ids)) <= most
    return Bound(found.value_B, certain_BP) if certain else found


def causal_inputs(lm: DiffusionLM, ids_1T: Tensor, count: int) -> ForwardInputs:
    """The inputs of a pass of a causal model that predicts the last `count` tokens. The last one is not read:
    a row may be one longer than the context."""
    length = ids_1T.shape[1]
    return replace(
        lm.noised_inputs(ids_1T[:, :-1]),
        index_N=torch.arange(length - 1 - count, length - 1, device=ids_1T.device),
    )


@torch.no_grad()
def is_greedy(lm: DiffusionLM, prompt: Sequence[int], completion: Sequence[int]) -> bool:
    """Whether `generate` writes exactly these tokens after the prompt, with one token a step, the most
    confident first, and a canvas of their number; with uniform noise, as it does by default. It stops at the
    first other token. Arguments are token ids. Of a causal model the last one may lie beyond the context."""
    goal = [*prompt, *completion]
    with evaluating(lm):
        if lm.autoregressive:
            ids_1T = torch.tensor([goal], device=lm.device)
            return lm.forward(causal_inputs(lm, ids_1T, len(completion))).argmax(-1).tolist() == list(
                completion
            )
        config = SamplerConfig(max_new_tokens=len(completion), stop_at_eos=False)
        if lm.noise == "uniform":
            return generate(lm, [list(prompt)], config).tokens[0] == list(completion)
        request = make_requests(lm, [list(prompt)], config)[0]
        ids, hidden = list(request.ids), list(request.hidden)
        for start, stop in request.blocks:
            visible = len(goal) if lm.attention == "bidirectional" else stop
            while positions := [position for position in range(start, stop) if hidden[position]]:
                hidden_1T = torch.tensor([hidden[:visible]], device=lm.device)
                rows_1T = torch.zeros_like(hidden_1T)
                rows_1T[0, positions] = True
                logits_NV = lm.logits(
                    torch.tensor([ids[:visible]], device=lm.device), rows_BT=rows_1T, hidden_BT=hidden_1T
                )
                confidence_N, token_N = logits_NV.log_softmax(-1).max(-1)
                best = int(confidence_N.argmax())
                position = positions[best]
                if int(token_N[best]) != goal[position]:
                    return False
                ids[position], hidden[position] = goal[position], False
    return True


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """The number of first tokens that are the same in all rows."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False)))


def _check_length(lm: DiffusionLM, index: int, prompt: int, completion: int) -> None:
    if lm.context_length is not None and prompt + completion > lm.context_length + lm.autoregressive:
        what = f"{prompt} prompt and {completion} completion tokens exceed the context of {lm.context_length}"
        raise GenerationError(what, where=f"pair {index}", remedy="Shorten the prompt or the completion")
    if lm.logit_shift and prompt == 0 and completion:
        raise GenerationError(
            "the prompt is empty", where=f"pair {index}", remedy="Give at least one token (such as BOS)"
        )
