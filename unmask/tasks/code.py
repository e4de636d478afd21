"""Python programs, verified by the tests of their dataset in sandboxes: HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021)."""

from __future__ import annotations

import ast
import re
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from unmask.errors import DataError
from unmask.rewards.format import code_format, parse_python
from unmask.rewards.parsing import FENCE, MAX_TEXT, OPEN, answer_of, code_block
from unmask.rewards.program import verify_programs
from unmask.rewards.verdict import Verdict
from unmask.sandbox.pool import Job, PythonTests, python_job
from unmask.tasks.base import Row, Task, Verify


def program_in(completion: str, languages: Sequence[str]) -> str | None:
    """The first fenced block of the answer, or all of an answer without fences; None where there is no answer, or no closed block."""
    if len(completion) > MAX_TEXT:
        return None
    text = answer_of(completion) if OPEN in completion else completion
    if text is None or not text.strip():
        return None
    return code_block(text, *languages) if FENCE in text else text


class Code(Task):
    """A task whose answers are programs."""

    languages: ClassVar[tuple[str, ...]] = ("python", "py", "python3")
    """Accepted names of a fenced block's language; the first is written in answers."""
    instructions = "Write the Python function. Give the whole of it in one fenced block: ```python ... ```"

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The complete program for the code that a model wrote."""
        return code

    @abstractmethod
    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        """The sandbox job that runs its tests."""

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The value is the fraction of passed tests."""
        return self.verify_all([completion], [row])[0]

    def verify_all(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        codes = [program_in(completion, self.languages) for completion in completions]
        return verify_programs(self.job(self.program(code, row), row) if code else None for code, row in zip(codes, rows, strict=True))

    def answer(self, row: Mapping[str, Any]) -> str:
        return f"```{self.languages[0]}\n{self.program(row['completion'], row).strip()}\n```"

    def shapings(self) -> dict[str, dict[str, Verify]]:
        """As of any task; published: 1 for a fenced block that parses (a half for one that does not), and the fraction of passed tests."""
        return super().shapings() | {"published": {"code_format": self._format, "tests": self.verify_all}}

    def _format(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        values = [code_format(completion, *self.languages) for completion in completions]
        return [Verdict(value, "ok" if value == 1 else "malformed") for value in values]


class HumanEval(Code):
    """Records have `prompt` (the beginning of a program), `canonical_solution`, `test` (a function `check`) and `entry_point`."""

    name = "humaneval"
    fields = ("prompt", "canonical_solution", "test", "entry_point")
    columns = ("stub", "test", "entry_point")

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        texts = {name: record[name] for name in self.fields}
        if not all(isinstance(text, str) and text.strip() for text in texts.values()) or not texts["entry_point"].isidentifier():
            raise DataError("not a program to complete", where=where, remedy=f"Write {', '.join(self.fields)} as text.")
        return {
            "prompt": texts["prompt"],
            "completion": texts["canonical_solution"],
            "group": texts["prompt"],
            "stub": texts["prompt"],
            "test": texts["test"],
            "entry_point": texts["entry_point"],
        }

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The stub, followed by a whole function or by the body of the function that the stub ends with."""
        whole = re.search(rf"^(async )?def {row['entry_point']}\b", code, re.MULTILINE)
        return row["stub"] + ("\n    pass\n\n" if whole else "") + code

    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        # Some tests call helpers that the stub defines. They get the dataset's helpers, never the candidate's.
        names = {"candidate": row["entry_point"], row["entry_point"]: row["entry_point"]}
        return python_job(program, PythonTests(f"{row['test']}\ncheck(candidate)\n", names, setup=row["stub"] + "\n    pass\n"))

    def question(self, row: Mapping[str, Any]) -> str:
        return f"```python\n{row['stub'].strip()}\n```"


class MBPP(Code):
    """Records have `text` (what is wanted), `code`, `test_list` and, if need be, `test_setup_code`."""

    name = "mbpp"
    fields = ("text", "code", "test_list")
    columns = ("tests", "names", "imports")

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        text, code, tests = (record[name] for name in self.fields)
        listed = isinstance(tests, Sequence) and not isinstance(tests, str) and all(isinstance(test, str) for test in tests)
        if not (isinstance(text, str) and text.strip() and isinstance(code, str) and listed and tests):
            raise DataError(
                "not a problem with tests", where=where, remedy="Write `text` and `code` as text, `test_list` as a list of texts."
            )
        shown = "\n".join(tests)
        asserts = str(record.get("test_setup_code") or "").replace("\r\n", "\n") + f"\n{shown}\n"
        code = code.replace("\r\n", "\n")
        names, imports = self._needed(asserts, code, where)
        return {
            "prompt": f'"""\n{text.strip()}\n{shown}\n"""\n',
            "completion": code.strip() + "\n",
            "group": text.strip(),
            "question": f"{text.strip()}\n\nIt must pass these tests:\n{shown}",
            "tests": asserts,
            "names": names,
            "imports": imports,
        }

    def _needed(self, tests: str, code: str, where: str) -> tuple[list[str], list[str]]:
        """The names that the tests use: those that the reference defines (taken from the candidate), and modules (never taken from it)."""
        try:
            used = {node.id for node in ast.walk(parse_python(tests)) if isinstance(node, ast.Name)}
            defined = {getattr(node, "name", None) for node in parse_python(code).body}
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise DataError(f"no Python: {error}", where=where, remedy="Mend or remove the row.") from None
        names = sorted(used & defined)
        if not names:
            raise DataError("the tests use nothing that the code defines", where=where, remedy="Mend or remove the row.")
        return names, sorted((used - defined) & sys.stdlib_module_names)

    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        setup = "".join(f"import {name}\n" for name in row["imports"])
        return python_job(program, PythonTests(row["tests"], {name: name for name in row["names"]}, setup))
