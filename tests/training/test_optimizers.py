"""Optimizers of few bits, and of host memory: each takes effect, resumes, and is refused where it could not act."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.conftest import QUICK, equal, make, prepared, tiny, unmask, weights, wide
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError
from unmask.models.load import make_diffusion
from unmask.training import switches
from unmask.training.sft import SFTConfig
from unmask.training.trainer import DiffusionTrainer

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # bitsandbytes and inductor use it
needs_bitsandbytes = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra `cuda`)")


def losses(trainer: DiffusionTrainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# Optimizers of bitsandbytes


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(
    ("verb", "name"),
    [*[("sft", name) for name in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit")], ("grpo", "adamw_bnb_8bit")],
)
def test_an_optimizer_of_bitsandbytes_keeps_its_state_in_few_bits_and_pages_it(verb, name, tmp_path):
    lm = wide()
    start = weights(lm)
    trainer = prepared(verb, tmp_path, lm, optim=name)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer).__module__.startswith("bitsandbytes")
    assert optimizer.is_paged == name.startswith("paged")  # on a CPU the pages are plain memory
    state = optimizer.state[lm.model.model.layers[0].mlp.up_proj.weight]
    assert state["state1"].dtype == (torch.float32 if name.endswith("32bit") else torch.uint8)
    assert not equal(weights(lm), start)


def test_an_optimizer_of_bitsandbytes_is_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(switches.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"optim: needs bitsandbytes, which is not installed.*unmask\[cuda\]"):
        make("sft", tmp_path, optim="adamw_bnb_8bit")
    with pytest.raises(ConfigError, match=r"optim: needs torchao, which is not installed.*unmask\[torchao\]"):
        make("sft", tmp_path, optim="adamw_torch_8bit")
    SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="stable_adamw")  # of another library


@needs_bitsandbytes
def test_an_optimizer_is_refused_on_a_device_that_it_cannot_work_on(tmp_path, monkeypatch):
    import bitsandbytes

    def step(self: Any) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", step)
    with pytest.raises(ConfigError, match=r"optim: adamw_bnb_8bit cannot work on cpu \(no kernel\)\. Use adamw_torch"):
        make("sft", tmp_path, optim="adamw_bnb_8bit")


# Weights in bfloat16, rounded stochastically

ROUNDED: dict[str, Any] = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}  # as the recipe bfloat16 has it
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao (the extra `torchao`)")


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """torchao compiles its step, which takes a minute on a CPU. The operations are the same."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@needs_torchao
def test_rounded_weights_are_resumed_bit_for_bit(tmp_path, uncompiled):
    def run(folder: str, steps: int, resume: bool = False) -> DiffusionTrainer:
        lm = tiny("causal", hidden_size=64, intermediate_size=64, dtype=torch.bfloat16)
        more = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
        trainer = make("sft", tmp_path / folder, lm, **ROUNDED, **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4, resume=True)
    assert equal(weights(resumed.lm), weights(whole.lm)) and next(whole.lm.model.parameters()).dtype == torch.bfloat16
    state = whole.optimizer.optimizer.state[whole.lm.model.model.layers[0].mlp.up_proj.weight]
    assert state["exp_avg"].codes.dtype == torch.uint8


@needs_torchao
def test_a_conversion_by_the_recipe_bfloat16(model, text, tmp_path, uncompiled):
    command = ("convert", "--model", model, "--data", text, "--output", tmp_path / "run", "--recipe", "bfloat16", *QUICK)
    result = unmask(*command, "training.max_length=16", "training.max_steps=10", "training.warmup_steps=0")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run/model/config.json").read_text())["dtype"] == "bfloat16"


def test_stochastic_rounding_is_refused_where_nothing_would_be_rounded(tmp_path):
    with pytest.raises(ConfigError, match=r"optim_args bf16_stochastic_round: no weight that is trained is in bfloat16"):
        make("sft", tmp_path, **ROUNDED)
    with pytest.raises(ConfigError, match=r"optim_args bf16_stochastic_round: adamw_torch does not know it"):
        make("sft", tmp_path, tiny(dtype=torch.bfloat16), **ROUNDED | {"optim": "adamw_torch"})


@needs_torchao
@pytest.mark.slow
def test_rounded_bfloat16_trains_as_float32_does_and_plain_bfloat16_worse(tmp_path, uncompiled):
    text = inspect.getsource(argparse)
    rows = [{"text": text[start : start + 200]} for start in range(0, len(text), 200)]
    tokenizer = character_tokenizer(sorted(set(text)))

    def loss(seed: int, dtype: torch.dtype, **more: Any) -> float:
        torch.manual_seed(seed)
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)).to(dtype)
        lm = make_diffusion(model, tokenizer, attention="causal")
        run = {"max_steps": 300, "logging_steps": 75, "learning_rate": 3e-4, "per_device_train_batch_size": 8, "seed": seed}
        return losses(make("pretrain", tmp_path / str(len(list(tmp_path.iterdir()))), lm, rows, **run | more))[-1]

    arms = ((torch.float32, {}), (torch.bfloat16, ROUNDED), (torch.bfloat16, {}))
    exact, rounded, plain = ([loss(seed, dtype, **more) for seed in range(2)] for dtype, more in arms)
    lost = (sum(plain) - sum(exact)) / 2
    assert lost > 3 * abs(exact[0] - exact[1])
    assert abs(sum(rounded) - sum(exact)) / 2 < lost / 4
