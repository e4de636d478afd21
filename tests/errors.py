"""`raises`: what a test expects of an error, with the messages of all tests in one file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import pytest

from unmask.errors import UnmaskError

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = os.environ.get("UNMASK_SHARED", str(REPOSITORY.parent / "shared"))
FILE = REPOSITORY / "tests" / "messages.json"

Golden = dict[str, list[str]]
"""Messages in the order in which a test first raises them, by the test's id. An id without parameters stands
for all parameters that have no entry of their own."""


def function_of(identifier: str) -> str:
    """A test's id without its parameters."""
    return identifier.split("[")[0]


def recorded(golden: Golden, identifier: str) -> list[str]:
    return golden.get(identifier, golden.get(function_of(identifier), []))


def merged(golden: Golden, ran: Golden, collected: Iterable[str], *, whole: bool) -> Golden:
    """The file's entries, with those of the tests that ran replaced. A test gets one entry if all its
    parameters have the same messages.

    Args:
        golden: the entries so far.
        ran: what the tests that passed have raised.
        collected: the ids of the tests that were read, whether they ran or not.
        whole: whether `collected` has all parameters of these tests, so that entries of others are old.
    """
    known = defaultdict(set)
    for identifier in [*collected, *ran, *(() if whole else golden)]:
        known[function_of(identifier)].add(identifier)
    new = dict(golden)
    for test in {function_of(identifier) for identifier in ran}:
        cases = known[test] - {test} or {test}
        raised = {case: ran.get(case, recorded(golden, case)) for case in cases}
        for case in [case for case in new if function_of(case) == test]:
            del new[case]
        kept = [messages for case, messages in raised.items() if messages or case in ran]
        if whole and all(messages == kept[0] for messages in kept):
            raised = {test: kept[0]}
        shared = {} if whole or test not in golden or test in cases else {test: golden[test]}
        new |= shared | {
            case: messages for case, messages in raised.items() if messages != shared.get(test, [])
        }
    return new


def read(path: Path = FILE) -> Golden:
    return {
        identifier: [messages] if isinstance(messages, str) else messages
        for identifier, messages in json.loads(path.read_text(encoding="utf-8")).items()
    }


def written(golden: Golden) -> str:
    short = {key: messages[0] if len(messages) == 1 else messages for key, messages in golden.items()}
    return json.dumps(short, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The library errors behind an error, whose texts change between versions; not those that a test
    raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = traceback.extract_tb(error.__traceback__)
        by_test = bool(frames) and Path(frames[-1].filename).is_relative_to(REPOSITORY / "tests")
        ours = type(error).__module__.startswith(("unmask.", "tests."))
        if not by_test and not ours and getattr(error, "errno", None) is None:
            yield error
        error = error.__cause__ or error.__context__


class Recorder:
    """Compares messages with the file while tests run, or collects them to be written there."""

    def __init__(self, config: pytest.Config):
        self.golden = read()
        self.writes = bool(config.getoption("write_messages"))
        self.config = config
        self.ran: Golden = {}
        self.collected: list[str] = []
        self.test = ""
        self.raised: list[str] = []
        self.varies = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected = [item.nodeid for item in items]  # before marks deselect some of them

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        self.test, self.raised = item.nodeid, []
        self.varies = item.get_closest_marker("hypothesis") is not None  # messages hold values of examples
        result = yield
        if self.writes:
            self.ran[self.test] = self.raised
        elif unseen := [text for text in recorded(self.golden, self.test) if text not in self.raised]:
            pytest.fail(f"not raised any more: {unseen}\n{self.advice()}", pytrace=False)
        return result

    def pytest_sessionfinish(self) -> None:
        if self.writes:
            whole = not any("[" in argument for argument in self.config.args)
            text = written(merged(self.golden, self.ran, self.collected, whole=whole))
            FILE.write_text(text, encoding="utf-8")

    def advice(self) -> str:
        return f"Record it with: python -m pytest --write-messages {self.test!r}"

    def normalized(self, error: UnmaskError) -> str:
        """An error's text without what differs from run to run, between machines, and between versions of
        libraries."""
        text = str(error)
        for cause in causes(error):
            said = str(cause).strip()
            for words in (" ".join(said.split()), said, said.split("\n")[0]):
                if " " in words:
                    text = text.replace(words.rstrip("."), f"<{type(cause).__name__}>")
        folder = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        text = re.sub(rf"{re.escape(str(folder))}/[\w-]+", "<tmp>", text)
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w*tmp\w+", "<tmp>", text)
        text = text.replace(SHARED, "<shared>").replace(str(REPOSITORY), "<checkout>")
        text = re.sub(r"\b(127\.0\.0\.1|localhost):\d+", r"\1:<port>", text)
        text = re.sub(r"\bprocess \d+ on \S+ \(.*?\) is", "process <pid> on <host> (<command>) is", text)
        text = re.sub(r"\bprocess \d+", "process <pid>", text)
        text = re.sub(r"\b\d[\d.e-]* GB\b", "<size> GB", text)
        text = re.sub(r"\b0x[0-9a-f]{6,}", "<address>", text)
        text = re.sub(r"\bcontent \w{8}\b", "content <hash>", text)
        return re.sub(r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b", "<hash>", text)

    def check(self, error: UnmaskError) -> None:
        __tracebackhide__ = True
        text = self.normalized(error)
        if self.varies:
            return
        if text not in self.raised:
            self.raised.append(text)
        if self.writes or text in (known := recorded(self.golden, self.test)):
            return
        pytest.fail(
            f"no such message in {FILE.name}:\n  {json.dumps(text, ensure_ascii=False)}\n"
            f"It has for {self.test}:\n"
            + "".join(f"  {json.dumps(other, ensure_ascii=False)}\n" for other in known)
            + self.advice()
        )


_recorder: Recorder | None = None


def pytest_configure(config: pytest.Config) -> None:
    global _recorder
    _recorder = Recorder(config)
    config.pluginmanager.register(_recorder, "messages")


@contextlib.contextmanager
def raises(
    kind: type[UnmaskError] | tuple[type[UnmaskError], ...], *, where: str | None
) -> Iterator[pytest.ExceptionInfo[UnmaskError]]:
    """Expects an error of this type at this place, with the message that `tests/messages.json` has for the
    test."""
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.value.where == where
    assert _recorder is not None
    _recorder.check(caught.value)
