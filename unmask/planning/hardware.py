"""Hardware recipes as machines to plan for."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

from unmask.config.layers import RECIPES, read_layers
from unmask.config.run import HardwareConfig, RunConfig
from unmask.errors import ConfigError, did_you_mean
from unmask.planning.blueprint import Blueprint
from unmask.planning.calibration import calibrate, measure
from unmask.planning.cost_model import Network, Precision, Workload
from unmask.planning.plans import Plan, make_plan

CPU = "cpu"
MEASURED_ROWS = 4  # where the user does not say


def preset_names() -> list[str]:
    """The hardware recipes, the CPU first."""
    return sorted((path.stem for path in (RECIPES / "hardware").glob("*.yaml")), key=lambda name: (name != CPU, name))


@dataclasses.dataclass(frozen=True)
class Preset:
    """A machine, and how its recipe trains on it.

    Attributes:
        name: of the recipe.
        hardware: its devices, with the memory of each.
        training: the recipe's training section.
        dtype: of the weights.
        device_map: how the layers of one model are spread over the devices; None: each has all.
    """

    name: str
    hardware: HardwareConfig
    training: Mapping[str, Any]
    dtype: str
    device_map: str | None = None

    @classmethod
    def read(cls, name: str, max_memory_gb: float | None = None, dtype: str | None = None, device_map: str | None = None) -> Preset:
        """Read a hardware recipe; `max_memory_gb` overrides its own cap, `dtype` the type of its weights, and with a `device_map` one model
        is split over its devices.

        Raises:
            ConfigError: there is none of that name.
        """
        if name not in preset_names():
            raise ConfigError(f"there is no hardware {name!r}", where="--hardware", remedy=did_you_mean(name, preset_names()))
        values = read_layers(recipes=[name]).merged()
        hardware = HardwareConfig(**values["hardware"])
        preset = cls._of(name, hardware, max_memory_gb, values["training"], dtype or values["model"]["dtype"])
        return dataclasses.replace(preset, device_map=device_map)

    @classmethod
    def of(cls, config: RunConfig) -> Preset:
        """The machine and the switches of a run; without a `hardware` section this computer."""
        hardware = config.hardware or cls.read(CPU).hardware
        training = dict(config.training)
        if training.get("bf16") is None:
            training["bf16"] = not hardware.is_cpu and not training.get("fp16") and config.model.dtype == "float32"
        preset = cls._of(hardware.name, hardware, None, training, config.model.dtype)
        return dataclasses.replace(preset, device_map=config.model.device_map)

    @classmethod
    def _of(cls, name: str, hardware: HardwareConfig, max_memory_gb: float | None, training: Mapping[str, Any], dtype: str) -> Preset:
        if dtype == "float64":
            raise ConfigError("no plan is made of float64 weights", where="--dtype, model.dtype", remedy="Use float32, bfloat16 or float16")
        devices = [device.model_copy(update={"memory_gb": device.memory_gb or own_memory_gb()}) for device in hardware.devices]
        changes = {"devices": devices, "max_memory_gb": max_memory_gb or hardware.max_memory_gb}
        return cls(name, hardware.model_copy(update=changes), training, dtype)

    def workload(self, work: Workload) -> Workload:
        """The same work with the recipe's switches. Quantised weights that would be split raise ConfigError, as in training."""
        if work.quantization and self.device_map:
            what = "quantised weights are not spread over devices"
            raise ConfigError(what, where="--device-map and --quantization", remedy="Leave one of the two out")
        fsdp = self.training.get("fsdp_config") or {}
        whole = not self.training.get("fsdp") and self.training.get("deepspeed") != "zero3"
        return dataclasses.replace(
            work,
            precision="bfloat16" if self.dtype in ("bfloat16", "float16") else "mixed" if self.training["bf16"] else "float32",
            checkpointing=self.training.get("activation_checkpointing", fsdp.get("activation_checkpointing", False)),
            optimiser="adamw_8bit" if "8bit" in self.training.get("optim", "") else "adamw",
            shards=1 if whole else self.hardware.count,
            split=self.hardware.count if self.device_map and whole and not self.hardware.is_cpu else 1,
            offload=bool(fsdp.get("cpu_offload")),
            host_optimiser=bool(self.training.get("optimizer_offload")),
            accumulate=self.training.get("gradient_accumulation_steps", 1) > 1,
        )

    @property
    def device(self) -> str | None:
        """As torch names it, where this machine has the preset's one device; else None."""
        if self.hardware.is_cpu:
            return "cpu"
        if self.hardware.count > 1 or not torch.cuda.is_available():
            return None
        found = set(torch.cuda.get_device_name().replace("-", " ").split())
        return "cuda" if found.issuperset(self.hardware.devices[0].name.split()) else None


def own_memory_gb() -> float:
    """The memory of this computer, in 1e9 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


class Planner:
    """Plans one blueprint for several machines; what it reads off the architecture is read once.

    Args:
        blueprint: the model.
        work: what is asked for; the presets set precision, checkpointing, optimiser and shards.
    """

    def __init__(self, blueprint: Blueprint, work: Workload):
        self.blueprint, self.work = blueprint, work
        self.network = functools.cache(self._network)

    def _network(self, precision: Precision) -> Network:
        return self.blueprint.network(dataclasses.replace(self.work, precision=precision))

    def plan(self, preset: Preset, batch: int | None = None) -> Plan:
        """The plan for a preset; `batch` None: the largest that fits. On the CPU this calibrates, for some seconds."""
        plan = make_plan(self.network, preset.workload(self.work), preset.hardware, batch=batch)
        if not preset.hardware.is_cpu or not plan.fits:
            return plan
        return dataclasses.replace(plan, seconds=calibrate(self.blueprint, self.network(plan.workload.precision), plan.workload))

    def compare(self, preset: Preset, batch: int) -> dict[str, float]:
        """Predict a step of this batch, then make such steps here (with AdamW in the weights' own precision).

        Raises:
            ConfigError: this machine is another, the step does not fit it, or its weights are quantised.
        """
        if self.work.quantization:
            raise ConfigError("steps on quantised weights are not measured", where="--measure, --quantization", remedy="Plan only")
        device = preset.device
        if device is None:
            raise ConfigError("this machine has no such device", where=f"--hardware {preset.name}", remedy="Measure there, or plan only")
        plain = dataclasses.replace(preset, training={**preset.training, "optim": "adamw_torch_fused"})
        plan = self.plan(plain, batch)
        if not plan.fits or plan.seconds is None:
            raise ConfigError("the step does not fit", where="--measure", remedy=f"Use {plan.advice}")
        real = measure(self.blueprint, plan.workload, device=device)
        return {
            "batch": batch,
            "predicted GB": plan.memory.total / 1e9,
            "measured GB": real.peak_bytes / 1e9,
            "memory ratio": plan.memory.total / real.peak_bytes,
            "predicted seconds": plan.seconds,
            "measured seconds": real.seconds,
            "time ratio": plan.seconds / real.seconds,
        }
