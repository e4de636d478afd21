"""The noise settings of a config: what is refused, and what a trainer hides with them."""

from __future__ import annotations

import pytest
import torch

import unmask
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, batch, make, settings
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.diffusion.views import MaskRNG
from unmask.errors import ConfigError
from unmask.training.noising import NoisingConfig, noised_views


@pytest.mark.parametrize(
    ("refused", "where"),
    [
        ({"schedule": "quadratic"}, "schedule"),
        ({"weighting": "2/t"}, "weighting"),
        ({"min_time": 0.0}, "min_time"),
        ({"cart_p": 1.0}, "cart_p"),
        ({"exact_count": True, "min_time": 0.4}, "exact_count"),
        ({"min_time": 0.9, "max_time": 0.1}, "min_time, max_time"),
        ({"num_timesteps": 3, "min_time": 0.4, "max_time": 0.5}, "num_timesteps"),
        ({"noise": "uniform", "weighting": "1/t"}, "weighting"),
        ({"noise": "hybrid", "weighting": "cart"}, "weighting"),
        ({"noise": "uniform", "num_timesteps": 8}, "num_timesteps"),
        ({"noise": "random"}, "noise"),
        ({"noise": "hybrid", "p_uniform": 1.0}, "p_uniform"),
        ({"noise": "uniform", "p_uniform": 0.1}, "p_uniform"),
    ],
)
def test_noise_that_makes_no_sense_is_refused(refused, where, tmp_path):
    with raises(ConfigError, where=where):
        NoisingConfig(**settings(tmp_path, **refused))


def test_a_pair_that_cannot_be_is_refused_with_the_config(tmp_path):
    for refused in ({"num_timesteps": 8}, {"min_time": 0.6}):
        ConvertConfig(**settings(tmp_path, **refused))
        with raises(ConfigError, where=next(iter(refused))):
            ConvertConfig(**settings(tmp_path, complementary=True, **refused))


@pytest.mark.parametrize("schedule", ["linear", "cosine", "geometric"])
def test_a_trainer_hides_what_the_settings_say(schedule, tmp_path):
    rows = [{"prompt": "ab", "completion": "cdefgh" * 4}] * 64
    trainer = make(
        "sft", tmp_path, rows=rows, schedule=schedule, min_time=0.5, max_time=0.5, weighting="uniform"
    )
    examples = batch(trainer, *range(64))
    views = trainer.plan(examples, trainer.draw(examples))
    maskable = examples["maskable"][:, None].expand_as(views.hidden_BMT)
    rate = trainer.args.noising.schedule.mask_rate(torch.tensor(0.5, dtype=torch.float64)).item()
    assert views.hidden_BMT[maskable].double().mean().item() == pytest.approx(rate, abs=0.05)
    assert not (views.hidden_BMT & ~maskable).any()
    assert views.weight_BMT[views.hidden_BMT].unique().tolist() == pytest.approx([1 / views.count])


def test_cart_weighs_by_what_the_model_of_the_trainer_sees(tmp_path):
    plans = {}
    for attention, block_size in (("bidirectional", None), ("block_causal", 4)):
        args = ConvertConfig(
            **settings(tmp_path, weighting="cart", attention=attention, block_size=block_size)
        )
        lm, everything = llama_lm(attention, block_size), torch.ones(2, 12, dtype=torch.long)
        plans[attention] = plan = noised_views(
            *(args, lm, everything, torch.zeros_like(everything), everything, MaskRNG(0, torch.arange(2)))
        )
        assert (plan.weight_BMT >= 0).all() and plan.weight_BMT.unique().numel() > 3
    one, other = plans.values()
    assert torch.equal(one.hidden_BMT, other.hidden_BMT) and not torch.equal(one.weight_BMT, other.weight_BMT)


def made(verb, folder, **chosen):
    if verb == "sft":
        return make("sft", folder, **chosen)
    args = ConvertConfig(**settings(folder, max_length=32, max_steps=10) | chosen)
    return ConvertTrainer(llama_lm("causal"), args, train_dataset=TEXTS)


RANDOM_TOKENS = [{"noise": "uniform"}, {"noise": "hybrid"}, {"noise": "uniform", "exact_count": True}]


@partly_slow("verb", ["sft", "convert"], 0)
@pytest.mark.parametrize("chosen", RANDOM_TOKENS, ids=str)
def test_a_model_is_trained_with_random_tokens_and_remembers_it(verb, chosen, tmp_path):
    trainer = made(verb, tmp_path, **chosen)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    kept = unmask.load(tmp_path / "model")
    assert (kept.noise, kept.p_uniform) == (chosen["noise"], {"hybrid": 0.1}.get(chosen["noise"]))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses and all(0 < loss < 100 for loss in losses)


def test_random_tokens_stand_where_tokens_are_hidden(tmp_path):
    rows = [{"prompt": "ab", "completion": "cdefgh" * 4}] * 64
    trainer = make("sft", tmp_path, rows=rows, noise="hybrid", p_uniform=0.5, eval_dataset=rows[:4])
    assert "eval_cross_entropy" not in trainer.evaluate()  # no mean of divergences without their weights
    examples = batch(trainer, *range(64))
    views = trainer.plan(examples, trainer.draw(examples))
    clean, maskable = examples["input_ids"][:, None], examples["maskable"][:, None]
    seen, hidden = views.replaced.ids_BMT, views.hidden_BMT
    assert (seen == clean)[~hidden].all() and views.target_BMT.equal(maskable)
    masks = seen == trainer.lm.mask_token_id
    assert masks.any() and (hidden & ~masks & (seen != clean)).any() and not (masks & ~hidden).any()


@pytest.mark.parametrize(("low", "high"), [(0.3, 1.0), (0.8, 0.9), (1.0, 1.0)])
def test_random_tokens_are_hidden_at_the_times_of_the_settings(low, high, tmp_path):
    rows = [{"prompt": "ab", "completion": "cdefgh" * 4}] * 256
    trainer = make("sft", tmp_path, rows=rows, noise="uniform", min_time=low, max_time=high)
    examples = batch(trainer, *range(256))
    views = trainer.plan(examples, trainer.draw(examples))
    maskable = examples["maskable"][:, None]
    assert views.hidden_BMT[maskable].double().mean().item() == pytest.approx((low + high) / 2, abs=0.03)
    assert views.weight_BMT.isfinite().all()
    loss = trainer.cross_entropy(trainer.lm, examples, views)
    assert loss.isfinite()


def test_methods_that_need_masks_refuse_models_of_random_tokens(tmp_path):
    with raises(ConfigError, where="method"):
        make("grpo", tmp_path, llama_lm("bidirectional").with_noise("uniform"))


@pytest.mark.parametrize("chosen", [{"quality_head": "joint"}, {"max_gap": 4}], ids=str)
def test_objectives_that_need_masks_refuse_models_of_random_tokens(chosen, tmp_path):
    with raises(ConfigError, where=next(iter(chosen))):
        make("sft", tmp_path, llama_lm("bidirectional").with_noise("uniform"), **chosen)


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        ({"distillation": 0.5}, "distillation"),
        ({"alignment": 0.5}, "alignment"),
        ({"lmbda": 0.5}, "lmbda"),
        ({"time_embedding": True}, "noise"),
    ],
)
def test_what_needs_masks_in_a_conversion_is_refused_with_random_tokens(chosen, where, tmp_path):
    with raises(ConfigError, where=where):
        made("convert", tmp_path, noise="uniform", **chosen)
