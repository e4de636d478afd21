"""OCaml programs: the candidate and the tests of its dataset are compiled apart, and run in two sandboxes.

`proxy` writes both sides of the interface: functions for the tests, which ask the candidate over pipes, and a
server for the candidate (ocaml_support/proxy.ml, wire.ml). No process has both the candidate's code and
anything that makes a verdict (docs/sandbox.md).
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unmask.sandbox.isolation import INSIDE, Host, SandboxError
from unmask.sandbox.launch import BATCH_OVER
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import Slot, SlotJob, outcome_of

SUPPORT = Path(__file__).parent / "ocaml_support"
PACKAGES = ("base", "ounit2")
COMPILE_SECONDS = 120.0
CACHED = 256
"""Number of compiled programs in the cache."""
QUIET = ("-w", "-a")
UNSAFE = {
    "Obj",
    "Marshal",
    "Callback",
    "Lexing",
    "Parsing",
    "Printexc",
    "Gc",
    "Sys",
    "Bigarray",
    "Ephemeron",
    "Weak",
    "In_channel",
}
UNSAFE |= {"Out_channel", "Domain", "Effect", "Mutex", "Condition", "Semaphore"}
"""Modules of the standard library that candidates are compiled without."""


@dataclass(frozen=True)
class OCamlTests:
    """A dataset's tests of an OCaml module.

    Attributes:
        module: the file of the candidate, such as `acronym.ml`.
        interface: its .mli.
        tests: a program that uses it, and runs OUnit2 suites or calls `Gate.check` with a function to a
            boolean for each test.
    """

    module: str
    interface: str
    tests: str


@dataclass(frozen=True)
class Toolchain:
    """The compiler and libraries of this machine, and the support modules compiled with them.

    Attributes:
        libraries, test_libraries: compiler options for the libraries of the candidate, of the tests.
        archives, test_archives: archives to link for each, in order.
        place: folder of the support modules in a sandbox.
    """

    compiler: str
    libraries: list[str]
    test_libraries: list[str]
    archives: list[str]
    test_archives: list[str]
    place: str

    def build_tests(self, module: str) -> list[list[str]]:
        """Commands that write the interface's functions for the tests, and compile and link the tests."""
        stem = module.removesuffix(".ml")
        compile_only = [self.compiler, "-c", *QUIET, *self.test_libraries, "-I", self.place]
        support = [f"{self.place}/wire.cmx", f"{self.place}/gate.cmx"]
        objects = [*support, f"{stem}.cmx", "tests__.cmx", f"{self.place}/finish.cmx"]
        return [
            [f"{self.place}/proxy", f"{stem}.mli", module, "serve__.ml"],
            [*compile_only, f"{stem}.mli", module],
            [*compile_only, "-open", "Gate", "tests__.ml"],
            [self.compiler, *self.test_libraries, *self.test_archives, *objects, "-o", "main"],
        ]

    def build_candidate(self, module: str) -> list[list[str]]:
        """Commands that write the candidate's server and compile the interface (`SERVER_COMMANDS`), vet and
        compile the candidate, and link it with its server."""
        stem = module.removesuffix(".ml")
        restricted = [self.compiler, "-c", *QUIET, "-nostdlib", "-I", f"{self.place}/stdlib", *self.libraries]
        objects = [f"{self.place}/wire.cmx", f"{stem}.cmx", "serve__.cmx"]
        return [
            [f"{self.place}/proxy", f"{stem}.mli", "unused.ml", "serve__.ml"],
            [*restricted, f"{stem}.mli"],
            [f"{self.place}/vet", module],
            [*restricted, module],
            [self.compiler, "-c", *QUIET, *self.libraries, "-I", self.place, "serve__.ml"],
            [self.compiler, "-ccopt", "-s", *self.libraries, *self.archives, *objects, "-o", "main"],
        ]


SERVER_COMMANDS = 2


@functools.cache
def toolchain(host: Host) -> Toolchain:
    """Find the compiler, and compile the support modules. SandboxError without OCaml, Base or OUnit2."""
    folder = host.folder / "ocaml"
    folder.mkdir(exist_ok=True)
    for source in SUPPORT.glob("*.ml"):
        shutil.copy(source, folder)
    compiler = shutil.which("ocamlopt")
    try:
        if not compiler:
            raise FileNotFoundError("there is no ocamlopt")
        standard = Path(
            subprocess.run([compiler, "-where"], check=True, capture_output=True, text=True).stdout.strip()
        )
        restricted = folder / "stdlib"
        restricted.mkdir(exist_ok=True)
        for interface in [*standard.glob("stdlib*.cm[ix]"), *standard.glob("camlinternal*.cm[ix]")]:
            if interface.stem.removeprefix("stdlib__") not in UNSAFE:
                shutil.copy(interface, restricted)
        libraries, test_libraries = (
            _query("-i-format", "-recursive", *packages).split() for packages in (PACKAGES[:1], PACKAGES)
        )
        archives, test_archives = (_archives("unix", *packages) for packages in (PACKAGES[:1], PACKAGES))
        parser = [compiler, *QUIET, "-I", "+compiler-libs", "ocamlcommon.cmxa"]
        for command in (
            [compiler, "-c", *QUIET, *test_libraries, "wire.ml", "gate.ml", "finish.ml"],
            [*parser, "vet.ml", "-o", "vet"],
            [*parser, "proxy.ml", "-o", "proxy"],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"OCaml programs cannot be compiled here: {getattr(error, 'stderr', None) or error}".strip()
        remedy = "apt-get install ocaml-nox ocaml-findlib libbase-ocaml-dev libounit-ocaml-dev"
        raise SandboxError(what, where="sandbox", remedy=remedy) from error
    place = f"{INSIDE}/ocaml" if host.isolated else str(folder)
    return Toolchain(compiler, libraries, test_libraries, archives, test_archives, place)


def _query(*arguments: str) -> str:
    return subprocess.run(
        ["ocamlfind", "query", *arguments], check=True, capture_output=True, text=True
    ).stdout


def _archives(*packages: str) -> list[str]:
    found = _query("-format", "%d/%a", "-predicates", "native", "-recursive", *packages).split()
    return [archive for archive in found if archive.endswith(".cmxa")]


_lock = threading.Lock()
built_programs: OrderedDict[str, str] = OrderedDict()
"""Native programs in base64, by the hash of their files, the last used one last."""


def ocaml_job(program: str, tests: OCamlTests) -> SlotJob:
    """The job of running the tests of an OCaml program."""

    def job(slot: Slot) -> Outcome:
        with _lock:
            tools = toolchain(slot.host)
        interface = {f"{tests.module.removesuffix('.ml')}.mli": tests.interface}
        commands = tools.build_tests(tests.module)
        tester = build(slot, {**interface, "tests__.ml": tests.tests}, commands, of_dataset=len(commands))
        if isinstance(tester, Outcome):
            return tester
        commands = tools.build_candidate(tests.module)
        candidate = build(slot, {**interface, tests.module: program}, commands, of_dataset=SERVER_COMMANDS)
        if isinstance(candidate, Outcome):
            return candidate
        with slot.cell() as cell:
            results = cell.run({"native": candidate}, {"native": tester}, slot.deadline)
        return outcome_of(results)

    return job


def build(
    slot: Slot, files: Mapping[str, str], commands: Sequence[list[str]], *, of_dataset: int
) -> str | Outcome:
    """The native program in base64; the outcome if a command fails: only those after the first `of_dataset`
    blame the candidate."""
    key = hashlib.sha256(json.dumps([files, commands]).encode()).hexdigest()
    with _lock:
        if key in built_programs:
            built_programs.move_to_end(key)
            return built_programs[key]
    with slot.member("compiler") as compiler:
        compiler.send({"files": files, "commands": commands, "result": "main"})
        frame = compiler.receive(min(COMPILE_SECONDS, slot.deadline - time.monotonic()))
    if frame is None and time.monotonic() > slot.deadline:
        return Outcome("verifier_error", detail=BATCH_OVER)
    if frame is None:
        # the tests alone: not the candidate's fault
        detail = f"not compiled within {COMPILE_SECONDS:g} seconds"
        return Outcome("timeout" if len(commands) > of_dataset else "verifier_error", detail=detail)
    found = json.loads(frame or b'{"failed": -1, "detail": "the compiler ended"}')
    if "failed" in found:
        return Outcome(
            "verifier_error" if 0 <= found["failed"] < of_dataset else "malformed", detail=found["detail"]
        )
    native: str = found["program"]
    with _lock:
        built_programs[key] = native
        while len(built_programs) > CACHED:
            built_programs.popitem(last=False)
    return native
