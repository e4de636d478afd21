"""The time of a step and of a pass on a GPU, and what bounds it: properties, and the times that were measured
(docs/results.md)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.models.configurations import ALPHABET
from tests.planning.test_cost_model import COSTS, GPU, NETWORK
from unmask.config.run import DeviceConfig
from unmask.data.characters import character_tokenizer
from unmask.planning import step_time as formula
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.planning.hardware import HardwareRecipe
from unmask.planning.step_time import BOUNDS, DenoisingPass, StepTime, pass_time, step_time

parts = st.floats(0, 10)


@given(st.builds(StepTime, arithmetic=parts, memory=parts, launches=parts, reads=parts, link=parts))
def test_launches_cost_only_what_they_take_longer_than_the_gpu(time: StepTime) -> None:
    idle = dataclasses.replace(time, launches=0)
    assert time.seconds == pytest.approx(max(idle.seconds, time.launches + time.reads + time.link))
    assert (time.bound == "launches") <= (time.seconds > idle.seconds)
    assert all(getattr(time, time.bound) >= getattr(idle, part) for part in BOUNDS)


@pytest.mark.parametrize("attention", ["bidirectional", "block_causal", "causal"])
def test_a_pass_of_one_short_sequence_waits_for_launches_and_one_of_many_for_the_gpu(attention: str) -> None:
    times = [
        pass_time(
            NETWORK,
            COSTS.forward,
            DenoisingPass(context=1024, block=32, attention=attention, batch=batch),
            GPU,
        )
        for batch in (1, 10_000)
    ]
    assert [time.bound == "launches" for time in times] == [True, False]
    assert times[0].seconds < times[1].seconds


def test_reads_of_memory_bound_the_pass_of_a_large_model_and_products_that_of_long_sequences() -> None:
    large = dataclasses.replace(NETWORK, linears=((8192, 8192),) * 400)
    one = DenoisingPass(context=4096, block=4, attention="block_causal")
    assert pass_time(large, COSTS.forward, one, GPU).bound == "memory"
    assert (
        pass_time(large, COSTS.forward, dataclasses.replace(one, attention="bidirectional"), GPU).bound
        == "arithmetic"
    )


def test_without_figures_there_is_no_time() -> None:
    unknown = DeviceConfig(name="unknown", memory_gb=24)
    assert step_time(NETWORK, COSTS, Workload(sequence_length=8, precision="mixed"), unknown, None) is None
    assert pass_time(NETWORK, COSTS.forward, DenoisingPass(context=8), unknown) is None


def qwen(hidden: int, inner: int, layers: int, heads: int, **more: Any) -> Qwen3Config:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return Qwen3Config(
        **sizes, num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=4096, **more
    )


QWEN3_06B = qwen(1024, 3072, 28, 16, tie_word_embeddings=True)
LLADA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=126_464,
    max_position_embeddings=4096,
)
H100, H200 = "h100-80gb", "h200-141gb"
SAMPLER_THEN = {"LAUNCHES_OF_SAMPLER": 120, "LAUNCHES_OF_DRAW": 300, "LAUNCHES_OF_CACHE": 5}
READS_THEN = {"bidirectional": 13, "block_causal": 16}
"""The launches and reads of the sampler that was measured."""
WITHIN = 0.15  # as docs/planning.md says


def blueprint(config: PretrainedConfig, attention: str) -> ModelSpec:
    block = 4 if attention == "block_causal" else None
    settings = {"attention": attention, "block_size": block, "logit_shift": False}
    return ModelSpec("model", config, character_tokenizer(ALPHABET), settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "work", "seconds", "bound"),
    [
        (QWEN3_06B, {"batch": 8, "precision": "mixed"}, 0.490, "memory"),
        (QWEN3_06B, {"batch": 4, "precision": "mixed", "attention": "block_causal"}, 0.519, "arithmetic"),
        (LLADA_8B, {"batch": 2, "precision": "bfloat16", "lora_rank": 16}, 0.571, "arithmetic"),
    ],
    ids=["Qwen3-0.6B", "Qwen3-0.6B, blocks", "LLaDA-8B, adapters"],
)
def test_the_steps_of_training_on_an_h100_are_predicted(
    config: Any, work: Any, seconds: float, bound: str
) -> None:
    model, step = (
        blueprint(config, work.get("attention", "bidirectional")),
        Workload(sequence_length=2048, **work),
    )
    device = HardwareRecipe.read(H100).hardware.devices[0]
    time = step_time(model.network(step), model.pass_costs(step), step, device, None)
    assert time is not None and time.bound == bound
    assert time.seconds == pytest.approx(seconds, rel=WITHIN)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "work", "machine", "milliseconds", "bound"),
    [
        (LLADA_8B, {"context": 256, "batch": 1}, H100, 28.4, "launches"),
        (LLADA_8B, {"context": 256, "batch": 8}, H100, 68.5, "arithmetic"),
        (
            qwen(2560, 9728, 36, 32),
            {"context": 192, "batch": 1, "block": 4, "drawn": True},
            H100,
            60,
            "launches",
        ),
        (
            qwen(2560, 9728, 36, 32),
            {"context": 192, "batch": 8, "block": 4, "drawn": True},
            H100,
            65,
            "launches",
        ),
        (
            qwen(2560, 9728, 4, 32),
            {"context": 192, "batch": 1, "block": 4, "drawn": True},
            H200,
            15.4,
            "launches",
        ),
    ],
    ids=["LLaDA-8B", "LLaDA-8B, 8 rows", "SDAR-4B", "SDAR-4B, 8 rows", "SDAR-4B, 4 layers"],
)
def test_the_passes_of_generation_on_gpus_are_predicted(
    config: Any, work: Any, machine: str, milliseconds: float, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = "block_causal" if "block" in work else "bidirectional"
    for name, launches in SAMPLER_THEN.items():
        monkeypatch.setattr(formula, name, launches)
    monkeypatch.setattr(DenoisingPass, "reads", READS_THEN[attention])
    model, one = (
        blueprint(config, attention),
        Workload(sequence_length=work["context"], attention=attention, precision="bfloat16"),
    )
    device = HardwareRecipe.read(machine).hardware.devices[0]
    time = pass_time(
        model.network(one), model.pass_costs(one).forward, DenoisingPass(attention=attention, **work), device
    )
    assert time is not None and time.bound == bound
    assert 1e3 * time.seconds == pytest.approx(milliseconds, rel=WITHIN)
