"""Settings of optimizer and schedule that were changed for a resumed run. The state that transformers
restores holds the earlier ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

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
