"""Predicted launches and host reads, compared with those of real steps and passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.dispatch_counts import Copies, Counts
from tests.helpers import partly_slow
from tests.models.configurations import ALPHABET, tiny_lm
from tests.tiny import LLAMA_ALPHABET, llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, TEXTS, make, settings
from unmask.config.run import LoraSettings, RunConfig, StartConfig
from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.stages import STAGES
from unmask.convert.trainer import ConvertTrainer
from unmask.data.characters import character_tokenizer
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.planning.blueprint import LaunchCounter, ModelSpec
from unmask.planning.cost_model import Workload
from unmask.planning.hardware import StepEstimator
from unmask.planning.step_time import DenoisingPass, pass_launches, step_launches, step_reads
from unmask.training.trainer import DiffusionTrainer

ROWS = {"convert": TEXTS * 4, "sft": PAIRS, "pretrain": TEXTS, "dpo": PREFERENCES, "kto": PREFERENCES}
LENGTH = 40
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 5], [6, 7, 8, 9, 10, 11, 5, 6]]


def blueprint(lm: DiffusionLM) -> ModelSpec:
    settings = {"attention": lm.attention, "block_size": lm.block_size, "logit_shift": lm.logit_shift}
    return ModelSpec("tiny", lm.config, character_tokenizer(LLAMA_ALPHABET), settings)


class Counter:
    """The launches and the host reads of what runs inside, copies among them."""

    def __init__(self) -> None:
        self._launches, self._counts, self._copies = LaunchCounter(), Counts(), Copies()

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self._launches, self._counts, self._copies:
            yield

    @property
    def both(self) -> tuple[int, int]:
        return self._launches.launches, self._counts.reads + self._copies.copies


class Steps(TrainerCallback):
    """The counts after every optimizer step."""

    def __init__(self) -> None:
        self.counter, self.counts = Counter(), list[tuple[int, int]]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append(self.counter.both)


def trainer_of(
    verb: str, folder: Path, lm: DiffusionLM, steps: Steps, **more: Any
) -> DiffusionTrainer | ConvertTrainer:
    """A trainer of three steps of one epoch; that of a conversion has the stage that trains all weights."""
    rows, shared = ROWS[verb] * 4, {"max_steps": 3, "logging_steps": 100} | more
    if verb == "convert":
        return ConvertTrainer(
            lm,
            ConvertConfig(**settings(folder, max_length=32, stages=STAGES[1:2]) | shared),
            train_dataset=rows,
            callbacks=[steps],
        )
    return make(verb, folder, lm, rows, callbacks=[steps], **shared)


def planned(trainer: DiffusionTrainer | ConvertTrainer, **changes: Any) -> tuple[float, int]:
    """Launches and reads of a training step, for the trainer's settings and these changes."""
    lm, model = trainer.lm, blueprint(trainer.lm)
    folder = trainer.args.output_folder / "planned"
    lm.config.save_pretrained(folder)
    pattern = {"attention": lm.attention, "block_size": lm.block_size}
    run = RunConfig(model=StartConfig(path=str(folder), **pattern), output_dir="unused")
    work = trainer.args.workload(model, run)
    assert work is not None
    work = replace(work, **changes)
    return step_launches(model.network(work), model.pass_costs(work), work), step_reads(work)


BIDIRECTIONAL = ("bidirectional",)
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "pretrain": ("pretrain", ("causal",), {}, {}),
    "convert": ("convert", BIDIRECTIONAL, {}, {}),
    "convert, complementary": ("convert", BIDIRECTIONAL, {"complementary": True}, {}),
    "convert, distillation": ("convert", BIDIRECTIONAL, {"distillation": 0.5}, {}),
    "sft": ("sft", BIDIRECTIONAL, {}, {}),
    "sft, blocks": ("sft", ("block_causal", 4), {}, {}),
    "sft, causal": ("sft", ("causal",), {}, {}),
    "sft, mixed": ("sft", BIDIRECTIONAL, {"bf16": True}, {"precision": "mixed"}),
    "sft, checkpointing": ("sft", BIDIRECTIONAL, {"activation_checkpointing": True}, {"checkpointing": True}),
    "sft, 8-bit": ("sft", BIDIRECTIONAL, {"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
    "sft, adapters": ("sft", BIDIRECTIONAL, {"peft_config": 4}, {"lora_rank": 4}),
    "sft, adapters, mixed": (
        "sft",
        BIDIRECTIONAL,
        {"peft_config": 4, "bf16": True},
        {"lora_rank": 4, "precision": "mixed"},
    ),
    "dpo": ("dpo", BIDIRECTIONAL, {"reference": "frozen"}, {}),
    "dpo, stored": ("dpo", BIDIRECTIONAL, {}, {}),
    "dpo, causal": ("dpo", ("causal",), {"reference": "frozen"}, {}),
    "dpo, passes": ("dpo", BIDIRECTIONAL, {"reference": "frozen", "logprob_batch_size": 4}, {}),
    "dpo, without a reference": ("dpo", BIDIRECTIONAL, {"loss_type": "simpo", "logprob_batch_size": 4}, {}),
    "kto": ("kto", BIDIRECTIONAL, {"reference": "frozen"}, {}),
    "kto, stored": ("kto", BIDIRECTIONAL, {}, {}),
}


@partly_slow("layers", [2, 4], 0)
@pytest.mark.parametrize(
    "case", [case if case == "sft" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_launches_and_reads_of_a_step_are_predicted(case: str, layers: int, tmp_path: Path) -> None:
    verb, pattern, more, changes = CASES[case]
    if "peft_config" in more:
        more = more | {"peft_config": LoraSettings(r=more["peft_config"]).to_peft()}
    lm, steps = llama_lm(*pattern, num_hidden_layers=layers), Steps()
    trainer = trainer_of(verb, tmp_path, lm, steps, **more)
    planned_launches, planned_reads = planned(trainer, **changes)
    with steps.counter.counting():
        trainer.train()
    launches, reads = (
        (last - first) / 2 for first, last in zip(steps.counts[0], steps.counts[2], strict=True)
    )
    assert planned_launches == pytest.approx(launches, rel=0.1)
    assert planned_reads == reads


@partly_slow("layers", [2, 4], 1)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@partly_slow(
    "pattern",
    [BIDIRECTIONAL, ("block_causal", 4), pytest.param(("causal",), marks=pytest.mark.slow)],
    1,
    ids=["bidirectional", "block_causal", "causal"],
)
def test_the_launches_and_reads_of_a_pass_of_generation_are_predicted(
    pattern: tuple[Any, ...], temperature: float, layers: int
) -> None:
    lm = llama_lm(*pattern, num_hidden_layers=layers)
    model = blueprint(lm)
    config = SamplerConfig(
        max_new_tokens=32, temperature=temperature, forbidden_tokens=list(lm.eos_token_ids)
    )  # they end at no other place
    work = Workload(sequence_length=LENGTH, attention=lm.attention)
    one, counter = (
        DenoisingPass(context=LENGTH, attention=lm.attention, block=lm.block_size, drawn=temperature > 0),
        Counter(),
    )
    with counter.counting():
        passes = max(generate(lm, PROMPTS, config).forward_passes)
    launches, reads = counter.both
    assert pass_launches(model.network(work), model.pass_costs(work).forward, one) == pytest.approx(
        launches / passes, rel=0.1
    )
    assert one.reads == pytest.approx(reads / passes, abs=0.2)


@partly_slow("name", ["lfm2", "qwen3_5_text", "granitemoehybrid"], 0)
def test_the_launches_of_a_pass_of_generation_with_recurrent_layers_are_predicted(name: str) -> None:
    lm = tiny_lm(name, "block_causal", 4, shift=True, dtype=torch.float32)
    settings = {"attention": lm.attention, "block_size": lm.block_size, "logit_shift": lm.logit_shift}
    model = ModelSpec("tiny", lm.config, character_tokenizer(ALPHABET), settings)
    work, counter = Workload(sequence_length=LENGTH, attention=lm.attention), Counter()
    config = SamplerConfig(max_new_tokens=32, forbidden_tokens=list(lm.eos_token_ids))
    with counter.counting():
        passes = max(generate(lm, PROMPTS, config).forward_passes)
    one = DenoisingPass(context=LENGTH, attention=lm.attention, block=lm.block_size)
    cost = StepEstimator(model, work).cost_of_generation
    assert pass_launches(model.network(work), cost, one) == pytest.approx(counter.both[0] / passes, rel=0.12)


def test_views_launch_nothing_and_masks_are_read() -> None:
    data = torch.arange(6.0)
    with LaunchCounter() as counter:
        data.view(2, 3).t().unsqueeze(0).expand(4, 3, 2)
    assert (counter.launches, counter.traffic) == (0, 0)
    with LaunchCounter() as counter, Counts() as counts, Copies() as copies:
        rows = data[data > 2]
        assert rows.tolist() == [3, 4, 5]
    assert (counter.launches, counts.reads, copies.copies) == (2, 1, 1)
    assert counter.traffic == (24 + 6) + (24 + 6 + 12)
