"""Rows of different lengths and minimal settings, for very short training runs of a tiny Llama."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback
from typer.testing import CliRunner

from tests.tiny import llama_lm
from unmask.cli import app
from unmask.demo import DemoSettings
from unmask.models.diffusion_lm import DiffusionLM
from unmask.preference.config import MAX_EXACT_BLOCK, DPOConfig, exact_block_size
from unmask.preference.trainer import DPOTrainer
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.training.trainer import DiffusionTrainer

TEXTS = [
    {"text": text} for text in ("abcab", "ghgh", "aabbccdd", "fe", "hgfedcba", "cafe", "deadbeef", "babe")
]
PAIRS = [{"prompt": text[:2], "completion": text[2:] or "a"} for text in (row["text"] for row in TEXTS)]
ROLLOUT = {"num_generations": 2, "max_completion_length": 4, "epsilon": 0.2}
PREFERENCES = [
    {"prompt": p["prompt"], "chosen": p["completion"], "rejected": p["completion"][::-1] + "h"} for p in PAIRS
]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """The settings of every config in these tests."""
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        **more,
    }


def share_of_a(completions: list[str], **_: Any) -> list[float]:
    """A reward that a policy can learn in a few steps."""
    return [text.count("a") / max(len(text), 1) for text in completions]


def ranks(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within every group."""
    return [float(rank) for rank in range(len(completions))]


def low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that nearly always differs between different completions."""
    return [1 / sum(number * token for number, token in enumerate(ids, start=1)) for ids in completion_ids]


def make(
    verb: str, folder: Path, lm: DiffusionLM | None = None, rows: Any = None, **more: Any
) -> DiffusionTrainer:
    """A trainer on the rows above; `more` goes to its config, or to the trainer itself where it takes it."""
    taken = {
        name: more.pop(name)
        for name in (
            "callbacks",
            "peft_config",
            "eval_dataset",
            "progress",
            "log",
            "sampler",
            "processing_class",
            "formatting_func",
            "optimizers",
            "optimizer_cls_and_kwargs",
            "quantization_config",
            "reward_processing_classes",
        )
        if name in more
    }
    if verb == "pretrain":
        args = PretrainConfig(**settings(folder, packing=False, max_length=32) | more)
        return PretrainTrainer(lm or llama_lm("causal"), args, train_dataset=rows or TEXTS, **taken)
    if verb == "sft":
        return SFTTrainer(
            lm or llama_lm(),
            SFTConfig(**settings(folder, max_length=32) | more),
            train_dataset=rows or PAIRS,
            **taken,
        )
    if verb in ("dpo", "kto"):
        loss = {"loss_type": "kto"} if verb == "kto" else {}
        lm = lm or llama_lm()
        exact = more.get("bound") != "elbo" and exact_block_size(lm) <= MAX_EXACT_BLOCK
        few = {} if exact else {"samples": 2}
        reference = None if isinstance(more.get("ref_model"), str) else more.pop("ref_model", None)
        return DPOTrainer(
            lm,
            reference,
            DPOConfig(**settings(folder, max_length=32, **few) | loss | more),
            train_dataset=rows or PREFERENCES,
            **taken,
        )
    reward = more.pop("reward", share_of_a)
    return GRPOTrainer(
        lm or llama_lm(), reward, GRPOConfig(**settings(folder, **ROLLOUT) | more), rows or PAIRS, **taken
    )


def prepared(verb: str, folder: Path, lm: DiffusionLM | None = None, **more: Any) -> DiffusionTrainer:
    """A trainer that always has something to learn."""
    return make(verb, folder, lm, **({"reward": ranks} if verb == "grpo" else {}), **more)


def batch(trainer: DiffusionTrainer, *rows: int) -> dict[str, torch.Tensor]:
    """These rows of the training data, collated."""
    return trainer.data_collator([trainer.train_dataset[row] for row in rows])


def weights(lm: DiffusionLM) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in lm.model.state_dict().items()}


def moved(lm: DiffusionLM, by: float = 0.1, among: str = "") -> DiffusionLM:
    """The model, with the weights whose names contain this changed at random, by the same amounts at each
    call."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(lm.model.named_parameters()):
            if among in name:
                weight += by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)).to(
                    weight
                )
    return lm


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of weights agree bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


QUICK = [
    *(
        "training.max_steps=2",
        "training.per_device_train_batch_size=4",
        "training.logging_steps=1",
        "training.use_cpu=true",
    ),
    *("data.max_rows=16", "data.eval_rows=4"),
]
"""Settings of a run of the command line that takes a blink."""
TINY_DEMO = DemoSettings(
    rows=64, test_rows=6, hidden=16, layers=1, batch=16, pretrain=5, convert=10, sft=5, dpo=5, grpo=2
)
SMALL = [
    *("model.attention=bidirectional", "data.style=plain", "lora.r=2", "sampler.block_size=null"),
    *("training.max_completion_length=17", "training.steps=9", "training.block_size=null"),
    *("training.per_device_train_batch_size=6", "training.gradient_accumulation_steps=1"),
]
"""What fits a recipe of reinforcement learning to a model of characters."""


def unmask(*args: str | Path) -> Any:
    words = [str(arg) for arg in args]
    with mock.patch.object(sys, "orig_argv", ["python", "-m", "unmask", *words]):
        return CliRunner().invoke(app, words)


class Before(TrainerCallback):
    """Calls `act` after this many optimizer steps, when the next step's batches have been made."""

    def __init__(self, step: int, act: Callable[[], None]):
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.act()
