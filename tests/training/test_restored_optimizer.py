"""A restored schedule continues with changed settings as if they had always been set."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import get_scheduler

from tests.training.tiny_runs import PAIRS, make
from unmask.training.optimizers import RATE, apply_to_groups, apply_to_schedule, hyperparameters

KINDS = ("linear", "cosine", "constant_with_warmup")


def made(kind, rate, warmup, total, *, tensors):
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": decay} for decay in (0.1, 0.0)]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(rate) if tensors else rate)
    first = hyperparameters(optimizer)
    return (
        optimizer,
        get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total),
        copy.deepcopy(first),
    )


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize(("before", "after"), [*itertools.product(KINDS, KINDS)])
def test_the_rates_are_those_of_a_run_with_these_settings(before, after, tensors):
    def rates(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            found.append([float(group["lr"]) for group in optimizer.param_groups])
            assert [float(rate) for rate in scheduler.get_last_lr()] == found[-1]
            optimizer.step()
            scheduler.step()
        return found

    earlier, schedule, _ = made(before, 1e-3, 2, 10, tensors=tensors)
    rates(earlier, schedule, 3)
    optimizer, scheduler, groups = made(after, 5e-4, 4, 12, tensors=tensors)
    new = copy.deepcopy(scheduler.state_dict())
    optimizer.load_state_dict(earlier.state_dict())
    scheduler.load_state_dict(copy.deepcopy(schedule.state_dict()))
    apply_to_groups(optimizer, groups)
    apply_to_schedule(scheduler, new, groups, 3, {RATE})
    straight = rates(*made(after, 5e-4, 4, 12, tensors=tensors)[:2], 8)
    assert rates(optimizer, scheduler, 5) == straight[3:]


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_a_metric_begins_again(kind, tmp_path):
    run = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_dataset": PAIRS,
    }
    run["lr_scheduler_type"] = kind
    make("sft", tmp_path, **run).train()
    for changed, rate in ({"max_steps": 3}, 1e-2), ({"max_steps": 3, "learning_rate": 5e-3}, 5e-3):
        resumed = make("sft", tmp_path, **run, **changed)
        resumed.train(resume_from_checkpoint=tmp_path / "checkpoint-2")
        assert [line["learning_rate"] for line in resumed.state.log_history if "learning_rate" in line][
            -1
        ] == rate
