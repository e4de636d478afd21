"""Measured steps compared with the estimate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from tests.helpers import partly_slow
from tests.models.configurations import ALPHABET, CONFIGURATIONS, HYBRIDS, NAMES
from unmask.data.characters import character_tokenizer
from unmask.planning import calibration
from unmask.planning.blueprint import LaunchCounter, ModelSpec
from unmask.planning.calibration import Step, build_model, calibrate, median_times
from unmask.planning.cost_model import Workload, peak_memory
from unmask.planning.step_time import step_launches

SETTINGS = {"attention": "causal", "block_size": None, "logit_shift": True}


def blueprint(config: object) -> ModelSpec:
    return ModelSpec("tiny", config, character_tokenizer(ALPHABET), SETTINGS)


def llama(hidden: int, layers: int, vocabulary: int) -> ModelSpec:
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    return blueprint(LlamaConfig(**sizes, **heads, max_position_embeddings=512))


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_built_with_fewer_layers(name: str) -> None:
    model = build_model(blueprint(CONFIGURATIONS[name]), Workload(sequence_length=8), layers=1).model
    assert model.config.num_hidden_layers == 1
    Step(
        build_model(blueprint(CONFIGURATIONS[name]), Workload(sequence_length=8), layers=3),
        Workload(sequence_length=8),
    )()


HYBRID = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
MIXED = {
    "qwen3_5_text": HYBRID
    | {
        "intermediate_size": 128,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2,
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": HYBRID | {"block_ff_dim": 128, "layer_types": ["conv", "conv", "conv", "full_attention"] * 2},
}
"""Sizes of models with recurrent layers."""


@pytest.mark.slow
@partly_slow("checkpointing", [False, True], 1)
@partly_slow("name", MIXED, 1)
def test_memory_and_launches_of_recurrent_layers_are_predicted_within_a_tenth(
    name: str, checkpointing: bool
) -> None:
    config = HYBRIDS[name].to_dict() | MIXED[name]
    work = Workload(batch=3, sequence_length=96, attention="block_causal", checkpointing=checkpointing)
    model = blueprint(type(HYBRIDS[name])(**config))
    assert model.depths == (4, 8)
    step, network = Step(build_model(model, work), work), model.network(work)
    step()
    assert peak_memory(network, work).total == pytest.approx(step.peak_bytes(), rel=0.1)
    with LaunchCounter() as counter:
        step()
    assert step_launches(network, model.pass_costs(work), work) == pytest.approx(counter.launches, rel=0.1)


@pytest.mark.parametrize("work", [
    Workload(batch=4, sequence_length=64, attention="bidirectional"),
    Workload(batch=3, sequence_length=64, attention="block_causal", copies=2),
    Workload(batch=4, sequence_length=64, attention="block_causal", checkpointing=True),
    Workload(batch=4, sequence_length=64, attention="causal"),
], ids=lambda work: f"{work.attention}{' checkpointing' * work.checkpointing}")  # fmt: skip
def test_peak_memory_is_predicted_within_a_tenth(work: Workload) -> None:
    model = llama(64, 4, 1024)
    predicted = peak_memory(model.network(work), work).total
    step = Step(build_model(model, work), work)
    step()
    assert predicted == pytest.approx(step.peak_bytes(), rel=0.1)


def test_a_step_hides_half_and_its_copy_the_other_half() -> None:
    work = Workload(batch=2, sequence_length=8, copies=2)
    hidden_BMT = Step(build_model(llama(64, 1, 64), work), work).views.hidden_BMT
    assert hidden_BMT.sum(-1).tolist() == [[4, 4], [4, 4]]
    assert hidden_BMT.sum(1).eq(1).all()


@pytest.mark.parametrize("noise", [("uniform", None), ("hybrid", 0.1)])
def test_a_step_with_random_tokens_predicts_all(noise) -> None:
    names = ("noise", "p_uniform")
    settings = {**SETTINGS, "attention": "bidirectional", **dict(zip(names, noise, strict=True))}
    spec = ModelSpec("tiny", llama(64, 1, 64).config, character_tokenizer(ALPHABET), settings)
    work = spec.workload("bidirectional", 8, 2, None)
    step = Step(build_model(spec, work), work)
    assert step.views.target_BMT.sum() == work.predicted == 16
    step()


class Touched(TorchDispatchMode):
    """A clock that counts the elements that operations read and write, so other processes do not affect
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements += sum(
            leaf.numel() for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)
        )
        return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "work"),
    [
        (llama(64, 8, 512), Workload(batch=16, sequence_length=128, attention="block_causal")),
        pytest.param(
            llama(128, 4, 4096),
            Workload(batch=16, sequence_length=256, attention="causal"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *(
                llama(256, 6, 16_000),
                Workload(batch=4, sequence_length=256, attention="bidirectional", checkpointing=True),
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["block_causal", "causal", "checkpointing"],
)
def test_a_few_layers_tell_the_time_of_all(
    model: ModelSpec, work: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Touched() as clock:  # that of the machine is read by `unmask inspect --measure`
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock.elements))
        predicted = calibrate(model, model.network(work), work)
        assert predicted == pytest.approx(
            sum(median_times([Step(build_model(model, work), work)], 0, at_least=1)[0]), rel=0.1
        )


def test_steps_of_a_narrow_model_are_timed_on_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tell the time of many."""
    model, work = llama(64, 2, 64), Workload(batch=256, sequence_length=128)
    timed: list[int] = []

    def times(steps: list[Step], *_: Any, **__: Any) -> list[tuple[float, float]]:
        timed.extend(step.work.tokens for step in steps)
        return median_times(steps, 0, at_least=1)

    predicted = []
    with Touched() as clock:
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock.elements))
        monkeypatch.setattr(calibration, "median_times", times)
        for most in (calibration.CALIBRATION_TOKENS, work.tokens):
            monkeypatch.setattr(calibration, "CALIBRATION_TOKENS", most)
            predicted.append(calibrate(model, model.network(work), work))
    assert timed == [work.tokens / 2] * 2 + [work.tokens] * 2
    assert predicted[0] == pytest.approx(predicted[1], rel=0.02)
