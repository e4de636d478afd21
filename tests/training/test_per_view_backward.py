"""A loss over many views has the gradient of the loss computed at once, for any split into passes, with the
memory of one pass.

Shapes: B completions, M views, T positions.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.errors import raises
from tests.helpers import partly_slow
from tests.rl.methods.rollouts import held
from tests.tiny import toy_lm
from tests.training.tiny_runs import moved, ranks, settings
from unmask.errors import TrainingError
from unmask.rl.config import GRPOConfig
from unmask.rl.methods import METHODS
from unmask.rl.methods.base import fixed_settings
from unmask.rl.trainer import GRPOTrainer, Update

CASES: list[tuple[str, dict[str, Any]]] = [
    (name, {"samples": 3} if name == "bgpo" else {}) for name in METHODS
]
CASES += [("cj-grpo", {"importance_sampling_level": "sequence"}), ("diffu-grpo", {"kl": "k1"})]
FULL, BLOCKS = ("bidirectional", None, False), ("block_causal", 3, False)
PASSES = [(*case, FULL) for case in CASES] + [
    (name, {}, BLOCKS) for name in ("diffu-grpo", "coupled-grpo", "spg", "espo", "cj-grpo")
]
ALL_AT_ONCE = 10**6


def case_id(name: str, more: dict[str, Any]) -> str:
    return " ".join([name, *map(str, more.values())])


def trainer_of(
    folder: Path,
    name: str,
    attention: tuple[str, int | None, bool] = ("bidirectional", None, False),
    **more: Any,
) -> GRPOTrainer:
    """A trainer of a toy model in float64, with a method that has a KL term; it drops no groups."""
    shape = {"num_generations": 2, "max_completion_length": 5, **held(name)}
    shape |= {} if name == "exact-gradient" else {"difficulty": [-99.0, 99.0]}  # it takes all groups
    args = GRPOConfig(**settings(folder, method=name, **shape) | more)
    trainer = GRPOTrainer(
        toy_lm(attention=attention), ranks, args, [{"prompt": prompt} for prompt in ("ab", "ba", "aab", "b")]
    )
    trainer.model.train()
    return trainer


def experience(trainer: GRPOTrainer, *sizes: int) -> list[list[Update]]:
    """Micro-batches of completions with these sizes."""
    rows = iter([trainer.train_dataset[index] for index in range(sum(sizes))])
    return trainer.collect_updates([[next(rows) for _ in range(size)] for size in sizes])


def gradients(trainer: GRPOTrainer) -> list[torch.Tensor]:
    made = [weight.grad.clone() for weight in trainer.model.parameters() if weight.grad is not None]
    trainer.model.zero_grad()
    return made


def plain(
    trainer: GRPOTrainer, update: Update, items: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss computed at once, and its gradients."""
    trainer.args.logprob_batch_size = ALL_AT_ONCE
    loss = trainer.loss_on(update, trainer.per_view.log_probs(trainer.lm, update)) / items
    loss.backward()
    return loss.detach(), gradients(trainer)


@partly_slow(
    "name, more, attention",
    PASSES,
    *range(0, len(PASSES), 4),
    ids=[f"{case_id(*case)} {kind[0]}" for *case, kind in PASSES],
)
def test_in_any_number_of_passes_the_gradient_is_that_of_the_whole(name, more, attention, tmp_path):
    trainer = trainer_of(
        tmp_path,
        name,
        attention,
        num_iterations=1 if "num_iterations" in fixed_settings(METHODS[name]) else 2,
        **more,
    )
    [updates] = experience(trainer, 4)
    seen: list[tuple[bool, int]] = []
    trainer.model.register_forward_pre_hook(
        lambda model, args, kwargs: seen.append((torch.is_grad_enabled(), len(kwargs["input_ids"]))),
        with_kwargs=True,
    )
    for update in updates:
        items = trainer.count_items(update) + 3  # as of several micro-batches
        expected, whole = plain(trainer, update, items)
        assert any((gradient != 0).any() for gradient in whole)
        scored = int(update.views.target_BMT.any(2).sum())
        for chunk in (1, 2, None, ALL_AT_ONCE) if update is updates[-1] else (1,):
            trainer.args.logprob_batch_size = chunk
            seen.clear()
            loss = trainer.training_step(trainer.model, update, items)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(gradients(trainer), whole, rtol=1e-8, atol=1e-10)
            learning, looking = (
                [rows for with_gradient, rows in seen if with_gradient == kind] for kind in (True, False)
            )
            assert max(learning) <= (chunk or 4)
            if chunk == 1 and attention != BLOCKS:
                assert len(learning) == scored
                assert bool(looking) == (not trainer.per_view.separable)
        moved(trainer.lm, 0.02)  # the weights of the next update are others


@partly_slow("name, more", CASES, *range(1, len(CASES), 4), ids=[case_id(*case) for case in CASES])
def test_accumulated_gradients_are_those_of_one_large_batch(name, more, tmp_path):
    """Masks, which do not depend on the split, are also the same."""
    trainer = trainer_of(tmp_path, name, **more)
    made = []
    for sizes in ((6,), (1, 2, 3)):
        updates = [update for [update] in experience(trainer, *sizes)]
        items = trainer._get_num_items_in_batch(updates, torch.device("cpu"))
        for update in updates:
            trainer.training_step(trainer.model, update, items)
        made.append(gradients(trainer))
    torch.testing.assert_close(made[1], made[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["diffu-grpo", "espo", "cj-grpo"])
def test_the_first_update_on_a_rollout_needs_no_scores_of_the_policy_that_sampled(name, tmp_path):
    """Its gradient is the same with and without them."""
    trainer = trainer_of(tmp_path, name, num_iterations=2)
    [[first, second]] = experience(trainer, 4)
    assert first.old_BMT is None and second.old_BMT is not None
    scored = replace(first, old_BMT=trainer.per_view.log_probs(trainer.lm, first).detach())
    made = []
    for update in (first, scored):
        trainer.training_step(trainer.model, update, trainer.count_items(update))
        made.append(gradients(trainer))
    torch.testing.assert_close(made[1], made[0], rtol=1e-8, atol=1e-10)
    assert any((gradient != 0).any() for gradient in made[0])


def test_a_loss_that_is_no_number_is_refused_in_any_pass(tmp_path):
    for name in ("cj-grpo", "spg"):
        trainer = trainer_of(tmp_path, name, logprob_batch_size=1)
        [[update]] = experience(trainer, 4)
        update.advantage_BT[1] = torch.nan
        with raises(TrainingError, where="step 0"):
            trainer.training_step(trainer.model, update, trainer.count_items(update))


def test_completions_that_teach_nothing_leave_no_gradient(tmp_path):
    for name in ("cj-grpo", "spg"):
        trainer = trainer_of(tmp_path, name, logprob_batch_size=1)
        [[update]] = experience(trainer, 4)
        update.loss_mask_BT[:] = False
        assert trainer.training_step(trainer.model, update, torch.tensor(1)) == 0
        assert not any(gradient.any() for gradient in gradients(trainer))


def test_the_scores_of_pieces_are_those_of_the_whole(tmp_path):
    trainer = trainer_of(tmp_path, "coupled-grpo")
    [[update]] = experience(trainer, 4)
    with torch.no_grad():
        trainer.args.logprob_batch_size = 1
        whole_BMT = trainer.per_view.log_probs(trainer.lm, update)
        for piece in trainer.per_view.chunks_with_targets(trainer.lm, update):
            # bit for bit
            assert torch.equal(trainer.per_view.log_probs(trainer.lm, update, piece), whole_BMT[piece])
