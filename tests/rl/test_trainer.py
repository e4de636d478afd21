"""Rollouts, masks and log-probabilities of GRPO are computed once, used once, and independent of the
micro-batches."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, equal, low_ids, make, moved, ranks, settings, share_of_a, weights
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_model
from unmask.errors import ConfigError, DataError, GenerationError, TrainingError
from unmask.generation.rollout import make_rollout
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.rl.config import GRPOConfig
from unmask.rl.methods.spg import lower_bound, upper_bound
from unmask.rl.prompts import GroupSampler
from unmask.rl.rewarded import RewardedCompletions
from unmask.rl.trainer import GRPOTrainer
from unmask.tasks import get_task
from unmask.training.run.checkpoint import FILE_LIST, described

METHODS = ["diffu-grpo", "cj-grpo"]


def run(folder: Path, reward: Any, lm: DiffusionLM | None = None, **more: Any) -> GRPOTrainer:
    """A training run with these rewards."""
    trainer = make("grpo", folder, lm, reward=reward, **more)
    assert isinstance(trainer, GRPOTrainer)
    trainer.train()
    return trainer


@pytest.mark.parametrize("repeats", [1, 3])
def test_each_step_holds_whole_groups_and_each_epoch_each_prompt(repeats):
    sampler = GroupSampler(7, prompts_per_step=3, group_size=4, repeats=repeats, seed=0)
    first = list(sampler)
    assert len(first) == len(sampler) == 2 * repeats * 12
    steps = [first[at : at + 12] for at in range(0, len(first), 12)]
    assert steps == [step for step in steps[::repeats] for _ in range(repeats)]
    for step in steps:
        assert set(Counter(index // 4 for index in step).values()) == {4} and len(set(step)) == 12
    assert len(set(first)) == 24
    sampler.set_epoch(1)
    second = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second


def rollouts(
    folder: Path, size: int, accumulation: int, **more: Any
) -> tuple[dict[Any, Any], dict[str, torch.Tensor]]:
    """Completions by step, prompt and repeat, and the weights at the end."""
    lm = llama_lm(dtype=torch.float64)
    shape = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
        "num_generations": 4,
    }
    trainer = make("grpo", folder, lm, **shape, **more)
    made: dict[Any, Any] = {}
    sample = trainer.sample

    def recording(rows: Any, **arguments: Any) -> Any:
        generation = sample(rows, **arguments)
        assert set(Counter(row.sample_id for row in rows).values()) == {4}
        for row, tokens in zip(rows, generation.tokens, strict=True):
            made[trainer.state.global_step, row.sample_id, row.repeat] = tokens
        return generation

    trainer.sample = recording
    trainer.train()
    return made, weights(lm)


@partly_slow("method", METHODS, METHODS.index("diffu-grpo"))
def test_rollouts_and_gradients_do_not_depend_on_how_the_batch_is_cut(method, tmp_path):
    shape = {"max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "method": method}
    made, trained = rollouts(tmp_path, 8, 1, **shape)
    assert len(made) == 16 and len({tuple(tokens) for tokens in made.values()}) > 8
    for size, accumulation, more in [
        (4, 2, {}),
        (1, 8, {}),
        (8, 1, {"rollout_batch_size": 3}),
        (4, 2, {"logprob_batch_size": 1}),
    ]:
        again, other = rollouts(tmp_path, size, accumulation, **shape, **more)
        assert again == made
        torch.testing.assert_close(other, trained, rtol=0, atol=1e-6)  # advantages are float32


def test_a_completion_follows_from_seed_step_prompt_and_repeat(tmp_path):
    shape = {"rows": PAIRS[:2], "learning_rate": 0.0, "max_steps": 2}  # the same prompts in both steps
    made, _ = rollouts(tmp_path, 8, 1, **shape)
    first, second = (
        [made[step, sample, repeat] for sample in range(2) for repeat in range(4)] for step in range(2)
    )
    assert len({tuple(tokens) for tokens in first + second}) > 12
    other, _ = rollouts(tmp_path, 8, 1, **shape, seed=1)
    for step in range(2):  # nor those of a seed one lower, or of an earlier step, a step later
        drawn = [other[step, sample, repeat] for sample in range(2) for repeat in range(4)]
        for earlier in (first, second):
            assert sum(one == another for one, another in zip(drawn, earlier, strict=True)) < 4
    trainer = make("grpo", tmp_path, llama_lm(dtype=torch.float64))
    rows = [trainer.train_dataset[index] for index in range(8)]
    together, alone = (trainer.sample(asked, temperature=1.0, step=0).tokens for asked in (rows, rows[5:]))
    assert together[5:] == alone


@pytest.mark.parametrize("size", [1, 8])
def test_completions_compete_with_their_own_group(size, tmp_path):
    shape = {
        "num_generations": 4,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 8 // size,
        "max_steps": 1,
    }
    trainer = run(tmp_path, ranks, **shape)
    advantage_B = torch.cat([updates[0].advantage_BT for updates in trainer.buffer])
    assert advantage_B.flatten().tolist() == [-1.5, -0.5, 0.5, 1.5] * 2


class Stepwise(GRPOTrainer):
    """Advantages from the reward of a completion and from the fraction of `a` among the tokens of its first
    steps."""

    def token_advantages(
        self, rewarded: RewardedCompletions, rollout: Any, advantage_B: torch.Tensor
    ) -> torch.Tensor:
        assert rewarded.total_B.shape == advantage_B.shape and len(rewarded.generation.tokens) == len(
            rewarded.rows
        ) == len(rollout.ids_BT)
        is_a_BT = rollout.ids_BT == self.lm.tokenizer.convert_tokens_to_ids("a")
        by_step_BT = torch.zeros(rollout.ids_BT.shape)
        for row, steps in enumerate(rollout.step_BT.tolist()):
            for column, step in enumerate(steps):
                known = [
                    is_a_BT[row, other].item() for other, earlier in enumerate(steps) if 0 <= earlier <= step
                ]
                by_step_BT[row, column] = sum(known) / max(len(known), 1)
        return advantage_B[:, None] + by_step_BT


def test_single_steps_can_have_advantages_of_their_own(tmp_path):
    args = GRPOConfig(
        **settings(
            tmp_path,
            num_generations=4,
            max_completion_length=5,
            num_iterations=2,
            loss_type="dapo",
            epsilon=0.1,
        )
    )
    trainer = Stepwise(llama_lm(dtype=torch.float64), ranks, args, PAIRS)
    [[_, update]] = trainer.collect_updates([[trainer.train_dataset[index] for index in range(8)]])
    moved(trainer.lm, 0.05)
    with torch.no_grad():
        gap_BT = (trainer.per_view.log_probs(trainer.lm, update) - update.old_BMT)[:, 0]
    expected, clipped, values = 0.0, 0, set()
    for row, column in update.rollout.completion_BT.nonzero().tolist():
        advantage, ratio = update.advantage_BT[row, column].item(), gap_BT[row, column].exp().item()
        bounded = min(max(ratio, 0.9), 1.1)
        expected -= min(ratio * advantage, bounded * advantage)
        clipped += ratio != bounded
        values.add((row, round(advantage, 6)))
    items = trainer.count_items(update)
    # more than one of a completion
    assert 0 < clipped < items == update.rollout.completion_BT.sum() and len(values) > 8
    loss = trainer.training_step(trainer.model, update, items)
    assert loss.item() == pytest.approx(expected / items.item(), rel=1e-6)


def test_advantages_that_fit_neither_completions_nor_tokens_are_refused(tmp_path, monkeypatch):
    trainer = make("grpo", tmp_path, num_generations=4)
    monkeypatch.setattr(trainer, "token_advantages", lambda rewarded, rollout, advantage_B: advantage_B)
    with raises(TrainingError, where="token_advantages"):
        trainer.train()


def test_a_run_with_inner_iterations_resumes_at_a_rollout_bit_for_bit(tmp_path):
    # six steps an epoch
    shape = {
        "max_steps": 8,
        "num_iterations": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "rows": PAIRS[:6],
    }
    straight = make("grpo", tmp_path, **shape)
    straight.train()
    resumed = make("grpo", tmp_path, **shape)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert equal(weights(resumed.lm), weights(straight.lm))
    assert not equal(weights(straight.lm), weights(load(tmp_path / "checkpoint-4")))


@pytest.mark.parametrize("chat", [False, True])
def test_rewards_are_asked_as_trl_asks_them(chat, tmp_path):
    calls: list[dict[str, Any]] = []

    def reward(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        answer: list[str],
        **rest: Any,
    ) -> list[float]:
        calls.append(
            {
                "prompts": prompts,
                "completions": completions,
                "ids": completion_ids,
                "answer": answer,
                "rest": rest,
            }
        )
        return [0.0] * len(prompts)

    prompts = [[{"role": "user", "content": pair["prompt"]}] if chat else pair["prompt"] for pair in PAIRS]
    rows = [
        {"prompt": prompt, "answer": str(i), "sample_id": f"s{i}", "repeat": -i}
        for i, prompt in enumerate(prompts)
    ]
    trainer = run(tmp_path, reward, rows=rows, max_steps=1)
    [call] = calls
    assert call["rest"].keys() == {"trainer_state", "log_extra", "log_metric", "sample_id", "repeat"}
    assert call["rest"]["sample_id"] == [f"s{answer}" for answer in call["answer"]]
    assert call["rest"]["repeat"] == [-int(answer) for answer in call["answer"]]
    assert call["rest"]["trainer_state"].max_steps == trainer.state.max_steps == 1
    assert [prompts[int(answer)] for answer in call["answer"]] == call["prompts"]
    assert call["answer"][0::2] == call["answer"][1::2]
    texts = [trainer.lm.tokenizer.decode(ids, skip_special_tokens=True) for ids in call["ids"]]
    assert call["completions"] == (
        [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    )


def test_async_rewards_are_waited_for(tmp_path):
    async def waiting(completions: list[str], **columns: Any) -> list[float]:
        return share_of_a(completions)

    assert equal(weights(run(tmp_path, waiting).lm), weights(run(tmp_path, share_of_a).lm))


def test_rewards_are_logged_from_the_first_step_on(tmp_path):
    trainer = run(
        tmp_path,
        [share_of_a, lambda completions, **_: [1.0] * len(completions)],
        max_steps=3,
        reward_weights=[1.0, 0.5],
    )
    lines = trainer.state.log_history[:3]
    for line in lines:
        assert line["reward"] == pytest.approx(line["rewards/share_of_a"] + 0.5)
        assert {"reward_std", "unscored", "completion_length", "clipped", "kl"} <= line.keys()
    assert not any(name.startswith("eval_") for line in trainer.state.log_history for name in line)


def test_equal_rewards_have_no_deviation_though_their_mean_is_rounded(tmp_path):
    def one(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    lm = llama_lm()
    before = weights(lm)
    settings = {
        "max_steps": 1,
        "reward_weights": [1.0, 0.3],
        "scale_rewards": "population",
        "weight_decay": 0.0,
    }
    line = run(tmp_path, [one, one], lm, **settings).state.log_history[0]
    assert line["reward"] == pytest.approx(1.3) and line["reward_std"] == 0.0
    assert equal(weights(lm), before)


def test_completions_without_a_reward_teach_nothing(tmp_path):
    def never(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    def sometimes(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
        return [None if prompt == "ab" else float(rank) for rank, prompt in enumerate(prompts)]

    lm = llama_lm()
    before = weights(lm)
    line = run(tmp_path, never, lm, max_steps=1, weight_decay=0.0).state.log_history[0]
    assert equal(weights(lm), before)
    assert line["unscored"] == 1.0 and line["loss"] == 0.0 and "reward" not in line

    rows = [{"prompt": "ab"}, {"prompt": "cd"}]
    trainer = run(
        tmp_path, sometimes, rows=rows, num_generations=4, per_device_train_batch_size=8, max_steps=1
    )
    line = trainer.state.log_history[0]
    # of the first four completions, or of the last
    assert line["unscored"] == 0.5 and line["reward"] in (1.5, 5.5)
    [[update]] = trainer.buffer
    silent_B = update.rollout.ids_BT[:, 1] == trainer.lm.tokenizer.convert_tokens_to_ids("a")
    assert silent_B.sum() == 4
    assert not update.loss_mask_BT[silent_B].any() and update.loss_mask_BT[~silent_B].any(1).all()


@pytest.mark.parametrize("eos", [True, False])
def test_a_rollout_ends_where_its_completion_does(eos, tmp_path):
    lm = llama_lm()
    if not eos:
        with torch.no_grad():
            lm.model.model.embed_tokens.weight[lm.eos_token_id] = 0
            lm.model.model.norm.weight *= 100
    sampler = SamplerConfig(max_new_tokens=8, temperature=1.0, block_size=2, trace=True)
    prompts = [pair["prompt"] * (1 + i % 3) for i, pair in enumerate(PAIRS)]
    generation = generate(lm, prompts, sampler)
    rollout = make_rollout(lm, generation, slice(2, 8))
    ends = []
    for row in range(6):
        prompt, tokens = generation.prompts[2 + row], generation.tokens[2 + row]
        assert rollout.ids_BT[row, rollout.prompt_BT[row]].tolist() == prompt
        assert rollout.ids_BT[row, rollout.completion_BT[row]].tolist() == tokens
        assert rollout.document_BT[row].sum() == len(prompt) + 8
        assert rollout.beyond_BT[row].sum() == 8 - len(tokens)
        traced = [-1] * len(prompt) + generation.trace[2 + row].steps
        assert rollout.step_BT[row].tolist() == traced + [-1] * (rollout.step_BT.shape[1] - len(traced))
        ends.append(tokens[-1] == lm.eos_token_id)
        assert ends[-1] or len(tokens) == 8  # truncated: the whole canvas counts
    assert any(ends) if eos else not all(ends)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, 0.5), ({"logprob_temperature": 1.0}, 1.0), ({"logprob_temperature": 0.25}, 0.25)],
)
def test_log_probabilities_are_of_the_temperature_asked_for_whatever_completions_are_sampled_at(
    given, expected, tmp_path
):
    lm = llama_lm(dtype=torch.float64)
    trainer = make(
        "grpo", tmp_path, lm, temperature=0.5, beta=0.1, num_iterations=2, prompt_mask_rate=0.0, **given
    )
    plain = make("grpo", tmp_path, llama_lm(dtype=torch.float64), temperature=0.5)
    drawn = []
    for each in (trainer, plain):
        assert isinstance(each, GRPOTrainer)
        rows = next(iter(each.get_train_dataloader()))
        drawn.append(each.collect_updates([rows]))
    (_, later), ids_BT = drawn[0][0], drawn[1][0][0].rollout.ids_BT
    assert torch.equal(later.rollout.ids_BT, ids_BT)  # what is sampled is not touched
    completion_BT, mask = later.rollout.completion_BT, lm.mask_token_id
    noisy_BT = torch.where(later.views.hidden_BMT[:, 0], mask, ids_BT)
    log_prob_BTV = (lm.logits(noisy_BT, later.rollout.document_BT) / expected).log_softmax(2)
    expected_BT = log_prob_BTV.gather(2, ids_BT[:, :, None]).squeeze(2)
    for target_BMT in (trainer.per_view.log_probs(lm, later), later.old_BMT, later.reference_BMT):
        torch.testing.assert_close(
            target_BMT[:, 0][completion_BT], expected_BT[completion_BT], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("beyond", ["mask", "noise", "train"])
def test_what_stands_behind_an_end_is_learnt_only_where_it_is_asked_for(beyond, tmp_path):
    trainer = make(
        "grpo",
        tmp_path,
        method="coupled-grpo",
        after_eos=beyond,
        stop_at_eos=False,
        max_completion_length=8,
        reward=ranks,
    )
    assert isinstance(trainer, GRPOTrainer)
    [[update]] = trainer.collect_updates([next(iter(trainer.get_train_dataloader()))])
    rollout = update.rollout
    behind_BT = (rollout.ids_BT == trainer.lm.eos_token_id).cumsum(1).roll(1, 1) > 0
    behind_BT &= (rollout.document_BT > 0) & ~rollout.prompt_BT
    assert behind_BT.any()
    assert (
        update.loss_mask_BT[behind_BT].all()
        if beyond == "train"
        else not update.loss_mask_BT[behind_BT].any()
    )
    shown_BMT = ~update.views.hidden_BMT & behind_BT[:, None]
    assert not shown_BMT[:, 0].any() and shown_BMT[:, 1:].any() == (beyond != "mask")


@pytest.mark.parametrize(
    "given",
    [
        {"after_eos": "noise"},
        {"after_eos": "noise", "method": "cj-grpo"},
        {"after_eos": "train", "lm": "causal"},
    ],
)
def test_what_stands_behind_an_end_is_refused_where_it_means_nothing(given, tmp_path):
    lm = llama_lm(given.pop("lm", "bidirectional"))
    with raises(ConfigError, where="after_eos"):
        make("grpo", tmp_path, lm, **given)


def test_rewards_and_losses_have_nothing_from_behind_any_end(tmp_path):
    """For a model with several end tokens, like SDAR-Chat; canvases are sampled whole, so there are tokens
    after the end."""
    seen: list[tuple[str, list[int]]] = []

    def look(completions, completion_ids, **_):
        seen.extend(zip(completions, completion_ids, strict=True))
        return [float(len(text)) for text in completions]

    lm = llama_lm()
    ends = lm.eos_token_ids = (lm.eos_token_id, *lm.tokenizer.convert_tokens_to_ids(["c", "d"]))
    trainer = make(
        "grpo",
        tmp_path,
        lm,
        reward=look,
        max_steps=1,
        stop_at_eos=False,
        max_completion_length=8,
        mask_truncated_completions=True,
    )
    rows = [[trainer.train_dataset[index] for index in range(16)]]
    update = trainer.collect_updates(rows)[0][0]
    closed = [ids[-1] in ends for _, ids in seen]
    assert sum(ids[-1] in ends[1:] for _, ids in seen) > 0 and 0 < sum(closed) < 16
    for row, (text, ids) in enumerate(seen):
        assert not set(ends) & set(ids[:-1]) and not set("cd") & set(text)
        assert update.rollout.ids_BT[row, update.rollout.completion_BT[row]].tolist() == ids
    assert update.loss_mask_BT.any(1).tolist() == closed
    assert (update.rollout.revealed_BT & ~update.rollout.completion_BT).any()


QUICK = ("diffu-grpo", "spg", "trace-rl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in METHODS]
)
def test_a_bandit_is_learnt(method, tmp_path):
    trainer = run(
        tmp_path,
        share_of_a,
        method=method,
        max_steps=30,
        num_generations=8,
        per_device_train_batch_size=32,
        learning_rate=5e-3,
    )
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6


@pytest.mark.parametrize("method", ["diffu-grpo", "trace-rl"])
def test_completions_match_a_constraint(method, tmp_path):
    pytest.importorskip("outlines_core")
    judged: list[str] = []

    def share(completions: list[str], **_: Any) -> list[float]:
        judged.extend(completions)
        return share_of_a(completions)

    make(
        "grpo",
        tmp_path,
        method=method,
        reward=share,
        constraint={"regex": "[ab]{2,}c?"},
        max_completion_length=5,
        max_steps=3,
    ).train()
    assert len({*judged}) > 2 and all(re.fullmatch("[ab]{2,}c?", text) for text in judged)
    with raises(ConfigError, where="constraint.json"):
        make("grpo", tmp_path, constraint={"regex": "a", "json": True})


def test_held_out_prompts_are_answered_greedily(tmp_path):
    def length(completion_ids: list[list[int]], x: list[int], **_: Any) -> list[float]:
        return [len(ids) + value for ids, value in zip(completion_ids, x, strict=True)]

    held_out = [{"prompt": "ab", "x": 1}, {"prompt": "cdef", "x": 5}]
    trainer = make(
        "grpo",
        tmp_path,
        reward=length,
        rows=held_out,
        eval_dataset=held_out,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    tokens = generate(trainer.lm, ["ab", "cdef"], trainer.args.sampler(0.0)).tokens
    assert trainer.evaluate()["eval_reward"] == pytest.approx((len(tokens[0]) + 1 + len(tokens[1]) + 5) / 2)
    assert [line["step"] for line in trainer.state.log_history if "eval_reward" in line] == [1, 2, 2]


def test_an_evaluation_draws_several_completions_of_each_prompt(tmp_path):
    seen = []

    def kept(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.append([*zip(prompts, completions, strict=True)])
        return [float(len(text)) for text in completions]

    trainer = make("grpo", tmp_path, reward=kept, eval_dataset=PAIRS[:2], num_generations_eval=3)
    found = trainer.evaluate()["eval_reward"]
    [pairs] = seen
    assert [prompt for prompt, _ in pairs] == [row["prompt"] for row in PAIRS[:2] for _ in range(3)]
    assert len({text for _, text in pairs[:3]}) > 1
    assert found == pytest.approx(sum(len(text) for _, text in pairs) / 6)


def test_rollouts_draw_among_likely_tokens(tmp_path):
    """Among one, whatever the temperature, all of a group write what is most probable."""
    for more in (
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"generation_kwargs": {"allowed_tokens": [7]}},
    ):
        trainer = make("grpo", tmp_path, rows=PAIRS[:2], temperature=5.0, max_completion_length=3, **more)
        rows = [trainer.train_dataset[number] for number in range(4)]
        first, second, *_ = tokens = trainer.sample(rows, temperature=5.0, step=0).tokens
        assert first == second and ("generation_kwargs" not in more or tokens == [[7] * 3] * 4)
    penalized = make("grpo", tmp_path, rows=PAIRS[:2], top_k=1, repetition_penalty=50.0)
    [once] = penalized.sample([penalized.train_dataset[0]], temperature=1.0, step=0).tokens
    assert len(set(once)) == len(once)


def test_the_template_of_prompts_reads_the_configs_variables(tmp_path):
    lm = character_model("ab ", hidden=8, layers=1, context=32, seed=0)
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ 'b' if long else 'a' }}"
    )
    rows = [{"prompt": [{"role": "user", "content": "ab"}]}]
    for row, expected in ((rows[0], "abb"), (rows[0] | {"chat_template_kwargs": {"long": False}}, "aba")):
        args = GRPOConfig(**settings(tmp_path, max_completion_length=2), chat_template_kwargs={"long": True})
        [prompt] = GRPOTrainer.make_rows(lm, args, [row], "train").ids
        assert lm.tokenizer.decode(prompt["ids"]) == expected
    with raises(DataError, where="train, row 0, chat_template_kwargs"):
        GRPOTrainer.make_rows(lm, args, [{"prompt": "ab"}], "train")


def test_the_name_of_a_task_is_a_reward(tmp_path):
    task = get_task("sudoku")
    lm = character_model(task.alphabet, hidden=32, layers=1, context=128, seed=0)
    shared = settings(tmp_path, num_generations=2, max_completion_length=task.max_completion, max_steps=1)
    trainer = GRPOTrainer(lm, ["sudoku", share_of_a], GRPOConfig(**shared), task.generate("train", 4, 0))
    trainer.train()
    assert {"rewards/sudoku", "rewards/share_of_a"} <= trainer.state.log_history[0].keys()
    with raises(ConfigError, where="task"):
        GRPOTrainer(lm, "sudoko", GRPOConfig(**shared), task.generate("train", 4, 0))


def test_batches_that_cannot_hold_whole_groups_are_refused(tmp_path):
    with raises(ConfigError, where="num_generations"):
        make("grpo", tmp_path, num_generations=6)
    make("grpo", tmp_path, num_generations=6, gradient_accumulation_steps=3)
    with raises(ConfigError, where="train_dataset"):
        make("grpo", tmp_path, rows=PAIRS[:1])
    with raises(ConfigError, where="method"):
        make("grpo", tmp_path, method="grpo")
    with raises(DataError, where="train_dataset, row 1"):
        make("grpo", tmp_path, rows=[PAIRS[0], {"text": "a"}])
    with raises(DataError, where="train_dataset, row 0"):
        make("grpo", tmp_path, max_length=6)


def test_a_broken_policy_is_found_in_its_rollout(tmp_path):
    lm = llama_lm()
    with torch.no_grad():
        lm.model.model.norm.weight[0] = torch.nan
    with raises(GenerationError, where="model"):
        make("grpo", tmp_path, lm).train()


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ({"scale_rewards": "zscore"}, "scale_rewards"),
        ({"method": "diffugrpo"}, "method"),
        ({"remasking": "certain"}, "remasking"),
        ({"segments": 0}, "segments"),
        ({"reward_workers": -1}, "reward_workers"),
        ({"num_completions_to_print": 0}, "num_completions_to_print"),
        ({"kl": "k4"}, "kl"),
        ({"loss_type": "mean"}, "loss_type"),
        ({"method": "agrpo", "num_iterations": 2}, "num_iterations"),
        ({"difficulty": [0.8, 0.2]}, "difficulty"),
        ({"overlong_buffer": 200}, "overlong_buffer"),
        ({"sync_ref_model": True}, "sync_ref_model"),
        ({"method": "just-grpo", "remasking": "low_confidence"}, "remasking"),
        ({"method": "just-grpo", "steps": 4}, "steps"),
        ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy"),
    ],
)
def test_settings_that_do_not_exist_are_refused_at_once(tmp_path, setting, where):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **setting)


def test_a_run_resumes_amid_the_updates_of_a_rollout_bit_for_bit(tmp_path):
    shape = {
        "max_steps": 7,
        "num_iterations": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "rows": PAIRS[:6],
        "method": "cj-grpo",
    }
    more = {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 3,
        "curriculum": 0.3,
        "max_resample_rounds": 1,
        "filter_zero_std_groups": True,
        "reward": low_ids,
    }
    straight = make("grpo", tmp_path, **shape, **more)
    straight.train()
    for checkpoint in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        resumed = make("grpo", tmp_path, **shape, **more)
        resumed.train(resume_from_checkpoint=str(tmp_path / checkpoint))
        assert equal(weights(resumed.lm), weights(straight.lm)), checkpoint
    assert not equal(weights(straight.reference.lm), weights(llama_lm()))


def test_a_curriculum_does_not_go_on_with_fewer_prompts(tmp_path):
    shape = {"curriculum": 0.5, "save_strategy": "steps", "save_steps": 2, "reward": ranks}
    make("grpo", tmp_path, max_steps=6, **shape).train()
    with raises(ConfigError, where="train_dataset"):
        make("grpo", tmp_path, rows=PAIRS[:4], max_steps=8, **shape).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_its_rollouts_is_refused(tmp_path):
    shape = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make("grpo", tmp_path, **shape).train()
    (tmp_path / "checkpoint-1" / "rollouts-0.pt").write_bytes(b"torn")
    with raises(TrainingError, where=str(tmp_path / "checkpoint-1")):
        make("grpo", tmp_path, **shape).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size"),
        ({"num_iterations": 3}, "num_iterations"),
        ({"method": "cj-grpo"}, "method and loss_type"),
        ({"logprob_temperature": 0.5}, "logprob_temperature"),
        ({"beta": 0.1}, "beta"),
    ],
)
def test_rollouts_of_other_settings_are_not_gone_on_with(change, where, tmp_path):
    shape = {
        "num_iterations": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "rows": PAIRS[:6],
    }
    make("grpo", tmp_path, **shape).train()
    with raises(ConfigError, where=where):
        make("grpo", tmp_path, **shape | change).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_rollout_is_not_divided_anew(tmp_path):
    shape = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make("grpo", tmp_path, **shape).train()
    parts = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    with raises(TrainingError, where=str(tmp_path / "checkpoint-1")):
        make("grpo", tmp_path, **shape, **parts).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_one_config_trains_models_of_several_families(tmp_path):
    args = GRPOConfig(**settings(tmp_path, num_generations=2, max_completion_length=4), method="trace-rl")
    for attention, block_size, expected in (
        ("block_causal", 4, ("view-constant", 10.0)),
        ("bidirectional", None, ("view", None)),
    ):
        trainer = GRPOTrainer(llama_lm(attention, block_size), share_of_a, args, PAIRS)
        assert (trainer.method.loss_type, trainer.method.log_ratio_clamp) == expected


def test_rollouts_of_more_processes_are_not_gone_on_with(tmp_path):
    shape = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    make("grpo", tmp_path, **shape).train()
    checkpoint = tmp_path / "checkpoint-1"
    (checkpoint / "rollouts-1.pt").touch()
    listed = json.loads((checkpoint / FILE_LIST).read_text())["files"] | described(
        checkpoint, [checkpoint / "rollouts-1.pt"]
    )
    (checkpoint / FILE_LIST).write_text(json.dumps({"files": listed}))
    with raises(TrainingError, where=str(checkpoint)):
        make("grpo", tmp_path, **shape).train(resume_from_checkpoint=str(checkpoint))


def test_groups_that_teach_nothing_are_replaced_by_those_of_other_prompts(tmp_path):
    """All completions of prompts with a b get 0; those of other prompts get different rewards."""

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [0.0 if "b" in prompt else float(rank) for rank, prompt in enumerate(prompts)]

    rows = [{"prompt": prompt} for prompt in ("ab", "ba", "bb", "bc", "cb", "ac", "ca", "cc")]
    trainer = run(
        tmp_path,
        reward,
        rows=rows,
        max_resample_rounds=4,
        filter_zero_std_groups=True,
        max_steps=3,
        learning_rate=0.0,
    )
    for line in trainer.state.log_history[:3]:
        assert line["groups_kept"] == 1.0
    used = {prompt for prompt, (_, mean) in trainer.history.seen.items() if mean > 0}
    assert used == {5, 6, 7}
    plain = run(tmp_path, reward, rows=rows, filter_zero_std_groups=True, max_steps=3, learning_rate=0.0)
    assert min(line["groups_kept"] for line in plain.state.log_history[:3]) < 1


@pytest.mark.slow
def test_a_curriculum_prefers_prompts_of_the_reward_asked_for(tmp_path):
    """The reward depends only on the prompt: from a to h each an eighth more."""

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return ["abcdefgh".index(prompt[0]) / 7 for prompt in prompts]

    rows = [{"prompt": letter * 2} for letter in "abcdefgh"]
    trainer = run(
        tmp_path, reward, rows=rows, curriculum=1.0, max_steps=60, learning_rate=0.0, num_train_epochs=30
    )
    counts = [trainer.history.seen[prompt][0] for prompt in range(8)]
    assert sum(counts[6:]) > 2 * sum(counts[:2]) > 0


@pytest.mark.parametrize("change", [{"mask_truncated_completions": True}, {"overlong_buffer": 3}])
def test_what_does_not_end_is_masked_or_earns_less(change, tmp_path):
    lm = llama_lm()
    with torch.no_grad():  # half of the completions end
        lm.model.model.embed_tokens.weight[lm.eos_token_id] *= 2
    plain, changed = (
        make("grpo", tmp_path, lm, max_steps=1, learning_rate=0.0, **more) for more in ({}, change)
    )
    rows = [[plain.train_dataset[index] for index in range(16)]]
    update, other = plain.collect_updates(rows)[0][0], changed.collect_updates(rows)[0][0]
    rollout = update.rollout
    ends_B = (rollout.completion_BT & (rollout.ids_BT == lm.eos_token_id)).any(1)
    length_B = rollout.completion_BT.sum(1)
    assert 0 < ends_B.sum() < 16 and torch.equal(rollout.ids_BT, other.rollout.ids_BT)
    if "mask_truncated_completions" in change:
        assert torch.equal(other.loss_mask_BT.any(1), ends_B) and update.loss_mask_BT.any(1).all()
    else:
        generation = plain.sample(rows[0], temperature=1.0, step=0)
        total_B = changed.shaped(torch.zeros(16), generation)
        expected_B = -((length_B + ~ends_B - 1) / 3).clamp(0, 1)
        torch.testing.assert_close(total_B, expected_B)


def test_a_group_reads_its_prompt_once(tmp_path):
    """The second of two completions shares all but the current block, and in causal models everything."""
    prompts = [{"prompt": "abcd"}, {"prompt": "efgh"}]
    trainer = run(
        tmp_path,
        ranks,
        llama_lm("causal"),
        rows=prompts,
        max_steps=2,
        eval_dataset=prompts,
        eval_strategy="steps",
        eval_steps=1,
    )
    assert [
        line["prefix/reuse_rate"] for line in trainer.state.log_history if "prefix/reuse_rate" in line
    ] == [0.5, 0.5]
    assert trainer.get_performance_stats()["prompt_reuse"] == 0.5
    assert make("grpo", tmp_path / "bidirectional").get_performance_stats()["prompt_reuse"] is None


@pytest.mark.parametrize("method", ["bgpo", "spg"])
def test_a_loss_without_a_divergence_takes_no_beta(method, tmp_path):
    with raises(ConfigError, where="beta"):
        GRPOConfig(output_dir=str(tmp_path), method=method, beta=0.1)


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ({"vllm_importance_sampling_cap": 0.0}, "vllm_importance_sampling_cap"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"difficulty": [float("nan"), 1.0]}, "difficulty"),
        ({"softmax_temperature": 0.0}, "softmax_temperature"),
        ({"max_resample_rounds": 3}, "max_resample_rounds"),
        ({"method": "espo", "importance_sampling_level": "sequence"}, "importance_sampling_level"),
    ],
)
def test_numbers_out_of_range_and_settings_without_effect_are_refused(setting, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **setting)


def test_what_a_causal_model_leaves_unplanned_is_refused(tmp_path):
    with raises(ConfigError, where="samples"):
        make("grpo", tmp_path, llama_lm("causal"), method="espo", samples=4)


@pytest.mark.parametrize(
    ("attention", "method", "calls"),
    [("causal", "diffu-grpo", 2), ("bidirectional", "cj-grpo", 2), ("bidirectional", "diffu-grpo", 7)],
)
def test_what_hangs_on_no_draw_is_scored_once_for_all_updates(attention, method, calls, tmp_path):
    """This holds for the policy from the second update on, and for the reference."""
    trainer = make(
        "grpo", tmp_path, llama_lm(attention), method=method, num_iterations=4, beta=0.1, reward=ranks
    )
    calls_made, score_views = [], trainer.per_view.log_probs
    trainer.per_view.log_probs = lambda lm, update, *piece: (
        calls_made.append(lm) or score_views(lm, update, *piece)
    )
    [updates] = trainer.collect_updates([[trainer.train_dataset[index] for index in range(4)]])
    assert len(calls_made) == calls
    for update in updates:
        with torch.no_grad():
            expected_BMT = score_views(trainer.lm, update)
        assert torch.equal(update.reference_BMT, expected_BMT)  # before the first step
        assert update is updates[0] or torch.equal(update.old_BMT, expected_BMT)


def test_the_best_model_is_that_of_the_highest_reward(tmp_path):
    run = {
        "eval_dataset": PAIRS,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
    }
    trainer = make("grpo", tmp_path, load_best_model_at_end=True, reward=low_ids, **run)
    trainer.train()
    rewards = [line["eval_reward"] for line in trainer.state.log_history if "eval_reward" in line]
    assert (
        len(set(rewards)) > 1
        and trainer.state.best_metric == max(rewards) == trainer.evaluate()["eval_reward"]
    )


def test_of_a_causal_model_the_bounds_of_spg_meet(tmp_path):
    """Its likelihood is exact, so the lower and the upper bound are equal."""
    trainer = make("grpo", tmp_path, llama_lm("causal"), method="spg", reward=ranks, epsilon=None)
    [[update]] = trainer.collect_updates([[trainer.train_dataset[index] for index in range(4)]])
    with torch.no_grad():
        scores = trainer.loss_inputs(update, trainer.per_view.log_probs(trainer.lm, update))
    above_B1 = upper_bound(scores.policy_BMT, scores.views.target_BMT, scores.length_B1, 1.5)
    torch.testing.assert_close(lower_bound(scores), above_B1)


def test_a_run_without_any_score_stops_with_a_checkpoint(tmp_path):
    def fails(completions, **_):
        if broken:
            raise ValueError("no server")
        return share_of_a(completions)

    broken = [True]
    with raises(TrainingError, where="rewards"):
        run(tmp_path, fails, max_steps=8)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    broken.clear()
    resumed = make("grpo", tmp_path, reward=fails, max_steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8


@partly_slow("errors", ["unscored", "raise"], 0)
@pytest.mark.parametrize(
    ("limit", "scored", "stops"), [(0, (), False), (3, (2, 5), False), (2, (2, 5), True), (3, (0, 1), True)]
)
def test_unscored_rollouts_are_counted_in_a_row(tmp_path, limit, scored, stops, errors):
    def sometimes(completions, trainer_state, **_):
        return share_of_a(completions) if trainer_state.global_step in scored else [None] * len(completions)

    def attempt():
        run(tmp_path, sometimes, max_steps=6, max_unscored_rollouts=limit, reward_errors=errors)

    if stops:
        with raises(TrainingError, where="rewards"):
            attempt()
    else:
        attempt()


@pytest.mark.slow
def test_a_wrong_reward_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path):
    """Also with a moving reference and a history of rewards: what was interrupted is done once."""
    shape = {
        "max_steps": 4,
        "beta": 0.5,
        "sync_ref_model": True,
        "ref_model_sync_steps": 2,
        "curriculum": 0.3,
        "max_resample_rounds": 1,
        "filter_zero_std_groups": True,
    }
    calls: list[int] = []

    def failing(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return share_of_a(completions)[: 1 if len(calls) == stop else None]

    stop = -1
    straight = make("grpo", tmp_path / "straight", reward=failing, **shape)
    straight.train()
    for stop in range(3, len(calls) + 1):
        calls.clear()
        broken = make("grpo", tmp_path / str(stop), reward=failing, **shape)
        with raises(TrainingError, where="reward function failing"):
            broken.train()
        if broken.state.global_step == 0:
            continue
        calls[:] = [0] * 100
        resumed = make("grpo", tmp_path / str(stop), reward=failing, **shape)
        resumed.train(resume_from_checkpoint=True)
        assert equal(weights(resumed.lm), weights(straight.lm)), stop
        assert equal(weights(resumed.reference.lm), weights(straight.reference.lm))
        assert resumed.history.seen == straight.history.seen
