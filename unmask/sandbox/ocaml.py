"""OCaml programs: compiled, linked with their tests and run in sandboxes.

The candidate runs in the process of its tests. docs/sandbox.md lists what keeps it from forging results: vet.ml and the restricted standard
library, its interface, and the nonce with which gate.ml signs each result.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import shutil
import subprocess
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unmask.sandbox.isolation import INSIDE, Host, SandboxError
from unmask.sandbox.outcome import Outcome
from unmask.sandbox.pool import Job, Slot

SUPPORT = Path(__file__).parent / "ocaml_support"
PACKAGES = ("base", "ounit2")
COMPILE_SECONDS = 120.0
CACHED = 256
"""Number of compiled programs in the cache."""
QUIET = ("-w", "-a")
UNSAFE = {"Obj", "Marshal", "Callback", "Lexing", "Parsing", "Printexc", "Gc", "Sys", "Bigarray", "Ephemeron", "Weak", "In_channel"}
UNSAFE |= {"Out_channel", "Domain", "Effect", "Mutex", "Condition", "Semaphore"}
"""Modules of the standard library that candidates are compiled without."""


@dataclass(frozen=True)
class OCamlTests:
    """A dataset's tests of an OCaml module.

    Attributes:
        module: the file of the candidate, such as `acronym.ml`.
        interface: its .mli.
        tests: a program that opens it, and runs OUnit2 suites or calls `Gate.check` with a boolean for each test.
        checks: number of calls of `Gate.check`.
    """

    module: str
    interface: str
    tests: str
    checks: int = 0


@dataclass(frozen=True)
class Toolchain:
    """The compiler and libraries of this machine, and the support modules compiled with them.

    Attributes:
        libraries, test_libraries: compiler options for the libraries of the candidate, of the tests.
        archives: archives to link, in order.
        place: folder of the support modules in a sandbox.
    """

    compiler: str
    libraries: list[str]
    test_libraries: list[str]
    archives: list[str]
    place: str

    def commands(self, tests: OCamlTests) -> list[list[str]]:
        """Commands that compile interface and tests (`DATASET_COMMANDS`), vet and compile the candidate, and link all."""
        compile_only = [self.compiler, "-c", *QUIET]
        restricted = [*compile_only, "-nostdlib", "-I", f"{self.place}/stdlib", *self.libraries]
        stem = tests.module.removesuffix(".ml")
        return [
            [*restricted, f"{stem}.mli"],
            [*compile_only, *self.test_libraries, "-I", self.place, "-open", "Gate", "tests__.ml"],
            [f"{self.place}/vet", tests.module],
            [*restricted, tests.module],
            [
                *(self.compiler, "-ccopt", "-s", *self.test_libraries, *self.archives),
                *(f"{stem}.cmx", f"{self.place}/gate.cmx", "tests__.cmx", f"{self.place}/finish.cmx", "-o", "main"),
            ],
        ]


DATASET_COMMANDS = 2


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
        standard = Path(subprocess.run([compiler, "-where"], check=True, capture_output=True, text=True).stdout.strip())
        restricted = folder / "stdlib"
        restricted.mkdir(exist_ok=True)
        for interface in [*standard.glob("stdlib*.cm[ix]"), *standard.glob("camlinternal*.cm[ix]")]:
            if interface.stem.removeprefix("stdlib__") not in UNSAFE:
                shutil.copy(interface, restricted)
        libraries, test_libraries = (_query("-i-format", "-recursive", *packages).split() for packages in (PACKAGES[:1], PACKAGES))
        archives = _query("-format", "%d/%a", "-predicates", "native", "-recursive", *PACKAGES).split()
        for command in (
            [compiler, "-c", *QUIET, *test_libraries, "gate.ml", "finish.ml"],
            [compiler, *QUIET, "-I", "+compiler-libs", "ocamlcommon.cmxa", "vet.ml", "-o", "vet"],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"OCaml programs cannot be compiled here: {getattr(error, 'stderr', None) or error}".strip()
        remedy = "apt-get install ocaml-nox ocaml-findlib libbase-ocaml-dev libounit-ocaml-dev"
        raise SandboxError(what, where="sandbox", remedy=remedy) from error
    place = f"{INSIDE}/ocaml" if host.isolated else str(folder)
    return Toolchain(compiler, libraries, test_libraries, [archive for archive in archives if archive.endswith(".cmxa")], place)


def _query(*arguments: str) -> str:
    return subprocess.run(["ocamlfind", "query", *arguments], check=True, capture_output=True, text=True).stdout


_lock = threading.Lock()
_compiled: OrderedDict[str, str] = OrderedDict()
"""Native programs in base64, by the hash of candidate and tests, the last used one last."""


def ocaml_job(program: str, tests: OCamlTests) -> Job:
    """The job of running the tests of an OCaml program."""

    def job(slot: Slot) -> Outcome:
        compiled = _compile(slot, program, tests)
        return compiled if isinstance(compiled, Outcome) else _run(slot, compiled, tests)

    return job


def _compile(slot: Slot, program: str, tests: OCamlTests) -> str | Outcome:
    """The native program in base64, or the outcome if there is none."""
    key = hashlib.sha256(json.dumps([program, tests.module, tests.interface, tests.tests]).encode()).hexdigest()
    with _lock:
        tools = toolchain(slot.host)
        if key in _compiled:
            _compiled.move_to_end(key)
            return _compiled[key]
    stem = tests.module.removesuffix(".ml")
    files = {tests.module: program, f"{stem}.mli": tests.interface, "tests__.ml": tests.tests}
    with slot.member("compiler") as compiler:
        compiler.send({"files": files, "commands": tools.commands(tests), "result": "main"})
        frame = compiler.receive(COMPILE_SECONDS)
    if frame is None:
        return Outcome("timeout", detail=f"not compiled within {COMPILE_SECONDS:g} seconds")
    found = json.loads(frame or b'{"failed": -1, "detail": "the compiler ended"}')
    if "failed" in found:
        of_dataset = 0 <= found["failed"] < DATASET_COMMANDS
        return Outcome("infrastructure" if of_dataset else "malformed", detail=found["detail"])
    native: str = found["program"]
    with _lock:
        _compiled[key] = native
        while len(_compiled) > CACHED:
            _compiled.popitem(last=False)
    return native


def _run(slot: Slot, program: str, tests: OCamlTests) -> Outcome:
    """The outcome of running a native program."""
    nonce = secrets.token_hex(16).encode()
    deadline = time.monotonic() + slot.limits.seconds
    frames: list[bytes] = []
    with slot.member("native") as native:
        native.send(program)
        frame = native.receive(deadline - time.monotonic())
        if frame == b"ready":
            native.write(nonce)
            while frame := native.receive(deadline - time.monotonic()):
                frames.append(frame)
    if frame is None:
        return Outcome("timeout", detail=f"not done within {slot.limits.seconds:g} seconds")
    return ocaml_outcome(frames, nonce, tests.checks)


def ocaml_outcome(frames: Iterable[bytes], nonce: bytes, checks: int) -> Outcome:
    """The outcome of the results that the nonce signs: ok if each planned test passed once, none failed, and the end was reached."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("planned", "passed", "failed", "finished")}
    for frame in frames:
        signature, _, result = frame.partition(b"\0")
        if signature == nonce:
            kind, _, name = result.decode(errors="replace").partition("\0")
            counts[kind][name] += 1
    planned = counts["planned"] + Counter({"": checks})
    passed = sum((planned & counts["passed"]).values())
    if passed and counts["finished"] and not counts["failed"] and counts["passed"] == planned:
        return Outcome("ok", passed, passed)
    return Outcome("wrong", passed, max(planned.total(), passed + 1), next(iter(counts["failed"]), "the tests ended early"))
