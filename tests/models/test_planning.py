"""The planning formula: its properties, and its numbers against real models, adapters, optimisers and allocations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.configurations import ALPHABET, CONFIGURATIONS, NAMES, tiny_lm
from unmask.config import DeviceConfig, HardwareConfig, LoraSettings
from unmask.data.characters import character_tokenizer
from unmask.models.blueprint import Blueprint
from unmask.models.head import LOGITS_AT_ONCE
from unmask.models.planning import (
    LOGIT_COPIES,
    Network,
    Plan,
    Workload,
    largest_batch,
    make_plan,
    matmul_flops,
    peak_memory,
    step_seconds,
)

NETWORK = Network(
    parameters=600_000_000,
    linears=((1024, 4096), (4096, 1024)) * 24,
    layers=24,
    hidden=1024,
    vocabulary=32_000,
    attention_width=1024,
    tied=True,
    saved_fixed=10_000,
    saved_per_row=50_000_000,
)
BFLOAT16 = "the recipe bfloat16"
GPU = DeviceConfig(name="GPU", memory_gb=24, tflops=100, bandwidth_gb_s=1000)

workloads = st.builds(
    Workload,
    batch=st.integers(1, 64),
    sequence_length=st.integers(16, 2048),
    attention=st.sampled_from(["causal", "block_causal", "bidirectional"]),
    copies=st.integers(1, 2),
    precision=st.sampled_from(["float32", "mixed", "bfloat16"]),
    checkpointing=st.booleans(),
    optimiser=st.sampled_from(["adamw", "adamw_8bit"]),
    lora_rank=st.none() | st.integers(1, 64),
    shards=st.integers(1, 8),
    offload=st.booleans(),
    host_optimiser=st.booleans(),
    accumulate=st.booleans(),
)


def blueprint(name: str) -> Blueprint:
    settings = {"attention": "causal", "block_size": None, "logit_shift": True}
    return Blueprint(name, CONFIGURATIONS[name], character_tokenizer(ALPHABET), settings)


def machine(**changes: object) -> HardwareConfig:
    return HardwareConfig(**{"name": "machine", "devices": [GPU.model_dump()], **changes})


def plan(work: Workload, hardware: HardwareConfig, batch: int | None = None) -> Plan:
    return make_plan(lambda precision: NETWORK, work, hardware, batch=batch)


@given(workloads)
def test_memory_and_time_grow_with_the_batch(work: Workload) -> None:
    larger = dataclasses.replace(work, batch=work.batch + 1)
    assert peak_memory(NETWORK, larger).total >= peak_memory(NETWORK, work).total
    if work.precision != "float32":
        assert step_seconds(NETWORK, larger, GPU, None) > step_seconds(NETWORK, work, GPU, None)


@given(workloads)
def test_memory_and_time_grow_with_the_length(work: Workload) -> None:
    longer = dataclasses.replace(work, sequence_length=2 * work.sequence_length)
    more = dataclasses.replace(NETWORK, saved_per_row=2 * NETWORK.saved_per_row)
    assert peak_memory(more, longer).total >= peak_memory(NETWORK, work).total
    if work.precision != "float32":
        assert step_seconds(more, longer, GPU, None) > step_seconds(NETWORK, work, GPU, None)


@given(workloads)
def test_each_switch_that_saves_memory_saves_memory(work: Workload) -> None:
    peak = peak_memory(NETWORK, work).total
    savings = [{"optimiser": "adamw_8bit"}, {"shards": work.shards * 8}, {"offload": True}, {"host_optimiser": True}]
    if work.batch > 8 and work.sequence_length > 64:
        # What a row keeps is given for one length here, so that only large batches gain from keeping less of it.
        roomy = dataclasses.replace(NETWORK, saved_per_row=1_000_000 * work.row_length)
        checkpointed = peak_memory(roomy, dataclasses.replace(work, checkpointing=True)).total
        assert checkpointed <= peak_memory(roomy, work).total
    for change in savings:
        gathered = 2 * NETWORK.linear_weights / NETWORK.layers * 4 if "shards" in change else 0
        assert peak_memory(NETWORK, dataclasses.replace(work, **change)).total <= peak + gathered


@given(workloads, st.floats(1e9, 1e12))
def test_the_largest_batch_fits_and_the_next_does_not(work: Workload, limit: float) -> None:
    batch = largest_batch(NETWORK, work, limit)
    peaks = [peak_memory(NETWORK, dataclasses.replace(work, batch=size)).total for size in (max(batch, 1), batch + 1)]
    assert (peaks[0] <= limit) == (batch > 0)
    assert peaks[1] > limit


@given(workloads, st.floats(2, 20))
def test_a_cap_caps_the_plan_and_a_plan_that_does_not_fit_says_what_helps(work: Workload, cap: float) -> None:
    capped = plan(work, machine(max_memory_gb=cap))
    assert capped.limit == pytest.approx(min(cap, 24 * 0.92) * 1e9)
    assert capped.fits == (capped.peak <= capped.limit) == (not capped.advice)


def test_advice_is_the_least_change_that_fits() -> None:
    roomy = dataclasses.replace(NETWORK, saved_per_row=4_000_000_000)
    work = Workload(sequence_length=512, precision="mixed")
    needed = {gb: make_plan(lambda precision: roomy, work, machine(max_memory_gb=gb)).advice for gb in (13, 11, 9, 5, 4, 3, 2.3, 2)}
    assert needed == {
        13: "",
        11: "checkpointing",
        9: "checkpointing and 8-bit AdamW",
        5: BFLOAT16,
        4: "the recipe offload",
        3: "LoRA of rank 16 and model.dtype bfloat16",
        2.3: "QLoRA of rank 16",
        2: "ZeRO-3 or FSDP over 16 such devices",
    }


def test_an_optimiser_in_host_memory_takes_16_bytes_a_parameter_there_and_time() -> None:
    work = Workload(sequence_length=512, precision="bfloat16", host_optimiser=True, checkpointing=True)
    there, here = plan(work, machine(), batch=1), plan(dataclasses.replace(work, host_optimiser=False), machine(), batch=1)
    assert (there.host, here.host) == (16 * NETWORK.parameters, 0)
    assert (there.memory.optimiser, here.memory.optimiser) == (0, 4 * NETWORK.parameters)
    assert there.seconds > here.seconds and "9.6 GB in host memory" in there.describe("machine")["with"]


def test_what_is_on_already_is_no_advice() -> None:
    on = Workload(sequence_length=512, precision="mixed", checkpointing=True, optimiser="adamw_8bit", lora_rank=8)
    advice = {gb: make_plan(lambda precision: NETWORK, on, machine(max_memory_gb=gb)).advice for gb in (4, 3, 2.5, 2, 1)}
    quantised = make_plan(lambda precision: NETWORK, dataclasses.replace(on, quantization="4bit"), machine(max_memory_gb=1)).advice
    assert "QLoRA of rank 8" in advice.values() and not any("LoRA of rank 16" in words for words in advice.values())
    assert "LoRA" not in quantised
    assert not any("ZeRO" in words or "FSDP" in words for words in [*advice.values(), quantised])  # no adapters on shards


def test_the_smallest_device_sets_the_batch_and_the_slowest_the_time() -> None:
    large, small = GPU.model_copy(update={"memory_gb": 48.0}), GPU.model_copy(update={"tflops": 50.0})
    work = Workload(sequence_length=512, precision="mixed")
    pair = plan(work, machine(devices=[large.model_dump(), small.model_dump()]))
    alone = plan(work, machine(devices=[small.model_dump()]))
    assert (pair.workload.batch, pair.seconds, pair.devices) == (alone.workload.batch, alone.seconds, 2)
    assert pair.tokens_per_second == 2 * alone.tokens_per_second


def test_logits_stop_at_the_budget() -> None:
    networks = [dataclasses.replace(NETWORK, hidden=64, vocabulary=vocabulary) for vocabulary in (8_000, 128_000)]
    peaks = [peak_memory(network, Workload(sequence_length=512, batch=64)) for network in networks]
    assert [memory.logits for memory in peaks] == [4 * LOGIT_COPIES * LOGITS_AT_ONCE] * 2


def test_flops_are_those_of_the_rule_of_thumb() -> None:
    work = Workload(sequence_length=128, attention="causal")
    rule = 6 * 128 * (NETWORK.linear_weights + NETWORK.hidden * NETWORK.vocabulary)
    assert matmul_flops(NETWORK, work) == rule
    blocks = dataclasses.replace(work, attention="block_causal")
    assert matmul_flops(NETWORK, blocks) == pytest.approx(rule * 2 - 6 * 128 * NETWORK.hidden * NETWORK.vocabulary * 1.5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks transformers by the old name
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # of GPT-2; PEFT mends it itself
@pytest.mark.parametrize("name", NAMES)
def test_a_blueprint_counts_what_the_real_model_has(name: str) -> None:
    from peft import get_peft_model

    real = tiny_lm(name, dtype=torch.float32).model
    network = blueprint(name).network(Workload(sequence_length=8))
    weights = list(real.parameters())
    assert network.parameters == sum(weight.numel() for weight in weights)
    assert network.tied == (real.get_output_embeddings().weight is real.get_input_embeddings().weight)
    adapters = sum(w.numel() for w in get_peft_model(real, LoraSettings(r=3).to_peft()).parameters() if w.requires_grad)
    assert network.adapter_parameters(3) == adapters


def test_a_token_meets_some_of_the_experts() -> None:
    mixture = dataclasses.replace(NETWORK, experts=((1024, 512),) * 64, expert_share=1 / 8)
    work, sharded = Workload(sequence_length=128), Workload(sequence_length=128, shards=2)
    assert matmul_flops(mixture, work) - matmul_flops(NETWORK, work) == 6 * 128 * 8 * 1024 * 512
    assert mixture.adapter_parameters(2) - NETWORK.adapter_parameters(2) == 64 * 2 * (1024 + 512)
    assert peak_memory(mixture, sharded).workspace > peak_memory(NETWORK, sharded).workspace  # all are gathered


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_states_and_gradients_are_those_of_the_real_optimiser(precision: str) -> None:
    real = tiny_lm("llama", dtype=getattr(torch, precision)).model
    optimiser = torch.optim.AdamW(real.parameters(), fused=True)
    for weight in real.parameters():
        weight.grad = torch.zeros_like(weight)
    optimiser.step()
    states = [value for state in optimiser.state.values() for name, value in state.items() if name != "step"]
    work = Workload(sequence_length=1, precision=precision, accumulate=True)
    memory = peak_memory(blueprint("llama").network(work), work)
    assert memory.parameters == memory.gradients == sum(weight.nbytes for weight in real.parameters())
    assert memory.optimiser == sum(state.nbytes for state in states)
