"""FSDP2 and DeepSpeed: two processes shard a model, train like one process, resume, and save the whole
model."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import REPOSITORY, run_all
from tests.tiny import llama_lm
from tests.training.sharded import (
    BLOCKS,
    CONVERSIONS,
    FASTER,
    RATIOS,
    RUN,
    STAGES,
    conversion,
    hybrid,
    ragged,
    samples_per_token,
)
from tests.training.tiny_runs import PAIRS, PREFERENCES, make, weights
from unmask.models.load import load

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="needs DeepSpeed (the extra `deepspeed`), and a C++ compiler for what it builds on first use",
)
NIGHTLY = {
    *[("sft", mode) for mode in ("fsdp", "zero1", "zero2", "zero2-offload", "fsdp-offload")],
    ("sft-hybrid", "zero2"),
    ("kto-blocks", "fsdp"),
    ("dpo", "zero2"),
    ("convert-blocks", "fsdp"),
    *[("kto", mode) for mode in ("fsdp", "zero2")],
    *[("convert", mode) for mode in ("ddp", "fsdp", "zero1", "zero2", "zero3")],
    *[("tokens", mode) for mode in ("ddp", "fsdp", "zero3")],
    *[
        ("convert-blocks", "zero2"),
        ("sequences", "ddp"),
        ("sequences", "zero3"),
        ("grpo", "zero2-offload"),
        ("dpo", "fsdp"),
    ],
}
"""What other runs cover in part: FSDP with offload and without it, and ZeRO 3, are among those that remain, and
`test_equal_runs.py` has all verbs under FSDP."""
SFT_MODES = ("fsdp", "fsdp-offload", "zero1", "zero2", "zero3", "zero2-offload")


def case(verb: str, mode: str) -> Any:
    """The parameters of a run."""
    marks = [needs_deepspeed] if mode.startswith("zero") else []
    return pytest.param(verb, mode, marks=[*marks, pytest.mark.nightly] if (verb, mode) in NIGHTLY else marks)


def launch(verb: str, mode: str, folder: Path) -> list[dict[str, Any]]:
    """Start a run in two processes; the records of each."""
    folder.mkdir()
    script = REPOSITORY / "tests" / "training" / "sharded.py"
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HOME": os.environ["HOME"]}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is beside python
    run_all([*LAUNCH, script, verb, mode, folder], env=environment | {"PATH": path}, timeout=600)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "mode"),
    [
        *[case("sft", mode) for mode in SFT_MODES],
        *[case("sft-hybrid", mode) for mode in ("fsdp", "zero2")],
        *[case(verb, mode) for verb in ("dpo", "kto") for mode in ("fsdp", "zero2")],
        case("kto-blocks", "fsdp"),  # responses take different numbers of passes
        *[case("grpo", mode) for mode in ("fsdp-offload", "zero2-offload")],
    ],
)
def test_a_sharded_run_is_the_same_run(verb, mode, tmp_path):
    plain, _, kind = verb.partition("-")
    rows = BLOCKS if kind == "blocks" else PREFERENCES if plain in ("dpo", "kto") else PAIRS
    more = {} if verb == "grpo" else {"eval_dataset": rows[:5]}  # an odd number
    lm = {"blocks": llama_lm("block_causal", 4), "hybrid": hybrid()}.get(kind) or llama_lm()
    alone = make(plain, tmp_path / "alone", lm, rows, **RUN, **more)
    alone.train()
    folder = tmp_path / mode
    total = sum(weight.numel() for weight in alone.lm.model.parameters())
    for seen in launch(verb, mode, folder):
        shared_out = {"moments": seen["moments"]} | (
            {} if mode.startswith(("zero1", "zero2")) else {"weights": seen["weights"]}
        )
        assert all(0.45 * total < count < 0.55 * total for count in shared_out.values()), (shared_out, total)
        assert seen["offload"] == mode.endswith("offload")
        assert seen["losses"] == pytest.approx(
            [line["loss"] for line in alone.state.log_history if "loss" in line], rel=1e-5, abs=1e-6
        )
        assert seen["samples per token"] == pytest.approx(samples_per_token(alone.state.log_history))
        if "evaluation" in seen:
            metrics = alone.evaluate()
            assert seen["evaluation"] == pytest.approx(
                {name: metrics[name] for name in seen["evaluation"]}, rel=1e-4, abs=1e-5
            )
    expected = dict.fromkeys(("model", "resumed"), weights(alone.lm))
    if verb == "sft":
        faster = make(verb, tmp_path / "alone", llama_lm(), rows, **RUN | FASTER, **more)
        faster.train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-2"))
        expected["faster"] = weights(faster.lm)
        assert (
            max((ends - expected["model"][name]).abs().max() for name, ends in expected["faster"].items())
            > 1e-3
        )
    for name, ends in expected.items():
        torch.testing.assert_close(weights(load(folder / name)), ends, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "mode"),
    [
        *[case("convert", mode) for mode in ("ddp", "fsdp", "zero1", "zero2", "zero3")],
        *[case("convert-blocks", mode) for mode in ("fsdp", "zero2")],
    ],
)
def test_a_sharded_conversion_is_the_same_conversion(verb, mode, tmp_path):
    more = CONVERSIONS[verb]
    alone, first = (
        conversion(tmp_path / "alone", **more),
        conversion(tmp_path / "start", **more | {"stages": STAGES[:1], "max_steps": 2}),
    )
    start = weights(alone.lm)
    alone.train()
    first.train()
    folder = tmp_path / mode
    losses, evaluations = (
        [line[name] for line in alone.state.log_history if name in line] for name in ("loss", "eval_loss")
    )
    for seen in launch(verb, mode, folder):
        assert seen["losses"] == pytest.approx(losses, rel=1e-5, abs=1e-6)
        assert seen["evaluations"] == pytest.approx(evaluations, rel=1e-5, abs=1e-6)
    for name in ("model", "resumed-1", "resumed-2", "resumed-3"):
        torch.testing.assert_close(weights(load(folder / name)), weights(alone.lm), rtol=0, atol=1e-5)
    sharded, mask = weights(load(folder / "first-model")), alone.lm.mask_token_id
    torch.testing.assert_close(sharded, weights(first.lm), rtol=0, atol=1e-5)
    for name, before in start.items():
        changed = (sharded[name] != before).flatten(1).any(1) if before.dim() > 1 else sharded[name] != before
        if "embed_tokens" in name or (name == "lm_head.weight" and alone.lm.config.tie_word_embeddings):
            assert changed.nonzero().flatten().tolist() == [mask], name
        else:
            assert changed.any() == (".self_attn." in name or "unmask_time" in name), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "mode"), [case(verb, mode) for verb in RATIOS for mode in ("ddp", "fsdp", "zero3")]
)
def test_processes_with_different_numbers_of_passes_make_the_same_run(verb, mode, tmp_path):
    """Under FSDP and ZeRO 3 all processes take part in every pass."""
    alone = ragged(
        tmp_path / "alone", mode, per_device_train_batch_size=4, importance_sampling_level=RATIOS[verb]
    )
    start = weights(alone.lm)
    alone.train()
    first, second = launch(verb, mode, tmp_path / mode)
    assert any(one != other for one, other in zip(first["views"], second["views"], strict=True)), (
        first,
        second,
    )
    ends, bar = weights(load(tmp_path / mode / "model", dtype="float64")), 1e-3 if mode == "zero3" else 1e-5
    for name, end in weights(alone.lm).items():
        change, expected = ends[name] - start[name], end - start[name]
        assert expected.norm() > 0 and (change - expected).norm() < bar * expected.norm(), name
    assert first["evaluation"] == second["evaluation"] == alone.evaluate()


@pytest.mark.slow
def test_a_server_that_one_process_has_lost_stops_all_with_a_checkpoint(tmp_path):
    alone = make("grpo", tmp_path / "alone", **RUN)
    alone.train()
    first, second = launch("lose-server", "ddp", tmp_path / "ddp")
    assert first["error"] == "here: the server is gone. Start it."
    assert second["error"].startswith("rollout: another process has failed (here: the server is gone")
    torch.testing.assert_close(
        weights(load(tmp_path / "ddp" / "resumed")), weights(alone.lm), rtol=0, atol=1e-5
    )
