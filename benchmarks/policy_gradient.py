"""How far each method's gradient is from that of the expected reward, on models whose samples can all be
listed.

    python -m benchmarks.policy_gradient            # prints the table of docs/rl.md

A model of six tokens completes a prompt by three. Every path of the sampler (what is drawn at every hidden
position, and which of it is kept) is listed with its probability, so that the expected reward and its
gradient are exact. A method's gradient is the expected one of its own loss and views, in the first update on
a rollout, over groups so large that their mean is the expected reward. Each text has a random reward. A
difference is relative to the exact gradient, after the method's own is scaled to be as near as possible,
which a learning rate would do.

Shapes: S states, H hidden positions of a block, D draws of them, V vocabulary, B paths, M views, T positions.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.harness import heading
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.diffusion.log_probs import noise_groups, view_log_probs
from unmask.diffusion.views import MaskRNG
from unmask.generation.policies import GivenTokens, decide_by, first_by_priority
from unmask.generation.rollout import decoding_blocks
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.rl.methods import Rollout, get_method
from unmask.rl.methods.base import Method
from unmask.rl.methods.trajectory import OnPolicyReplayMethod, ReplayMethod
from unmask.rl.policy_loss import policy_loss, policy_views
from unmask.rl.updates import plan_views

PROMPT = [4, 5]
LENGTH = 3
SAMPLERS: dict[str, dict[str, Any]] = {
    "confidence": {"remasking": "low_confidence"},
    "margin, entropy": {"remasking": "entropy"},
    "random": {"remasking": "random"},
    "left to right": {"remasking": "left_to_right"},
}
METHODS: dict[str, dict[str, Any]] = {
    "exact-gradient": {},
    "agrpo": {},
    "just-grpo": {},
    "cj-grpo": {},
    "dipo": {},
    "trace-rl": {"loss_type": "view"},
    "step-merge": {"segments": 2},
    "diffu-grpo": {"prompt_mask_rate": 0.0},
    "wd1": {"prompt_mask_rate": 0.0},
    "coupled-grpo": {},
    "espo": {"samples": 2},
    "gdpo": {},
    "bgpo": {},
    "uni-grpo": {},
    "spg": {"prompt_mask_rate": 0.0},
}
"""With what differs from a method's own settings."""
EXACT = 1e-9
DRAWS = 16  # of the views of each text, for methods that draw them


def toy(seed: int, attention: str = "bidirectional", block_size: int | None = None) -> DiffusionLM:
    """A model in float64 of six tokens, one of them the end. Its predictions depend strongly on what they
    see."""
    tokenizer = character_tokenizer("ab")
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, initializer_range=0.7, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    return make_diffusion(model, tokenizer, attention=attention, block_size=block_size, logit_shift=False)


@dataclass
class Paths:
    """Every path of a sampler to a text, with its probability [B], which has a gradient."""

    rollout: Rollout
    probability_B: Tensor

    def reward(self, seed: int) -> Tensor:
        """A random number [B] for each text, which ends with the first end token."""
        ids_BT = torch.where(self.rollout.completion_BT, self.rollout.ids_BT, -1)
        _, text_B = ids_BT.unique(dim=0, return_inverse=True)
        return torch.randn(
            int(text_B.max()) + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )[text_B]

    def advantage(self, reward_B: Tensor, kind: str) -> Tensor:
        """Of each path [B], in an infinite group. Standard deviations and constant factors are left out."""
        probability_B = self.probability_B.detach()
        centred_B = reward_B - (probability_B * reward_B).sum()
        if kind != "softmax":
            return centred_B
        up_B, down_B = centred_B.exp(), (-centred_B).exp()
        return up_B / (probability_B * up_B).sum() - down_B / (probability_B * down_B).sum()


def enumerate_paths(
    lm: DiffusionLM, config: SamplerConfig, prompt: Sequence[int] = PROMPT, length: int = LENGTH
) -> Paths:
    """All paths of `unmask.generate`. Of the settings `temperature` (above 0), `policy`, `tokens_per_step`,
    `block_size` and `stop_at_eos` are read."""
    start, count = len(prompt), config.tokens_per_step or 1
    ids_ST = torch.tensor([[*prompt, *[lm.mask_token_id] * length]])
    step_ST = torch.full_like(ids_ST, -1)
    probability_S, step, finished = torch.ones(1, dtype=torch.float64), 0, []
    size = {"bidirectional": config.block_size or length, "causal": 1}.get(lm.attention, lm.block_size or 1)
    for first in range(start, start + length, size):
        block = slice(first, min(first + size, start + length))
        while hidden := int((ids_ST[0, block] == lm.mask_token_id).sum()):
            ids_ST, step_ST, probability_S = _step(
                lm, config, (ids_ST, step_ST, probability_S), block, hidden, count, step
            )
            step += 1
        if config.stop_at_eos:
            ended_S = (ids_ST[:, start:] == lm.eos_token_ids[0]).any(1)
            finished.append((ids_ST[ended_S], step_ST[ended_S], probability_S[ended_S]))
            ids_ST, step_ST, probability_S = ids_ST[~ended_S], step_ST[~ended_S], probability_S[~ended_S]
        if not len(ids_ST):
            break
    ids_BT, step_BT, probability_B = (
        torch.cat(parts) for parts in zip(*finished, (ids_ST, step_ST, probability_S), strict=True)
    )
    canvas_BT = (torch.arange(start + length) >= start).expand_as(ids_BT)
    end_BT = canvas_BT & (ids_BT == lm.eos_token_ids[0])
    completion_BT = (
        canvas_BT & ((end_BT.cumsum(1) == 0) | ((end_BT.cumsum(1) == 1) & end_BT)) & (step_BT >= 0)
    )
    document_BT = torch.ones_like(ids_BT)
    group_BT = noise_groups(lm, canvas_BT, document_BT)
    block_BT = decoding_blocks(lm, canvas_BT, group_BT, config.block_size)
    return Paths(
        Rollout(ids_BT, document_BT, ~canvas_BT, completion_BT, step_BT, group_BT, block_BT), probability_B
    )


def _step(
    lm: DiffusionLM,
    config: SamplerConfig,
    states: tuple[Tensor, Tensor, Tensor],
    block: slice,
    hidden: int,
    count: int,
    step: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Every state that can follow some (tokens, steps, probabilities) that hide equally many positions of the
    block."""
    ids_ST, step_ST, probability_S = states
    is_hidden_ST = ids_ST == lm.mask_token_id
    visible = ids_ST.shape[1] if lm.attention == "bidirectional" else block.stop
    logits_STV = lm.logits(ids_ST[:, :visible], hidden_BT=is_hidden_ST[:, :visible])
    position_SH = is_hidden_ST[:, block].nonzero()[:, 1].view(-1, hidden) + block.start
    logits_SHV = logits_STV.gather(1, position_SH[:, :, None].expand(-1, -1, logits_STV.shape[2]))
    log_prob_SHV = (logits_SHV / config.temperature).log_softmax(-1)
    drawable = [token for token in range(logits_SHV.shape[2]) if token != lm.mask_token_id]
    draw_DH = torch.tensor(list(itertools.product(drawable, repeat=hidden)))
    log_prob_SDH = torch.stack([log_prob_SHV[:, place, draw_DH[:, place]] for place in range(hidden)], 2)
    reached_SD = probability_S[:, None] * log_prob_SDH.sum(2).exp()
    shape_SDH = log_prob_SDH.shape
    if config.remasking == "random":  # every set of positions is as likely
        sets = itertools.combinations(range(hidden), min(count, hidden))
        choices = [torch.isin(torch.arange(hidden), torch.tensor(chosen)) for chosen in sets]
        kept = [(choice_H.expand(shape_SDH), 1 / len(choices)) for choice_H in choices]
    else:
        rows_NV = logits_SHV.detach()[:, None].expand(*shape_SDH, -1).reshape(-1, logits_SHV.shape[2])
        given = GivenTokens(draw_DH.expand(shape_SDH).reshape(-1), None, None, None)
        priority_ND = decide_by(rows_NV, config, {}, given=given).priority_N.view(-1, hidden)
        kept = [(first_by_priority(priority_ND, torch.full((len(priority_ND),), count)).view(shape_SDH), 1.0)]
    follow, reached = [], []
    for keep_SDH, share in kept:
        new_SDH = torch.where(keep_SDH, draw_DH, lm.mask_token_id)
        follow.append(
            torch.cat(
                [torch.arange(len(ids_ST))[:, None, None].expand(-1, len(draw_DH), 1), new_SDH], 2
            ).flatten(0, 1)
        )
        reached.append((share * reached_SD).flatten())
    unique_NK, index = torch.cat(follow).unique(dim=0, return_inverse=True)
    parent_N, new_NH = unique_NK[:, 0], unique_NK[:, 1:]
    next_ids_NT = ids_ST[parent_N].scatter(1, position_SH[parent_N], new_NH)
    next_step_NT = torch.where(
        is_hidden_ST[parent_N] & (next_ids_NT != lm.mask_token_id), step, step_ST[parent_N]
    )
    return (
        next_ids_NT,
        next_step_NT,
        torch.zeros(len(unique_NK), dtype=torch.float64).index_add(0, index, torch.cat(reached)),
    )


def exact_gradient(lm: DiffusionLM, paths: Paths, reward_B: Tensor) -> Tensor:
    """The gradient of the expected reward by the weights, as one vector."""
    return _gradient(lm, (paths.probability_B * reward_B).sum())


def expected_gradient(lm: DiffusionLM, method: Method, paths: Paths, reward_B: Tensor) -> Tensor:
    """Minus the expected gradient of the method's loss, as one vector; drawn views are drawn `DRAWS` times
    for each text."""
    rollout, weight_B = (
        paths.rollout,
        paths.probability_B.detach() * paths.advantage(reward_B, method.scale_rewards),
    )
    if not isinstance(method, ReplayMethod | OnPolicyReplayMethod):  # the views depend on the text alone
        _, first_B = rollout.ids_BT.unique(dim=0, return_inverse=True)
        weight_B = (
            torch.zeros(int(first_B.max()) + 1, dtype=torch.float64)
            .index_add(0, first_B, weight_B)
            .repeat(DRAWS)
        )
        index_B = (
            torch.zeros(int(first_B.max()) + 1, dtype=torch.long)
            .scatter(0, first_B, torch.arange(len(first_B)))
            .repeat(DRAWS)
        )
        rollout = rollout.select(index_B)  # type: ignore[arg-type]
    rollout = rollout.whole() if method.after_eos == "train" else rollout
    draw = MaskRNG(0, torch.arange(len(weight_B)), 0)
    views = plan_views(lambda rollout: policy_views(lm, method, rollout, draw), rollout, method.after_eos)
    log_prob_BMT = view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views).double()
    settings = {} if not getattr(method, "beta", 0) else {"reference_BMT": log_prob_BMT.detach()}
    loss = policy_loss(
        method, rollout, views, log_prob_BMT, weight_B, max_completion_length=LENGTH, **settings
    )
    return -_gradient(lm, loss.total)


def _gradient(lm: DiffusionLM, value: Tensor) -> Tensor:
    parameters = list(lm.model.parameters())
    parts = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, parts, strict=True)]
    )


def difference(exact: Tensor, other: Tensor) -> float:
    """The distance of two vectors relative to the first, after the second is scaled to be nearest."""
    scale = (exact @ other).clamp_min(0) / (other @ other).clamp_min(1e-300)
    return ((exact - scale * other).norm() / exact.norm()).item()


def differences(
    methods: dict[str, Method], sampler: dict[str, Any], seeds: Sequence[int]
) -> dict[str, list[float]]:
    """The difference of each method's gradient for models and rewards of these seeds."""
    found: dict[str, list[float]] = {name: [] for name in methods}
    for seed in seeds:
        lm = toy(seed)
        paths = enumerate_paths(lm, SamplerConfig(temperature=1.0, **sampler))
        reward_B = paths.reward(seed)
        exact = exact_gradient(lm, paths, reward_B)
        for name, method in methods.items():
            found[name].append(difference(exact, expected_gradient(lm, method, paths, reward_B)))
    return found


def methods() -> dict[str, Method]:
    """The methods of the table; those that replay the sampler also with the tokens after the end."""
    made: dict[str, Method] = {}
    for name, settings in METHODS.items():
        made[name] = get_method(name)(**settings)
        if isinstance(made[name], ReplayMethod | OnPolicyReplayMethod) and made[name].after_eos == "mask":
            made[f"{name}`, `after_eos: train"] = get_method(name)(**settings, after_eos="train")
    return made


def table(methods: dict[str, Method], seeds: Sequence[int]) -> list[str]:
    """The median and the largest difference of each method by sampler, in Markdown; 0 below the rounding of
    float64."""
    columns = [differences(methods, sampler, seeds) for sampler in SAMPLERS.values()]
    lines = [f"| method | {' | '.join(SAMPLERS)} |", "|---|" + "---|" * len(SAMPLERS)]
    for name in methods:
        found = [column[name] for column in columns]
        cells = ["0" if max(of) < EXACT else f"{statistics.median(of):.2f} ({max(of):.2f})" for of in found]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=10)
    options = parser.parse_args()
    print(heading(), "\n")
    print("\n".join(table(methods(), range(options.models))))


if __name__ == "__main__":
    main()
