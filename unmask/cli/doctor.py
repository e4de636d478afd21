"""`unmask doctor`: what an installation and a machine have and lack, without secrets or the names of people.

torch is probed by `doctor_torch.py`, in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unmask.artifacts import git_state, num_cores, package_version
from unmask.cli.options import AsJson
from unmask.errors import first_line
from unmask.redaction import shown
from unmask.sandbox.isolation import LAYERS, probe

WIDTH = 100
"""Columns of the text."""
COLUMNS = (18, 36, 42)
LOGIN_NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
PACKAGE = Path(__file__).parents[1]
PURPOSES = {
    "train": "the training verbs and the demo",
    "rewards": "answers in mathematics, and the seccomp layer of the sandbox",
    "eval": "lm-evaluation-harness, ROUGE and BLEU",
    "serve": "unmask serve",
    "cuda": "weights in 4 and 8 bits, 8-bit optimizers",
    "torchao": "optimizers of torchao, stochastic rounding",
    "constraints": "text held to a pattern, a schema or a grammar",
    "deepspeed": "ZeRO",
    "dev": "the tests and checks of Unmask itself",
    "docs": "this documentation as a site",
    "peers": "the tests that compare with TRL",
}
"""What each extra is for."""
LITTLE_MEMORY, LITTLE_DISK = 2e9, 5e9
"""Bytes: the demo needs 1.3 GB of memory; a checkpoint of a model of 0.5 billion weights, with Adam's
moments, 6 GB of disk."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
TORCH = "unmask.cli.doctor_torch"
TORCH_SECONDS = 180.0
VARIABLE = re.compile(
    r"(UNMASK|DIFFU|GRPO|HF|HUGGING_?FACE|TRANSFORMERS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|CUDA|NCCL"
    r"|ACCELERATE|OMP|MKL|ATEN|XDG_CACHE)_\w+"
    r"|(\w+_proxy)|CC|CXX|RANK|WORLD_SIZE|LOCAL_RANK|PYTHONPATH",
    re.IGNORECASE,
)
"""The names of variables that change what Unmask does."""
SET_BY_US = {"HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TORCH_CPP_LOG_LEVEL"}
"""The variables that the command line sets itself (`unmask/cli/quiet.py`)."""
NETWORK_SECONDS = 5.0
"""For each part of a request: to connect, to send, to read."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    found: str
    meaning: str = ""
    """What follows from it, and how to fix it if something is missing."""
    broken: bool = False
    """Whether Unmask cannot work like this."""


Probe = Callable[[], Iterable[Finding]]


def doctor(
    network: Annotated[
        bool, typer.Option("--network", help="Also ask whether the hub answers, for a few seconds.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe this installation and machine for a bug report, without secrets or names.

    Exits with 2 if Unmask cannot work here."""
    groups = examine(network=network)
    broken = any(finding.broken for findings in groups.values() for finding in findings)
    if as_json:
        lines = {title: [asdict(finding) for finding in findings] for title, findings in groups.items()}
        typer.echo(json.dumps({"broken": broken, "groups": lines}))
    else:
        typer.echo(as_text(groups))
    if broken:
        raise typer.Exit(2)


def examine(*, network: bool = False) -> dict[str, list[Finding]]:
    """The findings of all probes by group; `network`: whether to ask the hub."""
    groups = GROUPS | ({"network": [reach_hub]} if network else {})
    return {
        title: [without_names(finding) for probe in probes for finding in findings_of(probe)]
        for title, probes in groups.items()
    }


def findings_of(probe: Probe) -> Iterator[Finding]:
    """What a probe finds. If it fails, the last line says so."""
    try:
        yield from probe()
    except Exception as error:  # user code: a damaged installation raises anything
        failed = f"the probe failed: {type(error).__name__}: {first_line(error)}"
        yield Finding(probe.__name__, failed, "nothing is known of it here")


def without_names(finding: Finding, environ: Mapping[str, str] = os.environ) -> Finding:
    """The finding without secrets and control characters, with `~` for the home folder and `USER` for the
    user in other paths."""
    home = os.path.expanduser("~")
    people = {environ.get(name, "") for name in LOGIN_NAMES} | {os.path.basename(home)}

    def clean(text: str) -> str:
        for folder in sorted({home, os.path.realpath(home)} - {os.sep}, key=len, reverse=True):
            text = re.sub(rf"{re.escape(folder)}(?![\w.-])", "~", text)
        for person in sorted(people - {"", "~", os.sep}):
            text = re.sub(rf"(?<=[/\\]){re.escape(person)}(?![\w.-])", "USER", text)
        return shown(text)

    return Finding(clean(finding.name), clean(finding.found), clean(finding.meaning), finding.broken)


def as_text(groups: Mapping[str, list[Finding]]) -> str:
    """The groups one below the other, in lines of at most `WIDTH` columns: what it is, what was found, what
    it means."""
    console = Console(width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        for title, findings in groups.items():
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), width=WIDTH)
            for width in COLUMNS:
                table.add_column(width=width, overflow="fold")
            for finding in findings:
                meaning = f"BROKEN. {finding.meaning}" if finding.broken else finding.meaning
                table.add_row(Text(finding.name), Text(finding.found), Text(meaning))
            console.print(Text(f"{title}\n{'-' * len(title)}"), table, Text(""))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).rstrip()


# Unmask, its packages and its extras


def installation() -> Iterator[Finding]:
    version, checkout = package_version("unmask"), PACKAGE.parent
    if not (checkout / "pyproject.toml").is_file():
        yield Finding("Unmask", f"{version}, a wheel", str(PACKAGE))
        return
    git = git_state(checkout)
    commit = f" at {git['commit'][:10]}{', with changes' if git['changed'] else ''}" if git else ""
    remedy = "" if version else ". To install it and to know its version:\npip install -e ."
    yield Finding("Unmask", f"{version or 'not installed'}, a checkout{commit}", f"{checkout}{remedy}")


def playground() -> Iterator[Finding]:
    if (PACKAGE / "serving" / "static" / "index.html").is_file():
        yield Finding("playground page", "built", "unmask serve shows it")
    else:
        what = "unmask serve answers requests but has no page. In a checkout, with Node 20.19:"
        yield Finding("playground page", "not built", f"{what}\nmake playground")


def requirements() -> Iterator[Finding]:
    """One line if the needed packages are there, else a line for each problem."""
    there, lacking = installed("")
    for name, problem in lacking.items():
        yield Finding(name, problem, "Unmask needs it:\npip install --upgrade unmask", broken=True)
    if not lacking:
        listed = ", ".join(f"{name} {version}" for name, version in there.items())
        yield Finding("needed packages", f"all {len(there)} are there", listed)


def extras() -> Iterator[Finding]:
    for extra, purpose in PURPOSES.items():
        there, lacking = installed(extra)
        found = ", ".join(f"{name} {state}" for name, state in (lacking | there).items())
        meaning = f"for {purpose}"
        if lacking:
            meaning += f". To add it:\npip install 'unmask[{extra}]'"
        yield Finding(f"extra {extra}", found or "needs nothing on this platform", meaning)


def installed(extra: str) -> tuple[dict[str, str], dict[str, str]]:
    """The packages that Unmask (or an extra) needs on this platform: the versions of those that are there,
    and what is wrong with the others."""
    there, lacking = dict[str, str](), dict[str, str]()
    for need in map(Requirement, importlib.metadata.requires("unmask") or []):
        applies = need.marker is None or need.marker.evaluate({"extra": extra})
        if not applies or bool(extra) != ("extra" in str(need.marker)):
            continue
        version = package_version(need.name)
        if version is None:
            lacking[need.name] = "missing"
        elif need.specifier.contains(version, prereleases=True):
            there[need.name] = version
        else:
            lacking[need.name] = f"{version}, needed: {need.specifier}"
    return there, lacking


# The machine


def system() -> Iterator[Finding]:
    version = f"{platform.python_version()} ({platform.python_implementation()})"
    yield Finding("Python", version, sys.executable)
    yield Finding("platform", platform.platform())
    found = re.search(r"^model name\s*: (.*)$", kernel_text("/proc/cpuinfo"), re.M)
    name = found[1] if found else platform.processor() or platform.machine()
    cores = f"{num_cores()} of {os.cpu_count()} cores may be used here"
    yield Finding("CPU", f"{name}, {platform.machine()}", cores)


def memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = re.search(r"^MemAvailable:\s*(\d+) kB$", kernel_text("/proc/meminfo"), re.M)
    free = 1024 * int(available[1]) if available else total
    limit = min([total, *(int(text) for text in map(kernel_text, CGROUP_LIMITS) if text.strip().isdecimal())])
    found = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB available" if available else f"{total / 1e9:.1f} GB"
    if limit < total:
        found += f"; this container may use {limit / 1e9:.1f} GB"
    little = min(free, limit) < LITTLE_MEMORY
    yield Finding("memory", found, "little: the demo needs 1.3 GB. End other programs" if little else "")


def disks() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    yield disk("current folder", Path.cwd(), "start in another folder")
    yield disk("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to another folder")
    yield disk("hub cache", Path(HF_HUB_CACHE), "set HF_HOME to another folder")


def disk(name: str, path: Path, remedy: str) -> Finding:
    """The free space at a path, which need not exist yet, and whether this user may write there."""
    folder = next(each for each in (path, *path.parents) if each.is_dir())
    free = shutil.disk_usage(folder).free
    problems = [] if os.access(folder, os.W_OK) else ["not writable"]
    if free < LITTLE_DISK:
        problems.append("little space for models and checkpoints")
    meaning = f"{' and '.join(problems)}: free some, or {remedy}" if problems else ""
    return Finding(name, f"{free / 1e9:.1f} GB free in {path}", meaning)


def kernel_text(path: str) -> str:
    """A file of the kernel; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def torch_probes() -> Iterator[Finding]:
    """The findings of `doctor_torch.py`, and how its process ended if it did so early."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = ""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", TORCH],
            capture_output=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=TORCH_SECONDS,
        )
        out, status = done.stdout, done.returncode
        if status < 0:
            ended = f"ended by {signal.Signals(-status).name}"
        elif status:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            ended = said[-1] if said else f"exit status {status}"
    except subprocess.TimeoutExpired as late:
        out, ended = late.stdout or b"", f"not finished after {TORCH_SECONDS:g} seconds"
    lines = out.decode(errors="replace").splitlines()
    found = [Finding(**json.loads(line)) for line in lines if line.startswith('{"name": ')]
    yield from found
    if ended and found:
        yield Finding("torch", f"the probes {ended}", f"the last one that worked: {found[-1].name}")
    elif ended:
        remedy = "Unmask computes with it:\npip install --force-reinstall torch"
        yield Finding("torch", f"cannot be imported: {ended}", remedy, broken=True)


# The sandbox, the environment variables, and the hub


def sandbox() -> Iterator[Finding]:
    """A line for each layer, as in `unmask sandbox probe`."""
    missing = probe().missing
    for layer, risk in LAYERS.items():
        if layer in missing:
            yield Finding(layer, f"missing: {missing[layer]}", f"{risk} (docs/sandbox.md)")
        else:
            yield Finding(layer, "works")


def variables() -> Iterator[Finding]:
    """The names alone: values may be secrets."""
    names = sorted(name for name in os.environ if VARIABLE.fullmatch(name) and name not in SET_BY_US)
    yield Finding("variables set", ", ".join(names) or "none", "only their names are read" if names else "")
    if "OMP_NUM_THREADS" not in names:
        meaning = "torch uses all cores: set it if several programs share this machine"
        yield Finding("OMP_NUM_THREADS", "not set", meaning)


def offline() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        meaning = "models and data come from files and the hub cache alone"
        yield Finding("hub", "HF_HUB_OFFLINE is set", meaning)
    else:
        yield Finding("hub", "HF_HUB_OFFLINE is not set")


def reach_hub() -> Iterator[Finding]:
    """Whether the hub answers."""
    import httpx2 as httpx
    from huggingface_hub.constants import ENDPOINT

    try:
        status = httpx.head(ENDPOINT, timeout=NETWORK_SECONDS).status_code
        yield Finding("network", f"{ENDPOINT} answers ({status})")
    except httpx.HTTPError as error:
        remedy = (
            "without it load models and data by their paths. Behind a proxy: set HTTPS_PROXY; for a "
            "mirror: HF_ENDPOINT"
        )
        yield Finding("network", f"{ENDPOINT} does not answer: {type(error).__name__}", remedy)


GROUPS: dict[str, list[Probe]] = {
    "Unmask": [installation, requirements, playground],
    "machine": [system, memory, disks],
    "torch, GPUs and kernels": [torch_probes],
    "extras": [extras],
    "sandbox": [sandbox],
    "surroundings": [variables, offline],
}
