"""Estimates of a training step on a machine: the batch that fits, the time of the step, and what to change if
nothing fits."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from unmask.config.run import DeviceConfig, HardwareConfig
from unmask.planning.cost_model import (
    MARGIN,
    RUNTIME_BYTES,
    Memory,
    Network,
    Precision,
    Workload,
    host_bytes,
    peak_memory,
)
from unmask.planning.step_time import BoundBy, PassCosts, step_launches, step_reads, step_time


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Memory and time of a workload on a machine."""

    workload: Workload  # with the batch that fits (batch 1 if none does)
    memory: Memory  # of each device at the peak, in bytes
    runtime: float  # bytes that the libraries use in addition
    limit: float  # bytes that may be used on each device
    # of a step for the batches of all devices; None if the throughput of a device is unknown
    seconds: float | None
    bound: BoundBy | None  # what takes most of that time; None if it is unknown
    launches: float  # of kernels, in a step
    reads: float  # of values by the host, in a step
    devices: int  # data-parallel ones; 1 for a split model
    host: float = 0.0  # bytes in host memory, with `Workload.host_optimizer`
    advice: str = ""  # the change that would make it fit; empty if it fits

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def peak(self) -> float:
        return self.memory.total + self.runtime

    @property
    def tokens_per_second(self) -> float | None:
        """Clean tokens per second, of all devices."""
        tokens = self.workload.batch * self.workload.sequence_length * self.devices
        return None if self.seconds is None else tokens / self.seconds

    def describe(self, name: str) -> dict[str, str]:
        """One line of a table, by column."""
        work = self.workload
        switches = {
            work.precision: True,
            "checkpointing": work.checkpointing,
            "8-bit AdamW": work.optimizer == "adamw_8bit",
            f"{work.shards} shards": work.shards > 1,
            f"split over {work.split}": work.split > 1,
            f"{self.host / 1e9:.3g} GB in host memory": work.host_optimizer,
        }
        return {
            "hardware": name,
            "batch": f"{work.batch} x {self.devices}" if self.devices > 1 else str(work.batch),
            "peak GB": f"{self.peak / 1e9:.3g} of {self.limit / 1e9:.3g}",
            "seconds": "-" if self.seconds is None else f"{self.seconds:.3g}",
            "tokens/s": "-" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            "bound by": self.bound or "-",
            "with": ", ".join(name for name, on in switches.items() if on),
            "fits": f"no: use {self.advice}" if self.advice else "yes",
        }

    def to_dict(self) -> dict[str, Any]:
        """All values, in JSON types."""
        computed = {name: getattr(self, name) for name in ("fits", "peak", "tokens_per_second")}
        return dataclasses.asdict(self) | computed


def device_limit(device: DeviceConfig, max_memory_gb: float | None) -> float:
    """Bytes that may be used on a device whose memory is known."""
    assert device.memory_gb is not None
    return min(device.memory_gb * MARGIN, max_memory_gb or math.inf) * 1e9


def largest_batch(network: Network, work: Workload, limit: float) -> int:
    """The largest batch whose peak, which grows with the batch, is at most `limit` bytes; 0: not even one row
    fits."""
    batches = range(1, 2**20)
    return bisect_right(
        batches, limit, key=lambda batch: peak_memory(network, replace(work, batch=batch)).total
    )


def estimate_step(
    networks: Callable[[Precision], Network],
    costs: Callable[[Precision], PassCosts],
    work: Workload,
    hardware: HardwareConfig,
    *,
    batch: int | None = None,
) -> StepEstimate:
    """Estimate a workload on a machine, with `batch` sequences per device; None: the largest batch that fits.

    The smallest device sets the batch of all devices, the slowest one the time. A model that is split over
    devices has the memory of all of them, and takes their mean time, weighted by the memory of each.
    `networks` and `costs` return the network and the costs of its passes at a precision.
    """
    split = work.split > 1
    limits = [device_limit(device, hardware.max_memory_gb) for device in hardware.devices]
    limit, runtime = min(limits), RUNTIME_BYTES["cpu" if hardware.is_cpu else "gpu"]
    if split:
        limits = [device.count * limit for device, limit in zip(hardware.devices, limits, strict=True)]
        limit, runtime = sum(limits), runtime * work.split
    network, passes = networks(work.precision), costs(work.precision)
    work = replace(work, batch=batch or largest_batch(network, work, limit - runtime) or 1)
    memory = peak_memory(network, work)
    link = None if split else hardware.slowest_link  # a split model sends only hidden states
    times = [step_time(network, passes, work, device, link) for device in hardware.devices]
    known = [time for time in times if time is not None]
    slowest = max(known, key=lambda time: time.seconds) if len(known) == len(times) else None
    seconds, bound = (slowest.seconds, slowest.bound) if slowest else (None, None)
    if split and seconds is not None:
        seconds = sum(weight * each.seconds for weight, each in zip(limits, known, strict=True)) / limit
    advice = ""
    if memory.total + runtime > limit:
        change = first_change_that_fits(networks, work, hardware, limit - runtime)
        advice = change[0] if change else "a smaller batch, shorter sequences or a larger device"
    return StepEstimate(
        workload=work,
        memory=memory,
        runtime=runtime,
        limit=limit,
        seconds=seconds,
        bound=bound,
        launches=step_launches(network, passes, work),
        reads=step_reads(work),
        devices=1 if split else hardware.count,
        host=host_bytes(network, work),
        advice=advice,
    )


def first_change_that_fits(
    networks: Callable[[Precision], Network], work: Workload, hardware: HardwareConfig, limit: float
) -> tuple[str, Workload] | None:
    """The name of the least change after which the workload fits into `limit` bytes, and the changed
    workload; None if there is none."""
    for name, changed in _changes(work, hardware):
        if peak_memory(networks(changed.precision), changed).total <= limit:
            return name, changed
    return None


def _changes(work: Workload, hardware: HardwareConfig) -> Iterator[tuple[str, Workload]]:
    """Changes in the order of their cost in speed or quality. Checkpointing and 8-bit AdamW stay on for the
    changes after them. Sharded weights allow neither adapters nor another optimizer than torch's."""
    rank, whole, prefix = work.lora_rank or 16, work.shards == 1, ""
    if not work.checkpointing:
        work, prefix = replace(work, checkpointing=True), "checkpointing and "
        yield "checkpointing", work
    if work.optimizer == "adamw" and whole:
        work = replace(work, optimizer="adamw_8bit")
        yield f"{prefix}8-bit AdamW", work
    if work.lora_rank is None and whole:
        if work.precision != "bfloat16":
            yield "the recipe bfloat16", replace(work, precision="bfloat16")
        if not hardware.is_cpu and not work.host_optimizer:
            yield "the recipe offload", replace(work, precision="bfloat16", host_optimizer=True)
        adapted = replace(work, lora_rank=rank)
        yield f"LoRA of rank {rank}", adapted
        yield f"LoRA of rank {rank} and model.dtype bfloat16", replace(adapted, precision="bfloat16")
    if hardware.is_cpu:
        return
    if work.quantization != "4bit" and whole:
        quantized = replace(work, lora_rank=rank, quantization="4bit", precision="bfloat16")
        yield f"QLoRA of rank {rank}", quantized
    if work.lora_rank is None and work.split == 1:
        work = replace(work, optimizer="adamw")
        for shards in (2, 4, 8, 16, 32, 64):
            if shards > work.shards:
                yield f"ZeRO-3 or FSDP over {shards} such devices", replace(work, shards=shards)
        yield "ZeRO-3 with offload", replace(work, offload=True)
