"""The planning formula: its properties, and its numbers compared with real models, adapters, optimizers and
allocations."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import partly_slow
from tests.models.configurations import ALPHABET, CONFIGURATIONS, NAMES, tiny_lm
from unmask.config.run import DeviceConfig, HardwareConfig, LoraSettings
from unmask.data.characters import character_tokenizer
from unmask.models.hooks.head import LOGITS_AT_ONCE
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import LOGIT_COPIES, Network, Workload, matmul_flops, peak_memory
from unmask.planning.estimates import StepEstimate, estimate_step
from unmask.planning.step_time import PassCost, PassCosts, step_time

NETWORK = Network(
    parameters=600_000_000,
    tensors=300,
    linears=((1024, 4096), (4096, 1024)) * 24,
    layers=24,
    attention_layers=24,
    hidden=1024,
    vocabulary=32_000,
    attention_width=1024,
    key_width=1024,
    tied=True,
    saved_fixed=10_000,
    saved_per_row=50_000_000,
)
COSTS = PassCosts(PassCost(1_000, 1e9, 5e6), PassCost(2_000, 1e9, 1e7))
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
    optimizer=st.sampled_from(["adamw", "adamw_8bit"]),
    lora_rank=st.none() | st.integers(1, 64),
    shards=st.integers(1, 8),
    offload=st.booleans(),
    host_optimizer=st.booleans(),
    accumulate=st.booleans(),
)


def blueprint(name: str) -> ModelSpec:
    settings = {"attention": "causal", "block_size": None, "logit_shift": True}
    return ModelSpec(name, CONFIGURATIONS[name], character_tokenizer(ALPHABET), settings)


def machine(**changes: object) -> HardwareConfig:
    return HardwareConfig(**{"name": "machine", "devices": [GPU.model_dump()], **changes})


def estimate(
    work: Workload, hardware: HardwareConfig, batch: int | None = None, network: Network = NETWORK
) -> StepEstimate:
    return estimate_step(lambda precision: network, lambda precision: COSTS, work, hardware, batch=batch)


def device_seconds(work: Workload) -> float:
    """What the GPU computes in a step, whatever the host does."""
    time = step_time(NETWORK, COSTS, work, GPU, None)
    assert time is not None
    return time.arithmetic + time.memory


@given(workloads)
def test_memory_and_time_grow_with_the_batch(work: Workload) -> None:
    larger = dataclasses.replace(work, batch=work.batch + 1)
    assert peak_memory(NETWORK, larger).total >= peak_memory(NETWORK, work).total
    if work.precision != "float32":
        assert device_seconds(larger) > device_seconds(work)


@given(workloads)
def test_memory_and_time_grow_with_the_length(work: Workload) -> None:
    longer = dataclasses.replace(work, sequence_length=2 * work.sequence_length)
    more = dataclasses.replace(NETWORK, saved_per_row=2 * NETWORK.saved_per_row)
    assert peak_memory(more, longer).total >= peak_memory(NETWORK, work).total
    if work.precision != "float32":
        assert device_seconds(longer) > device_seconds(work)


@given(workloads)
def test_each_switch_that_saves_memory_saves_memory(work: Workload) -> None:
    peak = peak_memory(NETWORK, work).total
    savings = [
        {"optimizer": "adamw_8bit"},
        {"shards": work.shards * 8},
        {"offload": True},
        {"host_optimizer": True},
    ]
    if work.batch > 8 and work.sequence_length > 64:
        # The memory of a row is given for one length here, so only large batches gain from keeping less.
        roomy = dataclasses.replace(NETWORK, saved_per_row=1_000_000 * work.row_length)
        checkpointed = peak_memory(roomy, dataclasses.replace(work, checkpointing=True)).total
        assert checkpointed <= peak_memory(roomy, work).total
    for change in savings:
        gathered = 2 * NETWORK.linear_weights / NETWORK.layers * 4 if "shards" in change else 0
        assert peak_memory(NETWORK, dataclasses.replace(work, **change)).total <= peak + gathered


def test_an_optimizer_in_host_memory_takes_16_bytes_a_parameter_there_and_time() -> None:
    work = Workload(sequence_length=512, precision="bfloat16", host_optimizer=True, checkpointing=True)
    there, here = (
        estimate(work, machine(), batch=1),
        estimate(dataclasses.replace(work, host_optimizer=False), machine(), batch=1),
    )
    assert (there.host, here.host) == (16 * NETWORK.parameters, 0)
    assert (there.memory.optimizer, here.memory.optimizer) == (0, 4 * NETWORK.parameters)
    assert there.seconds > here.seconds and "9.6 GB in host memory" in there.describe("machine")["with"]


def test_logits_stop_at_the_budget() -> None:
    networks = [
        dataclasses.replace(NETWORK, hidden=64, vocabulary=vocabulary) for vocabulary in (8_000, 128_000)
    ]
    peaks = [peak_memory(network, Workload(sequence_length=512, batch=64)) for network in networks]
    assert [memory.logits for memory in peaks] == [4 * LOGIT_COPIES * LOGITS_AT_ONCE] * 2


def test_flops_are_those_of_the_rule_of_thumb() -> None:
    work = Workload(sequence_length=128, attention="causal")
    rule = 6 * 128 * (NETWORK.linear_weights + NETWORK.hidden * NETWORK.vocabulary)
    assert matmul_flops(NETWORK, work) == rule
    blocks = dataclasses.replace(work, attention="block_causal")
    assert matmul_flops(NETWORK, blocks) == pytest.approx(
        rule * 2 - 6 * 128 * NETWORK.hidden * NETWORK.vocabulary * 1.5
    )


# PEFT asks transformers by the old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
# of GPT-2; PEFT mends it itself
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@partly_slow("name", NAMES, *range(0, len(NAMES), 4))
def test_a_blueprint_counts_what_the_real_model_has(name: str) -> None:
    from peft import get_peft_model

    real = tiny_lm(name, dtype=torch.float32).model
    network = blueprint(name).network(Workload(sequence_length=8))
    weights = list(real.parameters())
    assert network.parameters == sum(weight.numel() for weight in weights)
    assert network.tied == (real.get_output_embeddings().weight is real.get_input_embeddings().weight)
    adapters = sum(
        w.numel() for w in get_peft_model(real, LoraSettings(r=3).to_peft()).parameters() if w.requires_grad
    )
    assert network.adapter_parameters(3) == adapters


def test_a_token_meets_some_of_the_experts() -> None:
    mixture = dataclasses.replace(NETWORK, experts=((1024, 512),) * 64, expert_fraction=1 / 8)
    work, sharded = Workload(sequence_length=128), Workload(sequence_length=128, shards=2)
    assert matmul_flops(mixture, work) - matmul_flops(NETWORK, work) == 6 * 128 * 8 * 1024 * 512
    assert mixture.adapter_parameters(2) - NETWORK.adapter_parameters(2) == 64 * 2 * (1024 + 512)
    # all are gathered
    assert peak_memory(mixture, sharded).workspace > peak_memory(NETWORK, sharded).workspace


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_states_and_gradients_are_those_of_the_real_optimizer(precision: str) -> None:
    real = tiny_lm("llama", dtype=getattr(torch, precision)).model
    optimizer = torch.optim.AdamW(real.parameters(), fused=True)
    for weight in real.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    work = Workload(sequence_length=1, precision=precision, accumulate=True)
    memory = peak_memory(blueprint("llama").network(work), work)
    assert memory.parameters == memory.gradients == sum(weight.nbytes for weight in real.parameters())
    assert memory.optimizer == sum(state.nbytes for state in states)
