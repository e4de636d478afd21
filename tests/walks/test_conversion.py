"""From a three-stage converter with model, training and hardware configurations, on an RTX A6000."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import REPOSITORY, run_all, shared_path
from tests.training.tiny_runs import unmask
from tests.walks.walking import walk
from unmask.artifacts import MetricsLog
from unmask.config.yaml import parse_yaml
from unmask.models.load import load

OLD = {
    "phi2_diffusion.yaml": """
model_name: "microsoft/phi-2"
model_type: "phi"
hidden_size: 2560
num_timesteps: 1000
noise_schedule: "cosine"
use_bidirectional_attention: true
stage1_epochs: 2
stage2_epochs: 4
stage3_epochs: 2
use_gradient_checkpointing: true
use_lora: false
""",
    "stage2_diffusion.yaml": """
batch_size: 2
gradient_accumulation_steps: 16
learning_rate: 1e-4
use_8bit_adam: true
dataset_name: "wikitext"
text_column: "content"
max_seq_length: 512
max_train_samples: 50000
use_wandb: true
save_steps: 2500
eval_steps: 1000
""",
    "single_a6000.yaml": """
device: "cuda:0"
max_memory_gb: 45
dtype: "float16"
gradient_checkpointing: true
use_8bit_adam: true
compile_model: true
""",
}
HERE = [
    "model.device=cpu",
    "training.use_cpu=true",
    "training.fp16=false",
    "training.torch_compile=false",
    "training.report_to=none",
]
"""What a laptop lacks of the machine that the configurations are for."""
SMALL = [
    *(
        "training.optim=adamw_torch",
        "training.max_steps=8",
        "training.gradient_accumulation_steps=1",
        "training.max_length=32",
    ),
    *("training.save_strategy=steps", "training.save_steps=1", "training.logging_steps=1"),
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | Path]:
    """The folder that the guide sets up, its configurations migrated; the options of a run on a small model
    and data of one's own."""
    monkeypatch.chdir(tmp_path)
    for name, text in OLD.items():
        Path(name).write_text(text)
    story = "Once upon a time there was a little cat who liked milk, the sun and her red ball."
    Path("rows.jsonl").write_text("".join(json.dumps({"content": story}) + "\n" for _ in range(16)))
    walk("migrate", *OLD, "--output", "convert.yaml")
    return [
        "--config",
        "convert.yaml",
        "--model",
        shared_path("models", "stories260K"),
        "--data",
        "rows.jsonl",
        *HERE,
        *SMALL,
    ]


def read(path: str) -> dict[str, Any]:
    return parse_yaml(Path(path).read_text(), path)


def test_its_three_configurations_become_one(project):
    refused = unmask("convert", "--config", "phi2_diffusion.yaml", "--output", "out")
    assert refused.exit_code == 2 and "unmask migrate phi2_diffusion.yaml --output NEW.yaml" in refused.stderr
    new = read("convert.yaml")
    assert new["model"]["path"] == "microsoft/phi-2" and new["hardware"]["max_memory_gb"] == 45
    settings = {
        "optim": "adamw_bnb_8bit",
        "activation_checkpointing": True,
        "schedule": "cosine",
        "num_timesteps": 1000,
    }
    settings |= {
        "fp16": True,
        "torch_compile": True,
        "report_to": "wandb",
        "max_length": 512,
        "learning_rate": 1e-4,
    }
    assert new["training"].items() >= settings.items()
    assert [(stage["share"], stage["rate"]) for stage in new["training"]["stages"]] == [
        (2, 0.5),
        (4, 1),
        (2, 0.3),
    ]


@pytest.mark.slow
def test_the_model_is_analysed_and_the_setup_validated(project):
    facts = json.loads(
        walk("inspect", shared_path("models", "stories260K"), "--hardware", "a6000-48gb", "--json").stdout
    )
    assert facts["facts"]["architecture"] == "LlamaForCausalLM" and facts["plans"]["a6000-48gb"]["fits"]
    rehearsed = walk("convert", *project, "--output", "out", "--dry-run")
    told = rehearsed.stdout
    assert "{'loss'" not in told and "convert done" in rehearsed.stderr  # the plan, and one progress display
    assert told.count("predicted peak GB") == 1 and "mask_token" in told and not Path("out").exists()
    small = unmask("convert", *project, "--output", "out", "--dry-run", "hardware.max_memory_gb=0.001")
    assert small.exit_code == 2 and "but only 0.001 may be used" in small.stderr


@pytest.mark.slow
def test_three_stages_train_log_and_go_on_from_a_checkpoint(project):
    walk("convert", *project, "--output", "out")
    lines = MetricsLog(Path("out/training_logs.json")).read()
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 9)) and [line["stage"] for line in steps] == [
        1,
        1,
        2,
        2,
        2,
        2,
        3,
        3,
    ]
    assert {"learning_rate", "grad_norm", "cross_entropy", "tokens_per_second"} <= steps[
        0
    ].keys() and "lm_cross_entropy" in steps[-1]
    rates = [next(line["learning_rate"] for line in steps if line["stage"] == stage) for stage in (1, 2, 3)]
    # at the start of each stage; warm-up apart
    assert rates == pytest.approx([0.5e-4, 1e-4, 0.3e-4], rel=0.3)
    whole = load("out/model")
    assert whole.attention == "bidirectional" and whole.has_time_embedding
    walk("convert", *project, "--output", "again", "--resume", "out/stage-2/checkpoint-2")
    other = load("again/model").model.state_dict()
    assert all(weight.equal(other[name]) for name, weight in whole.model.state_dict().items())
    filled = walk("generate", "out/model", "--prompt", "Once upon a time", "--max-new-tokens", "8", "--json")
    assert json.loads(filled.stdout)["tokens"]


def test_what_its_guide_does_about_memory_and_speed(project):
    Path("less.yaml").write_text(
        "batch_size: 1\ngradient_accumulation_steps: 32\nuse_8bit_adam: true\ncpu_offload: true\n"
    )
    walk("migrate", "less.yaml", "--output", "less-new.yaml", "--format", "converter")
    less = read("less-new.yaml")["training"]
    assert (less["per_device_train_batch_size"], less["gradient_accumulation_steps"], less["optim"]) == (
        1,
        32,
        "paged_adamw_8bit",
    )
    Path("fast.yaml").write_text(
        "compile_model: true\nuse_flash_attention: true\npin_memory: true\nmax_seq_length: 256\n"
    )
    walk("migrate", "fast.yaml", "--output", "fast-new.yaml", "--format", "converter")
    fast = {"torch_compile": True, "flash_attention": True, "dataloader_pin_memory": True, "max_length": 256}
    assert read("fast-new.yaml")["training"].items() >= fast.items()
    Path("many.yaml").write_text('use_deepspeed: true\ndeepspeed_config: "configs/deepspeed_zero2.json"\n')
    walk("migrate", "many.yaml", "--output", "many-new.yaml", "--format", "converter")
    assert read("many-new.yaml")["training"]["deepspeed"] == "configs/deepspeed_zero2.json"


def test_data_of_ones_own(project):
    Path("own.yaml").write_text(
        'dataset_name: "rows.jsonl"\ntext_column: "content"\ncache_dir: "./custom_cache"\n'
    )
    refused = unmask("convert", "--config", "own.yaml", "--output", "out")
    assert refused.exit_code == 2 and "unmask migrate own.yaml --output NEW.yaml" in refused.stderr
    assert "HF_HOME" in walk("migrate", "own.yaml", "--output", "own-new.yaml").stderr
    assert read("own-new.yaml")["data"] == {"train": "rows.jsonl", "text_column": "content"}
    unnamed = unmask("convert", *project, "--output", "out", "data.text_column=text")
    assert (
        unnamed.exit_code == 2
        and "present: 'content'" in unnamed.stderr
        and "data.text_column" in unnamed.stderr
    )
    kept = [
        "data.text_column=content",
        "training.max_steps=3",
        "training.save_strategy=no",
    ]
    walk("convert", *project, "--output", "out", *kept)


@pytest.mark.slow
def test_adapters_where_the_card_is_small(project):
    Path("lora.yaml").write_text(OLD["phi2_diffusion.yaml"].replace("use_lora: false", "use_lora: true"))
    walk("migrate", "lora.yaml", *list(OLD)[1:], "--output", "lora-new.yaml")
    walk("convert", "--config", "lora-new.yaml", *project[2:], "--output", "out")
    assert load("out/model").attention == "bidirectional"


@pytest.mark.slow
def test_debugging_makes_few_steps_with_checks(project, debugging):
    walk("convert", *project, "--output", "out", "--debug", "training.max_steps=3")
    assert Path("out/model").exists()


@pytest.mark.slow
def test_its_script(project):
    files = ["--model_config", "convert.yaml", "--dry_run"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": path}
    command = ["bash", REPOSITORY / "scripts/convert.sh", *files, *project[2:], "--output", "out"]
    called = run_all(command, env=environment, timeout=300, stdout=subprocess.PIPE, text=True)
    assert "predicted peak GB" in called.stdout
