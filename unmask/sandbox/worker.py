"""The program inside a sandbox, in one of three roles.

A `candidate` serves the functions of an untrusted program, and a `tester`, in another sandbox, runs the tests
of a dataset on them. Only plain data passes between the two (docs/sandbox.md). Both can be native programs,
which a `compiler` builds.

A bare interpreter runs this file. It imports only modules written in C, because importing `ast`, `json` and
`os` would take longer than starting the interpreter.

A frame is four bytes of length, then JSON of that length. Each process sends null (ready), then reads its
payload from standard input. The tester ends with its results.
"""

import _ast
import _json
import builtins
import posix
import resource
import sys
from _collections import deque

MAX_FRAME = 1 << 24
SAFE_INTEGER = 1 << 53
DETAIL = 300
COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
"""Collections other than list and dict, by their tag in JSON."""

TYPES = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and not name.startswith("_")
}


class ScannerSettings:
    """The settings of `json.loads`."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}.__getitem__


scan = _json.make_scanner(ScannerSettings)  # type: ignore[arg-type]
quoted = _json.encode_basestring_ascii
write_parts = _json.make_encoder(None, None, quoted, None, ": ", ", ", 0, 0, 1)  # type: ignore[arg-type]

MAKERS = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*parts),
    "type": lambda name: TYPES[name],
}
"""Constructors of tagged values."""


class CandidateError(Exception):
    """The candidate raised an exception that is not built in, sent an invalid answer, or ended."""


class Pipe:
    """Reads frames from one file descriptor and writes them to another."""

    def __init__(self, source, sink):
        self.source, self.sink = source, sink

    def read(self):
        size = int.from_bytes(self._bytes(4), "big")
        if size > MAX_FRAME:
            raise CandidateError(f"a frame of {size} bytes")
        try:
            value, end = scan(self._bytes(size).decode("ascii"), 0)
        # SystemError: CPython 3.11 needs a class of `json`
        except (RecursionError, StopIteration, SystemError, ValueError):
            end = -1
        if end != size:
            raise CandidateError("a frame that is not JSON")
        return value

    def _bytes(self, size):
        parts = []
        while size:
            part = posix.read(self.source, min(size, 1 << 16))
            if not part:
                raise CandidateError("it ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, value):
        data = "".join(write_parts(value, 0)).encode()
        if len(data) > MAX_FRAME:
            raise CandidateError(f"a frame of {len(data)} bytes")
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        while rest:
            rest = rest[posix.write(self.sink, rest) :]


def encode(value, keep):
    """Plain data as JSON; types that JSON lacks become an object with one tag. `keep` returns a handle for
    any other object."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -SAFE_INTEGER < number < SAFE_INTEGER else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(item, keep)] for key, item in value.items()]}
    for tag, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {tag: [encode(item, keep) for item in value]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return {"handle": keep(value)}


def decode(value, handle):
    """The value of encoded JSON, of built-in types only. `handle` resolves the number of a handle."""
    if isinstance(value, list):
        return [decode(item, handle) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in COLLECTIONS:
        return COLLECTIONS[tag](decode(item, handle) for item in content)
    if tag == "dict":
        return {decode(key, handle): decode(item, handle) for key, item in content}
    return handle(content) if tag == "handle" else MAKERS[tag](content)


class Candidate:
    """The untrusted program. It runs once, then answers the requests of the tester."""

    def __init__(self, pipe, source):
        self.pipe, self.source = pipe, source
        # where pickle and dataclasses look for its classes
        self.module = sys.modules["candidate"] = type(sys)("candidate")
        self.names = vars(self.module)
        self.names["__builtins__"] = builtins
        self.objects = []

    def run(self):
        self.pipe.write(self._attempt(self._start))
        while True:
            operation, *arguments = self.pipe.read()
            self.pipe.write(self._attempt(getattr(self, operation), *arguments))

    def _start(self):
        exec(compile(self.source, "candidate.py", "exec"), self.names)

    def _attempt(self, action, *arguments):
        """The result as JSON, or the name and text of the exception."""
        try:
            return {"value": encode(action(*arguments), self._keep)}
        except BaseException as error:  # user code
            return {"error": type(error).__name__, "text": str(error)[:DETAIL]}

    def _keep(self, value):
        self.objects.append(value)
        return len(self.objects) - 1

    def _decode(self, value):
        return decode(value, self.objects.__getitem__)

    def name(self, name):
        if name not in self.names:
            raise NameError(f"name {name!r} is not defined")
        return self.names[name]

    def call(self, number, args, kwargs):
        return self.objects[number](*self._decode(args), **self._decode(kwargs))

    def get(self, number, name):
        return getattr(self.objects[number], name)

    def set(self, number, name, value):
        setattr(self.objects[number], name, self._decode(value))

    def items(self, number):
        return list(self.objects[number])


class Handle:
    """An object of the candidate, of which the tester knows only a number. It equals nothing and has no truth
    value."""

    __slots__ = ("_number", "_tester")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tester, number):
        object.__setattr__(self, "_tester", tester)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **kwargs):
        return self._tester.ask("call", self._number, list(args), kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._tester.ask("get", self._number, name)

    def __setattr__(self, name, value):
        self._tester.ask("set", self._number, name, value)

    def __iter__(self):
        return iter(self._tester.ask("items", self._number))

    def __bool__(self):
        raise CandidateError("an object of the candidate has no truth value")

    def __eq__(self, other):
        return False


def parse(source):
    return compile(source, "tests.py", "exec", _ast.PyCF_ONLY_AST)


def count_asserts(node):
    """Replace each assertion with one that is counted and does not end the tests; `assert True` is
    removed."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(statements := getattr(node, name, None), list):
            setattr(node, name, [count_asserts(statement) for statement in statements])
    if not isinstance(node, _ast.Assert):
        return node
    if isinstance(node.test, _ast.Constant) and node.test.value:
        return parse("pass").body[0]
    (counted,) = parse(
        "try:\n    pass\nexcept Exception as _error:\n    _count(_error)\nelse:\n    _count(None)"
    ).body
    counted.body = [node]
    return counted


class Tester:
    """Runs the tests of a dataset on the functions of a candidate.

    Args:
        pipe: pipe to the candidate.
        payload: `setup`: a program that defines what the tests need beside the candidate; `tests`: a program
            of assertions; `names`: names in the candidate, by the names that the tests use for them.
    """

    def __init__(self, pipe, payload):
        self.pipe, self.payload = pipe, payload
        self.passed = self.total = 0
        self.detail = ""

    def run(self):
        """The results: `broken` if the tests themselves are; `refused` if the candidate fails to load; else
        counts, and whether all ran."""
        names = {"__name__": "tests", "_count": self._count}
        try:
            program = compile(count_asserts(parse(self.payload["tests"])), "tests.py", "exec")
            exec(compile(self.payload["setup"], "setup.py", "exec"), names)
        except Exception as error:  # user code
            return {"broken": f"{type(error).__name__}: {error}"[:DETAIL]}
        try:
            self.value(self.pipe.read())
        except Exception as error:  # user code
            return {
                "refused": f"{type(error).__name__}: {error}"[:DETAIL],
                "syntax": isinstance(error, SyntaxError),
            }
        complete = False
        try:
            names.update({alias: self.ask("name", name) for alias, name in self.payload["names"].items()})
            exec(program, names)
            complete = True
        except Exception as error:  # user code
            self._note(error)
        return {"passed": self.passed, "total": self.total, "complete": complete, "detail": self.detail}

    def ask(self, *request):
        operation, *arguments = request
        self.pipe.write([operation, *(encode(argument, self._number) for argument in arguments)])
        return self.value(self.pipe.read())

    def value(self, answer):
        """The value in an answer. An exception in it is raised: the built-in one of that name, otherwise a
        CandidateError.

        StopIteration also becomes a CandidateError, because within `map` or `filter` it would end loops of
        the tests.
        """
        try:
            if "value" in answer:
                return decode(answer["value"], lambda number: Handle(self, int(number)))
            name, text = str(answer["error"]), str(answer["text"])
        except (ArithmeticError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
            raise CandidateError(f"its answer is not plain data ({type(error).__name__})") from None
        unknown = CandidateError(f"{name}: {text}")
        try:
            kind = TYPES.get(name, object)
            raised = (
                kind(text) if issubclass(kind, Exception) and not issubclass(kind, StopIteration) else unknown
            )
        except TypeError:  # an exception with other arguments
            raised = unknown
        raise raised

    def _number(self, value):
        if type(value) is not Handle:
            raise TypeError(f"a test passes a {type(value).__name__}, which is not plain data")
        return value._number

    def _count(self, error):
        self.total += 1
        self.passed += error is None
        self._note(error)

    def _note(self, error):
        if error is not None and not self.detail:
            self.detail = f"{type(error).__name__}: {error}"[:DETAIL]


def compile_program(payload):
    """Write files and run commands in order. Returns the resulting file in base64, or the first failed
    command and its stderr."""
    import base64  # here, because the other roles start faster without it
    import subprocess

    for name, text in payload["files"].items():
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    for number, command in enumerate(payload["commands"]):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        if done.returncode:
            return {"failed": number, "detail": done.stderr.decode(errors="replace")[-DETAIL:]}
    with open(payload["result"], "rb") as file:
        return {"program": base64.b64encode(file.read()).decode()}


def become_program(program, *descriptors):
    """Replace this process with a native program (in base64), which gets the numbers of its descriptors as
    arguments."""
    import base64  # as above

    with open("program", "wb", opener=lambda path, flags: posix.open(path, flags, 0o700)) as file:
        file.write(base64.b64decode(program))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # it needs no other process
    posix.execv("program", ["program", *map(str, descriptors)])


def main():
    role, *descriptors = sys.argv[1:5]
    control, source, sink = map(int, descriptors)
    for limit in sys.argv[5:]:
        name, _, value = limit.partition("=")
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (int(value), int(value)))
    outside, peer = Pipe(0, control), Pipe(source, sink)
    outside.write(None)
    payload = outside.read()
    native = (
        payload["native"]
        if role != "compiler" and isinstance(payload, dict) and "native" in payload
        else None
    )
    if role == "compiler":
        outside.write(compile_program(payload))
    elif role == "tester":
        if native:
            become_program(native, sink, source, control)
        outside.write(Tester(peer, payload).run())
    else:
        # The candidate must not reach the control pipe, and its output is discarded.
        posix.close(control)
        for standard in (0, 1, 2):
            posix.dup2(posix.open("/dev/null", posix.O_RDWR), standard)
        if native:
            become_program(native, sink, source)
        Candidate(peer, payload).run()


if __name__ == "__main__":
    main()
