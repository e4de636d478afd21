"""Low-bit optimizers, and an optimizer in host memory: each takes effect, resumes, and is refused where it
cannot work."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.errors import raises
from tests.tiny import build_causal, llama_lm, quantizable_llama_lm
from tests.training.tiny_runs import QUICK, equal, make, prepared, unmask, weights
from unmask.errors import ConfigError, TrainingError
from unmask.models.load import make_diffusion
from unmask.supervised.sft import SFTConfig
from unmask.training.optimizers import check_offload
from unmask.training.trainer import DiffusionTrainer

# bitsandbytes and inductor use it
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra `cuda`)"
)


def test_a_loss_is_read_before_the_backward_pass_if_that_updates_weights(tmp_path):
    trainer, nan = make("sft", tmp_path), torch.tensor(torch.nan)
    for name in ("adamw_torch", "galore_adamw"):
        trainer.args.optim = name
        assert trainer.per_item(nan, 1).isnan()
    for name in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise"):
        trainer.args.optim = name
        with raises(TrainingError, where="step 0"):
            trainer.per_item(nan, 1)


def losses(trainer: DiffusionTrainer) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


# Optimizers of bitsandbytes


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *[("sft", name) for name in ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_8bit")],
        ("grpo", "adamw_bnb_8bit"),
    ],
)
def test_an_optimizer_of_bitsandbytes_keeps_its_state_in_few_bits_and_pages_it(verb, name, tmp_path):
    lm = quantizable_llama_lm()
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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, where="optim"):
        make("sft", tmp_path, optim="adamw_bnb_8bit")
    with raises(ConfigError, where="optim"):
        make("sft", tmp_path, optim="adamw_torch_8bit")
    SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="stable_adamw")  # of another library


@needs_bitsandbytes
def test_an_optimizer_of_bitsandbytes_is_refused_on_shards(tmp_path):
    with raises(ConfigError, where="optim and fsdp"):
        SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="adamw_bnb_8bit", fsdp=True)
    SFTConfig(output_dir=str(tmp_path), use_cpu=True, optim="adamw_torch_8bit", fsdp=True)


@needs_bitsandbytes
def test_an_optimizer_is_refused_on_a_device_that_it_cannot_work_on(tmp_path, monkeypatch):
    import bitsandbytes

    def step(self: Any) -> None:
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(bitsandbytes.optim.AdamW8bit, "step", step)
    with raises(ConfigError, where="optim"):
        make("sft", tmp_path, optim="adamw_bnb_8bit")


# Weights in bfloat16, rounded stochastically

# as in the recipe bfloat16
ROUNDED: dict[str, Any] = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao (the extra `torchao`)"
)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Switch off torchao's compilation of its step, which takes a minute on a CPU. The operations are the
    same."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@needs_torchao
def test_rounded_weights_are_resumed_bit_for_bit(tmp_path, uncompiled):
    def run(folder: str, steps: int, resume: bool = False) -> DiffusionTrainer:
        lm = llama_lm("causal", hidden_size=64, intermediate_size=64, dtype=torch.bfloat16)
        more = {
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 2,
            "lr_scheduler_type": "constant",
            "learning_rate": 1e-3,
        }
        trainer = make("sft", tmp_path / folder, lm, **ROUNDED, **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4, resume=True)
    assert (
        equal(weights(resumed.lm), weights(whole.lm))
        and next(whole.lm.model.parameters()).dtype == torch.bfloat16
    )
    state = whole.optimizer.optimizer.state[whole.lm.model.model.layers[0].mlp.up_proj.weight]
    assert state["exp_avg"].codes.dtype == torch.uint8


@needs_torchao
def test_a_conversion_by_the_recipe_bfloat16(model, text, tmp_path, uncompiled):
    command = (
        "convert",
        "--model",
        model,
        "--data",
        text,
        "--output",
        tmp_path / "run",
        "--recipe",
        "bfloat16",
        *QUICK,
    )
    result = unmask(*command, "training.max_length=16", "training.max_steps=10", "training.warmup_steps=0")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "run/model/config.json").read_text())["dtype"] == "bfloat16"


def test_stochastic_rounding_is_refused_where_nothing_would_be_rounded(tmp_path):
    with raises(ConfigError, where="optim_args and model.dtype"):
        make("sft", tmp_path, **ROUNDED)
    with raises(ConfigError, where="optim_args and optim"):
        make("sft", tmp_path, llama_lm(dtype=torch.bfloat16), **ROUNDED | {"optim": "adamw_torch"})


@needs_torchao
@pytest.mark.nightly
def test_rounded_bfloat16_trains_as_float32_does_and_plain_bfloat16_worse(tmp_path, uncompiled):
    text = inspect.getsource(argparse)
    rows = [{"text": text[start : start + 200]} for start in range(0, len(text), 200)]

    def loss(seed: int, dtype: torch.dtype, **more: Any) -> float:
        sizes = {"width": 64, "intermediate_size": 128, "layers": 1, "heads": 4}
        model, tokenizer = build_causal("llama", "".join(sorted(set(text))), seed=seed, ids=(), **sizes)
        lm = make_diffusion(model.to(dtype), tokenizer, attention="causal")
        run = {
            "max_steps": 300,
            "logging_steps": 75,
            "learning_rate": 3e-4,
            "per_device_train_batch_size": 8,
            "seed": seed,
        }
        return losses(
            make("pretrain", tmp_path / str(len(list(tmp_path.iterdir()))), lm, rows, **run | more)
        )[-1]

    arms = ((torch.float32, {}), (torch.bfloat16, ROUNDED), (torch.bfloat16, {}))
    exact, rounded, plain = ([loss(seed, dtype, **more) for seed in range(2)] for dtype, more in arms)
    lost = (sum(plain) - sum(exact)) / 2
    assert lost > 3 * abs(exact[0] - exact[1])
    assert abs(sum(rounded) - sum(exact)) / 2 < lost / 4


# The optimizer in host memory


def trained(
    folder: Path, steps: int, dtype: torch.dtype, resume: bool = False, **more: Any
) -> DiffusionTrainer:
    schedule = {
        "lr_scheduler_type": "constant",
        "learning_rate": 1e-4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    trainer = make(
        "sft",
        folder,
        llama_lm(dtype=dtype),
        **schedule | {"max_steps": steps, "optim": "adamw_torch_fused"} | more,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "more",
    [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}],
    ids=["plain", "accumulated and clipped"],
)
def test_an_optimizer_in_host_memory_makes_the_same_updates(more, tmp_path):
    plain, offloaded = (
        weights(trained(tmp_path / str(on), 4, torch.float32, optimizer_offload=on, **more).lm)
        for on in (False, True)
    )
    assert equal(plain, offloaded)


def test_an_optimizer_in_host_memory_holds_float32_states_beside_bfloat16_weights_and_no_gradient(tmp_path):
    trainer = trained(tmp_path, 2, torch.bfloat16, optimizer_offload=True)
    optimizer = trainer.optimizer.optimizer
    held = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {(tensor.dtype, tensor.device.type) for tensor in held + states} == {
        (torch.float32, "cpu")
    } and len(states) == 2 * len(held)
    model = list(trainer.lm.model.parameters())
    assert not {weight.data_ptr() for weight in held} & {weight.data_ptr() for weight in model}
    assert all(
        torch.equal(weight, copy.bfloat16())
        for weight, copy in zip(model, sorted_as(model, held), strict=True)
    )
    assert all(weight.grad is None for weight in model)


def sorted_as(model: list[Any], held: list[torch.Tensor]) -> list[torch.Tensor]:
    """The copies in the order of the model. Its vectors, which have no weight decay, are in a separate
    group."""
    vectors, tables = (
        iter([copy for copy in held if copy.dim() == 1]),
        iter([copy for copy in held if copy.dim() > 1]),
    )
    return [next(vectors if weight.dim() == 1 else tables) for weight in model]


def test_updates_too_small_for_bfloat16_add_up_in_host_memory_and_a_resume_keeps_them(tmp_path):
    whole = trained(tmp_path / "whole", 4, torch.bfloat16, optimizer_offload=True, learning_rate=1e-6)
    trained(tmp_path / "parts", 2, torch.bfloat16, optimizer_offload=True, learning_rate=1e-6)
    resumed = trained(
        tmp_path / "parts", 4, torch.bfloat16, resume=True, optimizer_offload=True, learning_rate=1e-6
    )
    copies = [
        [copy for group in run.optimizer.optimizer.param_groups for copy in group["params"]]
        for run in (whole, resumed)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*copies, strict=True))
    assert equal(weights(whole.lm), weights(resumed.lm))
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in copies[1])


@pytest.mark.parametrize("more", [{"optim": "adamw_bnb_8bit"}, {"fsdp": True}, {"fp16": True}])
def test_an_optimizer_that_cannot_go_to_host_memory_is_refused(more):
    args = SimpleNamespace(
        **{"optimizer_offload": True, "optim": "adamw_torch", "fsdp": None, "deepspeed": None, "fp16": False}
        | more
    )
    with raises(ConfigError, where=f"optimizer_offload and {next(iter(more))}"):
        check_offload(args)


def test_a_conversion_with_the_optimizer_in_host_memory(model, text, tmp_path):
    command = (
        "convert",
        "--model",
        model,
        "--data",
        text,
        "--output",
        tmp_path / "run",
        "--recipe",
        "offload",
        *QUICK,
    )
    result = unmask(*command, "training.max_length=16", "training.max_steps=10", "training.warmup_steps=0")
    assert result.exit_code == 0, result.output
    assert "host_weights" in torch.load(next((tmp_path / "run").rglob("optimizer.pt")), weights_only=True)
