"""GRPO of a causal code model with OCaml rewards: what makes generation fast, then vLLM, then three A40s, one
after another."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from transformers import training_args

from tests.generation.remote.stub_servers import FakeVLLM, serving
from tests.helpers import REPOSITORY, partly_slow, require_ocaml
from tests.tiny import PLAIN_TEMPLATE
from tests.training.tiny_runs import unmask
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model, character_tokenizer
from unmask.models.load import load
from unmask.rl.config import GRPOConfig
from unmask.tasks import get_task

RECIPE = ("--recipe", "grpo-code-ocaml-causal")
HERE = (
    "training.use_cpu=true",
    "training.bf16=false",
    "training.optim=adamw_torch",
    "training.activation_checkpointing=false",
)
VARIABLES = {
    "GRPO_USE_VLLM": "true",
    "VLLM_SERVER_HOST": "localhost:8000",
    "GRPO_USE_TORCH_COMPILE": "true",
    "GRPO_BATCH_SIZE": "8",
    "GRPO_NUM_GENERATIONS": "16",
    "GRPO_GRAD_ACCUM_STEPS": "2",
}
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 3
rdzv_backend: static
same_network: true
use_cpu: false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model of characters with a chat template, and problems in OCaml."""
    folder = tmp_path_factory.mktemp("walk")
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = PLAIN_TEMPLATE
    config = lm.config
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 2048
    config.bos_token_id, config.eos_token_id, config.pad_token_id = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    type(lm.model)(config).save_pretrained(folder / "stock")
    tokenizer.save_pretrained(folder / "stock")
    problems = [
        {
            "prompt": f"let {name} (n : int) : int =",
            "tests": f"\nlet assertions =\n  (assert (({name} 1) = 2));\n  (assert (({name} 2) = 3));\n  ()",
        }
        for name in ("f", "g")
    ]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Path:
    """The model as any server can load it."""
    result = unmask("export", folder / "stock", "--layout", "hf", "--output", folder / "served")
    assert result.exit_code == 0, result.output
    return folder / "served"


def grpo(folder: Path, output: Path, *more: str) -> list[str | Path]:
    return [
        "grpo",
        *RECIPE,
        "--model",
        folder / "stock",
        "--data",
        folder / "problems.jsonl",
        "--output",
        output,
        *HERE,
        *more,
    ]


def test_flash_attention_needs_a_gpu_and_says_so_before_the_model_is_loaded(folder, tmp_path):
    result = unmask(*grpo(folder, tmp_path / "out", "training.flash_attention=true"))
    line = " ".join(result.stderr.splitlines()[-1].split())
    assert (
        result.exit_code == 2
        and "training.flash_attention (command line) and training.use_cpu (command line): there is no GPU"
        in line
    )
    printed = unmask(
        "grpo",
        *RECIPE,
        "--recipe",
        "a40-48gb-x3-ddp",
        "--model",
        "m",
        "--output",
        tmp_path,
        "--print-config",
        HERE[0],
    )
    assert printed.exit_code == 0, printed.output
    assert not parse_yaml(printed.stdout, "stdout")["training"]["flash_attention"]


@pytest.mark.usefixtures("tf32_restored")
def test_tf32_is_on_by_the_check_that_readers_know(tmp_path, monkeypatch):
    monkeypatch.setattr(training_args, "is_torch_tf32_available", lambda: True)
    GRPOConfig(output_dir=str(tmp_path), use_cpu=True, tf32=True)
    assert torch.backends.cuda.matmul.allow_tf32 is True and torch.backends.cudnn.allow_tf32 is True


def test_the_variables_are_read_and_make_48_completions_a_step_on_three_cards(folder, tmp_path, monkeypatch):
    for name, text in VARIABLES.items():
        monkeypatch.setenv(name, text)
    result = unmask(*grpo(folder, tmp_path / "out", "--print-config"))
    assert result.exit_code == 0, result.output
    assert all(f"{name} is read as training." in result.stderr for name in VARIABLES)
    training = parse_yaml(result.stdout, "stdout")["training"]
    assert training["rollout"]["backend"] == "vllm" and training["rollout"]["url"] == "http://localhost:8000"
    assert training["torch_compile"] is True
    accelerate = load_config_from_file(str(REPOSITORY / "scripts" / "accelerate-a40-x3.yaml"))
    step = (
        training["per_device_train_batch_size"]
        * training["gradient_accumulation_steps"]
        * accelerate.num_processes
    )
    assert (step, step % training["num_generations"]) == (48, 0)


def test_the_accelerate_file_of_the_scripts_says_what_the_readers_own_says(tmp_path):
    (tmp_path / "own.yaml").write_text(ACCELERATE)
    own, ours = (
        load_config_from_file(str(path))
        for path in (tmp_path / "own.yaml", REPOSITORY / "scripts" / "accelerate-a40-x3.yaml")
    )
    assert ours == own
    assert (ours.distributed_type, ours.num_processes, ours.mixed_precision) == (
        DistributedType.MULTI_GPU,
        3,
        "bf16",
    )


def test_variables_and_accelerate_file_migrate_to_one_configuration(tmp_path):
    (tmp_path / "run.env").write_text(
        "".join(f"export {name}={shlex.quote(text)}\n" for name, text in VARIABLES.items())
    )
    (tmp_path / "accelerate_config.yaml").write_text(ACCELERATE)
    result = unmask(
        "migrate",
        tmp_path / "run.env",
        tmp_path / "accelerate_config.yaml",
        "--output",
        tmp_path / "run.yaml",
    )
    assert result.exit_code == 0, result.output
    training = parse_yaml((tmp_path / "run.yaml").read_text(), "run.yaml")["training"]
    assert (
        training["rollout"] == {"backend": "vllm", "url": "http://localhost:8000"}
        and training["bf16"] is True
    )
    assert "unmask grpo --config" in result.stderr


def test_a_model_is_exported_for_the_server(served):
    assert load(served).attention == "causal" and list(served.glob("*.safetensors"))


def test_the_commands_of_the_docs_make_48_completions_a_step(tmp_path):
    """The server has a card of its own; the other two train."""
    block = re.search(
        r"```bash\n(unmask export Qwen.*?)```",
        (REPOSITORY / "docs" / "rl.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " ").partition("accelerate launch")[2])
    launch, command = words[: words.index("-m")], words[words.index("-m") + 2 :]
    launched = launch_command_parser().parse_args([*launch, "-m", "unmask"])
    assert Path(launched.config_file).name == "accelerate-a40-x3.yaml" and launched.num_processes == 2
    result = unmask(*command, "--print-config", *HERE)
    assert result.exit_code == 0, result.output
    training = parse_yaml(result.stdout, "stdout")["training"]
    assert training["rollout"]["sync"] == "lora" and training["rollout"]["backend"] == "vllm"
    assert (
        launched.num_processes
        * training["per_device_train_batch_size"]
        * training["gradient_accumulation_steps"]
        == 48
    )
    rank = int(re.search(r"--max-lora-rank (\d+)", block[1])[1])  # type: ignore[index]
    assert rank >= parse_yaml(result.stdout, "stdout")["lora"]["r"]


@partly_slow("sync", ["disk", "lora"], 1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_training_takes_completions_from_the_server_and_judges_them_by_the_compiler(
    sync, folder, served, tmp_path, monkeypatch
):
    require_ocaml()
    server = FakeVLLM(load(served), processed=True)
    with serving(server) as url:
        monkeypatch.setenv("GRPO_USE_VLLM", "true")
        monkeypatch.setenv("VLLM_SERVER_HOST", url.removeprefix("http://"))
        monkeypatch.setenv("GRPO_BATCH_SIZE", "2")
        monkeypatch.setenv("GRPO_NUM_GENERATIONS", "2")
        monkeypatch.setenv("GRPO_GRAD_ACCUM_STEPS", "1")
        quick = [
            "training.max_steps=2",
            "training.max_completion_length=8",
            "lora.r=2",
            "training.dataloader_num_workers=1",
        ]
        quick += [
            "training.dataloader_prefetch_factor=2",
            "data.eval_rows=1",
            f"training.rollout.sync={sync}",
        ]
        result = unmask(*grpo(folder, tmp_path / "out", *quick, f"model.path={served}"))
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [json.loads(line) for line in (tmp_path / "out" / "training_logs.json").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 2, lines
    assert all(0 <= line["reward"] <= 1 and line["unscored"] == 0 for line in steps)
    assert all(line["samples_per_second"] > 0 and "server_gap" in line for line in steps)
    asked = server.paths()
    assert asked.count("/v1/completions") >= 4
    assert ("/v1/load_lora_adapter" in asked) == (sync == "lora")
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        (
            ["grpo-code-ocaml", "a40-48gb-x3-ddp"],
            (
                "training.rollout.backend (environment variable GRPO_USE_VLLM) and training.block_size "
                "(recipe grpo-code-ocaml): "
            ),
        ),
        (
            ["grpo-code-ocaml-causal", "a40-48gb-x3"],
            "training.fsdp (recipe a40-48gb-x3) and lora (recipe grpo-code-ocaml-causal): ",
        ),
    ],
)
def test_recipes_for_other_models_and_machines_are_refused_with_the_way_out(
    recipes, message, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("GRPO_USE_VLLM", "true")
    monkeypatch.setenv("VLLM_SERVER_HOST", "nowhere.invalid:8000")
    named = [part for name in recipes for part in ("--recipe", name)]
    files = ["--model", folder / "stock", "--data", folder / "problems.jsonl", "--output", tmp_path / "out"]
    result = unmask("grpo", *named, *files, *HERE)
    line = " ".join(result.stderr.splitlines()[-1].split())
    assert result.exit_code == 2 and message in line
    assert ("grpo-code-ocaml-causal is for causal models" in line) or ("a40-48gb-x3-ddp" in line)
    assert not (tmp_path / "out").exists()
