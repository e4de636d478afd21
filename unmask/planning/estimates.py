"""Estimates of a training step on a machine: the batch that fits, the time of the step, and what to change if nothing fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from unmask.config.run import DeviceConfig, HardwareConfig
from unmask.planning.cost_model import MARGIN, RUNTIME_BYTES, Memory, Network, Precision, Workload, host_bytes, peak_memory, step_seconds


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Memory and time of a workload on a machine.

    Attributes:
        workload: the workload with the batch that fits (batch 1 if none does).
        memory: memory of each device at the peak, in bytes.
        runtime: bytes that the libraries use in addition.
        limit: bytes that may be used on each device.
        seconds: time of a step for the batches of all devices; None if the throughput of a device is unknown.
        devices: number of data-parallel devices; 1 for a split model.
        host: bytes of the optimiser in host memory.
        advice: the change that would make it fit; empty if it fits.
    """

    workload: Workload
    memory: Memory
    runtime: float
    limit: float
    seconds: float | None
    devices: int
    host: float = 0.0
    advice: str = ""

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def peak(self) -> float:
        return self.memory.total + self.runtime

    @property
    def tokens_per_second(self) -> float | None:
        """Clean tokens per second, of all devices."""
        return None if self.seconds is None else self.workload.batch * self.workload.sequence_length * self.devices / self.seconds

    def describe(self, name: str) -> dict[str, str]:
        """One line of a table, by column."""
        work = self.workload
        switches: list[str] = [work.precision]
        if work.checkpointing:
            switches.append("checkpointing")
        if work.optimiser == "adamw_8bit":
            switches.append("8-bit AdamW")
        if work.shards > 1:
            switches.append(f"{work.shards} shards")
        if work.split > 1:
            switches.append(f"split over {work.split}")
        if work.host_optimiser:
            switches.append(f"{self.host / 1e9:.3g} GB in host memory")
        return {
            "hardware": name,
            "batch": f"{work.batch} x {self.devices}" if self.devices > 1 else str(work.batch),
            "peak GB": f"{self.peak / 1e9:.3g} of {self.limit / 1e9:.3g}",
            "seconds": "-" if self.seconds is None else f"{self.seconds:.3g}",
            "tokens/s": "-" if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            "with": ", ".join(switches),
            "fits": f"no: use {self.advice}" if self.advice else "yes",
        }

    def to_dict(self) -> dict[str, Any]:
        """All values, in JSON types."""
        derived = {"fits": self.fits, "peak": self.peak, "tokens_per_second": self.tokens_per_second}
        return dataclasses.asdict(self) | derived


def device_limit(device: DeviceConfig, max_memory_gb: float | None) -> float:
    """Bytes that may be used on a device whose memory is known."""
    assert device.memory_gb is not None
    return min(device.memory_gb * MARGIN, max_memory_gb or math.inf) * 1e9


def largest_batch(network: Network, work: Workload, limit: float) -> int:
    """The largest batch whose peak is at most `limit` bytes; 0: not even one row fits. The peak grows with the batch."""

    def fits(batch: int) -> bool:
        return peak_memory(network, dataclasses.replace(work, batch=batch)).total <= limit

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**20:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def estimate_step(
    networks: Callable[[Precision], Network], work: Workload, hardware: HardwareConfig, *, batch: int | None = None
) -> StepEstimate:
    """Estimate a workload on a machine.

    The smallest device sets the batch of all devices, the slowest one the time. A model that is split over devices has the memory of all
    of them, and takes their mean time, weighted by the memory of each.

    Args:
        networks: returns the network at a precision.
        work: the workload; its batch is replaced.
        hardware: the machine; the memory of every device must be set.
        batch: sequences per device; None: the largest batch that fits.
    """
    kind = "cpu" if hardware.is_cpu else "gpu"
    limits = [device_limit(device, hardware.max_memory_gb) for device in hardware.devices]
    limit, runtime = min(limits), RUNTIME_BYTES[kind]
    if work.split > 1:
        limits = [device.count * limit for device, limit in zip(hardware.devices, limits, strict=True)]
        limit, runtime = sum(limits), runtime * work.split
    network = networks(work.precision)
    work = dataclasses.replace(work, batch=batch or largest_batch(network, work, limit - runtime) or 1)
    memory = peak_memory(network, work)
    link = None if work.split > 1 else hardware.slowest_link  # a split model sends only hidden states
    times = [step_seconds(network, work, device, link) for device in hardware.devices]
    known = [seconds for seconds in times if seconds is not None]
    if work.split > 1 and len(known) == len(times):
        known = [sum(weight * seconds for weight, seconds in zip(limits, known, strict=True)) / limit] * len(times)
    advice = "" if memory.total + runtime <= limit else advice_for(networks, work, hardware, limit - runtime)
    return StepEstimate(
        workload=work,
        memory=memory,
        runtime=runtime,
        limit=limit,
        seconds=max(known) if len(known) == len(times) else None,
        devices=1 if work.split > 1 else hardware.count,
        host=host_bytes(network, work),
        advice=advice,
    )


def advice_for(networks: Callable[[Precision], Network], work: Workload, hardware: HardwareConfig, limit: float) -> str:
    """The least change after which the workload fits into `limit` bytes."""
    change = first_change_that_fits(networks, work, hardware, limit)
    return change[0] if change else "a smaller batch, shorter sequences or a larger device"


def first_change_that_fits(
    networks: Callable[[Precision], Network], work: Workload, hardware: HardwareConfig, limit: float
) -> tuple[str, Workload] | None:
    """The name of the least change after which the workload fits into `limit` bytes, and the changed workload; None if there is none."""
    for name, changed in _changes(work, hardware):
        if peak_memory(networks(changed.precision), changed).total <= limit:
            return name, changed
    return None


def _changes(work: Workload, hardware: HardwareConfig) -> Iterator[tuple[str, Workload]]:
    """Changes in the order of their cost in speed or quality. Checkpointing and 8-bit AdamW stay on for the changes after them. Sharded
    weights allow neither adapters nor another optimizer than torch's."""
    rank, switches, whole = work.lora_rank or 16, [], work.shards == 1
    if not work.checkpointing:
        work = dataclasses.replace(work, checkpointing=True)
        switches.append("checkpointing")
        yield " and ".join(switches), work
    if work.optimiser == "adamw" and whole:
        work = dataclasses.replace(work, optimiser="adamw_8bit")
        switches.append("8-bit AdamW")
        yield " and ".join(switches), work
    if work.precision != "bfloat16" and work.lora_rank is None and whole:
        yield "the recipe bfloat16", dataclasses.replace(work, precision="bfloat16")
    if not hardware.is_cpu and work.lora_rank is None and not work.host_optimiser and whole:
        yield "the recipe offload", dataclasses.replace(work, precision="bfloat16", host_optimiser=True)
    if work.lora_rank is None and whole:
        yield f"LoRA of rank {rank}", dataclasses.replace(work, lora_rank=rank)
        yield f"LoRA of rank {rank} and model.dtype bfloat16", dataclasses.replace(work, lora_rank=rank, precision="bfloat16")
    if not hardware.is_cpu:
        if work.quantization != "4bit" and whole:
            yield f"QLoRA of rank {rank}", dataclasses.replace(work, lora_rank=rank, quantization="4bit", precision="bfloat16")
        if work.lora_rank is None and work.split == 1:
            work = dataclasses.replace(work, optimiser="adamw")
            for shards in (2, 4, 8, 16, 32, 64):
                if shards > work.shards:
                    yield f"ZeRO-3 or FSDP over {shards} such devices", dataclasses.replace(work, shards=shards)
            yield "ZeRO-3 with offload", dataclasses.replace(work, offload=True)
