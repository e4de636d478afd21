"""GRPO of a causal model compared with TRL's trainer: with the same weights, completions and rewards, the
gradients agree.

Two rollouts of two updates each (mu = 2) are compared. In the first update the ratio is 1 and the KL 0; in
the second the ratio is clipped and the KL has a gradient; the third has other old log-probabilities, and a
reference that differs from the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import settings, share_of_a
from tests.training.trl_peers import Gradients, Watch, distance, stock_on_disk
from unmask.data.encoding import encode_prompt
from unmask.generation.output import Generation, Trace
from unmask.rl.config import GRPOConfig
from unmask.rl.prompts import PromptRow
from unmask.rl.trainer import GRPOTrainer

trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")
pytestmark = [
    # TRL uses names of transformers that have newer ones.
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
    pytest.mark.filterwarnings(
        "ignore:You are using 'rollout_func', which is an experimental feature:UserWarning"
    ),
]

GROUP, LENGTH = 4, 6
COMPLETIONS = {"ab": ["a", "bcdefg", "aac", ""], "cdefg": ["hhaaaa", "gfa", "abgh", "b"]}
"""By prompt. Completions of `LENGTH` characters are truncated, all others end."""


def unscored_if_truncated(completions: list[str], **_: Any) -> list[float | None]:
    """One completion of each group has no reward."""
    return [
        None if len(text) == LENGTH else value
        for text, value in zip(completions, share_of_a(completions), strict=True)
    ]


@dataclass
class Case:
    """A loss: the settings of each trainer, and those that both have under the same name."""

    ours: dict[str, Any] = field(default_factory=dict)
    trl: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    reward: Callable[..., Any] = share_of_a


REDUCTIONS = {
    "dapo": Case({}, {"loss_type": "dapo"}),
    "grpo": Case({"loss_type": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": Case({"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "luspo": Case({"loss_type": "sum"}, {"loss_type": "luspo"}),
    "gspo": Case(
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
}
SETTINGS = {
    "z-score": Case({"scale_rewards": "group"}, {"scale_rewards": "group"}),
    # The mean of the others is further away than the mean of all, by this factor.
    "leave-one-out": Case({"scale_rewards": "leave-one-out"}, {"reward_weights": [GROUP / (GROUP - 1)]}),
    "temperature": Case(both={"temperature": 0.7}),
    "clip higher": Case(both={"epsilon": 0.1, "epsilon_high": 0.3}),
    "dual clip": Case({"delta": 1.25}, {"delta": 1.25}),
    "unbiased divergence": Case({"use_bias_correction_kl": True}, {"use_bias_correction_kl": True}),
    # Moved at each rollout. TRL also moves it between rollouts, but uses it only at the next one.
    "moving reference": Case(
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
        {"sync_ref_model": True, "ref_model_sync_steps": 2},
    ),
    "mask truncated": Case({"mask_truncated_completions": True}, {"mask_truncated_completions": True}),
    # Unmask masks what has no reward. TRL sets its advantage to 0, but counts its tokens and keeps its KL,
    # unless set to mask it.
    "unscored": Case({}, {"mask_truncated_completions": True}, reward=unscored_if_truncated),
    # One micro-batch: TRL takes the quantile over each.
    "entropy": Case(
        both={
            "top_entropy_quantile": 0.4,
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": 8,
        }
    ),
    "entropy of sequences": Case(
        both={
            "top_entropy_quantile": 0.4,
            "importance_sampling_level": "sequence",
            "gradient_accumulation_steps": 1,
            "per_device_train_batch_size": 8,
        }
    ),
    # bnpo takes the mean over the tokens of a micro-batch, then over micro-batches: equal to Unmask's if
    # there is one.
    "bnpo": Case(
        {}, {"loss_type": "bnpo"}, both={"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}
    ),
}


def shared(folder: Path, accumulation: int, beta: float) -> dict[str, Any]:
    shape = {
        "per_device_train_batch_size": 8 // accumulation,
        "gradient_accumulation_steps": accumulation,
        "num_generations": GROUP,
    }
    schedule = {
        "optim": "sgd",
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 4,
    }
    return settings(
        folder, **shape, **schedule, num_iterations=2, beta=beta, epsilon=0.2, max_completion_length=LENGTH
    )


def completed(tokenizer: Any, prompts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
    """The ids of prompts, each as often as its group is large, and of the group's completions."""
    taken: Counter[str] = Counter()
    completions = []
    for prompt in prompts:
        text = COMPLETIONS[prompt][taken[prompt]]
        taken[prompt] += 1
        completions.append(
            tokenizer(text, add_special_tokens=False)["input_ids"]
            + [tokenizer.eos_token_id] * (len(text) < LENGTH)
        )
    return [encode_prompt(tokenizer, prompt) for prompt in prompts], completions


def ours(case: Case, config: dict[str, Any]) -> tuple[Gradients, list[float]]:
    """The gradients of each update, and the fraction of its tokens that was clipped."""
    watch = Watch()
    rows = [{"prompt": prompt} for prompt in COMPLETIONS]
    model = llama_lm("causal", dtype=torch.float64)
    trainer = GRPOTrainer(
        model, case.reward, GRPOConfig(**config | case.both | case.ours), rows, callbacks=[watch]
    )

    def sample(rows: Sequence[PromptRow], **_: Any) -> Generation:
        prompts, tokens = completed(trainer.lm.tokenizer, [row.prompt for row in rows])
        texts = trainer.lm.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        log_probs, steps = [[0.0] * len(ids) for ids in tokens], [list(range(len(ids))) for ids in tokens]
        traces = []
        for ids in tokens:  # after its end a canvas holds masks
            rest = LENGTH - len(ids)
            traces.append(
                Trace(
                    ids + [trainer.lm.mask_token_id] * rest, [*range(len(ids)), *[-1] * rest], [0.0] * LENGTH
                )
            )
        return Generation(prompts, texts, tokens, log_probs, steps, [len(ids) for ids in tokens], traces)

    trainer.sample = sample
    trainer.train()
    return watch.seen, [line["clipped"] for line in trainer.state.log_history if "clipped" in line]


def theirs(case: Case, config: dict[str, Any]) -> Gradients:
    watch = Watch()
    model, tokenizer = stock_on_disk(Path(config["output_dir"]) / "model")
    plain = {"bf16": False, "activation_checkpointing": False, "report_to": "none"}
    # Unmask's default: TRL's KL is by default multiplied by the ratio, which also has a gradient.
    loss = {"loss_type": "dapo", "scale_rewards": "none", "use_bias_correction_kl": False}
    config = (
        {name: value for name, value in config.items() if name != "max_length"}
        | plain
        | loss
        | case.both
        | case.trl
    )

    def rollout(prompts: Sequence[str], _: Any) -> dict[str, Any]:
        prompt_ids, completion_ids = completed(tokenizer, prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}

    rows = datasets.Dataset.from_dict({"prompt": list(COMPLETIONS)})
    trainer = trl.GRPOTrainer(
        model,
        case.reward,
        trl.GRPOConfig(**config),
        rows,
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=[watch],
    )
    trainer.train()
    return watch.seen


def check(case: Case, folder: Path, accumulation: int, beta: float) -> None:
    config = shared(folder, accumulation, beta)
    mine, clipped = ours(case, config)
    distances = [distance(*pair) for pair in zip(mine, theirs(case, config), strict=True)]
    assert len(distances) == 4 and max(distances) < 1e-5, distances
    assert [0 < share < 1 for share in clipped] == [False, True, False, True]


@partly_slow("accumulation, beta", [(1, 0.0), (2, 0.04)], 1)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_of_each_reduction_are_those_of_trl(name, accumulation, beta, tmp_path):
    check(REDUCTIONS[name], tmp_path, accumulation, beta)


@partly_slow("name", SETTINGS, *range(0, len(SETTINGS), 2))
def test_gradients_of_each_setting_are_those_of_trl(name, tmp_path):
    check(SETTINGS[name], tmp_path, accumulation=2, beta=0.04)
