"""The quality head: what it learns from, its gradient by hand, what is trained, saved and refused."""

from __future__ import annotations

from dataclasses import replace

import peft
import pytest
import torch
from safetensors.torch import load_file

import unmask
from benchmarks import repair
from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import make
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError, GenerationError, ModelError
from unmask.models.export import export
from unmask.models.hooks.quality_head import add_quality_head
from unmask.supervised.quality import FilledRows, fill_in, quality_logits, quality_loss
from unmask.tasks import as_puzzle, get_task

PATTERNS = [
    ("bidirectional", None, False),
    ("bidirectional", None, True),
    ("block_causal", 4, False),
    ("block_causal", 4, True),
]


def with_head(attention="bidirectional", block_size=None, logit_shift=None, dtype=torch.float64):
    """A model with a quality head whose weights are not zero."""
    lm = llama_lm(attention, block_size, logit_shift=logit_shift, dtype=dtype)
    lm.quality_head = add_quality_head(lm.model)
    lm.quality_head.weight.data += torch.randn(
        lm.quality_head.weight.shape, generator=torch.Generator().manual_seed(3), dtype=dtype
    )
    return lm


def rows_of(lm, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of 11 tokens, and the hidden ones."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(4, 11, (count, 11), generator=generator)
    return ids_BT, (torch.rand(count, 11, generator=generator) < 0.6) & (torch.arange(11) > 2)


@pytest.mark.parametrize("attention, block_size, logit_shift", PATTERNS)
def test_a_few_hidden_tokens_are_filled_in_and_nothing_else(attention, block_size, logit_shift):
    lm = with_head(attention, block_size, logit_shift)
    ids_BT, hidden_BT = rows_of(lm, 40)
    rollout = fill_in(lm, ids_BT, None, hidden_BT, MaskRNG(0, torch.arange(40)), 3)
    assert rollout.filled_BT.sum(1).tolist() == hidden_BT.sum(1).clamp_max(3).tolist()
    assert (
        torch.equal(rollout.filled_BT | rollout.hidden_BT, hidden_BT)
        and not (rollout.filled_BT & rollout.hidden_BT).any()
    )
    assert torch.equal(rollout.ids_BT[~rollout.filled_BT], ids_BT[~rollout.filled_BT])
    assert torch.equal(rollout.right_N, (rollout.ids_BT == ids_BT)[rollout.filled_BT].float())
    assert 0 < rollout.right_N.mean() < 1 and lm.mask_token_id not in rollout.ids_BT
    again = fill_in(lm, ids_BT[7:9], None, hidden_BT[7:9], MaskRNG(0, torch.arange(7, 9)), 3)
    assert torch.equal(again.ids_BT, rollout.ids_BT[7:9])  # the noise belongs to the sample, not to the batch
    other = fill_in(lm, ids_BT, None, hidden_BT, MaskRNG(0, torch.arange(40), 1), 3)
    assert not torch.equal(other.filled_BT, rollout.filled_BT)  # another epoch


def test_tokens_are_drawn_from_the_models_distribution():
    """So that a label is right with the model's own probability of the original token."""
    lm, count = with_head(), 4000
    ids_BT = torch.tensor([[1, 4, 5, 6, 7]]).expand(count, -1)
    hidden_BT = torch.tensor([False, False, True, False, True]).expand(count, -1)
    rollout = fill_in(lm, ids_BT, None, hidden_BT, MaskRNG(0, torch.arange(count)), 2)
    noisy_1T = torch.where(hidden_BT[:1], lm.mask_token_id, ids_BT[:1])
    prob_TV = lm.logits(noisy_1T, hidden_BT=hidden_BT[:1])[0].softmax(-1)
    for position in (2, 4):
        drawn_V = torch.bincount(rollout.ids_BT[:, position], minlength=prob_TV.shape[1]) / count
        assert ((drawn_V - prob_TV[position]).abs() <= 5 * (prob_TV[position] / count).sqrt()).all()


@pytest.mark.parametrize("attention, block_size, logit_shift", PATTERNS)
def test_tokens_are_read_as_in_generation(attention, block_size, logit_shift):
    """Each at its own position, also with a logit shift; by blocks after clean ones."""
    lm = with_head(attention, block_size, logit_shift)
    ids_BT, hidden_BT = rows_of(lm, 3)
    rollout = fill_in(lm, ids_BT, None, hidden_BT, MaskRNG(0, torch.arange(3)), 4)
    logits_N = quality_logits(lm, rollout, trained=False)
    expected = []
    for row, column in rollout.filled_BT.nonzero().tolist():
        size = block_size or 11
        first, stop = column // size * size, min((column // size + 1) * size, 11)
        ids_T = ids_BT[row, :stop].clone()
        ids_T[first:] = torch.where(
            rollout.hidden_BT[row, first:stop], lm.mask_token_id, rollout.ids_BT[row, first:stop]
        )
        hidden_T = rollout.hidden_BT[row, :stop] & (torch.arange(stop) >= first)
        inputs = lm.noised_inputs(ids_T[None], hidden_BT=hidden_T[None])
        with lm.capturing() as seen:
            lm.forward(replace(inputs, index_N=torch.tensor([column])))
        expected.append(lm.quality_head(seen[0])[0])
    assert torch.allclose(logits_N, torch.stack(expected), atol=1e-5)
    assert logits_N.std() > 0.1


def test_the_gradient_by_hand():
    """Of a logistic regression on the hidden states; nothing else has a gradient."""
    lm = with_head()
    lm.quality_head.requires_grad_(True)
    ids_BT, hidden_BT = rows_of(lm, 5)
    rollout = fill_in(lm, ids_BT, None, hidden_BT, MaskRNG(0, torch.arange(5)), 3)
    items_B = torch.tensor([3, 1, 4, 1, 5])
    states: list[torch.Tensor] = []
    lm.quality_head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    logits_N = quality_logits(lm, rollout, trained=False)
    loss = quality_loss(logits_N, rollout, items_B)
    loss.backward()
    row_N = rollout.filled_BT.nonzero()[:, 0]
    weight_N = items_B[row_N] / rollout.filled_BT.sum(1)[row_N]
    right_N, prob_N = rollout.right_N, logits_N.detach().sigmoid()
    by_hand = -(weight_N * torch.where(right_N > 0, prob_N.log(), (1 - prob_N).log())).sum()
    assert torch.isclose(loss.detach().double(), by_hand, rtol=1e-5)
    gradient_D = ((weight_N * (prob_N - right_N))[:, None] * states[0]).sum(0)
    assert torch.allclose(lm.quality_head.weight.grad, gradient_D, rtol=1e-4, atol=1e-5)
    assert all(weight.grad is None for name, weight in lm.model.named_parameters() if "quality" not in name)


def test_with_the_true_probability_the_loss_is_least():
    """Labels of one state are drawn again and again: the head's best constant is the fraction that is
    right."""
    right_N = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1]).bool()
    ids_BT = torch.where(right_N, 4, 5)[:, None]
    filled_BT = torch.ones_like(ids_BT, dtype=torch.bool)
    rollout = FilledRows(torch.full_like(ids_BT, 4), ids_BT, ~filled_BT, filled_BT, None)
    losses = {
        p: float(quality_loss(torch.full((8,), p).logit(), rollout, torch.ones(8)))
        for p in (0.6, 0.7, 0.75, 0.8, 0.9)
    }
    assert min(losses, key=losses.__getitem__) == 0.75


@pytest.mark.parametrize("mode", ["alone", "joint"])
@pytest.mark.parametrize("attention, block_size", [("bidirectional", None), ("block_causal", 4)])
def test_training_the_head(attention, block_size, mode, tmp_path):
    lm = llama_lm(attention, block_size)
    before = {name: weight.clone() for name, weight in lm.model.state_dict().items()}
    trainer = make("sft", tmp_path, lm, quality_head=mode, quality_tokens=2, max_steps=3)
    trainer.train()
    head = trainer.lm.quality_head
    assert head.weight.abs().sum() > 0 and "quality_loss" in trainer.state.log_history[-2]
    same = all(
        torch.equal(before[name], weight) for name, weight in lm.model.state_dict().items() if name in before
    )
    assert same == (mode == "alone")
    assert all(
        weight.requires_grad == ("quality" not in name) for name, weight in lm.model.named_parameters()
    )


def test_the_head_alone_learns(tmp_path):
    trainer = make("sft", tmp_path, quality_head="alone", max_steps=60, learning_rate=0.1, seed=1)
    trainer.train()
    losses = [line["quality_loss"] for line in trainer.state.log_history if "quality_loss" in line]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # log 2, of a head that says 1/2
    assert sum(losses[10:]) / len(losses[10:]) < 0.5


def test_accumulated_gradients_are_those_of_the_large_batch(tmp_path):
    found = []
    for pieces in (1, 2, 4):
        lm, step = (
            llama_lm(dtype=torch.float64),
            {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "quality_head": "joint"},
        )
        batch = {"per_device_train_batch_size": 8 // pieces, "gradient_accumulation_steps": pieces}
        trainer = make("sft", tmp_path / str(pieces), lm, **step, **batch)
        trainer.train()
        found.append({name: weight.clone() for name, weight in trainer.lm.model.state_dict().items()})
    assert found[0]["unmask_quality.weight"].abs().sum() > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-6)  # the head's loss is in float32


def test_a_head_is_saved_with_the_model(tmp_path):
    trainer = make("sft", tmp_path / "run", quality_head="alone", max_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    loaded, head = unmask.load(tmp_path / "model"), trainer.lm.quality_head
    assert torch.equal(loaded.quality_head.weight, head.weight) and torch.equal(
        loaded.quality_head.bias, head.bias
    )
    assert "quality head" in (tmp_path / "model" / "README.md").read_text()
    config = unmask.SamplerConfig(max_new_tokens=6, tokens_per_step=2, revise={"by": "quality", "eta": 1.0})
    assert (
        unmask.generate(loaded, ["ab"], config).tokens == unmask.generate(trainer.lm, ["ab"], config).tokens
    )
    with raises(GenerationError, where="revise.by"):
        unmask.generate(llama_lm(), ["ab"], config)


def test_a_resumed_run_ends_with_the_same_head(tmp_path):
    def run(folder, **more):
        return make(
            "sft", folder, quality_head="joint", max_steps=4, save_strategy="steps", save_steps=2, **more
        )

    whole = run(tmp_path)
    whole.train()
    again = run(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, weight in whole.lm.model.state_dict().items():
        assert torch.equal(weight, again.lm.model.state_dict()[name]), name


def test_an_export_leaves_the_head_out(tmp_path):
    lm = with_head("causal", dtype=torch.float32)
    export(lm, tmp_path, "hf")
    assert lm.model.unmask_quality is lm.quality_head
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "quality" in name]
    assert "quality head" not in (tmp_path / "README.md").read_text()
    assert unmask.load(tmp_path).quality_head is None


def test_what_cannot_train_a_head_is_refused(tmp_path):
    with raises(ModelError, where="quality_head"):
        make("sft", tmp_path, llama_lm("causal"), quality_head="alone")
    with raises(ConfigError, where="quality_head"):
        make("sft", tmp_path, quality_head="alone", peft_config=peft.LoraConfig(target_modules=["q_proj"]))
    with raises(ConfigError, where="quality_head and loss_type"):
        make("sft", tmp_path, quality_head="alone", loss_type="sequence_nll")
    with raises(ConfigError, where="quality_tokens"):
        make("sft", tmp_path, quality_tokens=2)


@pytest.mark.nightly
def test_the_head_finds_planted_errors_better_than_the_models_own_confidence():
    """On held-out Sudoku."""
    task = as_puzzle(get_task("sudoku"))
    train, test = task.generate("train", 4000, 0), task.generate("test", 300, 1)
    lm = repair.demo_model(task, 0)
    lm = repair.fine_tuned(
        lm, train, 150, 0, quality_head="joint", learning_rate=1e-3, canvas_length=task.max_completion
    )
    found = repair.found_errors(lm, test, 0)
    assert found["quality"] > max(found["probability"], 0.9), found
