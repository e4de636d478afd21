"""A model completes prompts with its own sampler, and learns the causal model's predictions in the states that
the sampler visited.

Shapes: B completions, T tokens, V vocabulary, K most probable tokens, N tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.convert.test_trainer import convert
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import add_to_logits, float64_causal, float64_lm, llama_lm, toy_lm
from tests.training.tiny_runs import batch, equal, weights
from unmask.cli import app
from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.distillation import compare, generalized_divergence
from unmask.convert.on_policy import state_views, taught_tokens, visited_states
from unmask.convert.trainer import ConvertTrainer, StageTrainer
from unmask.diffusion.rng import sequence_key
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.generation.rollout import make_rollout
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load, make_diffusion

PROMPTS = [{"prompt": text} for text in ("ab", "cab", "fade", "d", "bead", "caf", "efa", "dab")]
BLOCKS = {"attention": "block_causal", "block_size": 3, "logit_shift": True}
ON_POLICY: dict[str, Any] = {"states": "sampler", "distillation": 1.0, "max_new_tokens": 7, "stages": [{}]}
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9}


def causal_lm() -> DiffusionLM:
    """A model to train, of which each call makes another."""
    lm = make_diffusion(*float64_causal("phi"), attention="causal")
    return add_to_logits(lm, {lm.eos_token_id: -1.0}, trained=True)


def moved(lm: DiffusionLM, size: float = 0.3) -> DiffusionLM:
    """The model after some training: other weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.add_(size * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return lm


def whole(folder: Path, lm: DiffusionLM | None = None, **more: Any) -> ConvertTrainer:
    settings = {**BLOCKS, **ON_POLICY, **SGD, "learning_rate": 0.1, "max_steps": 3} | more
    rows = settings.pop("rows", PROMPTS)
    return convert(folder, lm or causal_lm(), rows, **settings)


def stage(folder: Path, **more: Any) -> StageTrainer:
    """The trainer of the only stage, whose model is no longer its teacher."""
    trainer = whole(folder, **more)
    moved(trainer.lm)
    return StageTrainer(
        trainer.lm,
        trainer.args,
        train_dataset=trainer.train_rows,
        stage=trainer.args.stages[0],
        teacher=trainer.teacher,
        steps_before=0,
        total_steps=3,
    )


# The published definition (OPDLM, train/rl_sdar.py of 2606.06712), with the steps of a trace as its step map.


def published_rounds(step_of: dict[int, int]) -> list[set[int]]:
    """The positions of a block that are hidden in each round, from the step that revealed each of them."""
    left, rounds = dict(step_of), []
    while left:
        rounds.append(set(left))
        first = min(left.values())
        left = {position: step for position, step in left.items() if step > first}
    return rounds


def published_divergence(
    t_V: Tensor, s_V: Tensor, *, top_k: int, beta: float, reverse_kl_weight: float
) -> Tensor:
    """Of the log-probabilities of the teacher and the student at a position."""
    at_K = t_V.topk(top_k).indices if top_k else torch.arange(len(t_V))[t_V > -torch.inf]
    t_K, s_K = t_V[at_K], s_V[at_K]
    if 0 < beta < 1:  # loss_type jsd, with beta as jsd_alpha
        m_K = (beta * t_K.exp() + (1 - beta) * s_K.exp()).log()
        return beta * (t_K.exp() * (t_K - m_K)).sum() + (1 - beta) * (s_K.exp() * (s_K - m_K)).sum()
    weight = 1.0 if beta == 1 else reverse_kl_weight
    forward, reverse = (t_K.exp() * (t_K - s_K)).sum(), (s_K.exp() * (s_K - t_K)).sum()
    return (1 - weight) * forward + weight * reverse


def student_log_probs(lm: DiffusionLM, ids_T: Tensor, hidden: set[int], position: int) -> Tensor:
    """The student's log-probabilities [V] at a position, where these positions of its block are hidden. In a
    model by blocks, what comes before the block is clean and what comes after it is not there."""
    size = lm.block_size or len(ids_T)
    stop = min(len(ids_T), (position // size + 1) * size)
    seen_BT, hidden_BT = ids_T[None, :stop].clone(), torch.zeros(1, stop, dtype=torch.bool)
    hidden_BT[0, sorted(hidden)] = True
    return lm.logits(seen_BT.masked_fill(hidden_BT, lm.mask_token_id), hidden_BT=hidden_BT)[
        0, position
    ].log_softmax(-1)


def published_loss(
    lm: DiffusionLM,
    teacher: DiffusionLM,
    ids_BT: Tensor,
    hidden_BT: Tensor,
    document_BT: Tensor,
    start_B: list[int],
    exclude: bool,
    **how: Any,
) -> Tensor:
    """The mean over rows of the mean over hidden tokens up to the first end token, from logits row by row."""
    losses = []
    for row, start in enumerate(start_B):
        length = int(document_BT[row].sum())
        ids_T, hidden_T = ids_BT[row, :length], hidden_BT[row, :length]
        t_TV = teacher.logits(ids_T[None])[0].log_softmax(-1).detach()
        terms = []
        for position in range(start, length):
            ended = any(int(token) in lm.eos_token_ids for token in ids_T[start:position])
            left_out = exclude and int(ids_T[position]) in lm.eos_token_ids
            if hidden_T[position] and not ended and not left_out:
                size = lm.block_size or length
                block = range(position // size * size, min(length, (position // size + 1) * size))
                hidden = {each for each in block if hidden_T[each]}
                s_V = student_log_probs(lm, ids_T, hidden, position)
                terms.append(published_divergence(t_TV[position], s_V, **how))
        losses.append(torch.stack(terms).mean() if terms else 0 * sum(p.sum() for p in lm.model.parameters()))
    return torch.stack(losses).mean()


LOSSES = [
    {},
    {"teacher_top_k": 3},
    {"teacher_top_k": 0, "reverse_kl_weight": 0.3},
    {"teacher_top_k": 4, "reverse_kl_weight": 1.0},
    {"beta": 0.3, "teacher_top_k": 5},
    {"beta": 1.0, "teacher_top_k": 0},
    {"exclude_im_end": True, "teacher_top_k": 0},
]


@partly_slow("attention", [BLOCKS, {"attention": "bidirectional"}], 0, ids=["blocks", "bidirectional"])
@pytest.mark.parametrize("chosen", LOSSES, ids=str)
def test_loss_and_gradient_are_the_published_ones(chosen, attention, tmp_path):
    trainer = stage(tmp_path, **{"attention": None, "block_size": None} | attention | chosen)
    lm, teacher, rows = trainer.lm, trainer.teacher, batch(trainer, *range(8))
    trainer.state.max_steps = 3
    [made], items = trainer.get_batch_samples(iter([rows]), 1, torch.device("cpu"))
    assert items == 8
    loss = trainer.micro_loss(lm, made) / items
    lm.model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in lm.model.named_parameters() if p.grad is not None}
    lm.model.zero_grad()
    args = trainer.args
    expected = published_loss(
        *(
            lm,
            teacher,
            made["input_ids"],
            made["hidden"],
            made["documents"],
            (rows["documents"] > 0).sum(1).tolist(),
        ),
        exclude=args.exclude_im_end,
        top_k=args.teacher_top_k if args.teacher_top_k < lm.vocab_size - 1 else 0,
        beta=args.beta,
        reverse_kl_weight=args.reverse_kl_weight,
    )
    expected.backward()
    assert expected > 1e-3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in lm.model.named_parameters():
        torch.testing.assert_close(
            found.get(name, torch.zeros_like(parameter)),
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad,
            rtol=1e-6,
            atol=1e-7,
        )
    ended = torch.isin(made["input_ids"], torch.tensor(lm.eos_token_ids)) & (made["documents"] > 0)
    assert ended.any() and not ended.any(1).all()
    assert (made["maskable"] & ended).any() != args.exclude_im_end


def test_a_token_without_probability_in_both_adds_nothing():
    log_p = torch.tensor([[-0.1, -2.4, -math.inf]], dtype=torch.float64)
    log_q = torch.tensor([[-1.0, -0.46, -math.inf]], dtype=torch.float64, requires_grad=True)
    for how in ({}, {"beta": 0.5}, {"beta": 1.0}, {"reverse_kl_weight": 0.5}):
        found = generalized_divergence(log_p, log_q, **how)
        assert found.item() == pytest.approx(generalized_divergence(log_p[:, :2], log_q[:, :2], **how).item())
        [gradient] = torch.autograd.grad(found.sum(), log_q)
        assert gradient.isfinite().all() and gradient[0, 2] == 0 and gradient[0, :2].all()


# The states.


@partly_slow(
    "sampler",
    [{}, {"remasking": "random"}, {"threshold": 0.3}, {"tokens_per_step": 2}, {"stop_at_eos": False}],
    0,
    2,
    4,
    ids=str,
)
@pytest.mark.parametrize(("attention", "size"), [("block_causal", 3), ("bidirectional", None)])
def test_each_block_is_in_any_state_that_it_was_in(attention, size, sampler):
    lm = float64_lm("phi", attention, size, eos_bias=0.5)
    config = SamplerConfig(max_new_tokens=7, temperature=1.0, trace=True, **sampler)
    prompts = [[4, 5], [5], [4, 4, 6, 7]]
    generation = generate(lm, prompts, config)
    rollout, seen = make_rollout(lm, generation), defaultdict(Counter)
    draws = 400
    for seed in range(draws):
        hidden_BT = visited_states(rollout, MaskRNG(seed, torch.arange(3)))
        assert not (hidden_BT & (rollout.prompt_BT | (rollout.document_BT == 0))).any()
        for row, block in itertools.product(range(3), rollout.group_BT.unique().tolist()):
            at = (rollout.group_BT[row] == block).nonzero().flatten().tolist()
            if block >= 0 and at:
                hidden = frozenset(position for position in at if hidden_BT[row, position])
                seen[row, block][hidden] += 1
    for (row, block), states in seen.items():
        steps = rollout.step_BT[row].tolist()
        at = (rollout.group_BT[row] == block).nonzero().flatten().tolist()
        never = {position for position in at if steps[position] < 0}
        rounds = published_rounds({position: steps[position] for position in at if steps[position] >= 0})
        expected = {frozenset(hidden | never) for hidden in rounds} or {frozenset(never)}
        assert states.keys() == expected
        for count in states.values():
            assert abs(count / draws - 1 / len(expected)) < 5 * math.sqrt(0.25 / draws)


def test_a_state_does_not_depend_on_the_batch_or_on_other_blocks():
    lm = float64_lm("phi", "block_causal", 3)
    prompts, config = (
        [[4, 5], [5], [4, 4, 6, 7]],
        SamplerConfig(max_new_tokens=9, temperature=1.0, trace=True),
    )
    generation, key_B = generate(lm, prompts, config), torch.tensor([7, 8, 9])
    together = make_rollout(lm, generation)
    hidden_BT, chosen = visited_states(together, MaskRNG(0, key_B)), set()
    for row in range(3):
        alone = make_rollout(lm, generation, slice(row, row + 1))
        width = alone.ids_BT.shape[1]
        assert torch.equal(visited_states(alone, MaskRNG(0, key_B[row : row + 1]))[0], hidden_BT[row, :width])
    for seed in range(50):
        hidden_BT = visited_states(together, MaskRNG(seed, key_B))
        chosen.add((int(hidden_BT[1, 3:6].sum()), int(hidden_BT[1, 6:9].sum())))
    assert chosen == {*itertools.product((1, 2, 3), (1, 2, 3))}


def paths(
    log_probs: Callable[[tuple[int, ...], frozenset[int], int], Tensor],
    ids: tuple[int, ...],
    blocks: list[list[int]],
    letters: list[int],
    remasking: str,
) -> Iterator[tuple[float, tuple[int, ...], list[list[frozenset[int]]]]]:
    """All ways in which one token a step is revealed, block by block: the probability, the text, and of each
    block the sets of positions that were hidden, round by round."""

    def of_block(seen, hidden, rounds):
        if not hidden:
            yield 1.0, seen, rounds
            return
        positions = sorted(hidden)
        values = {position: log_probs(seen, hidden, position) for position in positions}
        chances = {position: values[position][letters].softmax(0).tolist() for position in positions}
        reveals: dict[tuple[int, int], float] = defaultdict(float)
        if remasking == "random":
            for position in positions:
                for letter, chance in zip(letters, chances[position], strict=True):
                    reveals[position, letter] += chance / len(positions)
        else:
            for drawn in itertools.product(range(len(letters)), repeat=len(positions)):
                pairs = [*zip(positions, drawn, strict=True)]
                best, letter = max(pairs, key=lambda pair: values[pair[0]][letters[pair[1]]].item())
                reveals[best, letters[letter]] += math.prod(chances[at][which] for at, which in pairs)
        for (position, letter), chance in reveals.items():
            now = (*seen[:position], letter, *seen[position + 1 :])
            for more, text, later in of_block(now, hidden - {position}, [*rounds, hidden]):
                yield chance * more, text, later

    if not blocks:
        yield 1.0, ids, []
        return
    for chance, text, rounds in of_block(ids, frozenset(blocks[0]), []):
        for more, last, others in paths(log_probs, text, blocks[1:], letters, remasking):
            yield chance * more, last, [rounds, *others]


@partly_slow("remasking", ["random", "low_confidence"], 1)
@partly_slow(
    "pattern, blocks",
    [(("block_causal", 3, False), [[2], [3, 4]]), (("bidirectional", None, False), [[2, 3, 4]])],
    0,
    ids=["blocks", "bidirectional"],
)
def test_the_expected_loss_is_that_of_the_states_that_the_sampler_visits(pattern, blocks, remasking):
    lm, teacher = toy_lm(attention=pattern, seed=1), toy_lm(attention=("causal", None, True)).frozen_copy()
    letters = [token for token in range(lm.vocab_size) if token not in (lm.mask_token_id, *lm.eos_token_ids)]
    prompt = (letters[-1], letters[-2])

    @cache
    @torch.no_grad()
    def log_probs(seen: tuple[int, ...], hidden: frozenset[int], position: int) -> Tensor:
        return student_log_probs(lm, torch.tensor(seen), set(hidden), position)

    @cache
    def divergence(text: tuple[int, ...], hidden: frozenset[int], position: int) -> float:
        t_V = teacher.logits(torch.tensor([text]))[0, position].log_softmax(-1)
        how = {"top_k": 0, "beta": 0.0, "reverse_kl_weight": 0.0}
        return published_divergence(t_V, log_probs(text, hidden, position), **how).item()

    expected = second = total = 0.0
    first = (*prompt, *[lm.mask_token_id] * 3)
    for chance, text, rounds in paths(log_probs, first, blocks, letters, remasking):
        total += chance
        for states in itertools.product(*rounds):
            losses = [divergence(text, hidden, position) for hidden in states for position in hidden]
            value, share = sum(losses) / len(losses), chance / math.prod(map(len, rounds))
            expected, second = expected + share * value, second + share * value**2
    assert total == pytest.approx(1)
    count = 3000
    config = SamplerConfig(
        max_new_tokens=3,
        temperature=1.0,
        remasking=remasking,
        allowed_tokens=letters,
        trace=True,
        batch_size=1000,
    )
    keys = [sequence_key([number, 5]) for number in range(count)]
    rollout = make_rollout(lm, generate(lm, [[*prompt]] * count, config, keys))
    hidden_BT = visited_states(rollout, MaskRNG(0, torch.tensor(keys)))
    views = state_views(hidden_BT, taught_tokens(rollout, hidden_BT))
    with torch.no_grad():
        found = compare(lm, teacher, rollout.ids_BT, None, views, top_k=0, divergence=generalized_divergence)
    mean = (views.weight_BMT[views.target_BMT] * found.divergence_N).sum().item() / count
    error = math.sqrt((second - expected**2) / count)
    assert abs(mean - expected) < 4 * error and error < 0.05 * expected


# Whose text it is.


def test_some_rows_are_what_the_causal_model_writes_itself(tmp_path):
    trainer = stage(tmp_path, lmbda=0.5, generation_kwargs={"remasking": "random", "top_p": 0.9})
    prompts, writers = batch(trainer, *range(8)), set()
    for step in range(6):
        trainer.state.global_step = step
        made = trainer.prepared([prompts])[0]
        keys = [sequence_key([number, step]) for number in range(8)]
        starts = (prompts["documents"] > 0).sum(1).tolist()
        ids = [prompts["input_ids"][row, :start].tolist() for row, start in enumerate(starts)]
        config = SamplerConfig(max_new_tokens=7, temperature=1.0, top_p=0.9, seed=trainer.args.seed)
        texts = {
            "student": generate(
                trainer.lm, ids, config.model_copy(update={"remasking": "random"}), keys
            ).tokens,
            "teacher": generate(trainer.teacher, ids, config, keys).tokens,
        }
        for row, start in enumerate(starts):
            own = {
                who: made["input_ids"][row, start : start + len(tokens[row])].tolist() == tokens[row]
                for who, tokens in texts.items()
            }
            assert any(own.values())
            if sum(own.values()) == 1:
                writers.add((row, next(who for who, is_own in own.items() if is_own)))
            ended = start + len(texts["teacher"][row])
            if own == {
                "student": False,
                "teacher": True,
            }:  # of each block some tokens, and all behind the end
                assert made["hidden"][row, ended:][made["documents"][row, ended:] > 0].all()
                for block in range(start // 3, (ended - 1) // 3 + 1):
                    assert made["hidden"][row, max(start, block * 3) : min(ended, block * 3 + 3)].any()
    assert {who for _, who in writers} == {"student", "teacher"} and len({row for row, _ in writers}) == 8


def test_rows_grow_over_the_first_steps_and_stay(tmp_path):
    args = whole(tmp_path, max_length=40, max_new_tokens=30, start_new_tokens=3, ramp_steps=9).args
    assert [args.new_tokens(step) for step in (*range(10), 50, None)] == [
        *(3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 30, 30)
    ]
    assert args.rollout_sampler(2).max_new_tokens == args.teacher_sampler(2).max_new_tokens == 9
    uneven = whole(tmp_path, max_new_tokens=7, start_new_tokens=1, ramp_steps=4).args
    assert [uneven.new_tokens(step) for step in range(6)] == [3, 3, 3, 6, 7, 7]
    assert whole(tmp_path).args.new_tokens(0) == 7


def test_the_sampler_is_the_one_that_was_asked_for(tmp_path):
    trainer = stage(tmp_path, generation_kwargs={"threshold": 0.4, "top_k": 3}, temperature=0.7)
    made = trainer.prepared([batch(trainer, 0, 1)])[0]
    config = SamplerConfig(max_new_tokens=7, temperature=0.7, threshold=0.4, top_k=3, seed=trainer.args.seed)
    keys = [sequence_key([number, 0]) for number in range(2)]
    ids = [trainer.train_dataset[row]["input_ids"] for row in range(2)]
    for row, tokens in enumerate(generate(trainer.lm, ids, config, keys).tokens):
        start = len(ids[row])
        assert made["input_ids"][row, start : start + len(tokens)].tolist() == tokens


# Runs.


@partly_slow("more", [{}, {"lmbda": 0.5, "start_new_tokens": 3, "ramp_steps": 4}], 1, ids=str)
def test_a_run_resumes_bit_for_bit(more, tmp_path):
    saving = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
        "stages": [{"train": ["attention"]}, {}],
    }
    straight = whole(tmp_path, **saving, **more)
    straight.train()
    shutil.rmtree(max((tmp_path / "stage-2").glob("checkpoint-*")))
    resumed = whole(tmp_path, **saving, **more)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))
    assert not equal(weights(straight.lm), weights(causal_lm()))


def test_accumulating_gradients_changes_nothing(tmp_path):
    ends = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        trainer = whole(tmp_path / str(size), lmbda=0.7, **sizes)
        trainer.train()
        ends.append(weights(trainer.lm))
    for end in ends[1:]:
        for name, weight in end.items():
            torch.testing.assert_close(weight, ends[0][name], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_run_brings_the_model_to_its_teacher(tmp_path):
    lm = causal_lm()
    trainer = whole(
        *(tmp_path, lm),
        max_steps=60,
        optim="adamw_torch",
        learning_rate=3e-3,
        eval_dataset=PROMPTS[:4],
        logging_steps=1,
    )
    moved(trainer.lm, 0.1)
    trainer.train()
    kl = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert sum(kl[-10:]) < 0.5 * sum(kl[:10])
    [last] = [line for line in trainer.state.log_history if "eval_kl" in line]
    assert 0 < last["eval_loss"] < 0.5 * kl[0] and 0 < last["eval_completion_length"] <= 7


def test_an_evaluation_is_of_the_same_completions_at_all_steps_and_batch_sizes(tmp_path):
    found = []
    for size, step in ((1, 0), (4, 0), (4, 2)):
        trainer = stage(tmp_path, eval_dataset=None, per_device_eval_batch_size=size)
        trainer.state.global_step = step
        found.append(trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-9) and found[0] > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_holds_few_logits_at_once(rows, tmp_path, monkeypatch):
    trainer = stage(tmp_path)
    made = trainer.prepared([batch(trainer, *range(4))])[0]
    loss = trainer.micro_loss(trainer.lm, made).item()
    monkeypatch.setattr("unmask.models.hooks.head.LOGITS_AT_ONCE", rows * trainer.lm.vocab_size)
    assert trainer.micro_loss(trainer.lm, made).item() == pytest.approx(loss, rel=1e-9)


def test_adapters_learn_too(tmp_path):
    import peft

    adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = whole(tmp_path, llama_lm("causal"), peft_config=adapters)
    start = weights(trainer.lm)
    trainer.train()
    assert not equal(weights(trainer.lm), start)


# What is refused.


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        ({"distillation": 0.0}, "distillation"),
        ({"distillation": 0.5}, "distillation"),
        ({"lmbda": 0.0, "max_new_tokens": None}, "lmbda"),
        ({"complementary": True}, "complementary"),
        ({"exact_count": True}, "exact_count"),
        ({"min_time": 0.1}, "min_time"),
        ({"alignment": 0.1}, "alignment"),
        ({"stages": [{}, {"lm_loss": 0.1}]}, "stages, stage 2, lm_loss"),
        ({"beta": 0.5, "reverse_kl_weight": 0.5}, "reverse_kl_weight"),
        ({"beta": 1.5}, "beta"),
        ({"start_new_tokens": 8}, "start_new_tokens"),
        ({"ramp_steps": 8}, "ramp_steps"),
        ({"states": "random", "beta": 0.5, "max_new_tokens": None}, "beta"),
        ({"states": "seen"}, "states"),
        ({"noise": "uniform"}, "distillation"),
        ({"generation_kwargs": {"mode": "self-speculative"}}, "generation_kwargs.mode"),
        ({"generation_kwargs": {"remask_fraction": 0.2}}, "generation_kwargs.remask_fraction"),
        ({"generation_kwargs": {"trace": False}}, "generation_kwargs.trace"),
        ({"generation_kwargs": {"temperature": 0.5}}, "generation_kwargs.temperature"),
        ({"generation_kwargs": {"top_p": 2.0}}, "generation_kwargs.top_p"),
    ],
    ids=str,
)
def test_settings_that_contradict_one_another_are_refused(chosen, where, tmp_path):
    with raises(ConfigError, where=where):
        given = {name: value for name, value in (ON_POLICY | BLOCKS | chosen).items() if value is not None}
        ConvertConfig(output_dir=str(tmp_path), **given)


def test_a_sampler_that_does_not_fit_the_model_is_refused_before_the_first_step(tmp_path):
    with raises(GenerationError, where="block_size"):
        whole(tmp_path, generation_kwargs={"block_size": 4})


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ([], "train_dataset"),
        ([{"text": "abc"}], "train_dataset, row 0"),
        ([*PROMPTS, {"prompt": 5}], "train_dataset, row 8, prompt"),
        (iter(PROMPTS), "train_dataset"),
        ([{"prompt": "a" * 30}], "train_dataset, row 0"),
    ],
    ids=["none", "text", "a number", "an iterator", "too long"],
)
def test_rows_without_prompts_are_refused(rows, where, tmp_path):
    args = ConvertConfig(
        output_dir=str(tmp_path), max_length=32, max_steps=1, use_cpu=True, **BLOCKS | ON_POLICY
    )
    with raises(DataError, where=where):
        ConvertTrainer(causal_lm(), args, train_dataset=rows)


@partly_slow("command", [["--dry-run"], []], ids=["plan", "run"])
def test_prompts_alone_convert_a_model_on_the_command_line(command, tmp_path):
    llama_lm("causal").save(tmp_path / "causal")
    rows = [{"prompt": text} for text in ("ab", "cab", "fade", "hg")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["convert", "--recipe", "on-policy", "--recipe", "tiny", "--model", str(tmp_path / "causal")]
    words += ["--data", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out"), "use_cpu=true"]
    words += [
        "per_device_train_batch_size=2",
        "max_steps=10",
        "max_new_tokens=8",
        "start_new_tokens=4",
        "max_length=32",
        "eval_strategy=no",
    ]
    result = CliRunner().invoke(app, [*words, *command])
    assert result.exit_code == 0, (result.output, result.exception)
    if not command:
        found = load(tmp_path / "out/model")
        assert (found.attention, found.block_size) == ("block_causal", 4)
        inspected = CliRunner().invoke(
            app, ["inspect", str(tmp_path / "out/model"), "--hardware", "h100-80gb"]
        )
        assert inspected.exit_code == 0
