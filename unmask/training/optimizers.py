"""Checks of optimizers before the first step, an optimizer in host memory, and settings of optimizer and
schedule that were changed for a resumed run."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from unmask.errors import ConfigError, first_line, require
from unmask.training.hardware_checks import TORCHAO_OPTIMIZERS

TORCH_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")


@contextmanager
def naming_missing_library() -> Iterator[None]:
    """A context in which an optimizer whose library is not installed is a ConfigError."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            first_line(error), where="optim", remedy="Install it, or use adamw_torch"
        ) from error


def updates_in_backward(args: TrainingArguments) -> bool:
    """Whether the optimizer updates each weight within the backward pass."""
    return re.search("lomo|layerwise", OptimizerNames(args.optim).value) is not None


def check_optimizer(args: TrainingArguments) -> None:
    """Raise ConfigError if torchao or bitsandbytes is needed and not installed, or bitsandbytes cannot work
    on the device or with FSDP."""
    name = OptimizerNames(args.optim).value
    if name in TORCHAO_OPTIMIZERS:
        require("torchao", where="optim")
    if "torch" in name or not re.search("8bit|bnb|paged|lion|ademamix", name):
        return
    require("bitsandbytes", where="optim")
    if args.fsdp:
        remedy = "Use adamw_torch_8bit (torchao's), or adamw_torch"
        raise ConfigError(
            f"{name} of bitsandbytes cannot update the shards of FSDP", where="optim and fsdp", remedy=remedy
        )
    import bitsandbytes

    probe = nn.Parameter(torch.zeros(4096, device=args.device))  # smaller tensors stay in 32 bits
    probe.grad = torch.zeros_like(probe)
    try:
        bitsandbytes.optim.AdamW8bit([probe]).step()
    except (RuntimeError, NotImplementedError) as error:
        what = f"{name} cannot work on {args.device.type} ({first_line(error)})"
        raise ConfigError(what, where="optim", remedy="Use adamw_torch, or a GPU") from error


def check_offload(args: Any) -> None:
    """Raise ConfigError for `optimizer_offload` with sharded weights, float16 and its scaler, or an optimizer
    that differs on a CPU."""
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
    if name not in TORCH_OPTIMIZERS:
        remedy = f"Use one of {', '.join(TORCH_OPTIMIZERS)}, or --recipe offload"
        raise ConfigError(
            f"{name} cannot keep its state in host memory", where="optimizer_offload and optim", remedy=remedy
        )


def keep_on_host(optimizer: Optimizer) -> None:
    """Move an optimizer before its first step to host memory, with copies of the weights in float32 or
    better.

    Before a step the gradients go to the host, and those on the device are freed; after it the weights come
    back, rounded to their dtype. The copies accumulate small updates, so that bfloat16 weights lose none
    (ZeRO-Offload, Ren et al. 2021). They are part of the optimizer's `state_dict`.
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
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.empty_like(weight, device="cpu", dtype=dtype, pin_memory=weight.device.type == "cuda").copy_(
        weight
    )


# Settings of optimizer and schedule that were changed for a resumed run. The state that transformers
# restores holds the earlier ones.

RATE = "training.learning_rate"
GROUP_SETTINGS = {
    RATE,
    "training.weight_decay",
    "training.adam_beta1",
    "training.adam_beta2",
    "training.adam_epsilon",
}
METRIC_SCHEDULE_SETTINGS = {RATE, "training.lr_scheduler_type", "training.lr_scheduler_kwargs"}
SCHEDULE_SETTINGS = {
    *METRIC_SCHEDULE_SETTINGS,
    "training.warmup_steps",
    "training.max_steps",
    "training.num_train_epochs",
}
METRIC_SETTINGS = {"training.metric_for_best_model", "training.greater_is_better"}
Groups = Sequence[Mapping[str, Any]]


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """The hyperparameters of each group of weights; `lr` is the base rate if no schedule has changed it
    yet."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def apply_settings(
    optimizer: Any,
    scheduler: Any,
    groups: Groups,
    first_schedule: Mapping[str, Any],
    step: int,
    changed: Collection[str],
) -> None:
    """Let the changed settings act on an optimizer and a schedule that were restored. Arguments as in
    `apply_to_schedule`; scheduler None: it is the user's."""
    if not GROUP_SETTINGS.isdisjoint(changed):
        apply_to_groups(optimizer, groups)
    if scheduler is not None:
        apply_to_schedule(scheduler, first_schedule, groups, step, changed)


def apply_to_groups(optimizer: Any, new: Groups) -> None:
    """Set the changed hyperparameters of a restored optimizer. `new`: as it was made, before it was
    restored."""
    for group, made in zip(optimizer.param_groups, new, strict=True):
        for name in ("weight_decay", "betas", "eps"):
            if name in group:
                group[name] = made[name]
        if "initial_lr" in group:
            group["initial_lr"] = made["lr"]


def apply_to_schedule(
    scheduler: Any, new: Mapping[str, Any], groups: Groups, step: int, changed: Collection[str]
) -> None:
    """Let a restored schedule continue with changed settings. One that follows a metric begins again with
    them.

    Args:
        scheduler: the restored schedule.
        new: its state as it was made, before it was restored.
        groups: the hyperparameters of its optimizer, as that was made.
        step: the steps so far.
        changed: the names of the settings that were changed.
    """
    acting = SCHEDULE_SETTINGS if isinstance(scheduler, LambdaLR) else METRIC_SCHEDULE_SETTINGS
    if acting.isdisjoint(changed):
        return
    scheduler.load_state_dict(dict(new))
    if isinstance(scheduler, LambdaLR):
        scheduler.last_epoch, scheduler._step_count = step - 1, step + 1
        scheduler.step()
        return
    for group, made in zip(scheduler.optimizer.param_groups, groups, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(made["lr"])
        else:
            group["lr"] = made["lr"]
