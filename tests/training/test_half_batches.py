"""A full memory halves the micro-batches, once, and changes nothing but rounding."""

from __future__ import annotations

import pytest
import torch

from tests.diffusion_gemma import save_published
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import make, ranks, weights
from unmask.models.load import load
from unmask.training.trainer import DiffusionTrainer

RUN = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "gradient_accumulation_steps": 2}
SAID = (
    "step 1: the device's memory is full: micro-batches of 4 rows .*per_device_train_batch_size=2 "
    ".*accumulation_steps=4"
)


def filled(monkeypatch: pytest.MonkeyPatch, *, fails_at: set[int], largest: int = 4) -> None:
    """Memory is full in these calls of the loss, after part of the gradients, and for more rows than
    `largest`."""
    whole, calls = DiffusionTrainer.micro_step, [0]

    def stepping(
        trainer: DiffusionTrainer, model: torch.nn.Module, batch: object, items: object
    ) -> torch.Tensor:
        calls[0] += 1
        if calls[0] in fails_at or trainer.count_samples(batch) > largest:
            whole(trainer, model, batch, items)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(trainer, model, batch, items)

    monkeypatch.setattr(DiffusionTrainer, "micro_step", stepping)


@partly_slow("verb", ["pretrain", "sft", "dpo", "kto", "grpo"], 1, 4)
@partly_slow("call", [3, 4], 1)  # the first and the second micro-batch of the second step
def test_a_full_memory_halves_the_micro_batches_and_changes_nothing_but_rounding(
    verb, call, tmp_path, monkeypatch
):
    more = {"reward": ranks} if verb == "grpo" else {}

    def run(name: str) -> DiffusionTrainer:
        return make(
            verb,
            tmp_path / name,
            llama_lm("causal" if verb == "pretrain" else "bidirectional", dtype=torch.float64),
            **RUN,
            **more,
        )

    straight, halved = run("straight"), run("halved")
    straight.train()
    filled(monkeypatch, fails_at={call})
    with pytest.warns(RuntimeWarning, match=SAID) as warned:
        halved.train()
    assert len(warned) == 1
    torch.testing.assert_close(
        weights(halved.lm), weights(straight.lm), rtol=0, atol=1e-6 if verb in ("dpo", "kto") else 1e-12
    )
    for one, other in zip(straight.state.log_history, halved.state.log_history, strict=True):
        metrics = [name for name in one if not name.endswith(("_runtime", "_per_second"))]
        assert {name: other[name] for name in metrics} == pytest.approx(
            {name: one[name] for name in metrics}, rel=1e-5, abs=1e-7
        )


@pytest.mark.filterwarnings("ignore:step 0")
def test_a_memory_that_is_full_again_is_an_error(tmp_path, monkeypatch):
    filled(monkeypatch, fails_at=set(), largest=1)
    with pytest.raises(torch.OutOfMemoryError):
        make("sft", tmp_path, **RUN).train()


@pytest.mark.slow
@partly_slow("method", ["cj-grpo", "agrpo"], 1)
def test_halves_of_canvases_are_conditioned_as_the_whole(method, tmp_path, monkeypatch):
    save_published(tmp_path / "base", canvas=2)
    more = {"generation_kwargs": {"max_denoising_steps": 4, "entropy_bound": 2.0}, "reward": ranks}
    trained = []
    for number, fails_at in enumerate(({}, {3})):
        lm = load(tmp_path / "base", dtype="float64")
        run = make("grpo", tmp_path / str(number), lm, method=method, epsilon=None, **RUN, **more)
        if fails_at:
            filled(monkeypatch, fails_at=fails_at)
            with pytest.warns(RuntimeWarning, match=SAID):
                run.train()
        else:
            run.train()
        trained.append(weights(lm))
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)
