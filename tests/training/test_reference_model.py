"""The reference stays the initial policy, or follows it slowly; with adapters it is the base model."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from tests.diffusion_gemma import loaded, published_model
from tests.errors import raises
from tests.tiny import llama_causal, llama_lm
from tests.training.tiny_runs import PAIRS, equal, make, ranks, weights
from unmask.data.characters import character_model
from unmask.errors import ConfigError
from unmask.models.adapters import with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.rl.trainer import GRPOTrainer
from unmask.tasks import get_task
from unmask.training.reference_model import Reference

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 4, 5, 3, 3, 6]])


def adapted() -> DiffusionLM:
    return with_adapters(
        llama_lm(), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    )


def scores(lm: DiffusionLM) -> torch.Tensor:
    with torch.no_grad():
        return lm.logits(IDS)


def train(lm: DiffusionLM) -> None:
    """Change all trained weights."""
    with torch.no_grad():
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight += 0.1


@pytest.mark.parametrize("moves", [False, True])
def test_a_frozen_copy_is_the_model_as_it_was(moves):
    lm = llama_lm()
    before = scores(lm)
    reference = Reference(lm, device=CPU, copy=moves)
    train(lm)
    with reference.model_in_use() as scored:
        assert torch.equal(scores(scored), before) and not torch.equal(scores(lm), before)
        assert not any(weight.requires_grad for weight in scored.model.parameters())


def test_under_adapters_the_reference_is_the_base_and_no_copy():
    base, lm = scores(llama_lm()), adapted()
    reference = Reference(lm, device=CPU)
    train(lm)
    with reference.model_in_use() as scored:
        assert scored.model is lm.model
        torch.testing.assert_close(scores(scored), base)
    assert not torch.allclose(scores(lm), base, atol=1e-3)  # and the adapters are on again afterwards


@pytest.mark.parametrize(
    "more", [{"init_lora_weights": False}, {"init_lora_weights": "pissa"}, {"bias": "all"}]
)
def test_adapters_that_change_the_base_at_once_or_train_it_have_a_copy(more, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", **more)
    lm = with_adapters(llama_lm(attention_bias=True), config)
    before = scores(lm)
    reference = Reference(lm, device=CPU)
    train(lm)
    with reference.model_in_use() as scored:
        assert torch.equal(scores(scored), before)
    with raises(ConfigError, where="reference"):
        make("dpo", tmp_path, llama_lm(attention_bias=True), peft_config=config, reference="adapter")


def test_a_moving_reference_goes_a_share_of_the_way():
    for lm in (llama_lm(), adapted()):
        reference = Reference(lm, device=CPU, copy=True)
        start = weights(reference.lm)
        train(lm)
        reference.move(0.25)
        trained = {name for name, weight in lm.model.named_parameters() if weight.requires_grad}
        assert trained
        for name, weight in reference.lm.model.named_parameters():
            assert torch.equal(
                weight != start[name], torch.full_like(weight, name in trained, dtype=torch.bool)
            )
            torch.testing.assert_close(weight, start[name] + 0.025 * (name in trained))
        reference.move(1.0)
        assert equal(weights(reference.lm), weights(lm))


def test_a_moved_reference_is_read_back(tmp_path):
    lm = adapted()
    reference = Reference(lm, device=CPU, copy=True)
    train(lm)
    reference.move(0.5)
    reference.save(tmp_path)
    again = Reference(adapted(), device=CPU, copy=True)
    assert not torch.equal(scores(again.lm), scores(reference.lm))
    again.load(tmp_path)
    assert torch.equal(scores(again.lm), scores(reference.lm))


def test_a_reference_is_kept_only_where_the_policy_is_held_to_it(tmp_path):
    for more, kept in [
        ({}, False),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "kl_to": "old"}, False),
        ({"method": "espo"}, True),
    ]:
        assert (make("grpo", tmp_path, **more).reference is not None) == kept


def test_the_reference_moves_before_the_first_rollout_that_its_step_comes_before(tmp_path, monkeypatch):
    moves: list[Any] = []
    shape = {"num_iterations": 2, "max_steps": 10, "rows": PAIRS[:6], "beta": 0.1}
    trainer = make(
        "grpo",
        tmp_path,
        reward=ranks,
        sync_ref_model=True,
        ref_model_sync_steps=3,
        ref_model_mixup_alpha=0.25,
        **shape,
    )
    monkeypatch.setattr(
        trainer.reference, "move", lambda share: moves.append((trainer.state.global_step, share))
    )
    trainer.train()
    assert moves == [(4, 0.25), (6, 0.25)]  # steps 3, 6 and 9; the rollouts begin at 0, 2, 4, 6 and 8


def test_another_model_of_the_same_tokens_can_be_the_reference(tmp_path):
    other = llama_lm()
    train(other)
    other.save(tmp_path / "other")
    trainer = make(
        "grpo",
        tmp_path / "run",
        reward=ranks,
        beta=0.1,
        ref_model=str(tmp_path / "other"),
        num_iterations=2,
    )
    with trainer.reference.model_in_use() as scored:
        assert equal(weights(scored), weights(other)) and not any(
            weight.requires_grad for weight in scored.model.parameters()
        )
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 1e-3  # from the first update on
    assert equal(weights(trainer.reference.lm), weights(other))


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    character_model(get_task("sudoku").alphabet, hidden=32, layers=1, context=128, seed=0).save(
        tmp_path / "other"
    )
    with raises(ConfigError, where=f"ref_model {tmp_path}/other"):
        make("grpo", tmp_path / "run", beta=0.1, ref_model=str(tmp_path / "other"))
    with raises(ConfigError, where="ref_model"):
        make("grpo", tmp_path / "run", ref_model=str(tmp_path / "other"))


@pytest.mark.parametrize(
    "pattern",
    [
        ("causal", None, True),
        ("block_causal", 8, False),
        ("block_causal", 4, True),
    ],
)
def test_a_reference_that_was_saved_with_other_settings_is_refused(pattern, tmp_path):
    attention, block_size, shift = pattern
    llama_lm(attention, block_size, logit_shift=shift).save(tmp_path / "other")
    with raises(ConfigError, where=f"ref_model {tmp_path}/other"):
        Reference(llama_lm("block_causal", 4), device=CPU, other=str(tmp_path / "other"))


@pytest.mark.parametrize(
    "pattern", [("bidirectional", None, False), ("bidirectional", None, True), ("block_causal", 4, False)]
)
def test_a_stock_checkpoint_is_read_as_the_policy_is(pattern, tmp_path):
    """The reference from the policy's own folder therefore equals the policy."""
    attention, block_size, shift = pattern
    for part in llama_causal(torch.bfloat16):
        part.save_pretrained(tmp_path / "stock")
    lm = load(tmp_path / "stock", attention, block_size, shift, dtype="bfloat16")
    with Reference(lm, device=CPU, other=str(tmp_path / "stock")).model_in_use() as scored:
        assert scored.settings == lm.settings and torch.equal(scores(scored), scores(lm))


def test_a_second_model_is_held_where_the_training_is(tmp_path):
    """Under FSDP and DeepSpeed the policy has not been moved yet when its reference is made."""
    lm, meta = llama_lm(), torch.device("meta")
    lm.save(tmp_path / "other")
    for path in (None, str(tmp_path / "other")):
        reference = Reference(lm, device=meta, other=path)
        assert {weight.device for weight in reference.lm.model.parameters()} == {meta}
    assert {weight.device for weight in lm.model.parameters()} == {CPU}
    assert Reference(adapted(), device=meta).lm.device == CPU  # the policy itself


def test_weights_that_are_shared_out_have_no_reference_that_would_not_be_right(tmp_path, monkeypatch):
    lm = llama_lm()
    next(lm.model.parameters()).ds_id = 0  # type: ignore[attr-defined]
    with raises(ConfigError, where="reference"):
        make("grpo", tmp_path, lm, beta=0.1)
    monkeypatch.setattr(GRPOTrainer, "shards_weights", True)
    make("grpo", tmp_path, beta=0.1)
    with raises(ConfigError, where="sync_ref_model"):
        make("grpo", tmp_path, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)


def test_a_reference_of_canvases_is_read_as_it_is(tmp_path):
    lm = loaded(tmp_path / "canvases")
    for other in (str(tmp_path / "canvases"), published_model()):
        reference = Reference(lm, device=CPU, other=other)
        assert reference.lm.pattern == lm.pattern and equal(weights(reference.lm), weights(lm))
    with raises(ConfigError, where=f"ref_model {tmp_path}/canvases"):
        Reference(llama_lm("block_causal", 4), device=CPU, other=str(tmp_path / "canvases"))
