"""Recipes that the docs put together make a trainer; those that cannot go together are refused before
anything is loaded."""

from __future__ import annotations

import json
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY, partly_slow
from tests.tiny import PLAIN_TEMPLATE
from tests.training.tiny_runs import unmask
from unmask.cli import run
from unmask.cli.modes import adapt_recipes
from unmask.cli.run import make_trainer, training_arguments
from unmask.config.layers import RECIPES, read_layers
from unmask.config.run import resolve
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model, character_tokenizer
from unmask.tasks import get_task

HARDWARE = sorted(path.stem for path in (RECIPES / "hardware").glob("*.yaml"))
SHARDED = ["a40-48gb-x3", "multi-node"]
MACHINES = [name for name in HARDWARE if name not in SHARDED]
MODES = [None, "speed", "balanced", "memory"]
MEMORY = ["lora", "bfloat16", "offload"]
CONVERSIONS = sorted(path.stem for path in (RECIPES / "conversion").glob("*.yaml"))
PREFERENCES = sorted(path.stem for path in (RECIPES / "preference").glob("*.yaml"))
OCAML_TESTS = """
let assertions =
  (assert ((f 1) = 2));
  (assert ((f 2) = 3));
  ()
"""
TASKS = ["sudoku", "countdown", "gsm8k", "math500", "code-python", "code-ocaml", "code-ocaml-causal"]
HERE = {
    **{
        "model.device": "cpu",
        "training.use_cpu": True,
        "training.torch_compile": False,
        "training.dataloader_pin_memory": False,
    },
    **{"training.max_steps": 4, "data.max_rows": 8},
}
"""What this machine forces on every recipe."""
if find_spec("bitsandbytes") is None:
    HERE["training.optim"] = "adamw_torch"
FEW_PAIRS = {"training.gradient_accumulation_steps": 1, "data.max_rows": 2}
SPARING = ("optim", "optim_args", "optimizer_offload", "activation_checkpointing", "bf16")
"""What recipes set to save memory."""
COMMAND = re.compile(r"unmask (pretrain|convert|sft|dpo|grpo) ([^`\n]*--recipe [a-z][^`\n#|]*)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model, and a bidirectional one, with a chat template and a long context; and rows of every
    kind."""
    folder = tmp_path_factory.mktemp("recipes")
    text = "".join(map(chr, range(32, 127))) + "\n"
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    tokenizer = character_tokenizer(text)
    tokenizer.chat_template = PLAIN_TEMPLATE
    config = lm.config
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 8192
    config.bos_token_id, config.eos_token_id, config.pad_token_id = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    for name in ("causal", "bidirectional"):
        type(lm.model)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = {
        "text": [{"text": "once upon a time there was"}] * 64,
        "prompts": [{"prompt": "a b"}] * 64,
        "pairs": [{"prompt": "a b", "completion": "c d"}] * 8,
        "preferences": [{"prompt": "a b", "chosen": "c d", "rejected": "d"}] * 64,
        "gsm8k": [{"question": "1 + 1?", "answer": "#### 2"}] * 8,
        "math500": [{"problem": "1 + 1?", "solution": "2", "answer": "2"}] * 8,
        "mbpp": [
            {"text": "Write f.", "code": "def f(): return 1", "test_list": ["assert f() == 1"], "task_id": 1}
        ]
        * 8,
        "ocaml": [{"prompt": "let f (n : int) : int =", "tests": OCAML_TESTS}] * 8,
    }
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


def constructed(
    verb: str, recipes: list[str], mode: str | None, folder: Path, model: str, data: str | None, **more: Any
) -> Any:
    """The trainer that the command line would make of these recipes, with what they set."""
    if "bfloat16" in recipes:
        pytest.importorskip("torchao")
    flags = {"model.path": str(folder / model), "output_dir": tempfile.mkdtemp(dir=folder), **HERE, **more}
    if data is not None:
        flags["data.train"] = str(folder / f"{data}.jsonl")
    layers = adapt_recipes(read_layers(recipes=recipes, flags=flags), verb, mode, recipes=len(recipes))
    config = resolve(layers)
    trainer = make_trainer(verb, config, training_arguments(verb, config))
    assert str(trainer.lm.dtype) == f"torch.{config.model.dtype}"
    for name in SPARING:
        assert getattr(trainer.args, name) == config.training.get(name, getattr(trainer.args, name)), name
    return trainer


def for_verb(verb: str, recipes: list[str]) -> tuple[str, str | None, dict[str, Any]]:
    """A model that the recipes are for, rows, and the settings that both need."""
    if verb == "grpo":
        data = {
            "gsm8k": "gsm8k",
            "math500": "math500",
            "code-python": "mbpp",
            "code-ocaml": "ocaml",
            "code-ocaml-causal": "ocaml",
        }
        name = recipes[0].removeprefix("grpo-")
        return (
            ("causal", data[name], {}) if name.endswith("causal") else ("bidirectional", data.get(name), {})
        )
    if verb in ("pretrain", "convert"):
        data = "prompts" if "on-policy" in recipes else "text"
        return "causal", data, {"training.max_steps": 64}
    return "bidirectional", {"sft": "pairs", "dpo": "preferences"}[verb], {}


def made(verb: str, recipes: list[str], mode: str | None, folder: Path, **more: Any) -> Any:
    model, data, fitting = for_verb(verb, recipes)
    attention = {} if model == "causal" else {"model.attention": "bidirectional"}
    return constructed(verb, recipes, mode, folder, model, data, **attention, **fitting | more)


ONE_BY_ONE = [(machine, None) for machine in MACHINES] + [("a6000-48gb", mode) for mode in MODES[1:]]
"""Each machine, and each mode."""
TOGETHER = [(machine, mode) for machine in MACHINES for mode in MODES if (machine, mode) not in ONE_BY_ONE]


@pytest.mark.parametrize(
    "cases", [ONE_BY_ONE, pytest.param(TOGETHER, marks=pytest.mark.slow)], ids=["one by one", "together"]
)
@partly_slow("task", TASKS, 5)
def test_every_recipe_of_a_task_goes_with_every_machine_and_mode(task, cases, models):
    for machine, mode in cases:
        trainer = made("grpo", [f"grpo-{task}", machine], mode, models)
        assert hasattr(trainer.lm.model, "merge_and_unload")


def test_the_recipe_of_a_causal_code_model_takes_rollouts_from_vllm():
    flags = {
        "model.path": "m",
        "output_dir": "out",
        **HERE,
        "training.rollout": {"backend": "vllm", "url": "http://localhost:8000"},
    }
    config = resolve(read_layers(recipes=["grpo-code-ocaml-causal", "a40-48gb-x3-ddp"], flags=flags))
    assert training_arguments("grpo", config).corrects_for_server


@partly_slow("recipe", CONVERSIONS, 0)
def test_every_recipe_of_a_conversion_goes_with_the_machines_the_modes_and_those_of_memory(recipe, models):
    cases = [([machine], mode) for machine, mode in ONE_BY_ONE]
    cases += [([*machine, beside], None) for beside in MEMORY for machine in ([], ["rtx3090-24gb"])]
    for beside, mode in cases:
        trainer = made("convert", [recipe, *beside], mode, models)
        assert len(trainer.ends) == len(trainer.args.stages)
        assert ("lora" in beside) == hasattr(trainer.lm.model, "merge_and_unload")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PREFERENCES)
def test_every_recipe_of_preferences_goes_with_the_machines_and_modes(recipe, models):
    for machine in MACHINES:
        assert made("dpo", [recipe, machine], None, models, **FEW_PAIRS)
    for mode in MODES[1:]:
        assert made("dpo", [recipe], mode, models, **FEW_PAIRS)


@partly_slow("recipe", ["sft-s1k", "lora"], 1)
def test_every_recipe_of_fine_tuning_goes_with_the_machines_and_modes(recipe, models):
    for beside in [[], *([machine] for machine in MACHINES)]:
        assert made("sft", [recipe, *beside], None, models)
    for mode in MODES[1:]:
        assert made("sft", [recipe], mode, models)


@pytest.mark.parametrize("recipe", ["tiny", "debug"])
def test_small_recipes_of_fine_tuning(recipe, models):
    assert made("sft", [recipe], None, models)


def documented() -> list[tuple[str, str]]:
    """The verb and options of each command with a recipe in docs, scripts and recipes."""
    pages = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *RECIPES.glob("*/*.yaml"),
        *(REPOSITORY / "scripts").glob("*.*"),
    ]
    shown = {found.groups() for page in pages for found in COMMAND.finditer(page.read_text(encoding="utf-8"))}
    # which stands for every one
    return sorted((verb, options) for verb, options in shown if "TASK" not in options)


@pytest.mark.parametrize(("verb", "options"), documented())
def test_the_recipes_of_every_command_in_the_docs_go_together(verb, options, models):
    recipes = re.findall(r"--recipe ([a-z0-9-]+)", options)
    mode = re.search(r"--mode ([a-z]+)", options)
    if set(recipes) & set(SHARDED):
        pytest.skip("shards, which one process does not")
    own = dict(pair.split("=", 1) for pair in re.findall(r"(?:training|lora)\.\S+=\S+", options))
    assert made(
        verb, recipes, mode and mode[1], models, **{key: parse_yaml(value, key) for key, value in own.items()}
    )


def test_the_docs_show_such_commands():
    shown = {
        recipe for _, options in documented() for recipe in re.findall(r"--recipe ([a-z0-9-]+)", options)
    }
    assert {
        "block",
        "offload",
        "bfloat16",
        "a40-48gb-x3-ddp",
        "grpo-code-ocaml-causal",
        "dpo-tiny",
        "tiny",
    } <= shown


# What cannot go together


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model was loaded")

    for name in ("load_or_initialize", "read_data"):
        monkeypatch.setattr(run, name, loaded)


def refusal(verb: str, recipes: list[str], folder: Path, model: Path, data: str, *settings: str) -> str:
    """The line with which the command line ends."""
    options = [part for recipe in recipes for part in ("--recipe", recipe)]
    result = unmask(
        verb,
        *options,
        "--model",
        model,
        "--data",
        data,
        "--output",
        folder / "out",
        "training.use_cpu=true",
        *settings,
    )
    assert result.exit_code == 2, (result.output, result.exception)
    assert not (folder / "out").exists()
    return " ".join(result.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("machine", SHARDED)
@pytest.mark.parametrize("task", TASKS)
def test_adapters_on_sharded_weights_are_refused_with_every_recipe_of_a_task(
    task, machine, models, tmp_path, nothing_is_loaded
):
    model, _, _ = for_verb("grpo", [f"grpo-{task}"])
    line = refusal(
        "grpo", [f"grpo-{task}", machine], tmp_path, models / model, "owner/rows", "training.bf16=false"
    )
    assert (
        f"training.fsdp (recipe {machine}) and lora (recipe grpo-{task}): adapters cannot be merged" in line
    )
    assert "lora=null" in line and "a40-48gb-x3-ddp" in line


CAUSAL, BIDIRECTIONAL = "causal", "bidirectional"
VLLM = ("training.rollout.backend=vllm", "training.rollout.url=http://nowhere.invalid:8000")


@pytest.mark.parametrize(
    ("verb", "recipes", "model", "settings", "message"),
    [
        *[
            (
                "grpo",
                [f"grpo-{task}"],
                CAUSAL,
                (),
                f"sampler.block_size (recipe grpo-{task}) and model.path (command line): decoding blocks",
            )
            for task in TASKS[:-1]
        ],
        (
            *("grpo", ["grpo-code-ocaml"], CAUSAL, VLLM),
            "training.rollout.backend (command line) and training.block_size (recipe grpo-code-ocaml): "
            "vllm decodes a causal model token "
            "by token, and ignores block_size. Leave block_size out (the recipe grpo-code-ocaml-causal",
        ),
        (
            *("grpo", ["grpo-code-ocaml-causal"], BIDIRECTIONAL, ("model.attention=bidirectional", *VLLM)),
            (
                "training.rollout.backend (command line) and model.path (command line): vllm decodes token "
                "by token, and this model is bidir"
            ),
        ),
        (
            *("grpo", ["grpo-code-ocaml-causal"], CAUSAL, (*VLLM, "lora=null", "training.rollout.sync=lora")),
            "training.rollout.sync (command line) and lora (command line): there are no adapters to send",
        ),
        (
            *("grpo", ["grpo-code-ocaml-causal", "a40-48gb-x3"], CAUSAL, (*VLLM, "lora=null")),
            (
                "training.rollout.backend (command line) and training.fsdp (recipe a40-48gb-x3): sharded "
                "weights cannot be sent"
            ),
        ),
        (
            *("grpo", ["grpo-sudoku", "a40-48gb-x3"], BIDIRECTIONAL, ("lora=null",)),
            (
                "training.sync_ref_model (recipe grpo-sudoku) and training.fsdp (recipe "
                "a40-48gb-x3): a reference cannot follow"
            ),
        ),
        (
            *("grpo", ["grpo-sudoku"], BIDIRECTIONAL, ("training.max_staleness=1",)),
            (
                "training.rollout.backend and training.max_staleness (command line): only a server can "
                "sample while the model trains"
            ),
        ),
        (
            *("grpo", ["grpo-code-ocaml-causal"], CAUSAL, ("training.masking=diffusion",)),
            (
                "model.path (command line) and training.masking (command line): a causal model's "
                "likelihood is exact"
            ),
        ),
        (
            *("grpo", ["grpo-code-ocaml-causal"], CAUSAL, ("model.device_map=balanced",)),
            "model.device_map (command line): rollouts on a model that is split",
        ),
        (
            *("sft", ["lora"], CAUSAL, ("training.flash_attention=true",)),
            "training.flash_attention (command line) and training.use_cpu (command line): there is no GPU",
        ),
        (
            *("sft", ["a40-48gb-x3"], CAUSAL, ("model.device_map=balanced",)),
            (
                "model.device_map (command line) and training.fsdp (recipe a40-48gb-x3): fsdp on a model "
                "that is split"
            ),
        ),
        (
            *("sft", ["tiny"], CAUSAL, ("model.device_map=balanced", "training.torch_compile=true")),
            (
                "model.device_map (command line) and training.torch_compile (command line): torch_compile "
                "on a model that is split"
            ),
        ),
        (
            *("sft", ["tiny"], CAUSAL, ("model.quantization=4bit",)),
            "model.quantization (command line) and lora: quantized weights take no gradients",
        ),
        (
            *("sft", ["lora"], CAUSAL, ("model.quantization=4bit", "model.device_map=balanced")),
            (
                "model.quantization (command line) and model.device_map (command line): quantized weights "
                "are not spread"
            ),
        ),
        (
            *("sft", ["lora", "bfloat16"], CAUSAL, ()),
            (
                "training.optim_args (recipe bfloat16) and lora (recipe lora): bf16_stochastic_round, but "
                "no trained weight"
            ),
        ),
        (
            *("sft", ["bfloat16"], CAUSAL, ("model.dtype=float32",)),
            (
                "training.optim_args (recipe bfloat16) and model.dtype (command line): "
                "bf16_stochastic_round, but no trained weight"
            ),
        ),
        (
            *("sft", ["offload", "a40-48gb-x3"], CAUSAL, ()),
            (
                "training.optimizer_offload (recipe offload) and training.fsdp (recipe a40-48gb-x3): "
                "sharding has its own offload"
            ),
        ),
        (
            *("sft", ["offload", "rtx3090-24gb"], CAUSAL, ()),
            (
                "training.optimizer_offload (recipe offload) and training.optim (recipe rtx3090-24gb): "
                "adamw_8bit cannot keep"
            ),
        ),
        (
            *("convert", ["block", "lora"], CAUSAL, ("training.time_embedding=true",)),
            (
                "training.time_embedding (command line) and lora (recipe lora): adapters cannot train a "
                "time embedding"
            ),
        ),
        (
            *("dpo", ["dpo-tiny"], BIDIRECTIONAL, ("training.reference=adapter",)),
            "training.reference (command line) and lora: the policy has no adapters",
        ),
        (
            *("dpo", ["dpo-tiny"], CAUSAL, ("training.bound=elbo",)),
            (
                "model.path (command line) and training.bound (command line): the likelihood of a causal "
                "model is exact"
            ),
        ),
        (
            *("pretrain", ["tiny"], CAUSAL, ("model.from_scratch=true", "model.device_map=balanced")),
            (
                "model.from_scratch (command line) and model.device_map (command line): new weights are "
                "made on one device"
            ),
        ),
    ],
)
def test_what_cannot_go_together_is_refused_before_anything_is_loaded(
    verb, recipes, model, settings, message, models, tmp_path, nothing_is_loaded
):
    if "bfloat16" in recipes:
        pytest.importorskip("torchao")
    switches = [] if "bfloat16" in recipes else ["training.bf16=false"]
    if not {"bfloat16", "offload"} & set(recipes):
        switches.append("training.optim=adamw_torch")
    line = refusal(verb, recipes, tmp_path, models / model, "owner/rows", *switches, *settings)
    assert message in line
