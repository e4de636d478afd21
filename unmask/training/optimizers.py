"""Checks of optimizers before the first step, and an optimizer in host memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from unmask.errors import ConfigError, first_line
from unmask.training.hardware_checks import TrainedModel, require

OF_TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
OF_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
STOCHASTIC_ROUNDING = "bf16_stochastic_round"
"""The entry of `optim_args` for unbiased stochastic rounding of updates of bfloat16 weights."""


def check_optimizer(args: TrainingArguments) -> None:
    """Try an optimizer of bitsandbytes on the device, and check that torchao is installed for its own; transformers checks the others.

    Raises:
        ConfigError: bitsandbytes is not installed, cannot work on the device, or would update shards; torchao is not installed.
    """
    name = OptimizerNames(args.optim).value
    if name in OF_TORCHAO:
        require("torchao", "torchao", where="optim")
    if "torch" in name or not re.search("8bit|bnb|paged|lion|ademamix", name):
        return
    require("bitsandbytes", "cuda", where="optim")
    if args.fsdp:
        remedy = "Use adamw_torch_8bit (torchao's), or adamw_torch"
        raise ConfigError(f"{name} of bitsandbytes cannot update the shards of FSDP", where="optim and fsdp", remedy=remedy)
    import bitsandbytes

    probe = nn.Parameter(torch.zeros(4096, device=args.device))  # smaller tensors stay in 32 bits
    probe.grad = torch.zeros_like(probe)
    try:
        bitsandbytes.optim.AdamW8bit([probe]).step()
    except (RuntimeError, NotImplementedError) as error:
        what = f"{name} cannot work on {args.device.type} ({first_line(error)})"
        raise ConfigError(what, where="optim", remedy="Use adamw_torch, or a GPU") from error


@contextmanager
def naming_missing_library() -> Iterator[None]:
    """Inside, an error about an optimizer's library names the setting.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(first_line(error), where="optim", remedy="Install it, or use adamw_torch") from error


def check_rounding(args: Any, subject: TrainedModel) -> None:
    """Refuse stochastic rounding where it has no effect.

    Raises:
        ConfigError: weights of another dtype than bfloat16, or an optimizer without it.
    """
    if STOCHASTIC_ROUNDING not in (args.optim_args or ""):
        return
    name = OptimizerNames(args.optim).value
    if name not in OF_TORCHAO:
        what = f"{name} does not support {STOCHASTIC_ROUNDING}"
        raise ConfigError(what, where="optim_args and optim", remedy=f"Use optim {' or '.join(OF_TORCHAO)}")
    if subject.adapters or subject.dtype != torch.bfloat16:
        other, remedy = ("lora", "lora") if subject.adapters else ("model.dtype", "set model.dtype to bfloat16")
        what = f"{STOCHASTIC_ROUNDING}, but no trained weight is in bfloat16"
        raise ConfigError(what, where=f"optim_args and {other}", remedy=f"Leave optim_args out, or {remedy}")


def check_offload(args: Any) -> None:
    """Refuse `optimizer_offload` where it has no effect, or a wrong one.

    Raises:
        ConfigError: sharded weights, float16 with its scaler, or an optimizer that differs between CPU and GPU.
    """
    if not args.optimizer_offload:
        return
    if args.fsdp or args.deepspeed:
        where = f"optimizer_offload and {'fsdp' if args.fsdp else 'deepspeed'}"
        remedy = "Leave optimizer_offload out; FSDP has fsdp_config.cpu_offload, DeepSpeed offload_optimizer"
        raise ConfigError("sharding has its own offload", where=where, remedy=remedy)
    if args.fp16:
        what = "the scaler of float16 reads gradients on the GPU"
        raise ConfigError(what, where="optimizer_offload and fp16", remedy="Use bf16")
    name = OptimizerNames(args.optim).value
    if name not in OF_TORCH:
        remedy = f"Use one of {', '.join(OF_TORCH)}, or --recipe offload"
        raise ConfigError(f"{name} cannot keep its state in host memory", where="optimizer_offload and optim", remedy=remedy)


def keep_on_host(optimizer: Optimizer) -> None:
    """Move an optimizer before its first step to host memory, with copies of the weights in float32 or better.

    Before a step the gradients go to the host, and those on the device are freed; after it the weights come back, rounded to their
    dtype. The copies accumulate small updates, so that bfloat16 weights lose none (ZeRO-Offload, Ren et al. 2021). They are part of
    the optimizer's `state_dict`.
    """
    pairs: list[tuple[nn.Parameter, Tensor]] = []
    for group in optimizer.param_groups:
        copies = [_on_host(weight.detach()) for weight in group["params"]]
        pairs += zip(group["params"], copies, strict=True)
        group["params"] = copies

    def fetch(*_: Any) -> None:
        for weight, copy in pairs:
            copy.grad = None if weight.grad is None else weight.grad.to("cpu").to(copy.dtype)
            weight.grad = None

    @torch.no_grad()
    def send(*_: Any) -> None:
        for weight, copy in pairs:
            weight.copy_(copy)
            copy.grad = None

    def save(_: Optimizer, state: dict[str, Any]) -> None:
        if state["state"]:  # before the first step they equal the weights
            state["host_weights"] = [copy for _, copy in pairs]

    @torch.no_grad()
    def load(loading: Optimizer, state: dict[str, Any]) -> None:
        for (_, copy), saved in zip(pairs, state.pop("host_weights", ()), strict=False):
            copy.copy_(saved)

    optimizer.register_step_pre_hook(fetch)
    optimizer.register_step_post_hook(send)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _on_host(weight: Tensor) -> Tensor:
    """A copy for the optimizer, in pinned memory if there is a GPU."""
    copy = torch.empty_like(
        weight, device="cpu", dtype=torch.promote_types(weight.dtype, torch.float32), pin_memory=weight.device.type == "cuda"
    )
    return copy.copy_(weight)
