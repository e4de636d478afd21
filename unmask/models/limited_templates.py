"""Limits of chat templates, which come with models: the steps and the output of a rendering.

transformers compiles templates in jinja2's sandbox, which keeps them from files and from Python, but not from
looping or growing without end. `LimitedEnvironment` takes the place of that sandbox in transformers, for all
templates of this process. Loops, calls, filters and operators count as steps, and large values as many steps.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

MAX_STEPS = 200_000
MAX_SIZE = 10_000_000
"""Characters of the output and of every text in it; items of a list."""
MAX_NUMBER = 1_000_000
"""The largest number that a method, a filter or a format may be given: a width, a count."""
PER_STEP = 1000  # characters or items of a value that count as one step
PERCENT_FIELD = re.compile(r"%(?:%|(?:\([^()]*([()]))?([-+ #0\d.*]*))")
"""A field of `%`: what ends its name (`(`: the name has parentheses), and its width and precision."""

steps_left: ContextVar[int] = ContextVar("steps_left", default=MAX_STEPS)


class LimitError(TemplateError):
    """A template exceeds a limit."""


def spend(steps: int) -> None:
    """Count steps of the current rendering. Raises LimitError if there are too many."""
    left = steps_left.get() - steps
    steps_left.set(left)
    if left < 0:
        raise LimitError(f"it takes more than {MAX_STEPS:,} steps")


def measured(value: Any) -> Any:
    """The value, whose size is counted as steps: of lists and mappings, with all that they hold."""
    if isinstance(value, (str, bytes, list, tuple, dict)):
        if len(value) > MAX_SIZE:
            raise LimitError(f"it makes a value of more than {MAX_SIZE:,} characters or items")
        spend(len(value) // PER_STEP)
        for item in (
            () if isinstance(value, (str, bytes)) else value.values() if isinstance(value, dict) else value
        ):
            if not isinstance(item, str) or len(item) >= PER_STEP:
                spend(1)
                measured(item)
    elif isinstance(value, int) and value.bit_length() > 256:
        raise LimitError("it makes a number of more than 256 bits")
    return value


def check_numbers(values: Iterable[Any]) -> None:
    """Raise LimitError for a number that could make a value too large."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise LimitError(f"it asks for {value:.3g} characters or items")
        if isinstance(value, (tuple, list)):
            check_numbers(value)


def check_format(fields: list[str], values: Iterable[Any]) -> None:
    """Raise LimitError if a format could make a text too large. `fields` has width and precision of each."""
    widths = sum(int(number[:9]) for field in fields for number in re.findall(r"[1-9]\d*", field))
    _limit(
        widths
        + len(fields)
        * max((len(value if isinstance(value, str) else str(measured(value))) for value in values), default=0)
    )


def percent_fields(text: str) -> list[str]:
    """Width and precision of each field of a format for `%`."""
    fields = PERCENT_FIELD.findall(text)
    if any(end == "(" or "*" in field for end, field in fields):
        raise LimitError("it asks for a width that it computes")
    return [field for _, field in fields]


def brace_fields(text: str) -> list[str]:
    """Width and precision of each field of a format for `format`."""
    fields = [field or "" for _, name, field, _ in string.Formatter().parse(text) if name is not None]
    if any("{" in field for field in fields):
        raise LimitError("it asks for a width that it computes")
    return fields


def check_text(method: str, text: Any, *args: Any) -> None:
    """Raise LimitError if a method or filter of a text could make it too large."""
    if method == "replace" and len(args) > 1:
        _limit(len(text) + text.count(args[0]) * len(args[1]))
    if method == "join" and isinstance(text, str | bytes):
        for values in args:
            measured(values)
            _limit(
                sum(len(str(value)) + len(text) for value in values)
                if isinstance(values, (str, list, tuple, dict))
                else 0
            )
    if method == "translate":
        raise LimitError("it asks for a translation of a text")


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers and result are checked."""

    @functools.wraps(function)  # also what jinja2 notes on a function
    def guarded(*args: Any, **kwargs: Any) -> Any:
        spend(1)
        check_numbers((*args, *kwargs.values()))
        for value in args:
            measured(value)
        if function.__name__ in ("do_join", "sync_do_join"):
            context, values, *rest = args
            args = (context, list(_counted(values)), *rest)
            check_text("join", str(rest[0]) if rest else "", args[1])
        if function.__name__ == "do_format":
            check_format(percent_fields(str(args[0])), (*args[1:], *kwargs.values()))
        # without the context that jinja2 adds
        texts = [value for value in args if isinstance(value, str | bytes)]
        if texts:
            check_text(function.__name__.removeprefix("do_"), *texts)
        return measured(function(*args, **kwargs))

    return guarded


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop."""
    for value in values:
        spend(1)
        yield value


class _Counting(NodeTransformer):
    """Makes loops and the operator `~` count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise LimitError("it has a recursive loop")
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "unmask_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(
            nodes.List(node.nodes, lineno=node.lineno),
            "unmask_joined",
            [],
            [],
            None,
            None,
            lineno=node.lineno,
        )


class LimitedTemplate(Template):
    """A template whose steps are counted from the start of each rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        token = steps_left.set(MAX_STEPS)
        try:
            return super().render(*args, **kwargs)
        finally:
            steps_left.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    template_class = LimitedTemplate

    def __init__(self, **options: Any):
        super().__init__(**options, finalize=measured)
        self.filters = {name: _guarded(function) for name, function in self.filters.items()}
        self.filters |= {"unmask_counted": _counted, "unmask_joined": self._joined}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the parts of the output, of a macro or of a block."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_SIZE:
                raise LimitError(f"it writes more than {MAX_SIZE:,} characters")
            found.append(part)
        spend(1 + size // PER_STEP)
        return "".join(found)

    def _joined(self, values: list[Any]) -> str:
        return self.concat(str(measured(value)) for value in values)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend(1)
        check_numbers((*args, *kwargs.values()))
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        if isinstance(text := getattr(method, "__self__", None), str | bytes):
            check_text(method.__name__, text, *args)
            if method.__name__ in ("format", "format_map"):
                check_format(brace_fields(str(text)), (*args, *kwargs.values()))
        return measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend(1)
        sizes = [len(side) if isinstance(side, (str, bytes, list, tuple)) else None for side in (left, right)]
        if operator == "+" and None not in sizes:
            _limit(len(left) + len(right))
        if operator == "*" and any(size is not None for size in sizes):
            count = next((side for side in (left, right) if isinstance(side, int)), 1)
            _limit(count * max(size or 0 for size in sizes))
        if operator == "**" and (abs(left) > MAX_NUMBER or abs(right) > 256):
            raise LimitError("it makes a number of more than 256 bits")
        if operator == "%" and isinstance(left, (str, bytes)):
            check_format(percent_fields(str(left)), right if isinstance(right, tuple) else [right])
        return measured(super().call_binop(context, operator, left, right))


def _limit(size: int) -> None:
    if size > MAX_SIZE:
        raise LimitError(f"it makes a value of more than {MAX_SIZE:,} characters or items")


chat_template_utils.ImmutableSandboxedEnvironment = LimitedEnvironment
chat_template_utils._compile_jinja_template.cache_clear()  # templates without limits
