"""Checks of the settings for memory and speed before the first step, so that none is silently ignored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, extract_model_from_parallel
from transformers.training_args import OptimizerNames
from transformers.utils import is_liger_kernel_available

from unmask.config.run import HardwareConfig
from unmask.errors import ConfigError, TrainingError, first_line
from unmask.models.adapters import quantized
from unmask.models.diffusion_lm import DiffusionLM
from unmask.training.sharding import check_sharding, weight_sharding_setting

TORCHAO_OPTIMIZERS = ("adamw_torch_8bit", "adamw_torch_4bit")
# in `optim_args`: unbiased rounding of the updates of bfloat16 weights
STOCHASTIC_ROUNDING = "bf16_stochastic_round"


def amp_supported(bf16: bool) -> bool:
    """Whether mixed precision can train here: float16 needs a GPU; bfloat16 a GPU that supports it, or a
    CPU."""
    if torch.cuda.is_available():
        return not bf16 or torch.cuda.is_bf16_supported()
    return bf16


def amp_faster() -> bool:
    """Whether mixed precision is known to be faster here: on a GPU with bfloat16 (Ampere or later). Only some
    CPUs are faster in it."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@contextlib.contextmanager
def bounded_memory(hardware: HardwareConfig | None, device: torch.device) -> Iterator[None]:
    """A context in which torch's allocator takes at most `max_memory_gb` of a GPU, and a full device (or a
    full allowed part of it) raises a TrainingError that says what to do. Memory of other libraries (contexts,
    NCCL) is not counted. A CPU has no such limit: one on the address space would count mapped files."""
    limit = None if hardware is None else hardware.max_memory_gb
    if limit is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit * 1e9 / total), device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = (
            "Use a smaller batch or activation_checkpointing; --dry-run estimates a step, and says what "
            "makes it fit"
        )
        where = "training" if limit is None else "hardware.max_memory_gb"
        what = f"the device's memory is full ({first_line(error)})"
        raise TrainingError(what, where=where, remedy=remedy) from error


def set_backends(args: Any) -> None:
    """Set TF32 (which transformers does once in a process) and cuDNN's benchmark mode. Raises ConfigError
    without cuDNN."""
    backends: Any = torch.backends
    if args.tf32 is not None:
        backends.fp32_precision = "tf32" if args.tf32 else "ieee"
    # with torch_compile transformers turns it on
    if args.tf32 is not None or backends.fp32_precision == "tf32":
        # The older flags as well: torch refuses to read one API if only the other was set.
        backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = backends.fp32_precision == "tf32"
    if args.cudnn_benchmark:
        if args.use_cpu or not (torch.cuda.is_available() and torch.backends.cudnn.is_available()):
            raise ConfigError("there is no GPU with cuDNN", where="cudnn_benchmark", remedy="Leave it out")
        torch.backends.cudnn.benchmark = True


def check_kernels(args: Any) -> None:
    """Raise ConfigError for `use_liger_kernel` without its library."""
    if args.use_liger_kernel and not is_liger_kernel_available():
        raise ConfigError(
            "needs liger-kernel, which is not installed",
            where="use_liger_kernel",
            remedy="Install it with pip install liger-kernel, or leave it out",
        )


@dataclass(frozen=True)
class TrainedModel:
    """What the checks need to know of a model, which may not be loaded yet."""

    attention: str
    dtype: torch.dtype  # of the weights
    adapters: bool  # whether adapters are trained in their place
    quantized: bool
    split: bool  # whether its layers are on several devices


def refuse_unsupported(lm: DiffusionLM, args: Any, *, adapters: bool) -> None:
    """Raise ConfigError for settings that this model does not support, before the first step. `adapters`:
    whether adapters are trained, including those that are still to be added."""
    if lm.recurrent and weight_sharding_setting(args) == "deepspeed":
        raise ConfigError(
            "ZeRO 3 gathers weights at every step of a recurrent layer, of which processes have different "
            "numbers",
            where="deepspeed",
            remedy="Use zero1, zero2 or fsdp",
        )
    kwargs = args.activation_checkpointing_kwargs
    if lm.canvas and isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        raise ConfigError(
            "reentrant checkpoints lose the gradients of the encoder's keys",
            where="activation_checkpointing_kwargs",
            remedy="Leave use_reentrant out",
        )
    check_hardware_settings(args, TrainedModel(lm.attention, lm.dtype, adapters, quantized(lm), is_split(lm)))


def refuse_other_model(model: Any, lm: DiffusionLM) -> None:
    """Raise ConfigError unless a model, which may be wrapped for several processes, is the one that is
    trained."""
    if extract_model_from_parallel(model) is not extract_model_from_parallel(lm.model):
        what = "is not the model that the trainer was made with, and would not be trained"
        raise ConfigError(what, where="trainer.model", remedy="Make a trainer with this model")


def check_hardware_settings(args: Any, model: TrainedModel, *, planned: bool = False) -> None:
    """Raise ConfigError for settings that this model ignores or does not support. If two settings conflict,
    `where` names both, joined by " and ". `planned`: the run is only planned here, and other processes will
    make it."""
    if model.quantized and not model.adapters:
        possible = not (args.excludes_adapters or weight_sharding_setting(args))
        remedy = f"{'Train adapters (lora), or load' if possible else 'Load'} it without quantization"
        raise ConfigError(
            "quantized weights take no gradients", where="model.quantization and lora", remedy=remedy
        )
    check_split(args, model)
    check_sharding(args, adapters=model.adapters, planned=planned)
    check_flash_attention(args, model)
    check_rounding(args, model)


def check_rounding(args: Any, model: TrainedModel) -> None:
    """Raise ConfigError for stochastic rounding by an optimizer without it, or of weights that are not in
    bfloat16."""
    if STOCHASTIC_ROUNDING not in (args.optim_args or ""):
        return
    name = OptimizerNames(args.optim).value
    if name not in TORCHAO_OPTIMIZERS:
        what = f"{name} does not support {STOCHASTIC_ROUNDING}"
        names = " or ".join(TORCHAO_OPTIMIZERS)
        use = f", or use optim {names} and train all weights in bfloat16 (model.dtype)"
        remedy = f"Leave optim_args out{'' if args.optimizer_offload else use}"
        raise ConfigError(what, where="optim_args and optim", remedy=remedy)
    if model.adapters or model.dtype != torch.bfloat16:
        other, remedy = ("lora", "lora") if model.adapters else ("model.dtype", "set model.dtype to bfloat16")
        what = f"{STOCHASTIC_ROUNDING}, but no trained weight is in bfloat16"
        raise ConfigError(what, where=f"optim_args and {other}", remedy=f"Leave optim_args out, or {remedy}")


def check_flash_attention(args: Any, model: TrainedModel) -> None:
    """Raise ConfigError for FlashAttention 2 without a GPU that it runs on, in 32 bits, or with attention by
    blocks."""
    if not args.flash_attention:
        return
    if args.use_cpu or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        where = "flash_attention and use_cpu" if args.use_cpu else "flash_attention"
        raise ConfigError(
            "there is no GPU that it runs on (Ampere or later)",
            where=where,
            remedy="Leave flash_attention out",
        )
    if not (args.bf16 or args.fp16 or model.dtype in (torch.bfloat16, torch.float16)):
        remedy = "Set bf16, or leave flash_attention out"
        raise ConfigError(
            "it computes in 16 bits only", where="flash_attention and model.dtype", remedy=remedy
        )
    if model.attention == "block_causal":
        remedy = "Leave flash_attention out: FlexAttention, which supports blocks, is used automatically"
        raise ConfigError(
            "it does not support block-causal attention",
            where="flash_attention and model.attention",
            remedy=remedy,
        )


def compile_in_place(lm: DiffusionLM, args: Any, accelerator: Accelerator) -> None:
    """Compile the model. Accelerate would compile a wrapper, which rollouts, log-probabilities and evaluation
    do not use."""
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
    lm.compile(backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)


def is_split(lm: DiffusionLM) -> bool:
    """Whether the layers of a model are on several devices (`model.device_map`)."""
    return len(set((getattr(lm.model, "hf_device_map", None) or {}).values())) > 1


def check_split(args: Any, model: TrainedModel) -> None:
    """Raise ConfigError for several GPUs in one process, to which transformers would copy the model; or, for
    a model split over devices, for what a split model does not support. FlashAttention reads the documents,
    and rollouts the cache, on one device only."""
    if not model.split:
        if args.n_gpu > 1:
            raise ConfigError(
                f"{args.n_gpu} GPUs in one process",
                where="device",
                remedy="Start it with accelerate launch or torchrun",
            )
        return
    for name in ("fsdp", "deepspeed", "torch_compile", "flash_attention"):
        if getattr(args, name):
            what, remedy = (
                f"{name} on a model that is split over devices",
                f"Leave one of the two out (model.device_map=null, {name}=null)",
            )
            raise ConfigError(what, where=f"model.device_map and {name}", remedy=remedy)
    for what, on in {
        "several processes": args.world_size > 1,
        "rollouts": args.generates,
    }.items():
        if on:
            remedy = "Leave it out" + (
                ", or start one process without a launcher" if args.world_size > 1 else ""
            )
            raise ConfigError(
                f"{what} on a model that is split over devices", where="model.device_map", remedy=remedy
            )


def watch_for_anomalies() -> None:
    """Make torch name the operation that produces a NaN, and transformers log in detail."""
    torch.autograd.set_detect_anomaly(True)
    transformers.logging.set_verbosity_info()
