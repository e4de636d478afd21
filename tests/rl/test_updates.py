"""In the first update on a rollout the ratio is exactly 1; each update has other masks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import partly_slow
from tests.rl.updates import RATIOS, check_first_updates, watched
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, make, ranks


@partly_slow("method", RATIOS, *range(0, len(RATIOS), 2))
@partly_slow("attention", ["bidirectional", "block_causal", "causal"], 1)
def test_the_first_update_has_a_ratio_of_one_and_no_divergence_bit_for_bit(method, attention, tmp_path):
    lm = llama_lm(attention, 2 if attention == "block_causal" else None, attention_dropout=0.3)
    check_first_updates(method, tmp_path, lm)


@pytest.mark.parametrize("method", ["diffu-grpo", "espo"])
def test_the_first_update_on_each_rollout_has_a_ratio_of_one(method, tmp_path):
    shape = {"num_iterations": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "beta": 0.1}
    trainer = make("grpo", tmp_path, llama_lm(attention_dropout=0.3), reward=ranks, method=method, **shape)
    calls = watched(trainer)
    trainer.train()
    ratios, kls = [ratio for ratio, _ in calls], [kl for _, kl in calls]
    assert len(calls) == 8 and ratios[0:2] == [0, 0] == ratios[4:6] and min(ratios[2:4] + ratios[6:8]) > 0
    assert kls[0:2] == [0, 0] and min(kls[2:]) > 0


ONE, MULTI = {"prompt_mask_rate": 0.5}, {"method": "coupled-grpo", "logprob_batch_size": 2}


@pytest.mark.parametrize(
    ("accumulation", "iterations", "more"), [(2, 2, ONE), (2, 12, ONE), (3, 4, ONE), (2, 2, MULTI)]
)
def test_every_mask_is_planned_once_and_used_once(accumulation, iterations, more, tmp_path, monkeypatch):
    planned: list[Any] = []
    used: list[Any] = []
    shape = {
        "gradient_accumulation_steps": accumulation,
        "num_iterations": iterations,
        "max_steps": 2 * iterations,
    }
    trainer = make("grpo", tmp_path, per_device_train_batch_size=2, rows=PAIRS[:6], **shape, **more)

    def plan(*arguments: Any) -> Any:
        planned.append(method_plan(*arguments))
        return planned[-1]

    method, method_plan = trainer.method, trainer.method.plan
    object.__setattr__(method, "plan", plan)
    step = trainer.training_step
    monkeypatch.setattr(
        trainer,
        "training_step",
        lambda model, batch, *rest: used.append(batch.views) or step(model, batch, *rest),
    )
    trainer.train()
    assert len(planned) == 2 * accumulation * iterations
    assert len(used) == len(planned)
    # of a micro-batch; two that are equal by chance may be one
    for updates in range(0, len(planned), iterations):
        at = updates // iterations
        theirs = used[at // accumulation * accumulation * iterations + at % accumulation :: accumulation][
            :iterations
        ]
        assert all(
            views.equals(plan)
            for views, plan in zip(theirs, planned[updates : updates + iterations], strict=True)
        )
    # of one rollout, by chance
    assert len({views.hidden_BMT.numpy().tobytes() for views in planned[:iterations]}) > 1
