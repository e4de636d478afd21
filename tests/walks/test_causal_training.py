"""From a causal training loop with a mask cache, mixed precision and asynchronous loading: train_model(...)
and its switches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import unmask as package
from tests.helpers import require_bfloat16, shared_path
from tests.training.tiny_runs import unmask
from tests.walks.walking import walk
from unmask.artifacts import MetricsLog
from unmask.config.yaml import parse_yaml
from unmask.models.load import load

SENTENCE = "Once upon a time there was a little cat who liked milk, the sun and her red ball. "


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(SENTENCE * (1 + number % 3) for number in range(24)))
    return path


def pretrain(corpus: Path, output: str, *settings: str) -> list[dict[str, float]]:
    """Train stories260K; the lines of the log with a loss."""
    shape = [
        "training.per_device_train_batch_size=8",
        "training.max_length=64",
        "training.logging_steps=1",
        "training.use_cpu=true",
    ]
    walk(
        "pretrain",
        "--model",
        shared_path("models", "stories260K"),
        "--data",
        corpus,
        "--output",
        output,
        *shape,
        *settings,
    )
    return [line for line in MetricsLog(Path(output, "training_logs.json")).read() if "loss" in line]


@pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")  # there is no GPU to pin memory for
def test_training_with_all_its_optimizations(corpus):
    require_bfloat16()
    switches = [
        "bf16=true",
        "dataloader_num_workers=2",
        "dataloader_pin_memory=true",
        "dataloader_persistent_workers=true",
    ]
    lines = pretrain(
        corpus, "all", "training.num_train_epochs=2", *(f"training.{switch}" for switch in switches)
    )
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["epoch"] == 2
    assert {"tokens_per_second", "samples_per_second"} <= lines[0].keys() and "memory_gb" not in lines[0]
    assert load("all/model").attention == "causal"  # and may be converted next


@pytest.mark.slow
def test_training_without_mixed_precision_and_with_memory_in_the_log(corpus):
    require_bfloat16()
    plain = pretrain(
        corpus, "plain", "training.max_steps=3", "training.bf16=false", "training.log_memory_usage=true"
    )
    mixed = pretrain(corpus, "mixed", "training.max_steps=3", "training.bf16=true")
    # its accuracy is kept
    assert [line["loss"] for line in mixed] == pytest.approx([line["loss"] for line in plain], rel=0.02)
    assert all(line["memory_gb"] > 0 for line in plain)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_mixed_precision_is_chosen_where_it_pays_and_falls_back_elsewhere(corpus):
    pretrain(corpus, "run", "training.max_steps=1")
    assert parse_yaml(Path("run/config.yaml").read_text(), "config.yaml")["training"]["bf16"] is False
    with pytest.warns(
        RuntimeWarning, match="fp16 is set, but this machine cannot train in it: training in float32"
    ):
        assert pretrain(corpus, "older", "training.max_steps=1", "training.fp16=true")


@pytest.mark.slow
def test_masks_are_kept_between_steps_and_can_be_forgotten(corpus):
    package.clear_mask_cache()
    pretrain(corpus, "run", "training.max_steps=4", "training.packing=false", "training.max_length=16")
    stats = package.mask_cache_stats()
    assert stats["hits"] >= 3 * stats["misses"] > 0 and stats["hit_rate"] == stats["hits"] / (
        stats["hits"] + stats["misses"]
    )
    package.clear_mask_cache()
    assert package.mask_cache_stats()["size"] == 0


@pytest.mark.slow
def test_the_same_from_python(corpus, tmp_path):
    model = package.load(shared_path("models", "stories260K"))
    settings = {
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "max_length": 64,
        "logging_steps": 1,
        "use_cpu": True,
    }
    args = package.PretrainConfig(
        output_dir=str(tmp_path / "run"), disable_tqdm=True, save_strategy="no", **settings
    )
    trainer = package.PretrainTrainer(
        model=model, args=args, train_dataset=[{"text": text} for text in corpus.read_text().split("\n\n")]
    )
    trainer.train()
    assert len([line for line in trainer.state.log_history if "loss" in line]) == 3


def test_the_names_of_its_switches_lead_to_ours(corpus):
    ours = {"use_amp": "bf16", "log_gpu_memory": "log_memory_usage", "num_workers": "dataloader_num_workers"}
    ours |= {"pin_memory": "dataloader_pin_memory", "batch_size": "per_device_train_batch_size"}
    ours |= {"epochs": "num_train_epochs", "seq_len": "max_length"}
    for old, new in ours.items():
        refused = unmask("pretrain", "--model", "m", "--data", corpus, "--output", "no", f"training.{old}=1")
        assert (
            refused.exit_code == 2
            and f"training.{old} (command line): is not a known key. Did you mean {new!r}?" in refused.stderr
        )


@pytest.mark.slow
def test_what_it_planned_for_later(corpus):
    """Checkpointing, attention in flash kernels, sharding; and what fits the machine."""
    steps = "training.max_steps=2"
    plain, checkpointed = (
        pretrain(corpus, "plain", steps),
        pretrain(corpus, "less", steps, "training.activation_checkpointing=true"),
    )
    assert [line["loss"] for line in checkpointed] == pytest.approx(
        [line["loss"] for line in plain], rel=1e-5
    )
    model = shared_path("models", "stories260K")
    command = ["pretrain", "--model", model, "--data", corpus, "--output", "no"]
    flash = unmask(*command, "training.flash_attention=true", "training.use_cpu=true")
    assert flash.exit_code == 2 and "flash_attention" in flash.stderr and not Path("no").exists()
    found = json.loads(
        walk("inspect", model, "--hardware", "h100-80gb", "--hardware", "multi-node", "--json").stdout
    )["plans"]
    assert found["multi-node"]["workload"]["shards"] == 16 and found["h100-80gb"]["workload"]["batch"] > 1
