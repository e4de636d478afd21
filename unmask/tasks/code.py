"""Python programs, verified by the tests of their dataset in sandboxes: HumanEval (Chen et al. 2021) and MBPP
(Austin et al. 2021)."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from unmask.errors import ConfigError, DataError
from unmask.records import PlacedRecord
from unmask.rewards.format import code_format, parse_python
from unmask.rewards.parsing import FENCE, MAX_TEXT, OPEN, answer_of, code_block
from unmask.rewards.program import verify_programs
from unmask.rewards.verdict import Verdict
from unmask.sandbox.pool import PythonTests, SlotJob, python_job
from unmask.tasks.base import Reward, Row, Task, Verify

UNPARSABLE = (SyntaxError, ValueError, MemoryError, RecursionError)
"""What Python's parser raises."""


def not_python(error: BaseException, where: str) -> DataError:
    return DataError(f"not Python: {error}", where=where, remedy="Fix or remove the row")


def program_in(completion: str, languages: Sequence[str]) -> str | None:
    """The first fenced block of the answer, or all of an answer without fences; None without an answer, or
    without a closed block."""
    if len(completion) > MAX_TEXT:
        return None
    text = answer_of(completion) if OPEN in completion else completion
    if text is None or not text.strip():
        return None
    return code_block(text, *languages) if FENCE in text else text


class Code(Task):
    """A task whose answers are programs."""

    languages: ClassVar[tuple[str, ...]] = ("python", "py", "python3")
    """Accepted languages of a fenced block; answers have the first."""
    instructions = "Write the Python function. Give the whole of it in one fenced block: ```python ... ```"

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The complete program of the code that a model wrote."""
        return code

    @abstractmethod
    def job(self, program: str, row: Mapping[str, Any]) -> SlotJob:
        """The sandbox job that runs the tests on a program."""

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The value is the fraction of passed tests."""
        return self.verify_all([completion], [row])[0]

    def verify_all(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        codes = [program_in(completion, self.languages) for completion in completions]
        return verify_programs(
            self.job(self.program(code, row), row) if code else None
            for code, row in zip(codes, rows, strict=True)
        )

    def answer(self, row: Mapping[str, Any]) -> str:
        return f"```{self.languages[0]}\n{self.program(row['completion'], row).strip()}\n```"

    def shapings(self) -> dict[str, dict[str, Verify]]:
        """The shapings that all tasks have. published: 1 for a fenced block that parses (1/2 if it does not),
        and the fraction of passed tests."""
        return super().shapings() | {"published": {"code_format": self._format, "tests": self.verify_all}}

    def _format(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        values = [code_format(completion, *self.languages) for completion in completions]
        return [Verdict(value, "ok" if value == 1 else "malformed") for value in values]


def names_in(code: str) -> set[str]:
    """The names that a program uses."""
    return {node.id for node in ast.walk(parse_python(code)) if isinstance(node, ast.Name)}


class HumanEval(Code):
    """Records have `prompt` (the beginning of a program), `canonical_solution`, `test` (a function `check`)
    and `entry_point`."""

    name = "humaneval"
    fields = ("prompt", "canonical_solution", "test", "entry_point")
    columns = ("stub", "test", "entry_point")

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        texts = {name: record[name] for name in self.fields}
        if (
            not all(isinstance(text, str) and text.strip() for text in texts.values())
            or not texts["entry_point"].isidentifier()
        ):
            raise DataError(
                "not a program to complete", where=where, remedy=f"Write {', '.join(self.fields)} as text"
            )
        stub, solution, test, entry_point = texts.values()
        try:
            # HumanEval/33 compares the candidate with the function of this name
            if {"candidate", entry_point} <= names_in(test):
                test = f"{stub}{solution}\n{test}"
        except UNPARSABLE as error:
            raise not_python(error, where) from None
        return {
            "prompt": stub,
            "completion": solution,
            "group": stub,
            "stub": stub,
            "test": test,
            "entry_point": entry_point,
        }

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The stub, and the code: a whole function, or the body of the function that the stub ends with."""
        whole = re.search(rf"^(async )?def {row['entry_point']}\b", code, re.MULTILINE)
        return row["stub"] + ("\n    pass\n\n" if whole else "") + code

    def job(self, program: str, row: Mapping[str, Any]) -> SlotJob:
        # Some tests call helpers that the stub defines: those of the dataset, never the candidate's.
        names = {"candidate": row["entry_point"], row["entry_point"]: row["entry_point"]}
        return python_job(
            program,
            PythonTests(f"{row['test']}\ncheck(candidate)\n", names, setup=row["stub"] + "\n    pass\n"),
        )

    def question(self, row: Mapping[str, Any]) -> str:
        return f"```python\n{row['stub'].strip()}\n```"


class MBPP(Code):
    """Records have `text` (the problem), `code`, `test_list`, and optionally `challenge_test_list` and
    `test_setup_code`.

    The prompt shows one test, and the others decide (`split`), with cases of our own for problems whose tests
    a program passes that does not read the problem (`mbpp_cases.json`). Problems that such a program solves
    are left out, as are nine that contradict themselves.
    """

    name = "mbpp"
    fields = ("text", "code", "test_list")
    columns = ("tests", "names", "imports")
    cases: ClassVar[Mapping[str, list[str]]] = json.loads(
        Path(__file__).with_name("mbpp_cases.json").read_text()
    )
    """Comparisons that decide beside the tests of a problem, by its `task_id` and the name of its
    function."""
    left_out: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "146": "ascii_value_string",
            "313": "pos_nos",
            "418": "Find_Max",
            "436": "neg_nos",
            "443": "largest_neg",
            "457": "Find_Min",
        }
        | {"461": "upper_ctr", "605": "prime_num", "670": "decreasing_trend"}
        | {"816": "clear_tuple", "847": "lcopy", "899": "check"}
    )
    """Problems that a constant or an argument answers, by their `task_id`; in the first nine, tests or
    reference contradict the text."""

    def rows(self, records: Iterable[PlacedRecord]) -> Iterator[Row]:
        return super().rows((where, record) for where, record in records if not self._is_left_out(record))

    def _is_left_out(self, record: Any) -> bool:
        function = self.left_out.get(str(record.get("task_id"))) if isinstance(record, dict) else None
        return function is not None and f"def {function}(" in str(record.get("code"))

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        text, code, tests, challenges = (
            *(record[name] for name in self.fields),
            record.get("challenge_test_list") or [],
        )
        if not (
            isinstance(text, str)
            and text.strip()
            and isinstance(code, str)
            and tests
            and _are_texts(tests)
            and _are_texts(challenges)
        ):
            remedy = (
                "Write `text` and `code` as text, `test_list` and `challenge_test_list` as lists of texts"
            )
            raise DataError("not a problem with tests", where=where, remedy=remedy)
        text, code, setup = (
            str(part).replace("\r\n", "\n")
            for part in (text.strip(), code, record.get("test_setup_code") or "")
        )
        names, imports = self._needed("\n".join([setup, *tests, *challenges]), code, where)
        cases = [case for name in names for case in self.cases.get(f"{record.get('task_id')} {name}", [])]
        shown, hidden = self.split(tests, [*challenges, *(f"assert {case}" for case in cases)])
        example = "\n".join(shown) or f"The tests call {' and '.join(names)}."
        return {
            "prompt": f'"""\n{text}\n{example}\n"""\n',
            "completion": code.strip() + "\n",
            "group": text,
            "question": f"{text}\n\nIt must pass tests such as:\n{example}"
            if shown
            else f"{text}\n\n{example}",
            "tests": "\n".join([setup, *hidden, ""]),
            "names": names,
            "imports": imports,
        }

    def split(self, tests: Sequence[str], challenges: Sequence[str]) -> tuple[list[str], list[str]]:
        """The tests that the prompt shows, and those that decide.

        The first is shown after which neither a constant nor an argument passes all others: a table of it
        with a guess for all else does not pass. If there is no such test, none is shown and all decide.
        """
        different = list(
            {ast.dump(parse_python(test)): test for test in reversed([*tests, *challenges])}.values()
        )[::-1]
        shown = next(
            (at for at in range(len(different)) if not _passes_blindly(different[:at] + different[at + 1 :])),
            None,
        )
        return (
            ([], different)
            if shown is None
            else ([different[shown]], different[:shown] + different[shown + 1 :])
        )

    def _needed(self, tests: str, code: str, where: str) -> tuple[list[str], list[str]]:
        """The names that the tests use: those that the reference defines, which the candidate provides, and
        standard modules."""
        try:
            used = names_in(tests)
            defined = {getattr(node, "name", None) for node in parse_python(code).body}
        except UNPARSABLE as error:
            raise not_python(error, where) from None
        names = sorted(used & defined)
        if not names:
            raise DataError(
                "the tests use nothing that the code defines", where=where, remedy="Fix or remove the row"
            )
        return names, sorted((used - defined) & sys.stdlib_module_names)

    def job(self, program: str, row: Mapping[str, Any]) -> SlotJob:
        setup = "".join(f"import {name}\n" for name in row["imports"])
        return python_job(program, PythonTests(row["tests"], {name: name for name in row["names"]}, setup))


class PublishedMBPP(MBPP):
    """MBPP as published: the prompt shows all of `test_list`, which decides. A table of what is shown passes:
    for evaluation only."""

    name = "mbpp_published"
    cases: ClassVar[Mapping[str, list[str]]] = MappingProxyType({})
    left_out: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def split(self, tests: Sequence[str], challenges: Sequence[str]) -> tuple[list[str], list[str]]:
        return list(tests), list(tests)

    def rewards(self, shaping: str = "strict") -> list[Reward]:
        raise ConfigError(
            "its prompts show all tests, which a table passes", where=f"reward {self.name}", remedy="Use mbpp"
        )


def _passes_blindly(tests: Sequence[str]) -> bool:
    """Whether a program passes these tests that returns a constant, or one of its arguments."""
    compared = [_compared(test) for test in tests]
    results = [result for result, _ in compared]
    return len(set(results)) < 2 or results in map(
        list, zip(*(arguments for _, arguments in compared), strict=False)
    )


@functools.lru_cache(maxsize=4096)
def _compared(test: str) -> tuple[str, list[str]]:
    """The value that an assertion compares with (else the whole assertion), and the arguments of its first
    call."""
    tree = parse_python(test)
    compared = [
        node.test.comparators[-1]
        for node in tree.body
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)
    ]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return ast.dump(compared[-1] if compared else tree), [
        ast.dump(each) for call in islice(calls, 1) for each in call.args
    ]


def _are_texts(tests: Any) -> bool:
    return (
        isinstance(tests, Sequence)
        and not isinstance(tests, str)
        and all(isinstance(test, str) for test in tests)
    )
