"""Predicted launches and host reads, compared with those of real steps and passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from tests.training.tiny_runs import ALPHABET, PAIRS, PREFERENCES, TEXTS, make, tiny
from unmask.config.run import LoraSettings, SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.planning.blueprint import Blueprint
from unmask.planning.cost_model import Workload
from unmask.planning.launches import SAMPLER, LaunchCounter
from unmask.planning.step_time import DenoisingPass, pass_launches, step_launches, step_reads

ROWS = {"sft": PAIRS, "pretrain": TEXTS, "dpo": PREFERENCES}
LENGTH = 32


def blueprint(lm: DiffusionLM) -> Blueprint:
    settings = {"attention": lm.attention, "block_size": lm.block_size, "logit_shift": lm.logit_shift}
    return Blueprint("tiny", lm.config, character_tokenizer(ALPHABET), settings)


class Steps(TrainerCallback):
    """The counts after every optimizer step."""

    def __init__(self) -> None:
        self.counter, self.counts = LaunchCounter(), list[tuple[int, int]]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.counts.append((self.counter.launches, self.counter.reads))


def counted(verb: str, folder: Path, lm: DiffusionLM, **more: Any) -> list[float]:
    """Launches and reads of a training step, without what begins and ends a run."""
    steps = Steps()
    trainer = make(verb, folder, lm, ROWS[verb] * 4, callbacks=[steps], max_steps=3, logging_steps=100, **more)
    with steps.counter:
        trainer.train()
    return [(last - first) / 2 for first, last in zip(steps.counts[0], steps.counts[2], strict=True)]


CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = {
    "pretrain": ("pretrain", ("causal",), {}, {}),
    "sft": ("sft", ("bidirectional",), {}, {}),
    "sft, blocks": ("sft", ("block_causal", 4), {}, {}),
    "sft, causal": ("sft", ("causal",), {}, {}),
    "sft, mixed": ("sft", ("bidirectional",), {"bf16": True}, {"precision": "mixed"}),
    "sft, checkpointing": ("sft", ("bidirectional",), {"activation_checkpointing": True}, {"checkpointing": True}),
    "sft, 8-bit": ("sft", ("bidirectional",), {"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
    "sft, adapters": ("sft", ("bidirectional",), {"peft_config": 4}, {"lora_rank": 4}),
    "sft, adapters, mixed": ("sft", ("bidirectional",), {"peft_config": 4, "bf16": True}, {"lora_rank": 4, "precision": "mixed"}),
    "dpo": ("dpo", ("bidirectional",), {"reference": "frozen", "samples": 2}, {"passes": 2, "forward_only_passes": 4}),
}


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("case", [case if case == "sft" else pytest.param(case, marks=pytest.mark.slow) for case in CASES])
def test_the_launches_and_reads_of_a_step_are_predicted(case: str, layers: int, tmp_path: Path) -> None:
    verb, pattern, more, changes = CASES[case]
    lm = tiny(*pattern, num_hidden_layers=layers)
    model = blueprint(lm)
    work = Workload(sequence_length=LENGTH, attention=lm.attention, **changes)
    planned = step_launches(model.network(work), model.pass_costs(work), work), step_reads(work)
    if "peft_config" in more:
        more = more | {"peft_config": LoraSettings(r=more["peft_config"]).to_peft()}
    launches, reads = counted(verb, tmp_path, lm, **more)
    assert planned[0] == pytest.approx(launches, rel=0.1)
    assert planned[1] == pytest.approx(reads, abs=1)


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    "pattern",
    [("bidirectional",), ("block_causal", 4), pytest.param(("causal",), marks=pytest.mark.slow)],
    ids=["bidirectional", "block_causal", "causal"],
)
def test_the_launches_and_reads_of_a_pass_of_generation_are_predicted(pattern: tuple[Any, ...], temperature: float, layers: int) -> None:
    lm = tiny(*pattern, num_hidden_layers=layers)
    model, settings = blueprint(lm), SamplerConfig(max_new_tokens=32, temperature=temperature, stop_at_eos=False)
    work = DenoisingPass(context=40, attention=lm.attention, block=lm.block_size, drawn=temperature > 0)
    cost = model.pass_costs(Workload(sequence_length=40, attention=lm.attention)).forward
    with LaunchCounter() as counter:
        out = generate(lm, [[5, 6, 7, 8, 9, 10, 11, 5]] * 2, settings)
    passes = max(out.forward_passes)
    planned = pass_launches(model.network(Workload(sequence_length=40, attention=lm.attention)), cost, work)
    assert planned == pytest.approx(counter.launches / passes, rel=0.1)
    assert SAMPLER[lm.attention][work.drawn].reads == pytest.approx(counter.reads / passes, abs=1)


def test_views_launch_nothing_and_masks_are_read() -> None:
    data = torch.arange(6.0)
    with LaunchCounter() as counter:
        data.view(2, 3).t().unsqueeze(0).expand(4, 3, 2)
    assert (counter.launches, counter.reads, counter.traffic) == (0, 0, 0)
    with LaunchCounter() as counter:
        rows = data[data > 2]
    assert rows.tolist() == [3, 4, 5]
    assert (counter.launches, counter.reads) == (2, 1)
    assert counter.traffic == (24 + 6) + (24 + 6 + 12)
