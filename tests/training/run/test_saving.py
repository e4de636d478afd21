"""What a trainer uploads: whole checkpoints, and no pickle of its settings, which hold tokens."""

from __future__ import annotations

from concurrent.futures import Future
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.tiny_runs import make

SECRET = "hf_s3cr3t"


@pytest.fixture
def uploads(monkeypatch) -> list[dict[str, bytes]]:
    """The files of each upload to a hub that takes everything."""
    found: list[dict[str, bytes]] = []

    def upload_folder(
        *, folder_path: str, ignore_patterns: Any = (), run_as_future: bool = False, **_: Any
    ) -> Any:
        files = {
            str(path.relative_to(folder_path)): path
            for path in Path(folder_path).rglob("*")
            if path.is_file()
        }
        found.append(
            {
                name: path.read_bytes()
                for name, path in files.items()
                if not any(fnmatch(name, each) for each in ignore_patterns)
            }
        )
        done: Future[None] = Future()
        done.set_result(None)
        return done if run_as_future else None

    hub = SimpleNamespace(
        upload_folder=upload_folder, create_repo=lambda name, **_: SimpleNamespace(repo_id=f"me/{name}")
    )
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    return found


@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
def test_uploads_hold_whole_checkpoints_and_no_pickle_of_settings(uploads, strategy, tmp_path):
    hub = {"push_to_hub": True, "hub_strategy": strategy, "hub_token": SECRET, "hub_model_id": "model"}
    trainer = make("sft", tmp_path, save_strategy="steps", save_steps=1, **hub)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.push_to_hub()
    assert len(uploads) == {"end": 2, "every_save": 4, "checkpoint": 6, "all_checkpoints": 6}[strategy]
    assert "model/model.safetensors" in uploads[-1]
    assert sum("checkpoint_files.json" in files for files in uploads) == 2 * ("checkpoint" in strategy)
    for files in uploads:
        assert not [name for name in files if name.startswith(".unfinished")]
        assert not [name for name in files if name.endswith("training_args.bin")]
        assert not [name for name, content in files.items() if SECRET.encode() in content]
