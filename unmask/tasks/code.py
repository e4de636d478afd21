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
    """The first fenced block of the answer, or all of an answer without fences; None without an answer, or without a closed block."""
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
    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        """The sandbox job that runs the tests on a program."""

    def verify(self, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The value is the fraction of passed tests."""
        return self.verify_all([completion], [row])[0]

    def verify_all(self, completions: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        codes = [program_in(completion, self.languages) for completion in completions]
        return verify_programs(self.job(self.program(code, row), row) if code else None for code, row in zip(codes, rows, strict=True))

    def answer(self, row: Mapping[str, Any]) -> str:
        return f"```{self.languages[0]}\n{self.program(row['completion'], row).strip()}\n```"

    def shapings(self) -> dict[str, dict[str, Verify]]:
        """Those of all tasks. published: 1 for a fenced block that parses (1/2 if it does not), and the fraction of passed tests."""
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
            raise DataError("not a program to complete", where=where, remedy=f"Write {', '.join(self.fields)} as text")
        stub, solution, test, entry_point = texts.values()
        return {"prompt": stub, "completion": solution, "group": stub, "stub": stub, "test": test, "entry_point": entry_point}

    def program(self, code: str, row: Mapping[str, Any]) -> str:
        """The stub, and the code: a whole function, or the body of the function that the stub ends with."""
        whole = re.search(rf"^(async )?def {row['entry_point']}\b", code, re.MULTILINE)
        return row["stub"] + ("\n    pass\n\n" if whole else "") + code

    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        # Some tests call helpers that the stub defines: those of the dataset, never the candidate's.
        names = {"candidate": row["entry_point"], row["entry_point"]: row["entry_point"]}
        return python_job(program, PythonTests(f"{row['test']}\ncheck(candidate)\n", names, setup=row["stub"] + "\n    pass\n"))

    def question(self, row: Mapping[str, Any]) -> str:
        return f"```python\n{row['stub'].strip()}\n```"


class MBPP(Code):
    """Records have `text` (the problem), `code`, `test_list`, and optionally `test_setup_code`."""

    name = "mbpp"
    fields = ("text", "code", "test_list")
    columns = ("tests", "names", "imports")

    def row(self, record: Mapping[str, Any], where: str) -> Row:
        text, code, tests = (record[name] for name in self.fields)
        listed = isinstance(tests, Sequence) and not isinstance(tests, str) and all(isinstance(test, str) for test in tests)
        if not (isinstance(text, str) and text.strip() and isinstance(code, str) and listed and tests):
            remedy = "Write `text` and `code` as text, `test_list` as a list of texts"
            raise DataError("not a problem with tests", where=where, remedy=remedy)
        text, shown, code = text.strip(), "\n".join(tests), code.replace("\r\n", "\n")
        asserts = str(record.get("test_setup_code") or "").replace("\r\n", "\n") + f"\n{shown}\n"
        names, imports = self._needed(asserts, code, where)
        return {
            "prompt": f'"""\n{text}\n{shown}\n"""\n',
            "completion": code.strip() + "\n",
            "group": text,
            "question": f"{text}\n\nIt must pass these tests:\n{shown}",
            "tests": asserts,
            "names": names,
            "imports": imports,
        }

    def _needed(self, tests: str, code: str, where: str) -> tuple[list[str], list[str]]:
        """The names that the tests use: those that the reference defines, which the candidate provides, and standard modules."""
        try:
            used = {node.id for node in ast.walk(parse_python(tests)) if isinstance(node, ast.Name)}
            defined = {getattr(node, "name", None) for node in parse_python(code).body}
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise DataError(f"not Python: {error}", where=where, remedy="Fix or remove the row") from None
        names = sorted(used & defined)
        if not names:
            raise DataError("the tests use nothing that the code defines", where=where, remedy="Fix or remove the row")
        return names, sorted((used - defined) & sys.stdlib_module_names)

    def job(self, program: str, row: Mapping[str, Any]) -> Job:
        setup = "".join(f"import {name}\n" for name in row["imports"])
        return python_job(program, PythonTests(row["tests"], {name: name for name in row["names"]}, setup))
