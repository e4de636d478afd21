"""On a GPU: every verb and method learns as on a CPU, resumes bit for bit, and switches change the loss by
rounding alone."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import GPU, STOOD_IN, needs_cuda, needs_gpu
from tests.tiny import llama_lm, quantizable_llama_lm
from tests.training.tiny_runs import TEXTS, equal, low_ids, make, moved, settings, weights
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.methods import METHODS
from unmask.training.run.log import LOG_NAME
from unmask.training.trainer import DiffusionTrainer

pytestmark = needs_gpu

VERBS: dict[str, dict[str, Any]] = {"pretrain": {}, "sft": {}, "dpo": {}, "kto": {}, "convert": {}}
VERBS["on-policy"] = {"states": "sampler", "distillation": 1.0, "lmbda": 0.5, "max_new_tokens": 6}
for NAME, METHOD in METHODS.items():
    VERBS[f"grpo: {NAME}"] = {"method": NAME, "reward": low_ids, "epsilon": getattr(METHOD, "epsilon", None)}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes (the extra `cuda`)"
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao (the extra `torchao`)"
)


def trainer(verb: str, folder: Path, lm: DiffusionLM | None = None, **more: Any) -> DiffusionTrainer:
    """Of four rows a step; float32 unless asked otherwise."""
    more = VERBS[verb] | {"learning_rate": 1e-3, "bf16": False} | more
    if verb in ("convert", "on-policy"):
        rows = [row | {"prompt": row["text"]} for row in TEXTS]
        stages = [
            {"attention": "block_causal", "block_size": 4, "share": 1},
            {"attention": "bidirectional", "share": 1},
        ]
        return ConvertTrainer(
            lm or llama_lm("causal"),
            ConvertConfig(**settings(folder, max_length=32, stages=stages) | more),
            train_dataset=rows,
            eval_dataset=rows[:3],
        )
    return make(verb.split(":")[0], folder, lm, **more)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / LOG_NAME).read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


QUICK_VERBS = ("sft", "dpo", "grpo: diffu-grpo")


@pytest.mark.parametrize(
    "verb", [verb if verb in QUICK_VERBS else pytest.param(verb, marks=pytest.mark.slow) for verb in VERBS]
)
def test_it_learns_as_on_a_cpu(verb, tmp_path):
    runs = []
    for device in ("cpu", GPU):
        made = trainer(verb, tmp_path / device, use_cpu=device == "cpu", max_steps=3)
        made.train()
        assert made.lm.device.type == device
        runs.append(
            (losses(tmp_path / device), {name: weight.cpu() for name, weight in weights(made.lm).items()})
        )
    if STOOD_IN:  # which computes with a CPU
        assert runs[1][0] == runs[0][0] and equal(runs[1][1], runs[0][1])
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-3, abs=1e-5) and len(runs[0][0]) == 3
    # Adam's first steps have the size of the rate, whatever the gradient: rounding can turn a few
    for name, weight in runs[0][1].items():
        close = torch.isclose(runs[1][1][name], weight, rtol=0, atol=1e-4).float().mean()
        assert close > 0.97, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "verb", ["pretrain", "sft", "dpo", "convert", "on-policy", "grpo: diffu-grpo", "grpo: cj-grpo"]
)
def test_a_resumed_run_ends_as_the_whole_one(verb, tmp_path):
    saving: dict[str, Any] = {"use_cpu": False, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(verb, tmp_path, **saving)
    whole.train()
    expected = weights(whole.lm)
    for later in tmp_path.glob("**/checkpoint-4"):
        shutil.rmtree(later)
    again = trainer(verb, tmp_path, **saving)
    again.train(resume_from_checkpoint=True)
    assert equal(weights(again.lm), expected)


SWITCHES: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "compiled": {"torch_compile": True},
    "checkpointing": {"activation_checkpointing": True},
    "offloaded optimizer": {"optimizer_offload": True},
    "FlashAttention": {"flash_attention": True, "bf16": True},
    "tf32": {"tf32": True},
    "fused": {"optim": "adamw_torch_fused"},
    "log_memory_usage": {"log_memory_usage": True},
    "worker": {"dataloader_num_workers": 1},
}
OF_A_GPU = {"bf16", "fp16", "compiled", "FlashAttention", "tf32"}  # no other device has them
every_switch = pytest.mark.parametrize(
    "switch", [pytest.param(name, marks=[needs_cuda] if name in OF_A_GPU else []) for name in SWITCHES]
)


@pytest.mark.slow
# in reinforcement learning other rounding samples other tokens
@pytest.mark.parametrize("verb", ["sft", "dpo"])
@every_switch
def test_a_switch_changes_the_loss_by_rounding_alone(verb, switch, tmp_path):
    """That it takes effect is tested in `test_hardware_checks.py`."""
    runs = []
    for name, more in {"plain": {}, "switch": SWITCHES[switch]}.items():
        trainer(
            verb, tmp_path / name, moved(quantizable_llama_lm()), use_cpu=False, max_steps=3, **more
        ).train()
        runs.append(losses(tmp_path / name))
    tolerance = 0.05 if SWITCHES[switch].keys() & {"bf16", "fp16", "tf32"} else 1e-3
    assert len(runs[1]) == 3 and runs[1] == pytest.approx(runs[0], rel=tolerance, abs=tolerance)


@pytest.mark.slow
@every_switch
def test_reinforcement_learning_goes_on_with_a_switch(switch, tmp_path):
    trainer(
        "grpo: diffu-grpo",
        tmp_path,
        moved(quantizable_llama_lm()),
        use_cpu=False,
        max_steps=3,
        **SWITCHES[switch],
    ).train()
    assert len(losses(tmp_path)) == 3


@needs_cuda
@needs_bitsandbytes
@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_optimizers_of_bitsandbytes_train(optim, tmp_path):
    lm = quantizable_llama_lm()
    before = weights(lm)
    trainer("sft", tmp_path, lm, use_cpu=False, optim=optim).train()
    assert not equal({name: weight.cpu() for name, weight in weights(lm).items()}, before)


@needs_cuda
@needs_torchao
def test_bfloat16_weights_move(tmp_path):
    lm = quantizable_llama_lm()
    lm.model.to(torch.bfloat16)
    before = weights(lm)
    trainer(
        "sft",
        tmp_path,
        lm,
        use_cpu=False,
        bf16=None,
        optim="adamw_torch_8bit",
        optim_args="bf16_stochastic_round=True",
    ).train()
    assert not equal({name: weight.cpu() for name, weight in weights(lm).items()}, before)
