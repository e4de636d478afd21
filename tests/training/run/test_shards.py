"""Shards that could run code are refused before torch reads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from tests.errors import raises
from unmask.errors import TrainingError
from unmask.training.run.checkpoint import check_in_shards
from unmask.training.run.shards import INDEX, check_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> Any:
        return exec, (f"import pathlib; pathlib.Path({str(self.target)!r}).write_text('ran')",)


def saved(folder: Path, **more: Any) -> Path:
    """A checkpoint with shards of an optimizer; the folder of the shards."""
    kinds = {
        name: torch.zeros(2, dtype=dtype)
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.int64))
    }
    state = {"state": kinds, "param_groups": {"lr": 1e-3, "betas": (0.9, 0.95), "fused": None}}
    dcp.save(state | more, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return folder / "optimizer_0"


def test_shards_of_a_run_are_accepted(tmp_path):
    saved(tmp_path)
    check_in_shards(tmp_path)


@pytest.mark.parametrize("name", ["index", "value", "a tensor that is called a value", "nothing"])
def test_shards_that_could_run_code_are_refused(tmp_path, name):
    folder = saved(tmp_path, **({"evil": Payload(tmp_path / "ran")} if name != "index" else {}))
    index = folder / INDEX
    if name == "index":
        index.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    if name == "nothing":
        index.write_bytes(b"")
    if name == "a tensor that is called a value":
        found = pickle.loads(index.read_bytes())
        found.state_dict_metadata["state.a"] = found.state_dict_metadata["evil"]
        place = next(place for part, place in found.storage_data.items() if part.fqn == "evil")
        found.storage_data = {
            part: place if part.fqn == "state.a" else old
            for part, old in found.storage_data.items()
            if part.fqn != "evil"
        }
        index.write_bytes(pickle.dumps(found))
    with raises(TrainingError, where=str(index)):
        check_in_shards(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_torch_itself_would_run_them(tmp_path):
    """Else the check could go."""
    folder = saved(tmp_path)
    (folder / INDEX).write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(CheckpointException):  # what the payload made is no index
        dcp.load({"state": {}}, checkpoint_id=folder, no_dist=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "kind, name, taken",
    [(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT", True), (Metadata, "__init__", False)],
)
def test_getattr_reads_members_of_an_enum_alone(tmp_path, kind, name, taken):
    """Python 3.11.0 to 3.11.3 pickle these by it."""

    class Asked:
        def __reduce__(self) -> Any:
            return getattr, (kind, name)

    index = tmp_path / INDEX
    index.write_bytes(pickle.dumps(Asked()))
    with pytest.raises(
        ValueError if taken else pickle.UnpicklingError, match="no index" if taken else "no part"
    ):
        check_shards(index)
