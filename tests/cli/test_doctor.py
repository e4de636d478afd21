"""`unmask doctor`: what it finds, what it never shows, and that nothing makes it fail."""

from __future__ import annotations

import importlib.metadata
import json
import os
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from tests.helpers import REPOSITORY
from unmask.cli import app, doctor, doctor_torch, quiet
from unmask.cli.doctor import WIDTH, Finding, as_text, findings_of, without_names

SECRET = "hf_" + "s3cr3tS3cr3tS3cr3t"
TORCH_LINES = """
import json
print("a library says hello")
print(json.dumps({"name": "torch", "found": "2.13.0", "meaning": "", "broken": False}), flush=True)
"""


@pytest.fixture
def light(tmp_path, monkeypatch):
    """Without the seconds that torch's process and the sandbox take. Returns a function that sets what
    torch's process runs."""
    monkeypatch.syspath_prepend(tmp_path / "path")
    (tmp_path / "path").mkdir()
    monkeypatch.setattr(doctor, "TORCH", "torch_lines")
    monkeypatch.setitem(doctor.GROUPS, "sandbox", [lambda: [Finding("bubblewrap", "works")]])

    def runs(source: str, name: str = "torch_lines") -> None:
        (tmp_path / "path" / f"{name}.py").write_text(source)

    runs(TORCH_LINES)
    return runs


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def found_by(probe: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in probe()}


def test_the_text_and_the_json_say_the_same_in_narrow_lines(light, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    text, as_json = run(), run("--json")
    assert text.exit_code == as_json.exit_code == 0, (text.output, as_json.output)
    assert max(map(len, text.stdout.splitlines())) <= WIDTH and "\x1b" not in text.stdout
    found = json.loads(as_json.stdout)
    assert not found["broken"] and list(found["groups"]) == list(doctor.GROUPS)
    names = {finding["name"] for findings in found["groups"].values() for finding in findings}
    assert {
        "Unmask",
        "Python",
        "CPU",
        "memory",
        "current folder",
        "torch",
        "extra train",
        "bubblewrap",
        "variables set",
        "hub",
    } <= names
    assert all(f"\n{name} " in text.stdout for name in names)


@given(
    st.lists(
        st.builds(Finding, st.text(max_size=30), st.text(max_size=200), st.text(max_size=200)), max_size=4
    )
)
def test_no_text_is_wider_than_a_page_or_moves_the_cursor(findings):
    text = as_text({"a group": [without_names(finding) for finding in findings]})
    assert all(cell_len(line) <= WIDTH for line in text.splitlines())
    assert not any(character < " " for character in text.replace("\n", "").replace("\t", ""))


def test_neither_secrets_nor_people_are_named(light, tmp_path, monkeypatch):
    home = tmp_path / "home" / "mallory"
    scratch = tmp_path / "scratch" / "mallory" / "work"
    for folder in (home, scratch):
        folder.mkdir(parents=True)
    monkeypatch.chdir(scratch)
    secret = {
        "HF_TOKEN": SECRET,
        "UNMASK_API_KEY": SECRET,
        "HTTPS_PROXY": f"http://mallory:{SECRET}@proxy:80",
        "HF_HOME": str(home / "hf"),
    }
    for name, value in {**secret, "HOME": str(home), "USER": "mallory", "LOGNAME": "mallory"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hf" / "hub"))
    light(f"raise ImportError('no {home}/torch.so, nor http://me:{SECRET}@host/')")
    text, as_json = run().stdout, run("--json").stdout
    assert not any(hidden in output for hidden in (SECRET, "mallory") for output in (text, as_json))
    assert all(shown in as_json for shown in ("~/hf/hub", "scratch/USER/work", "~/torch.so", *secret))


def test_a_home_is_shortened_where_it_ends_only(monkeypatch):
    monkeypatch.setenv("HOME", "/data/eve")
    cleaned = without_names(
        Finding("n", "/data/eve/x:/data/evening, /mnt/eve, evening", "/data/eve"), {"USER": "eve"}
    )
    assert (cleaned.found, cleaned.meaning) == ("~/x:/data/evening, /mnt/USER, evening", "~")
    monkeypatch.setenv("HOME", "/")
    assert without_names(Finding("n", "/data"), {}).found == "/data"


def test_a_probe_that_fails_is_a_line_and_hides_nothing(light, monkeypatch):
    def failing():
        yield Finding("before", "found")
        raise OSError("no such\nthing")

    assert [finding.found for finding in findings_of(failing)] == [
        "found",
        "the probe failed: OSError: no such",
    ]
    monkeypatch.setattr(doctor, "GROUPS", {title: [failing] for title in doctor.GROUPS})
    result = run()
    assert result.exit_code == 0 and result.stdout.count("the probe failed") == len(doctor.GROUPS)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "libcudart.so.13"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
        ("import time; time.sleep(60)", "not finished"),
    ],
)
def test_a_torch_that_cannot_be_imported_is_broken(light, monkeypatch, source, says):
    monkeypatch.setattr(doctor, "TORCH_SECONDS", 5.0 if "sleep" not in source else 0.2)
    light("import torch")
    light(source, "torch")
    result = run("--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["broken"]
    (finding,) = json.loads(result.stdout)["groups"]["torch, GPUs and kernels"]
    assert says in finding["found"] and "pip install" in finding["meaning"]
    assert "BROKEN" in run().stdout


def test_what_is_found_before_a_crash_is_kept(light):
    light(f"{TORCH_LINES}\nimport os\nos.abort()")
    known, crashed = doctor.torch_probes()
    assert known == Finding("torch", "2.13.0") and "SIGABRT" in crashed.found and not crashed.broken


def test_every_extra_has_a_purpose_and_says_how_to_add_it(monkeypatch):
    declared = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert doctor.PURPOSES.keys() == declared.keys()
    versions = {"peft": None, "accelerate": "0.1", "torch": "1.0"}
    monkeypatch.setattr(
        doctor, "package_version", lambda name: versions.get(name, importlib.metadata.version(name))
    )
    train = found_by(doctor.extras)["extra train"]
    assert (
        "peft missing" in train.found
        and "accelerate 0.1, needed: >=" in train.found
        and "pip install 'unmask[train]'" in train.meaning
    )
    assert "datasets missing" not in train.found and not train.broken
    needed = found_by(doctor.requirements)
    assert needed.keys() == {"torch"} and needed["torch"].broken


def test_a_wheel_is_told_from_a_checkout(tmp_path, monkeypatch):
    (checkout,) = doctor.installation()
    assert "checkout" in checkout.found
    monkeypatch.setattr(doctor, "package_version", lambda _: None)
    assert "pip install -e ." in found_by(doctor.installation)["Unmask"].meaning
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "site-packages" / "unmask")
    assert "wheel" in found_by(doctor.installation)["Unmask"].found
    assert found_by(doctor.playground)["playground page"].found == "not built"


def test_a_disk_or_a_memory_that_is_nearly_full_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1e9))
    monkeypatch.setattr(
        doctor, "kernel_text", lambda path: "MemAvailable:  1000000 kB\n" if "meminfo" in path else ""
    )
    assert all("little space" in finding.meaning for finding in doctor.disks())
    (memory,) = doctor.memory()
    assert memory.found.startswith("1.0 of ") and "little" in memory.meaning
    assert "GB free in" in doctor.disk("none yet", tmp_path / "a" / "b", "").found
    monkeypatch.setattr(
        doctor, "kernel_text", lambda path: "100000000\n" if path in doctor.CGROUP_LIMITS[:1] else ""
    )
    (memory,) = doctor.memory()
    assert "this container may use 0.1 GB" in memory.found and "little" in memory.meaning


def test_a_hub_that_does_not_answer_is_a_finding_and_it_is_not_asked_unless_told(light, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://localhost:9/")
    (answer,) = doctor.reach_hub()
    assert "does not answer: ConnectError" in answer.found and "HTTPS_PROXY" in answer.meaning
    assert "network" in run("--network").stdout and "network  " not in run().stdout


class Cuda:
    """Two GPUs as torch describes them: one of Turing, one of Hopper that others use."""

    def device_count(self) -> int:
        return 2

    def is_available(self) -> bool:
        return True

    def get_device_properties(self, number: int) -> Any:
        return SimpleNamespace(
            name=["T4", "H100"][number],
            total_memory=[16e9, 80e9][number],
            major=[7, 9][number],
            minor=[5, 0][number],
        )

    def get_device_capability(self) -> tuple[int, int]:
        return 7, 5

    def mem_get_info(self, number: int) -> tuple[float, float]:
        return [(15e9, 16e9), (1e9, 80e9)][number]


def test_each_gpu_is_described(monkeypatch):
    monkeypatch.setattr(doctor_torch.torch, "cuda", Cuda())
    monkeypatch.setattr(doctor_torch.collect_env, "get_nvidia_driver_version", lambda run: "595.1")
    found = found_by(doctor_torch.gpus)
    assert found["GPU 0"].found == "T4, 16.0 GB, compute capability 7.5" and "fp16" in found["GPU 0"].meaning
    assert found["GPU 1"].meaning == "bfloat16; driver 595.1"
    assert not found["GPU 0, memory"].meaning and "other programs" in found["GPU 1, memory"].meaning
    # as unmask.training.hardware_checks refuses it
    assert found_by(doctor_torch.attention)["FlashAttention 2"].found == "not usable"


@pytest.mark.parametrize(
    ("hidden", "smi", "cuda", "says"),
    [
        (None, None, None, "CPU"),
        ("", "x", "13.0", "unset"),
        (None, "x", None, "without CUDA"),
        (None, "x", "13.0", "/dev/nvidia"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, hidden, smi, cuda, says):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(doctor_torch.shutil, "which", lambda _: smi)
    monkeypatch.setattr(doctor_torch.torch.version, "cuda", cuda)
    assert says in doctor_torch.why_no_gpu([]) and "driver too old" in doctor_torch.why_no_gpu(
        ["driver too old"]
    )


def test_kernels_say_what_they_lack(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor_torch.shutil, "which", lambda _: None)
    compiled = found_by(doctor_torch.compiled)
    assert (
        compiled["C compiler"].found == "missing" and "apt-get install gcc" in compiled["C compiler"].meaning
    )
    assert compiled["compiled kernels"].found == "not used"
    monkeypatch.setattr(doctor_torch, "package_version", lambda _: None)
    assert "pip install 'unmask[cuda]'" in found_by(doctor_torch.bitsandbytes)["bitsandbytes"].meaning
    assert "pip install 'liger-kernel>=0.8.5'" in found_by(doctor_torch.liger)["liger-kernel"].meaning


@pytest.mark.slow
def test_this_machine_is_not_broken():
    groups = doctor.examine()
    failed = [
        finding
        for findings in groups.values()
        for finding in findings
        if finding.broken or "failed" in finding.found
    ]
    assert not failed
    torch = {finding.name for finding in groups["torch, GPUs and kernels"]}
    assert {
        "torch",
        "transformers",
        "SDPA",
        "FlexAttention",
        "Triton",
        "liger-kernel",
        "flash-attn",
        "bitsandbytes",
    } <= torch
    assert {finding.name for finding in groups["sandbox"]} >= {"bubblewrap", "seccomp"}
    assert os.path.expanduser("~") not in as_text(groups)


def test_what_the_command_line_sets_itself_is_not_called_the_users():
    own = {name for name in quiet.VARIABLES if doctor.VARIABLE.fullmatch(name)}
    assert own == doctor.SET_BY_US
