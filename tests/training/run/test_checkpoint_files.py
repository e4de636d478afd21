"""Checkpoints are whole or absent: every fault of the disk is noticed, and a checkpoint before it is used."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import Before, equal, make, weights
from unmask.errors import TrainingError
from unmask.models.export import export
from unmask.training.run.checkpoint import (
    FILE_LIST,
    checked_checkpoint,
    fault,
    last_checkpoint,
    steps_done,
    written_whole,
)
from unmask.training.run.folder import is_run

SAVING: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
NUM_FAULTS = 102


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(checkpoint: Path, number: int) -> str:
    """A fault at a random place: a flipped bit, a truncation, or a missing file."""
    draw = random.Random(number)
    path = draw.choice(files_of(checkpoint))
    data, kind = bytearray(path.read_bytes()), ("flip", "truncate", "remove")[number % 3]
    if kind == "remove":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(data[: draw.randrange(len(data))])
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
    return f"{kind} {path.name}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make(
        "grpo", folder, **SAVING, num_iterations=4, sync_ref_model=True, ref_model_sync_steps=4, beta=0.1
    ).train()
    return folder


def test_every_fault_of_the_disk_is_noticed_and_the_checkpoint_before_is_used(run, tmp_path):
    checkpoint = tmp_path / "checkpoint-6"
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    unnoticed = []
    for number in range(NUM_FAULTS):
        shutil.rmtree(checkpoint, ignore_errors=True)
        shutil.copytree(run / "checkpoint-6", checkpoint)
        fault = damage(checkpoint, number)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = last_checkpoint(tmp_path)
        if found != tmp_path / "checkpoint-4" or "checkpoint-6 (" not in str(caught[0].message):
            unnoticed.append(fault)
    assert unnoticed == []
    with raises(TrainingError, where=str(checkpoint)):
        checked_checkpoint(tmp_path, str(checkpoint), in_shards=False)


@partly_slow(
    "name",
    ["model.safetensors", "optimizer.pt", "rng_state.pth", "metric_sums.json", "scheduler.pt"],
    0,
    1,
    3,
)
def test_a_run_with_a_damaged_checkpoint_is_the_same_run(name, tmp_path):
    straight = make("sft", tmp_path, **SAVING)
    straight.train()
    path = tmp_path / "checkpoint-4" / name
    shutil.rmtree(tmp_path / "checkpoint-6")
    damage_to(path)
    resumed = make("sft", tmp_path, **SAVING)
    with pytest.warns(
        RuntimeWarning, match=rf"checkpoint-4 \({name} is damaged\): resuming from checkpoint-2"
    ):
        resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))


@partly_slow(
    "size, place",
    [(100, "."), (2_000, "checkpoint-4"), (60_000, "checkpoint-4"), (100_000, "checkpoint-4")],
    1,
    3,
)
def test_a_disk_that_fills_up_ends_the_run_in_one_error_and_spares_the_last_checkpoint(
    size, place, tmp_path, largest_file
):
    trainer = make("sft", tmp_path, **SAVING, callbacks=[Before(3, lambda: largest_file(size))])
    with raises(TrainingError, where=str(tmp_path / place)):
        trainer.train()
    largest_file(None)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / ".unfinished").exists()
    straight, resumed = make("sft", tmp_path / "straight", **SAVING), make("sft", tmp_path, **SAVING)
    straight.train()
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed.lm), weights(straight.lm))


@pytest.fixture
def largest_file() -> Iterator[Callable[[int | None], None]]:
    """Lets no file grow beyond a number of bytes, as on a full disk; None: any."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.EACCES])
def test_an_error_of_the_disk_is_one_error(code, tmp_path, monkeypatch):
    def failing(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    trainer = make(
        "sft",
        tmp_path,
        **SAVING,
        callbacks=[Before(3, lambda: monkeypatch.setattr("unmask.training.run.checkpoint.sync", failing))],
    )
    with raises(TrainingError, where=str(tmp_path / ".unfinished/checkpoint-4/chat_template.jinja")):
        trainer.train()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_run_that_is_killed_while_a_folder_is_replaced_loses_neither(tmp_path, monkeypatch):
    model, rename = tmp_path / "model", Path.rename
    with written_whole(model, writes=True, listed=False) as unfinished:
        (unfinished / "weights").write_text("first")

    def killed(path: Path, target: Path) -> Path:
        if path.name == "model" and target == model:
            os._exit(1)
        return rename(path, target)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(Path, "rename", killed)
        with written_whole(model, writes=True, listed=False) as unfinished:
            (unfinished / "weights").write_text("second")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 1 << 8 and not model.exists()
    with written_whole(tmp_path / "checkpoint-2", writes=True, listed=False) as unfinished:
        (unfinished / "weights").write_text("x")
    assert (model / "weights").read_text() == "first" and not (tmp_path / ".unfinished").exists()


@pytest.mark.parametrize("step", [0, 3])
def test_free_space_is_checked_before_a_checkpoint_is_written(step, tmp_path, monkeypatch):
    def fill() -> None:
        monkeypatch.setattr(
            "unmask.training.run.checkpoint.shutil.disk_usage", lambda _: SimpleNamespace(free=50_000)
        )

    trainer = make("sft", tmp_path, **SAVING, callbacks=[Before(step, fill)])
    with raises(TrainingError, where=str(tmp_path)):
        trainer.train()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_who_reads_what_is_saved(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        trainer = make("sft", tmp_path, **SAVING | {"max_steps": 2})
        trainer.train()
        trainer.save_model(str(tmp_path / "model"))
        trainer.lm.save(tmp_path / "saved")
        export(llama_lm("causal"), tmp_path / "exported", "hf")
    finally:
        os.umask(before)
    for name in ("checkpoint-2", "model", "saved", "exported"):
        assert {path.stat().st_mode & 0o777 for path in files_of(tmp_path / name)} == {mode}, name


def test_the_best_checkpoint_is_named_where_it_is_and_old_ones_are_removed(tmp_path):
    more = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    trainer = make("sft", tmp_path, **SAVING | more, eval_dataset=[{"prompt": "ab", "completion": "cab"}])
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    left = sorted(tmp_path.glob("checkpoint-*"))
    assert best.parent == tmp_path and best in left and len(left) == 2
    stored = json.loads((left[-1] / "trainer_state.json").read_text())
    assert Path(stored["best_model_checkpoint"]).parent == tmp_path
    damage_to(best / "model.safetensors")
    with raises(TrainingError, where=str(best)):
        trainer._load_best_model()


def damage_to(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "scaler.pt",
        "optimizer.bin",
        "rng_state_1.pth",
        "rollouts-1.pt",
        "default/adapter_model.bin",
        "pytorch_model.bin",
    ],
)
def test_a_file_beside_those_of_the_list_is_a_fault(name, tmp_path):
    """transformers reads some by their names."""
    with written_whole(tmp_path / "checkpoint-1", writes=True, listed=True) as unfinished:
        (unfinished / "model.safetensors").write_bytes(b"weights")
    folder = tmp_path / "checkpoint-1"
    (folder / ".DS_Store").write_bytes(b"")
    assert fault(folder) is None
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"")
    assert fault(folder) == f"{name} is not in {FILE_LIST}"


def test_what_is_no_file_is_a_fault_that_is_not_opened(tmp_path):
    """A named pipe in the folder of another would be waited for without end."""
    with written_whole(tmp_path / "checkpoint-1", writes=True, listed=True) as unfinished:
        (unfinished / "model.safetensors").write_bytes(b"weights")
    folder = tmp_path / "checkpoint-1"
    for name in ("scaler.pt", FILE_LIST):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert fault(folder) == f"{name} is not a file"
        (folder / name).unlink()
    os.mkfifo(folder / "trainer_state.json")
    assert steps_done(folder) is None
    os.mkfifo(tmp_path / "manifest.json")
    assert not is_run(tmp_path)
