"""On a GPU: the items of a task, and likelihoods of rows, are those of a CPU."""

from __future__ import annotations

import pytest

from tests.evaluation.test_tasks import DRAWN, ROWS, TASK, float64_model
from tests.helpers import GPU, needs_gpu
from tests.tiny import toy_lm
from unmask import log_likelihood
from unmask.evaluation.tasks import evaluate_task
from unmask.models.diffusion_lm import DiffusionLM

pytestmark = needs_gpu


def there(lm: DiffusionLM) -> DiffusionLM:
    copy = lm.frozen_copy()
    copy.model.to(GPU)
    return copy


def test_a_task_has_the_items_of_a_cpu() -> None:
    lm = float64_model()
    found, expected = (
        evaluate_task(model, TASK, ROWS[:4], DRAWN, attempts=2, pass_at=[1, 2]).items
        for model in (there(lm), lm)
    )
    assert found == expected


@pytest.mark.parametrize("kind", ["bidirectional", "blocks of three with a shift", "causal without a shift"])
@pytest.mark.parametrize("estimator", ["exact", "elbo"])
def test_likelihoods_are_those_of_a_cpu(kind: str, estimator: str) -> None:
    lm = toy_lm(kind)
    found, expected = (
        log_likelihood(model, ["ab", "b"], ["ba", "abab"], estimator, samples=2).tolist()
        for model in (there(lm), lm)
    )
    assert found == pytest.approx(expected, abs=1e-9)
