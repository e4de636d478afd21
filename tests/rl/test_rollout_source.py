"""A server samples the next rollout while the trainer trains: from weights that are no older than allowed,
and with the loss of a ratio to them."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch import Tensor
from torch.utils.data import BatchSampler

from tests.errors import raises
from tests.helpers import partly_slow
from tests.rl.copy_server import REMOTE, CopyServer, trainer_of
from tests.serving.servers import copied, serving_rollouts
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, equal, low_ids, make, ranks, weights
from unmask.config.run import LoraSettings
from unmask.errors import ConfigError, RunStopped
from unmask.generation.remote.http import RemoteError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.rl.methods.base import METHODS
from unmask.rl.prompts import GroupSampler
from unmask.rl.rollout_source import weights_in_use
from unmask.rl.trainer import GRPOTrainer
from unmask.training.run.around import StopOnSignal

WITH_RATIO = [
    "diffu-grpo",
    "uni-grpo",
    "coupled-grpo",
    "espo",
    "gdpo",
    "bgpo",
    "cj-grpo",
    "step-merge",
    "trace-rl",
    "dipo",
]


def ref_model(lm: DiffusionLM, held: dict[str, Tensor]) -> DiffusionLM:
    """Another model, with these weights."""
    other = lm.frozen_copy()
    other.model.load_state_dict(held)
    return other


def recorded(trainer: GRPOTrainer) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """The weights before each optimizer step, and the first micro-batch of each step, which `train` fills."""
    before: list[dict[str, Tensor]] = []
    batches: list[Any] = []
    get = trainer.get_batch_samples

    def recording(*arguments: Any) -> Any:
        before.append(weights(trainer.lm))
        found = get(*arguments)
        batches.extend(found[0][:1])
        return found

    trainer.get_batch_samples = recording  # type: ignore[method-assign]
    return before, batches


def test_without_staleness_nothing_is_asked_in_advance(tmp_path):
    server, shape = (
        CopyServer(),
        {"max_steps": 4, "num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "reward": ranks},
    )
    trainer = trainer_of(server, tmp_path / "server", **shape)
    assert trainer.args.max_staleness == 0 and trainer.source.backend is server
    trainer.train()
    here = make("grpo", tmp_path / "here", **shape)
    here.train()
    assert equal(weights(trainer.lm), weights(here.lm))
    assert [version for version, _ in server.sampled] == [0, 2]
    assert not list(tmp_path.rglob("rollout_ahead*")) and not any(
        "staleness" in line for line in trainer.state.log_history
    )


@partly_slow(
    "updates, most, versions",
    [
        (1, 1, [0, 0, 1, 2, 3, 4]),
        (1, 5, [0, 0, 1, 2, 3, 4]),  # the next rollout is the only one that is asked for
        (2, 1, [0, 1, 3]),
        (2, 2, [0, 0, 2]),
        (3, 2, [0, 1]),
    ],
    *(0, 3),
)
def test_no_rollout_is_older_than_allowed_however_slow_the_server(updates, most, versions, tmp_path):
    shape = {
        "max_steps": 6,
        "num_iterations": updates,
        "max_staleness": most,
        "reward": ranks,
        "learning_rate": 3e-2,
    }
    made = []
    for number, delays in enumerate([(0.0,), (0.2, 0.0)]):
        server = CopyServer(*delays)
        trainer = trainer_of(server, tmp_path / str(number), **shape)
        trainer.train()
        assert [version for version, _ in server.sampled] == versions
        ages = [line["staleness"] for line in trainer.state.log_history if "staleness" in line]
        assert (
            ages == [index * updates - version for index, version in enumerate(versions)]
            and max(ages) <= most
        )
        made.append(weights(trainer.lm))
    assert equal(*made)


def test_the_server_samples_while_the_trainer_trains(tmp_path):
    """Each rollout but the first is sampled only when the trainer has begun to train on the one before."""
    server, begun = CopyServer(), threading.Semaphore(0)
    generate = server.generate

    def waiting(*arguments: Any) -> Any:
        assert not server.sampled or begun.acquire(timeout=30), "the trainer waits for the server"
        return generate(*arguments)

    server.generate = waiting  # type: ignore[method-assign]
    trainer = trainer_of(server, tmp_path, max_steps=3, max_staleness=1)
    step = trainer.training_step

    def begins(*arguments: Any) -> Any:
        begun.release()
        return step(*arguments)

    trainer.training_step = begins  # type: ignore[method-assign]
    trainer.train()
    assert len(server.sampled) == 3  # nothing is asked for after the last rollout


@partly_slow("method", WITH_RATIO, 0, 1, 2, 3)
def test_the_old_policy_is_the_one_that_sampled(method, tmp_path):
    """Log-probabilities of the old policy are those of another model with the weights that the server had."""
    settings = {
        "max_steps": 3,
        "max_staleness": 1,
        "reward": ranks,
        "learning_rate": 3e-2,
        "epsilon": None,
        "method": method,
    }
    trainer = trainer_of(CopyServer(), tmp_path, gradient_accumulation_steps=2, **settings, rows=PAIRS[:6])
    before, batches = recorded(trainer)
    trainer.train()
    assert batches[0].old_BMT is None  # nothing has changed yet
    for step in (1, 2):
        then = ref_model(trainer.lm, before[step - 1])
        with torch.no_grad():
            assert torch.equal(batches[step].old_BMT, trainer.per_view.log_probs(then, batches[step]))
    now = ref_model(trainer.lm, before[2])
    assert not torch.equal(batches[2].old_BMT, trainer.per_view.log_probs(now, batches[2]))


def test_the_loss_of_an_older_rollout_is_that_of_the_formula(tmp_path):
    """PPO's clipped surrogate of each token, with the policy of one update before as the old one."""
    settings = {
        "method": "diffu-grpo",
        "prompt_mask_rate": 0.0,
        "epsilon": 0.1,
        "max_steps": 2,
        "reward": ranks,
        "learning_rate": 3e-2,
    }
    trainer = trainer_of(CopyServer(), tmp_path, max_staleness=1, **settings)
    before, batches = recorded(trainer)
    trainer.train()
    batch = batches[1]
    done = batch.rollout.completion_BT

    def log_probs(held: dict[str, Tensor]) -> Tensor:
        hidden_BT = (batch.rollout.document_BT > 0) & ~batch.rollout.prompt_BT
        ids_BT = batch.rollout.ids_BT.masked_fill(hidden_BT, trainer.lm.mask_token_id)
        logits_BTV = ref_model(trainer.lm, held).logits(
            ids_BT, hidden_BT=hidden_BT, attention_mask_BT=batch.rollout.document_BT
        )
        return logits_BTV.log_softmax(2).gather(2, batch.rollout.ids_BT[:, :, None])[:, :, 0]

    with torch.no_grad():
        ratio_BT = (log_probs(before[1]) - log_probs(before[0])).exp()
    advantage_BT = batch.advantage_BT.expand_as(ratio_BT)
    token_BT = -torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(0.9, 1.1) * advantage_BT)
    expected = token_BT[done].mean()
    assert (ratio_BT[done] - 1).abs().max() > 0.01
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged[1] == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_the_ratio_makes_the_gradient_that_of_the_present_policy(tmp_path):
    """Over all completions of one token, weighted by the probability with which the older policy draws them,
    the gradient of the loss is minus that of the present policy's expected reward."""
    lm, older = llama_lm(), weights(llama_lm())
    trainer = trainer_of(CopyServer(), tmp_path, lm, max_staleness=1, epsilon=1.0, epsilon_high=1e6)
    ids, [vocabulary] = [3, 4], lm.logits(torch.tensor([[3]])).shape[-1:]
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    reward_V = torch.linspace(-1, 1, vocabulary)

    def log_probs(model: DiffusionLM) -> Tensor:
        canvas_BT = torch.tensor([[*ids, model.mask_token_id]])
        return model.logits(canvas_BT, hidden_BT=canvas_BT == model.mask_token_id)[0, -1].log_softmax(0)

    with torch.no_grad():
        old_V = log_probs(ref_model(lm, older))
    drawable = old_V > -torch.inf
    now_V = log_probs(lm)
    surrogate = trainer.method.surrogate(  # type: ignore[attr-defined]
        (now_V - old_V)[drawable], None, reward_V[drawable], old_V[drawable].exp()
    )
    parameters = [weight for weight in lm.model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(surrogate.total, parameters, retain_graph=True, allow_unused=True)
    exact = torch.autograd.grad((now_V.exp() * reward_V)[drawable].sum(), parameters, allow_unused=True)
    for mine, theirs in zip(found, exact, strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, -theirs, rtol=1e-4, atol=1e-6)


def test_weights_are_exchanged_and_come_back(tmp_path):
    lm, other = (
        llama_lm(),
        {name: weight.detach() + 1 for name, weight in llama_lm().model.named_parameters()},
    )
    before, parts = weights(lm), list(lm.model.parameters())
    with pytest.raises(ValueError, match="inside"), weights_in_use(lm, other):
        assert all(torch.equal(weight, before[name] + 1) for name, weight in lm.model.named_parameters())
        raise ValueError("inside")
    assert equal(weights(lm), before) and all(
        one is two for one, two in zip(parts, lm.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(("processes", "size"), [(1, 4), (2, 2), (2, 4)])
def test_prompts_of_a_later_rollout_are_those_that_the_loader_gives(processes, size):
    steps, repeats = 4, 2
    sampler = GroupSampler(9, prompts_per_step=4, group_size=2, repeats=repeats, seed=5)
    accumulation = 8 // (size * processes)
    for mine in range(processes):
        given: list[list[int]] = []
        for epoch in range(steps // 2):
            sampler.set_epoch(epoch)
            batches = list(BatchSamplerShard(BatchSampler(sampler, size, drop_last=False), processes, mine))
            starts = range(0, len(batches), accumulation * repeats)
            given += [
                [row for batch in batches[start : start + accumulation] for row in batch] for start in starts
            ]
        later = [
            [row for place, row in enumerate(sampler.rollout(n)) if place // size % processes == mine]
            for n in range(steps)
        ]
        assert later == given


def test_prompts_asked_in_advance_are_those_of_the_run(tmp_path):
    """Over several epochs, and with a curriculum."""
    for number, more in enumerate(
        ({}, {"curriculum": 0.3, "max_resample_rounds": 1, "filter_zero_std_groups": True})
    ):
        keys = []
        for most in (0, 1):
            server = CopyServer()
            rows = {"rows": PAIRS[:6]} if not more else {}
            settings = {"learning_rate": 0.0, "max_steps": 5, "reward": low_ids} | rows
            trainer_of(server, tmp_path / f"{number}-{most}", max_staleness=most, **settings, **more).train()
            keys.append([asked for _, asked in server.sampled])
        assert keys[0] == keys[1] and len(keys[0]) >= 5


def test_a_run_ahead_resumes_bit_for_bit(tmp_path):
    """Also amid the updates of a rollout, while the next one is on its way."""
    shape = {
        "max_steps": 6,
        "num_iterations": 2,
        "max_staleness": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "curriculum": 0.3,
    }
    shape |= {
        "reward": low_ids,
        "learning_rate": 3e-2,
        "rows": PAIRS[:6],
        "max_resample_rounds": 1,
        "filter_zero_std_groups": True,
    }
    straight = trainer_of(CopyServer(), tmp_path, **shape)
    straight.train()
    for step in (2, 3):
        resumed = trainer_of(CopyServer(), tmp_path, **shape)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert equal(weights(resumed.lm), weights(straight.lm)), step


SHAPES: list[dict[str, Any]] = [
    {
        "num_iterations": 1,
        "max_staleness": 1,
        "method": "cj-grpo",
        "eval_dataset": PAIRS[:2],
        "eval_strategy": "steps",
        "eval_steps": 1,
    },
    {
        "num_iterations": 3,
        "max_staleness": 2,
        "curriculum": 0.3,
        "max_resample_rounds": 1,
        "filter_zero_std_groups": True,
        "beta": 0.1,
    },
    {
        "num_iterations": 2,
        "max_staleness": 2,
        "peft_config": LoraSettings(r=2, target_modules=["q_proj"]).to_peft(),
    },
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_run_ahead_of_a_real_server_resumes_bit_for_bit(shape, tmp_path):
    """From every step; a resumed run asks again for what was on its way, and evaluations use the server in
    between."""
    with serving_rollouts(copied(llama_lm(), tmp_path / "model"), tmp_path) as url:

        def run() -> GRPOTrainer:
            saved = {
                "save_strategy": "steps",
                "save_steps": 1,
                "reward": low_ids,
                "learning_rate": 3e-2,
                "rows": PAIRS[:6],
            }
            rollout = {"backend": "server", "url": url}
            return make("grpo", tmp_path / "run", rollout=rollout, max_steps=7, **saved, **shape)  # type: ignore[return-value]

        straight = run()
        straight.train()
        straight.source.backend.close()
        assert list(tmp_path.glob("run/checkpoint-*/rollout_ahead.pt"))
        for step in range(1, 7):
            resumed = run()
            resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))
            resumed.source.backend.close()
            assert equal(weights(resumed.lm), weights(straight.lm)), step


def test_a_run_ahead_of_a_real_server_is_that_ahead_of_a_copy(tmp_path):
    shape = {"max_steps": 3, "max_staleness": 1, "reward": ranks, "learning_rate": 3e-2}
    with serving_rollouts(copied(llama_lm(), tmp_path / "model"), tmp_path) as url:
        there = make("grpo", tmp_path / "there", rollout={"backend": "server", "url": url}, **shape)
        there.train()
        there.source.backend.close()
    here = trainer_of(CopyServer(), tmp_path / "here", **shape)
    here.train()
    assert equal(weights(there.lm), weights(here.lm))


def test_no_process_sends_weights_before_the_server_has_sampled_for_all(tmp_path, monkeypatch):
    events: list[str] = []

    @contextmanager
    def together(where):
        yield
        events.append("all processes are here")

    source = trainer_of(CopyServer(), tmp_path, max_staleness=1).source
    monkeypatch.setattr("unmask.rl.rollout_source.failing_together", together)
    monkeypatch.setattr(source.backend, "wait", lambda: events.append("waited"))
    monkeypatch.setattr(source.backend, "sync", lambda lm, step: events.append("sent"))
    source.sync_weights(None, 0)
    assert events == ["waited", "all processes are here", "sent", "all processes are here"]


def test_groups_that_replace_others_come_from_the_weights_of_the_rest_although_an_evaluation_sent_others(
    tmp_path,
):
    def equal_rewards(completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(completions)

    server, shape = (
        CopyServer(0.05),
        {"max_steps": 4, "max_staleness": 1, "max_resample_rounds": 1, "filter_zero_std_groups": True},
    )
    held_out = {"eval_dataset": PAIRS[:1], "eval_strategy": "steps", "eval_steps": 1}
    trainer_of(server, tmp_path, reward=equal_rewards, **shape, **held_out).train()
    assert [version for version, keys in server.sampled if len(keys) > 1] == [0, 0, 0, 0, 1, 1, 2, 2]
    assert [version for version, keys in server.sampled if len(keys) == 1] == [1, 2, 3, 4]


@partly_slow("failing", [1, 3], 1)
def test_a_server_that_fails_in_the_background_stops_the_run_with_a_checkpoint(failing, tmp_path):
    shape = {"max_steps": 5, "max_staleness": 1, "reward": ranks, "learning_rate": 3e-2}
    straight = trainer_of(CopyServer(), tmp_path / "straight", **shape)
    straight.train()
    error = RemoteError(
        "the server has accepted no requests for 30 seconds", where="http://h:1", remedy="Start it"
    )
    trainer = trainer_of(CopyServer(failing={failing: error}), tmp_path / "run", **shape)
    with raises(RemoteError, where="http://h:1"):
        trainer.train()
    assert (
        trainer.state.global_step == failing
        and (tmp_path / "run" / f"checkpoint-{failing}" / "rollout_ahead.pt").exists()
    )
    resumed = trainer_of(CopyServer(), tmp_path / "run", **shape)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))


def test_a_signal_ends_a_run_that_waits_for_no_server(tmp_path):
    shape = {"max_steps": 4, "max_staleness": 1, "learning_rate": 3e-2, "num_iterations": 2}
    straight = trainer_of(CopyServer(), tmp_path / "straight", reward=ranks, **shape)
    straight.train()
    answers = threading.Event()
    server = CopyServer()
    generate = server.generate

    def stuck(*arguments: Any) -> Any:
        if len(server.sampled) == 1:
            answers.wait()
        return generate(*arguments)

    server.generate = stuck  # type: ignore[method-assign]
    stopping = StopOnSignal(tmp_path / "run", resumes=False)
    trainer = trainer_of(server, tmp_path / "run", reward=ranks, callbacks=[stopping], **shape)
    step = trainer.training_step

    def killed(*arguments: Any) -> Any:
        if trainer.state.global_step == 1:  # the next rollout is on its way
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    trainer.training_step = killed  # type: ignore[method-assign]
    with stopping, pytest.raises(RunStopped, match="after step 2, checkpoint saved"):
        trainer.train()
    answers.set()
    resumed = trainer_of(CopyServer(), tmp_path / "run", reward=ranks, **shape)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))


def test_every_method_either_has_a_ratio_or_refuses_older_rollouts(tmp_path):
    for name in METHODS.keys() & {*WITH_RATIO, "wd1", "spg", "agrpo", "just-grpo"}:
        settings = {"output_dir": str(tmp_path), "method": name, "max_staleness": 1, "rollout": REMOTE}
        if name in WITH_RATIO:
            assert GRPOConfig(**settings).max_staleness == 1
        else:
            with raises(ConfigError, where="method and max_staleness"):
                GRPOConfig(**settings)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "rollout.backend and max_staleness"),
        (
            {"rollout": {"backend": "vllm", "url": "http://h:1", "sync_steps": 2}},
            "rollout.sync_steps and max_staleness",
        ),
        (
            {"rollout": {"backend": "vllm", "url": "http://h:1", "sync": "nccl"}},
            "rollout.sync and max_staleness",
        ),
        ({"rollout": REMOTE, "max_staleness": -1}, "max_staleness"),
    ],
)
def test_rollouts_ahead_that_cannot_be_are_refused_at_once(given, where, tmp_path):
    with raises(ConfigError, where=where):
        GRPOConfig(output_dir=str(tmp_path), **{"max_staleness": 1, **given})
