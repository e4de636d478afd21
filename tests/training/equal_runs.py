"""One process of the runs that test_equal_runs.py starts: torchrun ... equal_runs.py FAMILY MODE FOLDER. Every
verb, one after another."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.models.configurations import tiny_lm
from tests.tiny import PLAIN_TEMPLATE, llama_lm
from tests.training.sharded import pass_for_gpus, switches, write
from tests.training.tiny_runs import PAIRS, PREFERENCES, TEXTS, low_ids, make, moved, settings
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.config import TrainingConfig

TOLERANCES = {"llama": 1e-5, "qwen3_5_text": 1e-3}
"""By family; one with recurrent layers computes these in float32 in the order of its steps."""
ROWS = 4
"""Rows of a step, over all processes."""
VERBS: dict[str, dict[str, Any]] = {
    "pretrain": {"eval_dataset": TEXTS[:5]},
    "convert": {"distillation": 0.5, "alignment": 0.1, "attention": "bidirectional", "stages": [{}, {}]},
    "on-policy": {
        "states": "sampler",
        "distillation": 1.0,
        "lmbda": 0.7,
        "max_new_tokens": 6,
        "attention": "block_causal",
        "block_size": 4,
        "stages": [{}, {}],
    },
    "sft": {"views": 2, "eval_dataset": PAIRS[:5]},
    "dpo": {"eval_dataset": PREFERENCES[:5]},
    "kto": {"eval_dataset": PREFERENCES[:5]},
    "grpo": {
        "reward": low_ids,
        "beta": 0.04,
        "kl_to": "reference",
        "num_iterations": 2,
        "eval_dataset": PAIRS[:5],
    },
}
"""A number of held-out rows that no number of processes divides."""


def model(family: str, verb: str) -> DiffusionLM:
    """The model that a verb starts from."""
    causal = verb in ("pretrain", "convert", "on-policy")
    if family == "llama":
        return llama_lm("causal" if causal else "bidirectional")
    attention = ("causal",) if causal else ("block_causal", 3)
    lm = moved(tiny_lm(family, *attention, shift=True, dtype=torch.float32), among="embed")
    lm.set_chat_template(PLAIN_TEMPLATE, ends=False)
    return lm


def run(family: str, verb: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A run of two steps that saves its model: the losses of its steps, and its evaluation."""
    lm = model(family, verb)
    # of recurrent layers, and near a teacher, some gradients are but rounding, which Adam would scale
    of_rounding = lm.recurrent or verb == "on-policy"
    steps = {"optim": "sgd", "learning_rate": 0.1} if of_rounding else {"learning_rate": 1e-3}
    more = steps | {"per_device_train_batch_size": ROWS} | more
    if verb in ("convert", "on-policy"):
        rows = [row | {"prompt": row["text"]} for row in TEXTS]
        pattern = {"attention": "block_causal", "block_size": 4} if lm.recurrent else {}
        args = ConvertConfig(**settings(folder, max_length=32, packing=False, **VERBS[verb] | pattern | more))
        trainer: Any = ConvertTrainer(lm, args, train_dataset=rows, eval_dataset=rows[:5])
        trainer.train()
        lines, evaluation = trainer.state.log_history, {}
    else:
        trainer = make(verb, folder, lm, **VERBS[verb] | more)
        trainer.train()
        lines, evaluation = trainer.state.log_history, trainer.evaluate()
    trainer.save_model(str(folder / "model"))
    kept = ("eval_loss", "eval_reward", "eval_cross_entropy", "eval_margin")
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "evaluation": {name: value for name, value in evaluation.items() if name in kept},
    }


def main(family: str, mode: str, folder: Path) -> None:
    sharing = {"per_device_train_batch_size": ROWS // int(os.environ["WORLD_SIZE"])} | switches(
        "fsdp-offload" if mode == "fsdp" else mode, model(family, "pretrain").model._no_split_modules
    )
    made = TrainingConfig.__post_init__

    def passing_for_gpus(args: TrainingConfig) -> None:
        made(args)
        if args.fsdp:
            pass_for_gpus()

    with mock.patch.object(TrainingConfig, "__post_init__", passing_for_gpus):
        reports = {verb: run(family, verb, folder / verb, **sharing) for verb in VERBS}
    write(folder, reports)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
