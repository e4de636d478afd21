"""GRPO of models whose canvas is random tokens: the ratio of a policy to itself is 1, runs resume bit for bit,
and a server samples the same canvases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.diffusion_gemma import loaded
from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.rl.updates import RATIOS, check_first_updates
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, equal, low_ids, make, ranks, share_of_a, weights
from unmask.errors import ConfigError
from unmask.generation.rollout import make_rollout
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.methods import METHODS
from unmask.rl.methods.masking import Diffusion
from unmask.rl.trainer import GRPOTrainer

FITTING = [name for name, method in METHODS.items() if method.random_tokens]
CANVAS = {"max_denoising_steps": 4, "entropy_bound": 2.0, "t_max": 1.2}
PATTERNS = {"bidirectional": None, "block_causal": 2}
every_pattern = pytest.mark.parametrize("attention", PATTERNS)


def canvas_lm(attention: str = "bidirectional", folder: Path | None = None, **more: Any) -> DiffusionLM:
    """A model of uniform noise, or DiffusionGemma, written to this folder."""
    if attention == "DiffusionGemma":
        assert folder is not None
        return loaded(folder, canvas=2)
    return llama_lm(attention, PATTERNS[attention], **more).with_noise("uniform")


def made(folder: Path, method: str, lm: DiffusionLM | None = None, **more: Any) -> GRPOTrainer:
    more = {"generation_kwargs": CANVAS} | ({"epsilon": None} if method == "agrpo" else {}) | more
    trainer = make("grpo", folder, lm or canvas_lm(), method=method, **more)
    assert isinstance(trainer, GRPOTrainer)
    return trainer


@each_once("method, attention", [name for name in FITTING if name in RATIOS], [*PATTERNS, "DiffusionGemma"])
def test_the_first_update_has_a_ratio_of_one_and_no_divergence_bit_for_bit(method, attention, tmp_path):
    lm = canvas_lm(attention, tmp_path / "gemma", attention_dropout=0.3)
    check_first_updates(method, tmp_path, lm, generation_kwargs=CANVAS)


@every_pattern
@partly_slow("method", ["cj-grpo", "trace-rl", "agrpo", "espo"], 0)
def test_gradients_do_not_depend_on_how_the_batch_is_cut(method, attention, tmp_path):
    shape = {"max_steps": 2, "optim": "sgd", "learning_rate": 1.0, "reward": low_ids, "num_generations": 4}
    shape |= {"difficulty": [-99.0, 99.0]}
    trained = []
    for size, accumulation, more in [(8, 1, {}), (4, 2, {}), (1, 8, {}), (4, 2, {"logprob_batch_size": 1})]:
        lm = canvas_lm(attention, dtype=torch.float64)
        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        made(tmp_path, method, lm, **shape, **cut, **more).train()
        trained.append(weights(lm))
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=0, atol=1e-6)  # advantages are float32
    assert not equal(trained[0], weights(canvas_lm(attention, dtype=torch.float64)))


@partly_slow(
    "method, attention",
    [
        *((name, "bidirectional") for name in FITTING),
        ("cj-grpo", "DiffusionGemma"),
        ("bgpo", "DiffusionGemma"),
    ],
    0,
    4,
)
def test_a_run_resumes_amid_the_updates_of_a_rollout_bit_for_bit(method, attention, tmp_path):
    shape = {"reward": ranks, "max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    shape |= {"num_iterations": 2} if method in RATIOS else {}  # two updates, where the loss has a ratio
    shape |= {"epsilon": None} if method == "bgpo" else {}
    lms = [canvas_lm(attention, tmp_path / "gemma") for _ in range(3)]
    whole, again = (made(tmp_path / "whole", method, lm, **shape) for lm in lms[:2])
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert equal(weights(whole.lm), weights(again.lm))
    assert not equal(weights(whole.lm), weights(lms[2]))


@partly_slow("method", ["agrpo", "espo"])
def test_a_letter_is_learned_from_its_reward(method, tmp_path):
    shape = {"max_steps": 30, "per_device_train_batch_size": 16, "num_generations": 8, "learning_rate": 2e-2}
    trainer = made(tmp_path, method, reward=share_of_a, lr_scheduler_type="constant", **shape)
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_rollouts_have_the_settings_of_canvases_in_training_and_evaluation(tmp_path):
    held_out = [{"prompt": "ab"}, {"prompt": "cdef"}]
    trainer = made(tmp_path, "cj-grpo", reward=low_ids, eval_dataset=held_out)
    seen = []
    generate = trainer.source.backend.generate
    trainer.source.backend.generate = lambda *given: seen.append(given[1]) or generate(*given)
    trainer.train()
    first = trainer.evaluate()["eval_reward"]
    assert trainer.evaluate()["eval_reward"] == first
    assert len(seen) == 4 and all(config == seen[0] for config in seen)
    assert seen[0].max_denoising_steps == 4 and seen[0].temperature == 0 and seen[0].trace


def test_only_uncertain_draws_are_trained_on(tmp_path):
    trainer = made(tmp_path, "cj-grpo", reward=ranks, top_entropy_quantile=0.5)
    trainer.train()
    assert not equal(weights(trainer.lm), weights(canvas_lm()))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"top_p": 0.9}, "top_p"),
        ({"generation_kwargs": {"forbidden_tokens": [4]}}, "generation_kwargs.forbidden_tokens"),
    ],
    ids=str,
)
def test_what_changes_the_predictions_of_diffusion_gemma_is_refused(given, where, tmp_path):
    lm = canvas_lm("DiffusionGemma", tmp_path / "gemma")
    made(tmp_path, "bgpo", lm, epsilon=None, **given)
    with raises(ConfigError, where=where):
        made(tmp_path, "cj-grpo", lm, **given)


def test_a_masking_strategy_is_refused(tmp_path):
    with raises(ConfigError, where="masking"):
        make("grpo", tmp_path, canvas_lm(), method="espo", masking="diffusion")
    args = made(tmp_path, "espo").args
    with raises(ConfigError, where="masking"):
        GRPOTrainer(canvas_lm(), ranks, args, PAIRS, masking=Diffusion())


def test_rows_of_a_rollout_are_selected_with_their_canvases(tmp_path):
    trainer = made(tmp_path, "cj-grpo")
    rows = [trainer.train_dataset[index] for index in range(4)]
    rollout = make_rollout(trainer.lm, trainer.sample(rows, temperature=1.0, step=0))
    part = rollout.select(slice(1, 3))
    for name, plane in rollout.canvas_steps._asdict().items():
        assert torch.equal(getattr(part.canvas_steps, name), plane[1:3])
