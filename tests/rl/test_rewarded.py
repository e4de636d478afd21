"""Completions from a server equal those made locally; losing it stops a run resumably; differing
log-probabilities are corrected for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import SafetensorError

import unmask
from tests.errors import raises
from tests.generation.remote.stub_servers import (
    FOR_ADAPTERS,
    FOR_ADAPTERS_IN_ENVIRONMENT,
    FOR_ROLLOUTS,
    FakeVLLM,
    Server,
    serving,
    write_model,
)
from tests.serving.servers import copied, serving_rollouts
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, ROLLOUT, equal, make, settings, share_of_a, weights
from unmask.artifacts import MetricsLog
from unmask.config.run import LoraSettings
from unmask.errors import ConfigError, GenerationError, TrainingError
from unmask.generation.remote.http import RemoteError
from unmask.models.load import load
from unmask.rewards.verdict import Verdict
from unmask.rl.config import GRPOConfig
from unmask.rl.rewarded import RewardedCompletions
from unmask.rl.trainer import GRPOTrainer

RUN = {"max_steps": 4, "num_iterations": 2, "logging_steps": 1, "performance_log_interval": 2}


@pytest.mark.parametrize(
    "adapters, more", [(False, {}), (True, {}), (False, {"constraint": {"regex": "[a-d]*"}})]
)
def test_a_run_on_a_server_is_the_run_in_process(adapters, more, tmp_path):
    more = (
        RUN
        | more
        | ({"peft_config": LoraSettings(r=2, target_modules=["q_proj"]).to_peft()} if adapters else {})
    )
    here = make("grpo", tmp_path / "here", llama_lm("block_causal", 2), **more)
    here.train()
    with serving_rollouts(copied(llama_lm("block_causal", 2), tmp_path / "model"), tmp_path) as url:
        there = make(
            "grpo",
            tmp_path / "there",
            llama_lm("block_causal", 2),
            rollout={"backend": "server", "url": url},
            **more,
        )
        there.train()
        there.source.backend.close()
    if adapters:  # the server's are merged, which rounds
        torch.testing.assert_close(weights(there.lm), weights(here.lm), rtol=0, atol=1e-5)
    else:
        assert equal(weights(there.lm), weights(here.lm))
    stats = there.get_performance_stats()
    assert {"generation", "reward", "scoring", "forward", "backward", "sync"} <= stats["seconds"].keys()
    assert {"reward", "ratio", "clipped", "kl", "entropy", "truncated", "unscored"} <= stats["logged"].keys()
    assert any("time/sync" in line for line in there.state.log_history)


def test_a_run_whose_server_stays_away_stops_with_a_checkpoint_and_goes_on_from_it(tmp_path):
    def run(url: str, **more: Any) -> GRPOTrainer:
        rollout = {"backend": "server", "url": url, "patience": 0.5}
        return make("grpo", tmp_path / "run", rollout=rollout, max_steps=4, rows=PAIRS[:6], **more)  # type: ignore[return-value]

    straight = make("grpo", tmp_path / "straight", max_steps=4, rows=PAIRS[:6])
    straight.train()
    with serving_rollouts(copied(llama_lm(), tmp_path / "model"), tmp_path) as url:
        trainer = run(url)
        generate, calls = trainer.source.backend.generate, []

        def dying(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise RemoteError(
                    "the server has accepted no requests for 0.5 seconds", where=url, remedy="Start it"
                )
            return generate(*arguments)

        trainer.source.backend.generate = dying  # type: ignore[method-assign]
        with raises(RemoteError, where=url):
            trainer.train()
        assert (tmp_path / "run" / "checkpoint-2").is_dir()
        resumed = run(url)
        resumed.train(resume_from_checkpoint=True)
        for each in (trainer, resumed):
            each.source.backend.close()
    assert equal(weights(resumed.lm), weights(straight.lm))


def test_what_was_half_done_is_not_logged_twice(tmp_path):
    shape = {"max_steps": 4, "logging_steps": 4, "max_resample_rounds": 1, "filter_zero_std_groups": True}
    calls: list[int] = []

    def run(folder: Path, fails: bool) -> GRPOTrainer:
        def reward(completions: list[str], trainer_state: Any, log_metric: Any, **_: Any) -> list[float]:
            calls.append(1)
            log_metric("at", trainer_state.global_step)
            # the second of a rollout: each step asks twice, as groups of equal rewards are replaced
            if fails and len(calls) == 4:
                raise TrainingError("wrong")
            return [1.0] * len(completions)

        return make("grpo", folder, llama_lm("causal"), reward=reward, **shape)  # type: ignore[return-value]

    run(tmp_path / "straight", fails=False).train()
    calls.clear()
    with raises(TrainingError, where=None):
        run(tmp_path / "broken", fails=True).train()
    run(tmp_path / "broken", fails=False).train(resume_from_checkpoint=True)
    for folder in (tmp_path / "straight", tmp_path / "broken"):
        assert MetricsLog(folder / "training_logs.json").read()[0]["at"] == 1.5


@pytest.mark.parametrize(
    "failure", [OSError("No space left on device"), SafetensorError("IoError: No space left on device")]
)
def test_weights_that_cannot_be_written_stop_the_run_with_a_checkpoint(failure, tmp_path, monkeypatch):
    with serving_rollouts(copied(llama_lm(), tmp_path / "model"), tmp_path) as url:
        trainer = make("grpo", tmp_path / "run", rollout={"backend": "server", "url": url}, max_steps=3)
        save, calls = type(trainer.lm).save, []

        def full(lm: Any, path: Any) -> None:
            calls.append(path)
            if len(calls) == 2:
                raise failure
            save(lm, path)

        monkeypatch.setattr(type(trainer.lm), "save", full)
        with raises(RemoteError, where=str(tmp_path / "run/rollout_weights/step-1")):
            trainer.train()
        trainer.source.backend.close()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()


def test_what_a_server_draws_otherwise_is_corrected_up_to_a_bound(tmp_path):
    """The server reports other log-probabilities of its tokens: each token is weighted by the ratio,
    capped."""
    lm = llama_lm("causal")
    with serving(FakeVLLM(lm, processed=True)) as url:
        settings = {
            "rollout": {"backend": "vllm", "url": url},
            "max_steps": 1,
            "learning_rate": 0.0,
            "rows": PAIRS[:4],
        }
        trainer = make(
            "grpo",
            tmp_path,
            lm,
            reward=lambda completions, **_: [0.0, 1.0] * (len(completions) // 2),
            **settings,
        )
        plain = make("grpo", tmp_path, lm, vllm_importance_sampling_cap=None, **settings)
        rows = [[trainer.train_dataset[index] for index in range(4)]]
        [[update]], [[uncorrected]] = trainer.collect_updates(rows), plain.collect_updates(rows)
        for each in (trainer, plain):
            each.source.backend.close()
    assert uncorrected.rollout.sampled_BT is None
    with torch.no_grad():
        log_prob_BMT = trainer.per_view.log_probs(trainer.lm, update)
    scores = trainer.loss_inputs(update, log_prob_BMT)
    where_BT = update.rollout.completion_BT
    expected = (
        (log_prob_BMT[:, 0][where_BT] - torch.tensor([-0.5, -0.25, -1.0]).repeat(4)).exp().clamp_max(2.0)
    )
    torch.testing.assert_close(scores.importance_BT[where_BT], expected)
    loss = trainer.method.loss(scores)
    by_hand = -(expected * update.advantage_BT.expand_as(where_BT)[where_BT]).sum()
    torch.testing.assert_close(loss.total, by_hand)


def test_a_server_that_does_not_say_how_likely_its_tokens_were_is_refused(tmp_path):
    lm = llama_lm("causal")
    with serving(FakeVLLM(lm, processed=False)) as url:
        trainer = make("grpo", tmp_path, lm, rollout={"backend": "vllm", "url": url}, temperature=0.7)
        with raises(GenerationError, where="rollout"):
            trainer.train()
        trainer.source.backend.close()


@pytest.mark.parametrize(
    ("rollout", "where"),
    [
        ({"backend": "sglang"}, "rollout.backend"),
        ({"backend": "vllm"}, "rollout.url"),
        ({"backend": "vllm", "url": "http://h:1", "method": "espo"}, "rollout.backend and method"),
        ({"url": "http://h:1"}, "rollout.url"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused_at_once(rollout, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), method=rollout.pop("method", "diffu-grpo"), rollout=rollout)


VLLM = {"rollout": {"backend": "vllm", "url": "http://h:1"}}


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (VLLM | {"block_size": 32}, "rollout.backend and block_size"),
        (VLLM | {"constraint": {"regex": "a*"}}, "rollout.backend and constraint"),
        (VLLM | {"steps": 64}, "rollout.backend and steps"),
        (VLLM | {"remasking": "entropy"}, "rollout.backend and remasking"),
        (
            {"rollout": {"backend": "vllm", "url": "http://h:1", "sync": "nccl"}, "use_cpu": True},
            "rollout.sync and use_cpu",
        ),
        (VLLM | {"masking": "diffusion"}, "rollout.backend and masking"),
        (VLLM | {"prompt_mask_rate": 0.3}, "rollout.backend and prompt_mask_rate"),
        (
            VLLM | {"method": "spg", "vllm_importance_sampling_cap": None, "samples": 3},
            "rollout.backend and samples",
        ),
        (VLLM | {"logprob_temperature": 0.5}, "rollout.backend and logprob_temperature"),
        ({"vllm_importance_sampling_cap": 3.0}, "rollout.backend and vllm_importance_sampling_cap"),
        (
            {"vllm_importance_sampling_cap": 3.0, "rollout": {"backend": "server", "url": "http://h:1"}},
            "rollout.backend and vllm_importance_sampling_cap",
        ),
    ],
)
def test_a_setting_that_the_backend_cannot_use_is_refused_at_once(given, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **given)


def test_settings_of_a_causal_model_are_taken_with_vllm(tmp_path):
    made = GRPOConfig(
        output_dir=str(tmp_path),
        **VLLM,
        vllm_importance_sampling_cap=3.0,
        remasking="left_to_right",
        rollout_batch_size=4,
        stop_at_eos=False,
    )
    assert made.corrects_for_server and made.vllm_importance_sampling_cap == 3.0
    assert (
        GRPOConfig(
            output_dir=str(tmp_path), **VLLM, method="just-grpo", vllm_importance_sampling_cap=None
        ).remasking
        == "left_to_right"
    )


def test_weights_that_are_shared_out_are_not_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "shards_weights", True)
    with raises(ConfigError, where="rollout.backend"):
        make("grpo", tmp_path, rollout={"backend": "server", "url": "http://127.0.0.1:9"})


def test_samples_of_completions_are_kept_and_rewound(tmp_path):
    shape = {
        "max_steps": 4,
        "log_completions": True,
        "log_completions_steps": 2,
        "num_completions_to_print": 3,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    make("grpo", tmp_path, **shape).train()
    read = (tmp_path / "completions.jsonl").read_text
    assert read().count('"step": 1') == 3 and '"rewards/share_of_a"' in read() and '"advantage"' in read()
    whole = read()
    make("grpo", tmp_path, **shape).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert sorted(read().splitlines()) == sorted(whole.splitlines())


def test_samples_tell_what_reward_functions_log_of_each_completion(tmp_path):
    def first(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("first", [text[:1] for text in completions])
        log_extra("parts", [torch.arange(len(text)) for text in completions])
        return [float(len(text)) for text in completions]

    make("grpo", tmp_path, reward=first, max_steps=1, log_completions=True).train()
    lines = MetricsLog(tmp_path / "completions.jsonl").read()
    assert len(lines) > 2 and len({line["first"] for line in lines}) > 1
    for line in lines:
        assert line["first"] == line["completion"][:1] and line["parts"] == list(range(int(line["reward"])))


def test_what_reward_functions_log_does_not_touch_what_the_trainer_logs(tmp_path):
    settings = {
        "max_steps": 2,
        "performance_log_interval": 1,
        "log_memory_usage": True,
        "include_num_input_tokens_seen": "all",
    }
    settings |= {
        "curriculum": 0.5,
        "filter_zero_std_groups": True,
        "max_resample_rounds": 1,
        "beta": 0.1,
        "method": "diffu-grpo",
    }
    settings |= {"eval_dataset": PAIRS[:2], "eval_strategy": "steps", "eval_steps": 1}

    def lines(folder: Path, reward: Any) -> list[dict[str, float]]:
        make("grpo", folder, llama_lm("causal"), reward=reward, **settings).train()
        return MetricsLog(folder / "training_logs.json").read()

    plain = lines(tmp_path / "plain", share_of_a)
    own = {name for line in plain for name in line}
    assert {
        "step",
        "loss",
        "kl",
        "eval_reward",
        "groups_replaced",
        "throughput/trained",
        "time/reward",
        "memory_gb",
        "train_loss",
    } <= own

    def chatty(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        for name in (*own, "mine"):
            log_metric(name, 1e6)
        return share_of_a(completions)

    chatty.__name__ = "share_of_a"
    logged = lines(tmp_path / "chatty", chatty)
    for before, after in zip(plain, logged, strict=True):
        theirs = {name for name in after if "mine" in name or "logged/" in name}
        assert after.keys() - theirs == before.keys() and all(after[name] == 1e6 for name in theirs)
        assert theirs >= ({"mine", "logged/step", "logged/loss"} if "loss" in after else set())
        changing = ("time/", "throughput/", "memory", "tokens_per_second", "samples_per_second", "train_")
        assert [after[name] for name in before if not name.startswith(changing)] == [
            before[name] for name in before if not name.startswith(changing)
        ]


def test_an_evaluation_is_of_the_weights_as_they_are(tmp_path):
    lm = llama_lm("causal")
    vllm = FakeVLLM(lm, processed=True)
    with serving(vllm) as url:
        trainer = make(
            "grpo",
            tmp_path,
            lm,
            rollout={"backend": "vllm", "url": url, "sync_steps": 9},
            eval_dataset=PAIRS[:2],
        )
        trainer.train()
        sent = [vllm.paths().count("/collective_rpc")]
        trainer.evaluate()
        sent.append(vllm.paths().count("/collective_rpc"))
        trainer.source.backend.close()
    assert sent == [1, 2] and vllm.version.endswith("step-2")


def test_an_evaluation_tells_what_each_function_gave_and_what_was_not_scored(tmp_path):
    def never(completions: list[str], **_: Any) -> list[None]:
        return [None] * len(completions)

    def b(prompts: list[str], **_: Any) -> list[float | None]:
        return [2.0 if prompt[0] == "b" else None for prompt in prompts]

    def tenth(completions: list[str], tenths: list[bool], **_: Any) -> list[float | None]:
        return [0.1 if tells else None for tells in tenths]

    held_out = [
        {"prompt": prompt, "tenths": tells}
        for prompt, tells in (("ab", False), ("ba", True), ("bb", False), ("cc", True))
    ]
    trainer = make("grpo", tmp_path / "some", reward=[b, tenth, never], eval_dataset=held_out)
    metrics = trainer.evaluate()
    assert metrics == pytest.approx(
        {
            "eval_reward": (2.1 + 2.0 + 0.1) / 3,
            "eval_unscored": 0.25,
            "eval_rewards/b": 2.0,
            "eval_rewards/tenth": 0.1,
            "eval_rewards/never": math.nan,
            "epoch": 0,
        },
        nan_ok=True,
    )
    assert trainer.state.log_history[-1]["eval_unscored"] == 0.25
    with raises(ConfigError, where="eval_dataset"):
        make("grpo", tmp_path / "unheld", reward=never).evaluate()
    none = make("grpo", tmp_path / "none", reward=never, eval_dataset=held_out).evaluate()
    assert math.isnan(none["eval_reward"]) and none["eval_unscored"] == 1.0


class Elsewhere(GRPOTrainer):
    """Rewards of one's own: 1 and 0 in turn."""

    asked: ClassVar[list[tuple[float, int | None]]] = []

    def generate_and_score(self, rows, *, temperature, step):
        self.asked.append((temperature, step))
        total_B = torch.tensor([1.0 - number % 2 for number in range(len(rows))])
        generation = self.sample(rows, temperature=temperature, step=step)
        return RewardedCompletions(rows, generation, total_B[:, None], total_B)


def test_one_method_gives_completions_and_rewards_of_ones_own(tmp_path):
    """In training and in evaluations. What is added to rewards, and the curriculum, follow it."""
    args = GRPOConfig(
        **settings(tmp_path, **ROLLOUT, max_steps=2, logging_steps=1, curriculum=0.5, overlong_buffer=1)
    )
    trainer = Elsewhere(llama_lm(), share_of_a, args, PAIRS, [{"prompt": "ab"}])
    trainer.train()
    assert trainer.evaluate()["eval_reward"] == 1.0
    assert Elsewhere.asked == [(args.temperature, 0), (args.temperature, 1), (0.0, None)]
    first = trainer.state.log_history[0]
    assert first["reward"] == pytest.approx(0.5 - first["truncated"])
    assert trainer.history.seen


def test_completions_without_canvases_are_refused(tmp_path, monkeypatch):
    trainer = make("grpo", tmp_path)
    source = trainer.source.generate
    monkeypatch.setattr(
        trainer.source, "generate", lambda *rows, **more: replace(source(*rows, **more), trace=None)
    )
    with pytest.raises(GenerationError, match="has no canvases"):
        trainer.train()


def test_training_averages_hold_nothing_of_evaluations(tmp_path):
    more = {"eval_dataset": [{"prompt": "ab"}, {"prompt": "cd"}], "eval_strategy": "steps", "eval_steps": 1}
    lines = [
        make_lines(tmp_path / name, **settings) for name, settings in (("alone", {}), ("evaluated", more))
    ]
    for name in ("prefix/reuse_rate", "rewards/length/ok", "reward"):
        alone, evaluated = ([line[name] for line in own if name in line] for own in lines)
        assert alone == evaluated and len(alone) == 3
    # its prompts differ
    assert [line["eval_prefix/reuse_rate"] for line in lines[1] if "eval_reward" in line] == [0.0] * 3


def make_lines(folder: Path, **more: Any) -> list[dict[str, float]]:
    """The log of a run of a causal model with a function that returns verdicts."""

    def length(completion_ids: list[list[int]], **_: Any) -> list[Verdict]:
        return [Verdict(float(len(ids)), "ok" if len(ids) > 2 else "wrong") for ids in completion_ids]

    trainer = make("grpo", folder, llama_lm("causal"), reward=length, max_steps=3, **more)
    trainer.train()
    return trainer.state.log_history


def test_one_of_several_rewards_can_say_how_difficult_a_prompt_is(tmp_path):
    def solved(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    shape = {"num_generations": 4, "difficulty": [0.2, 0.8], "reward": [solved, share_of_a]}
    value_BF = torch.tensor(
        [[1.0, -9.0]] * 4 + [[1.0, 9.0], [0.0, 9.0], [0.0, 9.0], [math.nan, 9.0]] + [[0.0, 0.5]] * 4
    )
    for name, kept in [
        ("solved", [False, True, False]),
        ("share_of_a", [False, False, True]),
        (None, [False, False, True]),
    ]:
        trainer = make("grpo", tmp_path, difficulty_reward=name, **shape)
        rows = [trainer.train_dataset[index] for index in range(12)]
        rewarded = RewardedCompletions(
            rows, trainer.sample(rows, temperature=1.0, step=0), value_BF, value_BF.nansum(1)
        )
        _, kept_B = trainer.group_advantages(rewarded)
        assert kept_B.tolist() == [each for each in kept for _ in range(4)], name
    twice = make("grpo", tmp_path, difficulty_reward="solved_2", **shape | {"reward": [solved, solved]})
    _, kept_B = twice.group_advantages(rewarded)
    assert kept_B.tolist() == [each for each in (False, False, True) for _ in range(4)]
    with raises(ConfigError, where="difficulty_reward"):
        make("grpo", tmp_path, difficulty_reward="solve", **shape)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("adapters", [False, True])
def test_causal_grpo_on_a_real_vllm(adapters, tmp_path):
    """Log-probabilities of server and trainer agree in every rollout, also after updates, since the server
    gets new weights."""
    write_model(tmp_path / "stock", seed=0)
    load(tmp_path / "stock").save(tmp_path / "model")
    options, environment = (
        (FOR_ROLLOUTS + FOR_ADAPTERS, FOR_ADAPTERS_IN_ENVIRONMENT) if adapters else (FOR_ROLLOUTS, {})
    )
    with Server(tmp_path / "model", tmp_path / "log.txt", options, **environment) as server:
        args = GRPOConfig(
            output_dir=str(tmp_path / "run"),
            per_device_train_batch_size=8,
            num_generations=4,
            num_iterations=2,
            max_steps=6,
            max_completion_length=16,
            temperature=0.8,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            rollout={
                "backend": "vllm",
                "url": server.url,
                "sync": "lora" if adapters else "disk",
                "patience": 300.0,
            },
        )
        peft = (
            {"peft_config": LoraSettings(r=8, target_modules=["q_proj", "v_proj"]).to_peft()}
            if adapters
            else {}
        )
        prompts = [
            {"prompt": text} for text in ("Once upon a time", "The dog", "Lily and her mom went to the", "A")
        ]
        trainer = GRPOTrainer(unmask.load(tmp_path / "model"), share_of_a, args, prompts, **peft)
        before = weights(trainer.lm)
        trainer.train()
        trainer.source.backend.close()
    gaps = [line["server_gap"] for line in trainer.state.log_history if "server_gap" in line]
    assert not equal(weights(trainer.lm), before)
    assert len(gaps) == 6 and max(gaps) < 1e-3, gaps
    assert all(
        math.isclose(line["importance"], 1.0, abs_tol=1e-2)
        for line in trainer.state.log_history
        if "importance" in line
    )
