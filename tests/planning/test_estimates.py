"""Estimates: the batch that fits, the time of a step on a machine, and the advice."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_cost_model import BFLOAT16, GPU, NETWORK, estimate, machine, workloads
from unmask.planning.cost_model import Workload, peak_memory
from unmask.planning.estimates import largest_batch


@given(workloads, st.floats(1e9, 1e12))
def test_the_largest_batch_fits_and_the_next_does_not(work: Workload, limit: float) -> None:
    batch = largest_batch(NETWORK, work, limit)
    peaks = [
        peak_memory(NETWORK, dataclasses.replace(work, batch=size)).total
        for size in (max(batch, 1), batch + 1)
    ]
    assert (peaks[0] <= limit) == (batch > 0)
    assert peaks[1] > limit


@given(workloads, st.floats(2, 20))
def test_a_cap_caps_the_plan_and_a_plan_that_does_not_fit_says_what_helps(work: Workload, cap: float) -> None:
    capped = estimate(work, machine(max_memory_gb=cap))
    assert capped.limit == pytest.approx(min(cap, 24 * 0.92) * 1e9)
    assert capped.fits == (capped.peak <= capped.limit) == (not capped.advice)


def test_advice_is_the_least_change_that_fits() -> None:
    roomy = dataclasses.replace(NETWORK, saved_per_row=4_000_000_000)
    work = Workload(sequence_length=512, precision="mixed")
    needed = {
        gb: estimate(work, machine(max_memory_gb=gb), network=roomy).advice
        for gb in (13, 11, 9, 5, 4, 3, 2.3, 2)
    }
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


def test_what_is_on_already_is_no_advice() -> None:
    on = Workload(
        sequence_length=512, precision="mixed", checkpointing=True, optimizer="adamw_8bit", lora_rank=8
    )
    advice = {gb: estimate(on, machine(max_memory_gb=gb)).advice for gb in (4, 3, 2.5, 2, 1)}
    quantized = estimate(dataclasses.replace(on, quantization="4bit"), machine(max_memory_gb=1)).advice
    assert "QLoRA of rank 8" in advice.values() and not any(
        "LoRA of rank 16" in words for words in advice.values()
    )
    assert "LoRA" not in quantized
    # no adapters on shards
    assert not any("ZeRO" in words or "FSDP" in words for words in [*advice.values(), quantized])


def test_the_smallest_device_sets_the_batch_and_the_slowest_the_time() -> None:
    large, small = GPU.model_copy(update={"memory_gb": 48.0}), GPU.model_copy(update={"tflops": 50.0})
    work = Workload(sequence_length=512, precision="mixed")
    pair = estimate(work, machine(devices=[large.model_dump(), small.model_dump()]))
    alone = estimate(work, machine(devices=[small.model_dump()]))
    assert (pair.workload.batch, pair.seconds, pair.devices) == (alone.workload.batch, alone.seconds, 2)
    assert pair.tokens_per_second == 2 * alone.tokens_per_second
