"""The samplers of LLaDA (and d1), Dream and SDAR, one prompt at a time, written from their definitions: no
code of Unmask but the model's logits and the random numbers. Positions of equal confidence are taken from
left to right.

Each is a generator: it gives the token ids that it wants predicted, is sent their logits, and returns the
canvas after the prompt. So `run` can compute those of many prompts at once.

Shapes: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable

import torch
from torch import Tensor

from unmask.diffusion.rng import RngStream, uniform
from unmask.models.diffusion_lm import DiffusionLM

Sampler = Generator[list[int], Tensor, list[int]]
LAST_TIME = 1e-3


@torch.no_grad()
def run(lm: DiffusionLM, samplers: Iterable[Sampler]) -> list[list[int]]:
    """What each sampler returns."""
    canvases: dict[int, list[int]] = {}
    waiting = {number: (sampler, next(sampler)) for number, sampler in enumerate(samplers)}
    while waiting:
        by_length = defaultdict(list)
        for number, (_, ids) in waiting.items():
            by_length[len(ids)].append(number)
        for numbers in by_length.values():
            logits_BTV = lm.logits(torch.tensor([waiting[number][1] for number in numbers]))
            for number, logits_TV in zip(numbers, logits_BTV, strict=True):
                sampler, _ = waiting.pop(number)
                try:
                    waiting[number] = sampler, sampler.send(logits_TV)
                except StopIteration as end:
                    canvases[number] = end.value
    return [canvases[number] for number in sorted(canvases)]


def llada(
    lm: DiffusionLM,
    prompt: list[int],
    length: int,
    steps: int,
    block: int,
    *,
    logits_eos_inf: bool = False,
    confidence_eos_eot_inf: bool = False,
    as_written: bool = False,
) -> Sampler:
    """Blocks from left to right; each step keeps the predictions of highest probability (Nie et al. 2025).

    `as_written`: the rule about confidence as the text has it, -inf at end tokens; else as the code has it at
    temperature 0, where the end tokens have no part in any distribution.
    """
    ids = prompt + [lm.mask_token_id] * length
    eos, ends = lm.eos_token_ids[0], list(lm.eos_token_ids)
    num_blocks = length // block
    steps_of_block = max(1, steps // num_blocks)
    for start in range(len(prompt), len(prompt) + length, block):
        for step in range(steps_of_block):
            count = block // steps_of_block + (step < block % steps_of_block)
            logits_TV = yield ids
            if logits_eos_inf:
                logits_TV[:, eos] = -torch.inf
            token_T = logits_TV.argmax(-1)
            if confidence_eos_eot_inf and not as_written:
                logits_TV[:, ends] = -torch.inf
            prob_TV = logits_TV.softmax(-1)
            confidence = {
                at: float(prob_TV[at, token_T[at]])
                for at in range(start, start + block)
                if ids[at] == lm.mask_token_id
            }
            if confidence_eos_eot_inf and as_written:
                confidence = {
                    at: -1.0 if int(token_T[at]) in ends else value for at, value in confidence.items()
                }
            for at in most_confident(confidence)[:count]:
                ids[at] = int(token_T[at])
    return ids[len(prompt) :]


def dream(
    lm: DiffusionLM,
    prompt: list[int],
    length: int,
    steps: int,
    *,
    temperature: float,
    top_p: float,
    rounded_down: bool,
    key: int,
) -> Sampler:
    """At times from 1 to 0.001, each step keeps those of lowest entropy, under the distribution that tokens
    are drawn from (Ye et al. 2025). `rounded_down`: their number is the hidden ones times 1 - s / t, rounded
    down, in the last step the rest; else length / steps."""
    ids = prompt + [lm.mask_token_id] * length
    time = torch.linspace(1, LAST_TIME, steps + 1)
    drawn = 0  # steps that changed something: those number the random draws
    for step in range(steps):
        hidden = [at for at, token in enumerate(ids) if token == lm.mask_token_id]
        count = length // steps + (step < length % steps)
        if rounded_down:
            count = len(hidden) if step == steps - 1 else int(len(hidden) * (1 - time[step + 1] / time[step]))
        if count == 0:
            continue
        logits_TV = yield ids
        prob_TV = nucleus((logits_TV / (temperature or 1.0)).softmax(-1), top_p)
        entropy_T = -torch.special.xlogy(prob_TV, prob_TV).sum(-1)
        for at in most_confident({at: -float(entropy_T[at]) for at in hidden})[:count]:
            ids[at] = int(prob_TV[at].argmax()) if temperature == 0 else draw(prob_TV[at], key, drawn, at)
        drawn += 1
    return ids[len(prompt) :]


def sdar(
    lm: DiffusionLM,
    prompt: list[int],
    length: int,
    *,
    temperature: float,
    top_k: int,
    threshold: float,
    confidence_after_filters: bool,
    key: int,
    block: int = 4,
) -> Sampler:
    """Blocks of absolute positions; each step keeps the most confident token, or with a threshold below 1 all
    above it (Cheng et al. 2025). It ends after a block with an end token. Temperature 0 stands for
    temperature 1 with the most probable token only."""
    total = -(-(len(prompt) + length) // block) * block
    ids = prompt + [lm.mask_token_id] * (total - len(prompt))
    steps = 0
    for start in range(len(prompt) // block * block, total, block):
        while lm.mask_token_id in ids[start : start + block]:
            logits_TV = yield ids[: start + block]
            prob_TV = (logits_TV / (temperature or 1.0)).softmax(-1)
            confidence, token_at = {}, {}
            for at in (at for at in range(start, start + block) if ids[at] == lm.mask_token_id):
                kept_V = largest(prob_TV[at], 1 if temperature == 0 else top_k)
                token_at[at] = draw(kept_V, key, steps, at)
                confidence[at] = float((kept_V if confidence_after_filters else prob_TV[at])[token_at[at]])
            order = most_confident(confidence)
            count = sum(confidence[at] > threshold for at in order) if threshold < 1 else 1
            for at in order[: max(1, count)]:
                ids[at] = token_at[at]
            steps += 1
        if set(lm.eos_token_ids) & set(ids[len(prompt) : start + block]):
            break
    return ids[len(prompt) :]


def most_confident(confidence: dict[int, float]) -> list[int]:
    return sorted(confidence, key=lambda at: (-confidence[at], at))


def nucleus(prob_TV: Tensor, top_p: float) -> Tensor:
    """The most probable tokens until their sum exceeds `top_p`, normalized."""
    sorted_TV, order_TV = prob_TV.sort(dim=-1, descending=True, stable=True)
    kept_TV = torch.where(sorted_TV.cumsum(-1) - sorted_TV <= top_p, sorted_TV, 0.0)
    return torch.zeros_like(prob_TV).scatter(-1, order_TV, kept_TV / kept_TV.sum(-1, keepdim=True))


def largest(prob_V: Tensor, k: int) -> Tensor:
    """The `k` most probable tokens (0: all), normalized."""
    kept_V = prob_V.clone()
    if k:
        kept_V[prob_V < prob_V.topk(k).values[-1]] = 0.0
    return kept_V / kept_V.sum()


def draw(prob_V: Tensor, key: int, step: int, position: int) -> int:
    """The token at which the cumulative distribution exceeds the uniform number of this sequence, step and
    position."""
    number = uniform(0, torch.tensor(key), step=step, position=position, stream=RngStream.TOKEN)
    return int((prob_V.cumsum(-1) <= number).sum().clamp_max(int(prob_V.nonzero()[-1])))
