"""Loops of one's own over `unmask.losses` train as the trainers do: they learn, and their gradients are
equal.

Shapes: B rows or completions, M views, T tokens, N responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import unmask
from tests.helpers import REPOSITORY, partly_slow
from tests.tiny import LLAMA_ALPHABET, llama_lm
from tests.training.tiny_runs import batch, make, ranks
from unmask import losses
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.methods import METHODS
from unmask.rl.methods.base import fixed_settings
from unmask.rl.prompts import completion_key
from unmask.training.trainer import DiffusionTrainer

# A loop without our trainers.


def test_a_loop_of_twenty_lines_learns_a_task():
    """Write a letter four times."""
    lm = llama_lm()
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-2)
    letters, config = list(LLAMA_ALPHABET), unmask.SamplerConfig(max_new_tokens=5, steps=5)
    rows = lm.tokenizer([letter * 5 + lm.tokenizer.eos_token for letter in letters], return_tensors="pt")
    ids_BT, key_B = rows["input_ids"], torch.arange(len(letters))
    completion_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT) >= 2  # after the start and the letter
    groups_BT = losses.noise_groups(lm, completion_BT, None)

    def right() -> int:
        return sum(
            text == letter * 4
            for letter, text in zip(letters, unmask.generate(lm, letters, config).texts, strict=True)
        )

    before, found = right(), []
    for step in range(60):
        views = losses.random_views(
            groups_BT, losses.MaskRNG(0, key_B, iteration=step), losses.Noise(), num_views=2
        )
        log_prob_BMT = losses.view_log_probs(lm, ids_BT, None, views)
        loss = losses.weighted_cross_entropy(log_prob_BMT, views) / completion_BT.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert before <= 1 and right() == len(letters)
    assert sum(found[-10:]) < 0.3 * sum(found[:10])


@pytest.mark.slow
def test_a_loop_of_twenty_lines_learns_from_rewards():
    """Write as many a as possible."""
    lm, method = llama_lm(), losses.get_method("diffu-grpo")(epsilon=0.2)
    optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-2)
    prompts, group_B, found = ["ab"] * 8 + ["cd"] * 8, torch.arange(2).repeat_interleave(8), []
    for step in range(20):
        out = unmask.generate(
            lm, prompts, unmask.SamplerConfig(max_new_tokens=4, temperature=1.0, trace=True, seed=step)
        )
        reward_B = torch.tensor([text.count("a") / 4 for text in out.texts])
        rollout = losses.make_rollout(lm, out)
        views = losses.policy_views(lm, method, rollout, losses.MaskRNG(step, torch.arange(len(prompts))))
        log_prob_BMT = losses.view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views)
        advantage_B = losses.advantages(reward_B, group_B, method.scale_rewards)
        losses.policy_loss(
            method, rollout, views, log_prob_BMT, advantage_B, max_completion_length=4
        ).total.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(reward_B.mean().item())
    assert found[0] < 0.2 and sum(found[-5:]) / 5 > 0.8


# The gradients of the trainers.


def gradients(lm: DiffusionLM, backward: Callable[[], object]) -> list[Tensor]:
    """The gradients of all weights that have one."""
    lm.model.zero_grad()
    backward()
    return [weight.grad.clone() for weight in lm.model.parameters() if weight.grad is not None]


def of_trainer(trainer: DiffusionTrainer, rows: Any) -> list[Tensor]:
    return gradients(
        trainer.lm, lambda: trainer.training_step(trainer.model, rows, trainer.count_items(rows))
    )


def check(mine: list[Tensor], other: list[Tensor], **tolerance: float) -> None:
    assert len(mine) == len(other) > 0 and any(each.abs().max() > 1e-4 for each in other)
    for one, another in zip(mine, other, strict=True):
        torch.testing.assert_close(one, another, **tolerance)


def moved(trainer: DiffusionTrainer) -> None:
    """Change the policy, so that it is another model than the reference."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trainer.lm.model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


@pytest.mark.parametrize(
    ("attention", "block_size"), [("bidirectional", None), ("block_causal", 4), ("causal", None)]
)
def test_supervised_gradients_are_the_trainers_bit_for_bit(attention, block_size, tmp_path):
    lm = llama_lm(attention, block_size)
    trainer = make("sft", tmp_path, lm, **({} if attention == "causal" else {"views": 2}))
    rows = batch(trainer, 4, 0, 6)

    def backward() -> None:
        if lm.autoregressive:
            views = losses.all_masked_views(rows["maskable"])
        else:
            group_BT = losses.noise_groups(lm, rows["maskable"], rows["documents"])
            views = losses.random_views(
                group_BT, losses.MaskRNG(trainer.args.seed, rows["sample_id"]), losses.Noise(), num_views=2
            )
        log_prob_BMT = losses.view_log_probs(lm, rows["input_ids"], rows["documents"], views)
        (losses.weighted_cross_entropy(log_prob_BMT, views) / rows["maskable"].sum()).backward()

    check(gradients(lm, backward), of_trainer(trainer, rows), rtol=0, atol=0)


@pytest.mark.slow
def test_gradients_of_gaps_of_unknown_length_are_the_trainers(tmp_path):
    trainer = make("sft", tmp_path, llama_lm(dtype=torch.float64), max_gap=3)
    rows = batch(trainer, 4, 0, 6)
    lm = losses.with_length_tokens(llama_lm(dtype=torch.float64), 3)
    lm.model.load_state_dict(trainer.lm.model.state_dict())

    def backward() -> None:
        canvases = losses.make_canvases(lm, rows, losses.MaskRNG(trainer.args.seed, rows["sample_id"]), 3)
        loss = losses.canvas_loss(losses.canvas_log_probs(lm, canvases), canvases, rows["maskable"].sum(1))
        (loss / rows["maskable"].sum()).backward()

    check(gradients(lm, backward), of_trainer(trainer, rows))


@pytest.mark.slow
def test_gradients_of_a_quality_head_are_the_trainers(tmp_path):
    trainer = make("sft", tmp_path, llama_lm(dtype=torch.float64), quality_head="alone", quality_tokens=2)
    rows = batch(trainer, 4, 0, 6)
    lm, draw = (
        losses.with_quality_head(llama_lm(dtype=torch.float64)),
        losses.MaskRNG(trainer.args.seed, rows["sample_id"]),
    )
    lm.model.load_state_dict(trainer.lm.model.state_dict())

    def backward() -> None:
        views = losses.random_views(
            losses.noise_groups(lm, rows["maskable"], rows["documents"]), draw, losses.Noise()
        )
        filled = losses.fill_in(lm, rows["input_ids"], rows["documents"], views.hidden_BMT[:, 0], draw, 2)
        loss = losses.quality_loss(
            losses.quality_logits(lm, filled, trained=False), filled, rows["maskable"].sum(1)
        )
        (loss / rows["maskable"].sum()).backward()

    with losses.training_head(lm, alone=True):
        mine = gradients(lm, backward)
    with losses.training_head(trainer.lm, alone=True):
        check(mine, of_trainer(trainer, rows))


def responses(lm: DiffusionLM, rows: dict[str, Tensor], draw: losses.MaskRNG, count: int) -> Tensor:
    """Estimates [N] of the log-likelihoods of `count` responses per row, which are documents of it, from two
    views."""
    group_BT = losses.noise_groups(lm, rows["maskable"], rows["documents"])
    views = losses.exact_count_views(group_BT, draw, num_views=2)
    token_BT = losses.sum_over_views(
        losses.view_log_probs(lm, rows["input_ids"], rows["documents"], views), views
    )
    return torch.cat([(token_BT * (rows["documents"] == number)).sum(1) for number in range(1, count + 1)])


def test_gradients_of_preferences_are_the_trainers(tmp_path):
    trainer = make("dpo", tmp_path, llama_lm(dtype=torch.float64), reference="frozen")
    lm, rows = trainer.lm, batch(trainer, 4, 0, 6)
    draw, reference = losses.MaskRNG(trainer.args.seed, rows["sample_id"]), lm.frozen_copy()
    moved(trainer)

    def backward() -> None:
        log_ratio_N = losses.log_ratios(responses(lm, rows, draw, 2), responses(reference, rows, draw, 2))
        losses.dpo(losses.margins(log_ratio_N), beta=trainer.args.beta).mean().backward()

    [prepared] = trainer.prepared([rows])
    check(gradients(lm, backward), of_trainer(trainer, prepared))


@pytest.mark.slow
def test_gradients_of_labeled_responses_are_the_trainers(tmp_path):
    trainer = make("kto", tmp_path, llama_lm(dtype=torch.float64), reference="frozen")
    lm, rows = trainer.lm, batch(trainer, 4, 0, 6, 9)
    reference = lm.frozen_copy()
    moved(trainer)

    def log_ratios(some: dict[str, Tensor]) -> Tensor:
        draw = losses.MaskRNG(trainer.args.seed, some["sample_id"])
        return losses.log_ratios(responses(lm, some, draw, 1), responses(reference, some, draw, 1))

    def backward() -> None:
        baseline = log_ratios(rows["mismatched"]).mean().clamp_min(0).detach()
        losses.kto(log_ratios(rows), rows["desirable"], baseline, beta=trainer.args.beta).mean().backward()

    [prepared] = trainer.prepared([rows])
    check(gradients(lm, backward), of_trainer(trainer, prepared))


@partly_slow("method", METHODS, list(METHODS).index("cj-grpo"))
def test_gradients_of_policies_are_the_trainers(method, tmp_path):
    beta = (
        {"beta": 0.1, "kl_to": "reference"}
        if "beta" in {*losses.get_method(method).__dataclass_fields__}
        else {}
    )
    more = (
        {}
        if method == "bgpo" or "epsilon" not in losses.get_method(method).__dataclass_fields__
        else {"epsilon": 0.2}
    )
    difficulty = (
        {} if "difficulty" in fixed_settings(losses.get_method(method)) else {"difficulty": [-99.0, 99.0]}
    )
    trainer = make(
        "grpo",
        tmp_path,
        llama_lm(dtype=torch.float64),
        reward=ranks,
        method=method,
        **{"epsilon": None} | difficulty | more | beta,
    )
    lm, size = trainer.lm, trainer.args.max_completion_length
    rows = [trainer.train_dataset[index] for index in range(4)]
    [[update]] = trainer.collect_updates([rows])
    with torch.no_grad():
        update.old_BMT = trainer.per_view.log_probs(lm, update)
    moved(trainer)
    own = losses.get_method(method)(**more | beta).for_attention(lm.attention)
    views, rollout = update.views, update.rollout
    key_B = torch.tensor([completion_key(row, 0) for row in rows])
    assert losses.policy_views(lm, own, rollout, losses.MaskRNG(trainer.args.seed, key_B)).equals(views)

    def backward() -> None:
        log_prob_BMT = losses.view_log_probs(lm, rollout.ids_BT, rollout.document_BT, views)
        tensors = {"old_BMT": update.old_BMT, "reference_BMT": update.reference_BMT}
        advantage_B = update.advantage_BT[:, 0]
        losses.policy_loss(
            own, rollout, views, log_prob_BMT, advantage_B, max_completion_length=size, **tensors
        ).total.backward()

    check(gradients(lm, backward), of_trainer(trainer, update))


# The names.


@pytest.mark.parametrize("name", losses.__all__)
def test_every_public_name_is_documented_and_is_what_the_trainers_import(name):
    public = getattr(losses, name)
    assert (
        public.__doc__ and not public.__doc__.startswith(f"{name}(") and public.__module__ != losses.__name__
    )


def test_the_page_names_all_of_them():
    page = (REPOSITORY / "docs" / "losses.md").read_text(encoding="utf-8")
    assert set(losses.__all__) <= set(re.findall(r"`(\w+)", page))
