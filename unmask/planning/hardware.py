"""Hardware recipes as machines for which a training step is estimated."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unmask.config.layers import check_hardware, hardware_recipe_names, read_layers
from unmask.config.run import HardwareConfig, RunConfig
from unmask.errors import ConfigError
from unmask.models.hooks.head import logits_at_once
from unmask.planning.blueprint import ModelSpec
from unmask.planning.calibration import calibrate, measure
from unmask.planning.cost_model import Network, Precision, Workload
from unmask.planning.estimates import StepEstimate, estimate_step
from unmask.planning.step_time import (
    CPU_LAUNCH_SECONDS,
    BoundBy,
    DenoisingPass,
    PassCost,
    PassCosts,
    StepTime,
    pass_time,
)

CPU = "cpu"
MEASURED_ROWS = 4  # unless --batch-size is set
GENERATION_BATCHES = (1, 8, 64)
LIKELY = (CPU, "rtx4080-16gb", "rtx3090-24gb", "a6000-48gb", "h100-80gb")
"""Recipes of single devices, of different memory."""


def recipes_to_show(named: Sequence[str], **settings: Any) -> list[HardwareRecipe]:
    """The named hardware recipes; `all`: all of them; none named: likely ones, and those of this machine.
    `settings`: of `read`."""
    names = hardware_recipe_names() if named in ([], ["all"]) else named
    recipes = [HardwareRecipe.read(name, **settings) for name in names]
    return recipes if named else [recipe for recipe in recipes if recipe.name in LIKELY or recipe.device]


@dataclasses.dataclass(frozen=True)
class HardwareRecipe:
    """A machine and the settings that its recipe trains with."""

    name: str  # of the recipe
    hardware: HardwareConfig  # its devices, with the memory of each
    training: Mapping[str, Any]  # the recipe's training section
    dtype: str  # of the weights
    # how the layers of one model are spread over the devices; None: each device has all layers
    device_map: str | None = None

    @classmethod
    def read(
        cls,
        name: str,
        max_memory_gb: float | None = None,
        dtype: str | None = None,
        device_map: str | None = None,
    ) -> HardwareRecipe:
        """Read a hardware recipe; `max_memory_gb` and `dtype` override the recipe's, and `device_map` splits
        one model over its devices. Raises ConfigError if there is no such recipe."""
        check_hardware(name)
        values = read_layers(recipes=[name]).merged()
        hardware = HardwareConfig(**values["hardware"])
        hardware = hardware.model_copy(update={"max_memory_gb": max_memory_gb or hardware.max_memory_gb})
        return cls._of(name, hardware, values["training"], dtype or values["model"]["dtype"], device_map)

    @classmethod
    def of(cls, config: RunConfig) -> HardwareRecipe:
        """The machine and the switches of a run; without a `hardware` section, this computer."""
        hardware = config.hardware or cls.read(CPU).hardware
        training = dict(config.training)
        if training.get("bf16") is None:
            training["bf16"] = (
                not hardware.is_cpu and not training.get("fp16") and config.model.dtype == "float32"
            )
        return cls._of(hardware.name, hardware, training, config.model.dtype, config.model.device_map)

    @classmethod
    def _of(
        cls,
        name: str,
        hardware: HardwareConfig,
        training: Mapping[str, Any],
        dtype: str,
        device_map: str | None,
    ) -> HardwareRecipe:
        if dtype == "float64":
            raise ConfigError(
                "float64 weights cannot be estimated",
                where="--dtype, model.dtype",
                remedy="Use float32, bfloat16 or float16",
            )
        devices = [
            device.model_copy(update={"memory_gb": device.memory_gb or host_memory_gb()})
            for device in hardware.devices
        ]
        return cls(name, hardware.model_copy(update={"devices": devices}), training, dtype, device_map)

    def workload(self, work: Workload) -> Workload:
        """The same workload with the recipe's switches. Raises ConfigError for quantized weights split over
        devices, as training does."""
        if work.quantization and self.device_map:
            raise ConfigError(
                "quantized weights are not spread over devices",
                where="--device-map and --quantization",
                remedy="Leave one of the two out",
            )
        fsdp = self.training.get("fsdp_config") or {}
        whole = not self.training.get("fsdp") and self.training.get("deepspeed") != "zero3"
        precision: Precision = (
            "bfloat16"
            if self.dtype in ("bfloat16", "float16")
            else "mixed"
            if self.training["bf16"]
            else "float32"
        )
        return dataclasses.replace(
            work,
            precision=precision,
            logits_at_once=logits_at_once(torch.device("cpu" if self.hardware.is_cpu else "cuda")),
            checkpointing=self.training.get(
                "activation_checkpointing", fsdp.get("activation_checkpointing", False)
            ),
            optimizer="adamw_8bit" if "8bit" in self.training.get("optim", "") else "adamw",
            shards=1 if whole else self.hardware.count,
            split=self.hardware.count if self.device_map and whole and not self.hardware.is_cpu else 1,
            offload=bool(fsdp.get("cpu_offload")),
            host_optimizer=bool(self.training.get("optimizer_offload")),
            accumulate=self.training.get("gradient_accumulation_steps", 1) > 1,
        )

    @property
    def device(self) -> str | None:
        """Torch's name of the recipe's device if there is a single one and this machine has it, else None."""
        if self.hardware.is_cpu:
            return "cpu"
        if self.hardware.count > 1 or not torch.cuda.is_available():
            return None
        words = set(torch.cuda.get_device_name().replace("-", " ").split())
        return "cuda" if words.issuperset(self.hardware.devices[0].name.split()) else None


def host_memory_gb() -> float:
    """The memory of this computer, in 1e9 bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


class StepEstimator:
    """Estimates the training step of one model on several machines, whose recipes set precision,
    checkpointing, optimizer and shards."""

    def __init__(self, blueprint: ModelSpec, work: Workload):
        self.blueprint, self.work = blueprint, work
        self.network: Callable[[Precision], Network] = functools.cache(
            lambda precision: blueprint.network(dataclasses.replace(work, precision=precision))
        )
        self.costs: Callable[[Precision], PassCosts] = functools.cache(
            lambda precision: blueprint.pass_costs(dataclasses.replace(work, precision=precision))
        )

    def estimate(self, recipe: HardwareRecipe, batch: int | None = None) -> StepEstimate:
        """The estimate for a hardware recipe; `batch` None: the largest that fits. On the CPU this times
        steps for some seconds."""
        estimate = estimate_step(
            self.network, self.costs, recipe.workload(self.work), recipe.hardware, batch=batch
        )
        if not recipe.hardware.is_cpu or not estimate.fits:
            return estimate
        work = estimate.workload
        seconds = calibrate(self.blueprint, self.network(work.precision), work)
        bound: BoundBy = "launches" if estimate.launches * CPU_LAUNCH_SECONDS > seconds / 2 else "arithmetic"
        return dataclasses.replace(estimate, seconds=seconds, bound=bound)

    @functools.cached_property
    def cost_of_generation(self) -> PassCost:
        """The cost of a pass of generation, with bfloat16 weights: recurrent layers read one block in it, and
        all blocks in a training step; of DiffusionGemma the decoder alone reads a canvas."""
        if self.blueprint.canvas:
            block = self.blueprint.settings["block_size"]
            one = dataclasses.replace(self.work, sequence_length=0, canvas=block, precision="bfloat16")
            return self.blueprint.pass_costs(one).forward
        if not (self.blueprint.recurrent and self.work.attention == "block_causal"):
            return self.costs("bfloat16").forward
        block = self.blueprint.settings_for("block_causal")["block_size"]
        one = dataclasses.replace(self.work, sequence_length=block, precision="bfloat16")
        return self.blueprint.pass_costs(one).forward

    def generation(self, recipe: HardwareRecipe) -> dict[int, StepTime]:
        """The time of a pass of generation at temperature 0, by the number of sequences, on the first device
        of a recipe. A sequence is as long as a row of training. Empty without figures of the device (a
        CPU)."""
        context, attention = self.work.sequence_length, self.work.attention
        block = self.blueprint.settings_for(attention)["block_size"]
        network, cost = self.network(recipe.workload(self.work).precision), self.cost_of_generation
        times = {}
        for batch in GENERATION_BATCHES:
            work = DenoisingPass(
                context=context,
                attention=attention,
                block=block,
                noise=self.work.noise,
                conditioned=self.blueprint.canvas,
                batch=batch,
            )
            if (time := pass_time(network, cost, work, recipe.hardware.devices[0])) is not None:
                times[batch] = time
        return times

    def device_to_measure(self, recipe: HardwareRecipe) -> str:
        """The recipe's device. Raises ConfigError if this machine lacks it, or the weights are quantized."""
        if self.work.quantization:
            raise ConfigError(
                "steps on quantized weights are not measured",
                where="--measure, --quantization",
                remedy="Leave one of the two out",
            )
        if (device := recipe.device) is None:
            raise ConfigError(
                "this machine has no such device",
                where=f"--hardware {recipe.name}",
                remedy="Leave out --measure, or run it there",
            )
        return device

    def compare(self, recipe: HardwareRecipe, batch: int) -> dict[str, float]:
        """Predict a step of this batch, then run such steps here (with AdamW in the precision of the
        weights).

        Raises:
            ConfigError: the step does not fit, or cannot be measured (`device_to_measure`).
        """
        device = self.device_to_measure(recipe)
        plain = dataclasses.replace(recipe, training={**recipe.training, "optim": "adamw_torch_fused"})
        estimate = self.estimate(plain, batch)
        if not estimate.fits or estimate.seconds is None:
            raise ConfigError("the step does not fit", where="--measure", remedy=f"Use {estimate.advice}")
        seconds, peak = measure(self.blueprint, estimate.workload, device)
        return {
            "batch": batch,
            "predicted GB": estimate.memory.total / 1e9,
            "measured GB": peak / 1e9,
            "memory ratio": estimate.memory.total / peak,
            "predicted seconds": estimate.seconds,
            "measured seconds": seconds,
            "time ratio": estimate.seconds / seconds,
        }
