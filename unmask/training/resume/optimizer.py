"""Settings of optimizer and schedule that were changed for a resumed run. The state that transformers restores holds the earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

RATE = "training.learning_rate"
OF_GROUPS = {RATE, "training.weight_decay", "training.adam_beta1", "training.adam_beta2", "training.adam_epsilon"}
OF_METRIC_SCHEDULES = {"training.lr_scheduler_type", "training.lr_scheduler_kwargs"}
OF_SCHEDULE = {RATE, *OF_METRIC_SCHEDULES, "training.warmup_steps", "training.max_steps", "training.num_train_epochs"}
Groups = Sequence[Mapping[str, Any]]


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """The hyperparameters of each group of weights; `lr` is the base rate if no schedule has changed it yet."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def apply_to_groups(optimizer: Any, new: Groups) -> None:
    """Set the changed hyperparameters of a restored optimizer. `new`: as it was made, before it was restored."""
    for group, made in zip(optimizer.param_groups, new, strict=True):
        for name in ("weight_decay", "betas", "eps"):
            if name in group:
                group[name] = made[name]
        if "initial_lr" in group:
            group["initial_lr"] = made["lr"]


def apply_to_schedule(scheduler: Any, new: Mapping[str, Any], groups: Groups, step: int, changed: Mapping[str, Any], rate: float) -> None:
    """Let a restored schedule continue with changed settings.

    Args:
        scheduler: the restored schedule.
        new: its state as it was made, before it was restored.
        groups: the hyperparameters of its optimizer, as that was made.
        step: the steps so far.
        changed: the earlier values of the settings that were changed.
        rate: the base learning rate now.
    """
    restored, optimizer = scheduler.state_dict(), scheduler.optimizer
    same_class = restored.keys() == new.keys()
    if isinstance(scheduler, LambdaLR):
        _replace_state(scheduler, new)
        scheduler.last_epoch = restored["last_epoch"] if same_class else step
        scheduler._step_count = scheduler.last_epoch + 1
        rates = [made["lr"] * factor(scheduler.last_epoch) for made, factor in zip(groups, scheduler.lr_lambdas, strict=True)]
        scheduler.base_lrs = [made["lr"] for made in groups]
    else:  # it follows a metric, and has changed the rate by a factor so far
        if not same_class or OF_METRIC_SCHEDULES & changed.keys():
            _replace_state(scheduler, new)
        earlier = changed.get(RATE, rate)
        factor = rate / earlier if earlier else 0.0
        rates = [
            float(group["lr"]) * factor if same_class and factor else made["lr"]
            for group, made in zip(optimizer.param_groups, groups, strict=True)
        ]
    for group, value in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _replace_state(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load a state without keeping what a state of another class left."""
    for name in scheduler.state_dict().keys() - state.keys():
        vars(scheduler).pop(name, None)
    scheduler.load_state_dict(dict(state))
