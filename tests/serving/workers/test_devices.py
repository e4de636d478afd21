"""Which device each worker has, and what the command line refuses."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from tests.errors import raises
from unmask.cli import app
from unmask.errors import ConfigError
from unmask.serving.workers.devices import environments, place


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shows four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that shows none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "workers, devices, device, placed",
    [
        (2, None, None, ["cuda:0", "cuda:1"]),
        (6, None, "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1"]),
        (2, None, "cuda", ["cuda:0", "cuda:1"]),
        (2, None, "cuda:3", ["cuda:3", "cuda:3"]),
        (2, None, "cpu", ["cpu", "cpu"]),
        (None, "cuda:1, cuda:3", None, ["cuda:1", "cuda:3"]),
        (3, "cuda:1,cuda:3", None, ["cuda:1", "cuda:3", "cuda:1"]),
    ],
)
def test_workers_take_devices_in_turn(
    workers: int | None, devices: str | None, device: str | None, placed: list[str]
) -> None:
    assert place(workers, devices, device) == placed


@pytest.mark.usefixtures("no_gpu")
def test_without_gpus_they_are_on_the_cpu() -> None:
    assert place(2, None, None) == place(2, "cpu", None) == ["cpu", "cpu"]
    with raises(ConfigError, where="--device"):
        place(2, None, "cuda")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    "workers, devices, device",
    [
        (None, "cuda:4", None),
        (None, "gpu1", None),
        (None, "cpu,,cpu", None),
        (None, "meta", None),
        (None, "hpu", None),
        (1, "cuda:0,cuda:1", None),
        (None, "cuda:0", "cuda:1"),
    ],
)
def test_other_devices_are_refused(workers: int | None, devices: str | None, device: str | None) -> None:
    with raises(ConfigError, where="--devices"):
        place(workers, devices, device)


def test_a_worker_sees_no_gpu_but_its_own() -> None:
    assert environments(["cuda:0", "cuda:1"], {}) == [
        ("cuda", {"CUDA_VISIBLE_DEVICES": number}) for number in "01"
    ]
    outer = {"CUDA_VISIBLE_DEVICES": "5,GPU-abc"}
    assert environments(["cuda:1", "cuda:0"], outer) == [
        ("cuda", {"CUDA_VISIBLE_DEVICES": number}) for number in ("GPU-abc", "5")
    ]


def test_workers_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(9))
    assert environments(["cpu", "cpu"], {}) == [("cpu", {"OMP_NUM_THREADS": "4"})] * 2
    assert environments(["cpu"] * 20, {})[0] == ("cpu", {"OMP_NUM_THREADS": "1"})
    assert environments(["cpu", "cpu"], {"OMP_NUM_THREADS": "3"}) == [("cpu", {})] * 2


@pytest.mark.parametrize(
    "words, error",
    [
        (["--workers", "0"], "Invalid value for '--workers'"),
        (["--devices", "gpu"], "--devices: 'gpu' is no device"),
        (
            ["--workers", "2", "--device-map", "balanced"],
            "--device-map: one model on all GPUs leaves none for other workers. Leave it out",
        ),
        (
            ["--workers", "4", "--queue-size", "3"],
            "--queue-size: 3 sequences for 4 workers, each of which has its own",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_worker_starts(words: list[str], error: str) -> None:
    result = CliRunner().invoke(app, ["serve", "no/model", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and error in result.stderr
