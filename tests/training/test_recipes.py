"""Recipes that the docs put together make a trainer; those that cannot go together are refused before anything is loaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import CHAT_TEMPLATE, unmask
from unmask.config import resolve
from unmask.config_files import read_layers
from unmask.data.characters import character_tokenizer
from unmask.demo import DemoSettings, small_model
from unmask.tasks import get_task
from unmask.training import run
from unmask.training.modes import arranged
from unmask.training.run import make_trainer, training_arguments

MACHINES = ["cpu", "rtx4080-16gb", "rtx3090-24gb", "a6000-48gb", "a40-48gb-x3-ddp", "h100-80gb"]
MODES = [None, "speed", "balanced", "memory"]
TASKS = ["sudoku", "countdown", "gsm8k", "math500", "code-python", "code-ocaml", "code-ocaml-causal"]
HERE = {
    **{"model.device": "cpu", "model.dtype": "float32", "training.use_cpu": True, "training.bf16": False, "training.fp16": False},
    **{"training.optim": "adamw_torch", "training.optim_args": None, "training.optimizer_offload": False, "training.torch_compile": False},
    **{"training.dataloader_pin_memory": False, "training.max_steps": 4, "training.tf32": None, "data.max_rows": 8},
}
"""What this machine forces on every recipe."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model, and a bidirectional one, with a chat template and a long context; and rows of every kind."""
    folder = tmp_path_factory.mktemp("recipes")
    text = "".join(map(chr, range(32, 127))) + "\n"
    lm = small_model(get_task("sudoku"), DemoSettings(hidden=16, layers=1), 0)
    tokenizer = character_tokenizer(text)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = lm.config
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 8192
    config.bos_token_id, config.eos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    for name in ("causal", "bidirectional"):
        type(lm.model)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = {
        "text": [{"text": "once upon a time there was"}] * 64,
        "pairs": [{"prompt": "a b", "completion": "c d"}] * 8,
        "preferences": [{"prompt": "a b", "chosen": "c d", "rejected": "d"}] * 64,
        "gsm8k": [{"question": "1 + 1?", "answer": "#### 2"}] * 8,
        "math500": [{"problem": "1 + 1?", "solution": "2", "answer": "2"}] * 8,
        "mbpp": [{"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"], "task_id": 1}] * 8,
        "ocaml": [{"prompt": "let f (n : int) : int =", "tests": "\nlet assertions =\n  (assert ((f 1) = 1))"}] * 8,
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def constructed(verb: str, recipes: list[str], mode: str | None, folder: Path, model: str, data: str | None, **more: Any) -> Any:
    """The trainer that the command line would make of these recipes."""
    flags = {"model.path": str(folder / model), "output_dir": tempfile.mkdtemp(dir=folder), **HERE, **more}
    if data is not None:
        flags["data.train"] = str(folder / f"{data}.jsonl")
    layers = arranged(read_layers(recipes=recipes, flags=flags), verb, mode, recipes=len(recipes))
    config = resolve(layers)
    return make_trainer(verb, config, training_arguments(verb, config))


def of_task(name: str) -> tuple[str, str | None]:
    """The model that a recipe is for, and its rows."""
    data = {"gsm8k": "gsm8k", "math500": "math500", "code-python": "mbpp", "code-ocaml": "ocaml", "code-ocaml-causal": "ocaml"}
    return "causal" if name.endswith("causal") else "bidirectional", data.get(name)


@pytest.mark.parametrize("task", TASKS)
def test_every_recipe_of_a_task_goes_with_every_machine_and_mode(task, models):
    model, data = of_task(task)
    attention = {} if model == "causal" else {"model.attention": "bidirectional"}
    for machine in MACHINES:
        for mode in MODES:
            trainer = constructed("grpo", [f"grpo-{task}", machine], mode, models, model, data, **attention)
            assert trainer.lm.attention == model and hasattr(trainer.lm.model, "merge_and_unload")


def test_the_recipe_of_a_causal_code_model_takes_rollouts_from_vllm():
    flags = {"model.path": "m", "output_dir": "out", **HERE, "training.rollout": {"backend": "vllm", "url": "http://localhost:8000"}}
    config = resolve(read_layers(recipes=["grpo-code-ocaml-causal", "a40-48gb-x3-ddp"], flags=flags))
    assert training_arguments("grpo", config).corrected


@pytest.mark.parametrize("recipe", ["block", "block-sdar", "full", "growing", "distilled"])
@pytest.mark.parametrize("beside", [[], ["lora"], ["rtx3090-24gb", "bfloat16"], ["rtx3090-24gb", "offload"], ["a6000-48gb"]], ids=str)
def test_every_recipe_of_a_conversion_goes_with_those_of_memory(recipe, beside, models):
    shares = {"training.max_steps": 64}
    trainer = constructed("convert", [recipe, *beside], None, models, "causal", "text", **shares)
    assert len(trainer.ends) == len(trainer.args.stages)
    assert ("lora" in beside) == hasattr(trainer.lm.model, "merge_and_unload")


@pytest.mark.parametrize("recipe", ["dpo-llada-8b", "dpo-rtx4080-16gb", "dpo-tiny"])
@pytest.mark.parametrize("machine", ["rtx4080-16gb", "h100-80gb", "a40-48gb-x3-ddp"])
def test_every_recipe_of_preferences_goes_with_the_machines(recipe, machine, models):
    assert constructed("dpo", [recipe, machine], None, models, "bidirectional", "preferences", **{"model.attention": "bidirectional"})


@pytest.mark.parametrize("recipes", [["tiny"], ["lora"], ["lora", "a40-48gb-x3-ddp"], ["debug"], ["sft-s1k"]], ids=str)
def test_recipes_of_fine_tuning(recipes, models):
    data = {"model.attention": "bidirectional"}
    assert constructed("sft", recipes, None, models, "bidirectional", "pairs", **data)


@pytest.mark.parametrize(
    ("recipes", "model", "message"),
    [
        (
            ["grpo-code-ocaml-causal", "a40-48gb-x3"],
            "causal",
            "training.fsdp (recipe a40-48gb-x3) and lora (recipe grpo-code-ocaml-causal): adapters cannot be merged",
        ),
        (["grpo-code-ocaml"], "causal", "sampler.block_size (recipe grpo-code-ocaml) and model.path (command line): decoding blocks of 32"),
    ],
)
def test_what_cannot_go_together_is_refused_before_anything_is_loaded(recipes, model, message, models, tmp_path, monkeypatch):
    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    for name in ("load", "read_data"):
        monkeypatch.setattr(run, name, loaded)
    options = [part for recipe in recipes for part in ("--recipe", recipe)]
    switches = ["training.use_cpu=true", "training.bf16=false", "training.optim=adamw_torch"]
    files = ["--model", str(models / model), "--data", str(models / "ocaml.jsonl"), "--output", str(tmp_path / "out")]
    result = unmask("grpo", *options, *files, *switches)
    assert result.exit_code == 2 and message in result.stderr, (result.output, result.exception)
    assert not (tmp_path / "out").exists()
