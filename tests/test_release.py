"""What is published: the wheel and the source archive hold what they need and nothing else, and work where no
checkout is near."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.helpers import REPOSITORY
from tests.training.tiny_runs import TINY_DEMO
from unmask import __version__

EXTRAS = "train,rewards,eval,serve,constraints"
IMPORT_ALL = """
import importlib, pathlib, resource, unmask
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
root = pathlib.Path(unmask.__file__).parent
paths = [path for path in root.rglob("*.py") if "templates" not in path.parts]
names = [".".join(["unmask", *path.relative_to(root).with_suffix("").parts]) for path in paths]
for name in names:
    if name.endswith("__main__"):
        continue
    importlib.import_module(name)
assert limits == {name: resource.getrlimit(getattr(resource, name)) for name in limits}
print(len(names), unmask.__file__)
"""
DEMO = f"""
from unmask.demo import DemoSettings, run_demo
run_demo(output="demo", settings={TINY_DEMO!r})
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints, in an environment that knows of no checkout."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=known | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(*folders: str) -> set[str]:
    """The files of the checkout that git does not ignore."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs the checkout's git")
    return set(run("git", "ls-files", "-co", "--exclude-standard", *folders, cwd=REPOSITORY).splitlines())


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    """A folder with the source archive, and with the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=REPOSITORY)
    return folder


def test_all_files_name_one_version():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    newest = re.findall(r"^## (\d\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)[0]
    assert project["version"] == citation["version"] == newest == __version__


def test_the_lowest_versions_are_those_that_the_project_admits():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [
        requirement for name in EXTRAS.split(",") for requirement in project["optional-dependencies"][name]
    ]
    lowest = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (REPOSITORY / "constraints-lowest.txt").read_text().lower(), re.M)
    )
    for requirement in [*project["dependencies"], *extras]:
        name, version = re.match(r"([\w.-]+)[>=]=([\d.]+)", requirement.lower()).groups()
        assert re.fullmatch(re.escape(version) + r"(\.0)*", lowest[name]), requirement


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_built_page(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    page = {
        str(path.relative_to(REPOSITORY))
        for path in REPOSITORY.glob("unmask/serving/static/**/*")
        if path.is_file()
    }
    assert names == tracked("unmask", "unmask_lm_eval.py") | page


@pytest.mark.slow
def test_the_source_archive_holds_what_is_built_and_tested(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    folders = ["unmask", "playground", "tests", "benchmarks", "docs", "scripts"]
    found = {name for name in names if not name.startswith("unmask/serving/static/")} - {
        "PKG-INFO",
        ".gitignore",
    }
    kept = {name for name in tracked() if name.split("/")[0] in folders or "/" not in name} - {
        ".gitignore",
        ".pre-commit-config.yaml",
    }
    assert found == kept


@pytest.mark.slow
def test_what_is_installed_for_use_is_little_and_enough(tmp_path):
    """What README says to install, one after the other, in a clean environment and with the tested
    versions."""
    readme = (REPOSITORY / "README.md").read_text()
    lines = [line.partition("#")[0] for line in readme.splitlines() if line.startswith("pip install")]
    assert [shlex.split(line)[2:] for line in lines] == [
        [".[train]"]
    ] and "or . to load and sample only" in readme
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    shutil.copytree(
        REPOSITORY / "unmask", tmp_path / "checkout" / "unmask", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "unmask_lm_eval.py"):
        shutil.copy(REPOSITORY / name, tmp_path / "checkout")
    command = python.with_name("unmask")
    for what in (".", ".[train]"):
        run(
            python,
            "-m",
            "pip",
            "install",
            what,
            "-c",
            REPOSITORY / "constraints.txt",
            cwd=tmp_path / "checkout",
        )
        if what == ".":
            run(command, "new", "mine", cwd=tmp_path)
            run(
                command, "generate", "mine/tiny-model", "--prompt", "a", "--max-new-tokens", "4", cwd=tmp_path
            )
    run(python, "-c", DEMO, cwd=tmp_path)
    assert (tmp_path / "demo/report.html").stat().st_size > 10_000
    installed = {
        entry["name"].lower()
        for entry in json.loads(run(python, "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    }
    assert not installed & {
        "trl",
        "deepspeed",
        "playwright",
        "mypy",
        "mkdocs",
        "pytest",
        "ruff",
        "lm-eval",
        "litellm",
        "bitsandbytes",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "constraints", ["constraints-lowest.txt", pytest.param("constraints.txt", marks=pytest.mark.nightly)]
)
def test_the_wheel_works_in_a_clean_environment_far_from_the_checkout(constraints, built, tmp_path):
    python, elsewhere = tmp_path / "env" / "bin" / "python", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    wheel = next(built.glob("*.whl"))
    run(python, "-m", "pip", "install", f"{wheel}[{EXTRAS}]", "-c", REPOSITORY / constraints, cwd=elsewhere)
    modules, where = run(python, "-c", IMPORT_ALL, cwd=elsewhere).split()
    assert int(modules) > 300 and Path(where).is_relative_to(tmp_path)
    command = python.with_name("unmask")
    assert run(command, "--version", cwd=elsewhere).strip() == __version__
    run(python, "-c", DEMO, cwd=elsewhere)
    assert (elsewhere / "demo/report.html").stat().st_size > 10_000
    assert run(
        command,
        "generate",
        "demo/grpo",
        "--prompt",
        "1003340220004001=",
        "--max-new-tokens",
        "17",
        cwd=elsewhere,
    ).strip()
