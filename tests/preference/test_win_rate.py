"""A judge model compares greedy completions of the policy with the chosen responses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import PREFERENCES, make, settings
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError, TrainingError
from unmask.generation.sampler import generate
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer, split_row, wins

SAMPLER = SamplerConfig(max_new_tokens=4)


def test_the_judge_gets_prompts_completions_and_chosen_responses():
    lm, seen = llama_lm(), []

    def judge(*given: list[str]) -> list[float]:
        seen.append(given)
        return [1, 0.5, 0]

    args: Any = DPOConfig(**settings(Path("unused")))
    pairs: Any = DPOTrainer.make_rows(lm, args, PREFERENCES[:3], "eval_dataset")
    assert wins(judge, lm, pairs, SAMPLER) == [1.0, 0.5, 0.0]
    [(prompts, completions, chosen)] = seen
    assert prompts == [row["prompt"] for row in PREFERENCES[:3]] and chosen == [
        row["chosen"] for row in PREFERENCES[:3]
    ]
    assert completions == generate(lm, prompts, SAMPLER).texts
    assert wins(judge, lm, [], SAMPLER) == [] and len(seen) == 1
    prompt, response = split_row(pairs[1])
    assert (
        prompt + response == pairs[1]["input_ids"][: pairs[1]["documents"].count(1)]
        and response[-1] == lm.eos_token_id
    )


@pytest.mark.parametrize(
    "judge",
    [
        lambda *_: [1],
        lambda *_: [1, 2],
        lambda *_: [1, float("nan")],
        lambda *_: [1, "win"],
        lambda *_: 1 / 0,
        lambda *_: sys.exit(3),
    ],
)
def test_wrong_values_of_a_judge_are_an_error(judge):
    lm = llama_lm()
    pairs: Any = DPOTrainer.make_rows(
        lm, DPOConfig(**settings(Path("unused"))), PREFERENCES[:2], "eval_dataset"
    )
    with raises(TrainingError, where="judge"):
        wins(judge, lm, pairs, SAMPLER)


def test_the_win_rate_is_logged_with_the_evaluation(tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(prompts, completions, chosen):\n    return [0.5 * (len(text) <= 3) for text in "
        "completions]\n"
    )
    shape = {
        "eval_dataset": PREFERENCES[:4],
        "canvas_length": 9,
        "max_steps": 1,
        "judge": f"{tmp_path}/judge.py:judge",
    }
    trainer = make("dpo", tmp_path / "run", sampler=SamplerConfig(max_new_tokens=30), **shape)
    assert trainer.sampler.max_new_tokens == 9  # the canvas
    metrics = trainer.evaluate()
    texts = generate(trainer.lm, [row["prompt"] for row in PREFERENCES[:4]], trainer.sampler).texts
    assert metrics["eval_win_rate"] == 0.5 * sum(len(text) <= 3 for text in texts) / 4
    assert trainer.state.log_history[-1]["eval_win_rate"] == metrics["eval_win_rate"]
    trainer.train()
    assert "win_rate" not in trainer.state.log_history[0]


def test_a_missing_judge_or_one_without_held_out_pairs_is_refused(tmp_path):
    with raises(ConfigError, where="absent.py:judge"):
        make("dpo", tmp_path, judge="absent.py:judge", eval_dataset=PREFERENCES)
    (tmp_path / "judge.py").write_text("def judge(*_):\n    return []\n")
    with raises(ConfigError, where="judge"):
        make("dpo", tmp_path, judge=f"{tmp_path}/judge.py:judge")
    with raises(ConfigError, where="judge"):
        DPOTrainer(
            llama_lm(),
            args=DPOConfig(**settings(tmp_path, loss_type="kto")),
            train_dataset=PREFERENCES,
            eval_dataset=PREFERENCES,
            judge=lambda *_: [],
        )


def test_a_prompt_without_room_for_a_completion_is_refused_before_training(tmp_path):
    (tmp_path / "judge.py").write_text("def judge(*_):\n    return []\n")
    rows = [PREFERENCES[0], PREFERENCES[0] | {"chosen": ""}, PREFERENCES[1] | {"prompt": "ab" * 10}]
    shape = {"judge": f"{tmp_path}/judge.py:judge", "eval_dataset": rows, "bad_rows": "skip"}
    # of a context of 64, and BOS
    make("dpo", tmp_path / "fits", sampler=SamplerConfig(max_new_tokens=43), **shape)
    with raises(GenerationError, where="eval_dataset, row 2"):
        make("dpo", tmp_path / "run", sampler=SamplerConfig(max_new_tokens=44), **shape)
