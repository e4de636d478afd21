"""Reinforcement learning on canvases of random tokens: what the views of methods show, what is refused, and
the gradient of the expected reward, on a model whose canvases can all be listed.

Shapes: B completions, M views, T positions, X canvases of L positions, V predicted tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from benchmarks.policy_gradient import difference
from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.rl.methods.rollouts import LENGTH, PROMPTS, config, keys, plan
from tests.tiny import float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.diffusion.log_probs import view_log_probs
from unmask.diffusion.mixing import RandomTokens
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, GenerationError
from unmask.generation import sampler
from unmask.generation.canvas import CanvasSettings, accept
from unmask.generation.output import CanvasStep, Generation, Trace
from unmask.generation.rollout import cut_at_end, make_rollout
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.rl.methods import METHODS, Rollout, get_method
from unmask.rl.methods.base import Method
from unmask.rl.policy_loss import policy_loss

PATTERNS = {
    "bidirectional": ("bidirectional", None, False),
    "blocks": ("block_causal", 4, False),
    "blocks with a shift": ("block_causal", 4, True),
}
every_canvas = pytest.mark.parametrize("kind", PATTERNS)
REPLAY = ["cj-grpo", "step-merge", "trace-rl", "dipo", "agrpo"]
BOUNDS = ["espo", "gdpo", "bgpo"]


def sampled(kind="bidirectional", **settings) -> tuple[DiffusionLM, Generation, Rollout]:
    attention, block_size, shift = PATTERNS[kind]
    lm = float64_lm("phi", attention, block_size, logit_shift=shift, eos_bias=1.0).with_noise("uniform")
    given = {"max_denoising_steps": 5, "entropy_bound": 3.0, "confidence_threshold": 1.6} | settings
    generation = sampler.generate(lm, PROMPTS, SamplerConfig(max_new_tokens=LENGTH, trace=True, **given))
    return lm, generation, make_rollout(lm, cut_at_end(lm, generation))


def canvases(trace: Trace) -> list[list[CanvasStep]]:
    return [[*steps] for _, steps in groupby(trace.canvas_steps, lambda step: step.start)]


# Views.


@each_once("chunk, kind", [None, 2], PATTERNS)
def test_replayed_log_probs_are_those_that_the_sampler_recorded(kind, chunk):
    lm, generation, rollout = sampled(kind)
    views = plan("cj-grpo", rollout.whole())
    with torch.no_grad():
        log_prob_BMT = view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views, chunk=chunk)
    target_BMT = torch.zeros_like(views.target_BMT)
    for row, trace in enumerate(generation.trace):
        for steps in canvases(trace):
            for number, step in enumerate(steps):
                for place, (token, log_prob) in enumerate(zip(step.kept, step.log_probs, strict=True)):
                    at = row, number, len(generation.prompts[row]) + step.start + place
                    last = step is steps[-1]
                    target_BMT[at] = token >= 0 or last
                    if token >= 0:
                        assert log_prob_BMT[at].item() == pytest.approx(log_prob, abs=1e-9)
                        assert views.replaced.token_BMT[at] == token
                    if last:
                        assert views.replaced.token_BMT[at] == rollout.ids_BT[row, at[2]]
    assert torch.equal(views.target_BMT, target_BMT)
    lengths = {len(steps) for trace in generation.trace for steps in canvases(trace)}
    assert len(lengths) > (kind != "bidirectional")


@partly_slow("kind", PATTERNS, 0, 2)
@pytest.mark.parametrize(
    ("name", "more"),
    [("step-merge", {"segments": n}) for n in (1, 2, 3, 9)]
    + [("trace-rl", {"shrink": n}) for n in (1, 2, 9)],
)
def test_a_view_of_a_stretch_shows_its_first_canvas_and_has_the_draws_of_its_last_step(kind, name, more):
    _, generation, rollout = sampled(kind)
    views = plan(name, rollout.whole(), **more)
    for row, trace in enumerate(generation.trace):
        start, most = len(generation.prompts[row]), max(map(len, canvases(trace)))
        if name == "trace-rl":
            edges = [*range(0, most, more["shrink"]), most]
        else:
            number = min(more["segments"], most)
            edges = [place * most // number for place in range(number + 1)]
        for view in range(views.count):
            expected = {}
            begin, stop = (*edges, *[most] * views.count)[view : view + 2]
            for steps in canvases(trace) if view < len(edges) - 1 else []:
                if begin >= len(steps):
                    continue
                last = steps[min(stop, len(steps)) - 1]
                kept = last.kept
                if last is steps[-1]:
                    kept = trace.canvas[last.start : last.start + len(kept)]
                for place, token in enumerate(kept):
                    if token >= 0:
                        at = start + last.start + place
                        expected[at] = token, last.temperature, begin
                        assert views.replaced.ids_BMT[row, view, at] == steps[begin].shown[place]
            found = views.target_BMT[row, view].nonzero().flatten().tolist()
            assert found == sorted(expected)
            for at in found:
                planes = (plane_BMT[row, view, at].item() for plane_BMT in views.replaced[1:])
                assert (*planes,) == expected[at]


def test_sampled_steps_are_those_of_the_replay_with_the_weight_of_all():
    _, _, rollout = sampled(confidence_threshold=1e-9)
    every, some = plan("cj-grpo", rollout), plan("agrpo", rollout, keys(rollout), samples=2)
    assert every.count == 5 and some.count == 2
    for row in range(len(PROMPTS)):
        steps = [
            next(
                step
                for step in range(5)
                if all(
                    torch.equal(getattr(every.replaced, name)[row, step], plane_BMT[row, view])
                    for name, plane_BMT in some.replaced._asdict().items()
                )
            )
            for view in range(2)
        ]
        assert len({*steps}) == 2
        assert torch.equal(some.target_BMT[row], every.target_BMT[row, steps])
        count = every.target_BMT[row].any(1).sum()
        assert torch.equal(some.weight_BMT[row], count / count.clamp(1, 2) * every.weight_BMT[row, steps])


@partly_slow("kind", PATTERNS, 0, 2)
@each_once("end, name", ["mask", "noise", "train"], BOUNDS)
def test_bounds_have_targets_in_the_completion_and_see_nothing_after_it(kind, name, end):
    lm, _, rollout = sampled(kind)
    rollout = rollout.whole() if end == "train" else rollout
    more = {"samples": 200} if name == "bgpo" else {}
    views = plan(name, rollout, end=end, **more)
    assert views.divergence
    assert torch.equal(views.target_BMT.any(1), rollout.completion_BT)
    assert not (views.replaced.ids_BMT != rollout.ids_BT[:, None])[~views.hidden_BMT].any()
    if end != "train" and name == "bgpo":
        after_BT = rollout.beyond_BT & rollout.revealed_BT
        seen_N = views.replaced.ids_BMT.transpose(1, 2)[after_BT]
        changed = (seen_N != rollout.ids_BT[after_BT][:, None]).double().mean()
        every = 1 - 1 / RandomTokens.of(lm).size
        assert changed.item() == pytest.approx(every if end == "mask" else every / 2, abs=0.05)


# The gradient of the expected reward.

WIDTH, STEPS = 2, 3
Sets = dict[tuple[int, ...], float]
SETS: Sets = {(0, 1): 0.7, (1,): 0.3}
"""The positions that a step keeps, and how often."""


def toy(seed: int) -> DiffusionLM:
    """A model in float64 of random tokens, of which there are three."""
    words = Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>")
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, initializer_range=0.7, **ids)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float64).eval()
    lm = make_diffusion(model, tokenizer, attention="bidirectional", logit_shift=False)
    return lm.with_noise("uniform")


class Listed:
    """All canvases of a toy after a prompt of one token, their predictions, and random rewards."""

    def __init__(self, lm: DiffusionLM, seed: int):
        self.lm = lm
        self.tokens = [token for token in range(lm.vocab_size) if token not in lm.never_predicted]
        self.canvas_XL = torch.tensor(list(itertools.product(range(len(self.tokens)), repeat=WIDTH)))
        random = torch.Generator().manual_seed(seed)
        self.reward_X = torch.randn(len(self.canvas_XL), generator=random, dtype=torch.float64)
        self.settings, self.size = CanvasSettings(max_denoising_steps=STEPS), len(self.tokens)

    def ids(self, index: int) -> list[int]:
        return [self.tokens[place] for place in self.canvas_XL[index].tolist()]

    def logits(self) -> Tensor:
        ids_XL = torch.tensor(self.tokens)[self.canvas_XL]
        prompt_X1 = torch.full_like(ids_XL[:, :1], 1)
        return self.lm.logits(torch.cat([prompt_X1, ids_XL], 1))[:, 1:, self.tokens]

    def following(self, share_XLV: Tensor) -> Tensor:
        """The probability of each canvas, of independent tokens with these probabilities [X, X]."""
        product_XX = torch.ones(len(share_XLV), len(self.canvas_XL), dtype=torch.float64)
        for place in range(WIDTH):
            product_XX = product_XX * share_XLV[:, place][:, self.canvas_XL[:, place]]
        return product_XX

    def kept(self, share_XLV: Tensor, kept_XL: Tensor) -> Tensor:
        """The next canvas [X, X], of which these positions are drawn and the others random."""
        return self.following(torch.where(kept_XL[:, :, None], share_XLV, 1 / self.size))

    def shares(self, step: int, logits_XLV: Tensor) -> Tensor:
        return (logits_XLV / self.settings.temperature(step)).softmax(-1)

    def mean_reward(self, sets: Sets | None, *, drawn: bool, as_drawn: bool = False) -> Tensor:
        """The expected reward, by the probabilities of canvases step by step.

        Args:
            sets: the positions that a step keeps, and how often; None: as the sampler does.
            drawn: whether the last step's draws are the result; else its most probable tokens are.
            as_drawn: whether these have the gradient of draws.
        """
        logits_XLV, count = self.logits(), len(self.canvas_XL)
        now_X = torch.full((count,), 1 / count, dtype=torch.float64)
        for step in range(STEPS - 1):
            share_XLV = self.shares(step, logits_XLV)
            if sets is None:
                entropy_XL = torch.special.entr(share_XLV.detach()).sum(-1)
                chosen = [(accept(entropy_XL, self.settings.entropy_bound), 1.0)]
            else:
                masks = (torch.isin(torch.arange(WIDTH), torch.tensor(kept)) for kept in sets)
                chosen = [
                    (kept_L.expand(count, -1), often)
                    for kept_L, often in zip(masks, sets.values(), strict=True)
                ]
            after_X = [often * (now_X @ self.kept(share_XLV, kept_XL)) for kept_XL, often in chosen]
            now_X = torch.stack(after_X).sum(0)
        share_XLV = self.shares(STEPS - 1, logits_XLV)
        if drawn:
            return (now_X @ self.following(share_XLV) * self.reward_X).sum()
        best_XL = share_XLV.argmax(-1)
        reward_X = self.reward_X[(best_XL[:, None] == self.canvas_XL).all(-1).long().argmax(1)]
        mean = (now_X * reward_X).sum()
        if as_drawn:
            log_prob_X = share_XLV.log().gather(2, best_XL[:, :, None]).sum((1, 2))
            centred_X = now_X.detach() * (reward_X - mean.detach())
            mean = mean + (centred_X * (log_prob_X - log_prob_X.detach())).sum()
        return mean


def gradient(lm: DiffusionLM, value: Tensor) -> Tensor:
    parts = torch.autograd.grad(value, [*lm.model.parameters()], allow_unused=True)
    pairs = zip(lm.model.parameters(), parts, strict=True)
    return torch.cat([(torch.zeros_like(p) if part is None else part).flatten() for p, part in pairs])


def paths(
    listed: Listed, sets_of: Callable[[int, Tensor], Sets], *, drawn: bool
) -> tuple[list[Trace], Tensor]:
    """Every path of canvases and its probability [B].

    Args:
        sets_of: the positions that a step keeps, and how often, by the canvas and the entropies [X, L].
        drawn: whether the last step's draws are the result; else its most probable tokens are.
    """
    logits_XLV = listed.logits().detach()
    every = [tuple(canvas) for canvas in listed.canvas_XL.tolist()]
    traces, probability = [], []

    def extend(now: int, steps: list[CanvasStep], chance: float) -> None:
        number = len(steps)
        share_XLV = listed.shares(number, logits_XLV)
        share_LV, none = share_XLV[now], [0.0] * WIDTH
        how = 0, listed.ids(now)
        if number == STEPS - 1:
            ends = {tuple(share_LV.argmax(-1).tolist()): 1.0}
            if drawn:
                ends = {end: likely(share_LV, end, range(WIDTH)) for end in every}
            for end, share in ends.items():
                last = CanvasStep(*how, [-1] * WIDTH, none, listed.settings.temperature(number))
                result = listed.ids(every.index(end))
                traces.append(Trace(result, [number] * WIDTH, none, canvas_steps=[*steps, last]))
                probability.append(chance * share)
            return
        for kept, often in sets_of(now, torch.special.entr(share_XLV).sum(-1)).items():
            for after, tokens in enumerate(every):
                ids = [token if at in kept else -1 for at, token in enumerate(listed.ids(after))]
                step = CanvasStep(*how, ids, none, listed.settings.temperature(number))
                extend(after, [*steps, step], chance * often * likely(share_LV, tokens, kept))

    def likely(share_LV: Tensor, tokens: Sequence[int], kept: Sequence[int]) -> float:
        shares = [
            share_LV[at, token].item() if at in kept else 1 / listed.size for at, token in enumerate(tokens)
        ]
        return math.prod(shares)

    for first in range(len(every)):
        extend(first, [], 1 / len(every))
    return traces, torch.tensor(probability, dtype=torch.float64)


def rollout_of(listed: Listed, traces: list[Trace]) -> tuple[Rollout, Tensor]:
    """The rollout of all paths, and their rewards."""
    count, tokens = len(traces), [trace.canvas for trace in traces]
    index = {tuple(listed.ids(at)): at for at in range(len(listed.canvas_XL))}
    reward_B = listed.reward_X[torch.tensor([index[tuple(canvas)] for canvas in tokens])]
    rows: list = [[0] * WIDTH] * count
    generation = Generation([[1]] * count, [""] * count, tokens, rows, rows, [STEPS] * count, traces)
    return make_rollout(listed.lm, cut_at_end(listed.lm, generation)).whole(), reward_B


def method_gradient(method: Method, listed: Listed, rollout: Rollout, weight_B: Tensor, steps: int) -> Tensor:
    """Minus the gradient of the method's loss with these advantages, by which each draw has the weight 1.
    `steps`: the first steps, whose draws count."""
    views = method.plan(rollout, MaskRNG(0, keys(rollout)))
    if steps < STEPS:  # of views in their order
        target_BMT = views.target_BMT & (torch.arange(views.count) < steps)[:, None]
        views = replace(views, target_BMT=target_BMT, weight_BMT=views.weight_BMT * target_BMT)
    log_prob_BMT = view_log_probs(listed.lm, rollout.ids_BT, None, views, chunk=8192)
    loss = policy_loss(method, rollout, views, log_prob_BMT, weight_B, max_completion_length=1)
    return -gradient(listed.lm, loss.total * len(weight_B))


EXACT = {"agrpo": {"samples": 99}, "cj-grpo": {}, "trace-rl": {"beta": 0.0}, "step-merge": {"segments": 99}}


@pytest.mark.slow
def test_with_random_acceptance_and_drawn_results_the_mean_gradient_is_exact():
    listed = Listed(toy(0), 0)
    reward = listed.mean_reward(SETS, drawn=True)
    exact = gradient(listed.lm, reward)
    traces, probability_B = paths(listed, lambda *_: SETS, drawn=True)
    rollout, reward_B = rollout_of(listed, traces)
    assert probability_B.sum().item() == pytest.approx(1)
    assert (probability_B @ reward_B).item() == pytest.approx(reward.item())
    for name, more in EXACT.items():
        method = get_method(name)(loss_type="dr_grpo", **more)
        weight_B = probability_B * (reward_B - reward.detach())
        found = method_gradient(method, listed, rollout, weight_B, STEPS)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


def test_with_the_samplers_acceptance_the_draws_that_were_kept_have_the_gradient_where_there_is_one():
    """The expected reward jumps where another set is kept or another token is the most probable. Between
    these places its gradient is that of the draws without the last step's, which drew nothing."""
    listed = Listed(toy(1), 1)

    def sets_of(now: int, entropy_XL: Tensor) -> Sets:
        kept_L = accept(entropy_XL, listed.settings.entropy_bound)[now]
        return {tuple(kept_L.nonzero().flatten().tolist()): 1.0}

    reward = listed.mean_reward(None, drawn=False)
    traces, probability_B = paths(listed, sets_of, drawn=False)
    rollout, reward_B = rollout_of(listed, traces)
    assert (probability_B @ reward_B).item() == pytest.approx(reward.item())
    method = get_method("cj-grpo")(loss_type="dr_grpo")
    weight_B = probability_B * (reward_B - reward.detach())
    found = method_gradient(method, listed, rollout, weight_B, STEPS - 1)
    torch.testing.assert_close(found, gradient(listed.lm, reward), rtol=1e-5, atol=1e-7)
    assert difference(found, method_gradient(method, listed, rollout, weight_B, STEPS)) > 0.1


def test_the_bias_with_the_samplers_acceptance_is_as_said():
    """Of the change of the expected reward from one model to another one, with all jumps, integrating the
    gradient of the draws that were kept predicts little: the correlation is 0.46 over 60 models, each changed
    by 0.02 times a standard normal number in each weight, and 0.91 of the change is left (as a root mean
    square). If the result counts as drawn, as in the methods, they are 0.56 and 0.83."""
    actual, kept, every = bias(range(20), parts=6)
    assert correlation(actual, kept) + 0.05 < correlation(actual, every)
    assert unexplained(actual, every) + 0.03 < unexplained(actual, kept) < 1


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one, other]))[0, 1].item()


def unexplained(actual: Tensor, predicted: Tensor) -> float:
    return ((actual - predicted).norm() / actual.norm()).item()


def bias(seeds: Sequence[int], parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of these models the change of its expected reward, and what integrating the gradient predicts:
    of the draws that were kept, and with the result as if drawn."""
    found = []
    for seed in seeds:
        listed = Listed(toy(seed), seed)
        weights = [*listed.lm.model.parameters()]
        random = torch.Generator().manual_seed(seed)
        change = [0.02 * torch.randn(w.shape, generator=random, dtype=torch.float64) for w in weights]
        change_N, predicted = torch.cat([part.flatten() for part in change]), [0.0, 0.0]

        @torch.no_grad()
        def move(share: float, weights=weights, change=change) -> None:
            for weight, part in zip(weights, change, strict=True):
                weight += share * part

        before = listed.mean_reward(None, drawn=False).item()
        move(0.5 / parts)
        for _ in range(parts):
            for index, as_drawn in enumerate((False, True)):
                value = listed.mean_reward(None, drawn=False, as_drawn=as_drawn)
                predicted[index] += (gradient(listed.lm, value) @ change_N).item() / parts
            move(1 / parts)
        move(-0.5 / parts)
        found.append((listed.mean_reward(None, drawn=False).item() - before, *predicted))
    return tuple(torch.tensor(found, dtype=torch.float64).unbind(1))


# What is refused.


def test_methods_that_need_masks_are_refused_with_those_that_do_not():
    for name, method in METHODS.items():
        args = config(name)
        if method.random_tokens:
            assert name in REPLAY + BOUNDS
            args.check_trained_noise("uniform")
            continue
        with raises(ConfigError, where="method") as raised:
            args.check_trained_noise("uniform")
        assert all(other in raised.value.remedy for other in REPLAY + BOUNDS)
    with raises(ConfigError, where="model"):
        config("cj-grpo").check_trained_noise("hybrid")


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"temperature": 0.9}, "temperature"),
        ({"steps": 4}, "steps"),
        ({"block_size": 4}, "block_size"),
        ({"remasking": "random"}, "remasking"),
        ({"generation_kwargs": {"threshold": 0.9}}, "generation_kwargs.threshold"),
        ({"logprob_temperature": 0.5}, "logprob_temperature"),
        ({"method": "step-merge", "prompt_mask_rate": 0.15}, "prompt_mask_rate"),
        ({"method": "gdpo", "method_settings": {"exact_counts": False}}, "method_settings.exact_counts"),
    ],
    ids=str,
)
def test_settings_that_need_masks_are_refused(given, where):
    with raises(ConfigError, where=where):
        config(**{"name": given.get("method", "cj-grpo")} | without(given, "method")).check_trained_noise(
            "uniform"
        )


def test_rollouts_need_the_steps_of_canvases():
    lm, generation, _ = sampled()
    bare = [replace(trace, canvas_steps=[]) for trace in generation.trace]
    with raises(GenerationError, where="generation"):
        make_rollout(lm, replace(generation, trace=bare))


def without(given: dict, name: str) -> dict:
    return {key: value for key, value in given.items() if key != name}
