"""Tools: how a model writes calls, the constraint that makes it call one, and calls read from its text.

The chat template decides how a call is written: it is found by rendering one, as the end of a turn is
(`chat_template.turn_end`). Templates that write no JSON with `name` and `arguments` (or `parameters`) are
taken to write `<tool_call>{...}</tool_call>`, as Hermes does.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from unmask.config.constraint import ConstraintConfig
from unmask.data.decoding import text_after
from unmask.data.special_tokens import encode
from unmask.errors import DataError, GenerationError
from unmask.generation.constraints.compiled import escape, regex_of
from unmask.models.chat_template import ANSWER, render_template
from unmask.serving.openai.requests import ChatRequest, NamedTool, Tool

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
LONGEST_WORD = len("-Infinity")
"""Length of the longest word of JSON, as Python reads it: this near to the end of a text, half a word may be
the reason why it cannot be read."""
MARK = re.compile(r'\\.|["{}]', re.DOTALL)
"""What says where a JSON object ends; an escaped character says nothing."""
QUESTION = {"role": "user", "content": "a"}
EXAMPLE = {
    "type": "function",
    "function": {"name": ANSWER, "description": "b", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": ANSWER, "arguments": {"d": "e"}}}


@dataclass(frozen=True)
class CallFormat:
    """How calls are written: `before`, JSON with the name and the arguments under a key, `after`."""

    before: str
    after: str
    key: str


HERMES = CallFormat("<tool_call>\n", "\n</tool_call>", "arguments")


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: str  # JSON

    def as_openai(self) -> dict[str, Any]:
        """The call as answers have it."""
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


def check_renders_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise GenerationError if the chat template does not show tools to the model."""
    if ANSWER not in render_template(tokenizer, [QUESTION], tools=[EXAMPLE], add_generation_prompt=True):
        remedy = "Leave them out, or use a model whose template has them"
        raise GenerationError("the model's chat template does not render tools", where="tools", remedy=remedy)


def call_format(tokenizer: PreTrainedTokenizerBase) -> CallFormat:
    """How the chat template writes calls, without special tokens, which answers do not show."""
    try:
        start = render_template(tokenizer, [QUESTION], tools=[EXAMPLE], add_generation_prompt=True)
        answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        whole = render_template(tokenizer, [QUESTION, answer], tools=[EXAMPLE])
    except DataError:
        return HERMES
    if not whole.startswith(start):
        return HERMES
    text = text_after(tokenizer, [], encode(tokenizer, whole[len(start) :]))
    for at in (at for at, character in enumerate(text) if character == "{"):
        read = read_object(text, at)
        if not isinstance(read, str) and read[0].get("name") == ANSWER:
            key = "arguments" if "arguments" in read[0] else "parameters"
            return CallFormat(text[:at].lstrip(), text[read[1] :].rstrip(), key)
    return HERMES


def call_constraint(
    request: ChatRequest, tools: Sequence[Tool], written: CallFormat
) -> ConstraintConfig | None:
    """What makes the model call a tool, where the request demands it: the text is one call whose arguments
    fit the tool's schema.

    Raises:
        GenerationError: `tool_choice` names no tool of the request, or a schema cannot be enforced.
    """
    if request.tool_choice in ("auto", "none"):
        return None
    chosen = tools
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        chosen = [tool for tool in tools if tool.function.name == name]
        if not chosen:
            raise GenerationError(
                f"{name!r} is not among the tools", where="tool_choice", remedy="Name one of them"
            )
    calls = [_call_pattern(tool, written, tools) for tool in chosen]
    return ConstraintConfig(regex=f"{escape(written.before)}(?:{'|'.join(calls)}){escape(written.after)}")


def _call_pattern(tool: Tool, written: CallFormat, tools: Sequence[Tool]) -> str:
    """The pattern of a call of a tool."""
    schema = tool.function.parameters or NO_ARGUMENTS
    arguments = regex_of(
        ConstraintConfig(json_schema=schema), f"tools.{tools.index(tool)}.function.parameters"
    )
    return f'\\{{"name": ?{escape(json.dumps(tool.function.name))}, ?"{written.key}": ?(?:{arguments})\\}}'


class CallReader:
    """Reads calls from a text as it grows. The rest is content, but for white space after a call. So is a
    part that looks like a call and is none of a known function.

    Args:
        names: of the functions.
        single: whether the text ends with its first call.

    Attributes:
        calls: calls so far.
    """

    def __init__(self, written: CallFormat, names: Collection[str], *, single: bool = False):
        self.before, self.after, self.key = written.before.strip(), written.after.strip(), written.key
        self.names, self.single = names, single
        self.calls = 0
        self._rest = ""
        self._growing: GrowingCall | None = None  # at the beginning of what is left
        self._at_start = True  # nothing but white space since the beginning or the last call

    def read(self, text: str, *, done: bool) -> Iterator[str | Call]:
        """The content and the calls that are sure once `text` has been added; `done`: nothing follows."""
        self._rest += text
        while not (self.single and self.calls):
            if self.calls and self._at_start:
                self._rest = self._rest.lstrip()
            at = self._find()
            sure = (
                len(self._rest) - (0 if done else held_back(self._rest, [self.before])) if at is None else at
            )
            yield from self._content(sure)
            if at is None or not self._rest:
                return
            found = self._read_call()
            if found == "open" and not done:
                return
            self._growing = None
            if isinstance(found, tuple):
                call, self._rest = found
                self.calls, self._at_start = self.calls + 1, True
                yield call
            else:
                yield from self._content(max(1, len(self.before)))

    def _content(self, length: int) -> Iterator[str]:
        """So much of what is left, as content."""
        text, self._rest = self._rest[:length], self._rest[length:]
        self._at_start = self._at_start and not text.strip()
        if text:
            yield text

    def _find(self) -> int | None:
        """Where a call may begin. Without a mark before calls, it is the text's beginning, or what follows a
        call."""
        if self.before:
            at = self._rest.find(self.before)
            return at if at >= 0 else None
        blank = len(self._rest) - len(self._rest.lstrip())
        return blank if self._at_start and self._rest[blank:].startswith("{") else None

    def _read_call(self) -> tuple[Call, str] | Literal["open", "none"]:
        """The call at the beginning of what is left, and what follows it; "open": more text may complete
        it."""
        if self._growing is None:
            at = len(self._rest) - len(self._rest[len(self.before) :].lstrip())
            if not self._rest.startswith("{", at):
                return "open" if at == len(self._rest) else "none"
            self._growing = GrowingCall(at, self._as_call)
        read = self._growing.read(self._rest)
        if isinstance(read, str):
            return read
        call, following = read[0], self._rest[read[1] :].lstrip()
        if following.startswith(self.after):
            return call, following[len(self.after) :]
        return "open" if self.after.startswith(following) else "none"

    def _as_call(self, value: dict[str, Any]) -> Call | None:
        keys = (self.key, *sorted({"arguments", "parameters"} - {self.key}))
        name, arguments = value.get("name"), next((value[key] for key in keys if key in value), None)
        if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
            arguments = {}
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return (
            Call(name, arguments)
            if isinstance(name, str) and name in self.names and isinstance(arguments, str)
            else None
        )


class GrowingCall:
    """A call in a text that grows. It is parsed when its last bracket has come, and before that whenever it
    has doubled, to know whether it still may become one: so a character is read a bounded number of times,
    however many pieces a call comes in.

    Args:
        start: the place of its first bracket.
        convert: makes a call of an object, or None if it is none.
    """

    def __init__(self, start: int, convert: Callable[[dict[str, Any]], Call | None]):
        self._start, self._convert = start, convert
        self._scanned, self._depth, self._in_string = start, 0, False
        self._parsed = 0  # characters, when it was parsed last
        self._found: tuple[Call, int] | Literal["open", "none"] = "open"

    def read(self, text: str) -> tuple[Call, int] | Literal["open", "none"]:
        """The call, and where its object ends; "open": more text may complete it."""
        length = len(text) - self._start
        if self._found == "open" and ((whole := self._scan(text)) or length >= 2 * self._parsed):
            read, self._parsed = read_object(text, self._start), length
            if isinstance(read, tuple):
                call = self._convert(read[0])
                self._found = "none" if call is None else (call, read[1])
            else:
                self._found = "none" if whole else read
        return self._found

    def _scan(self, text: str) -> bool:
        """Look at the characters that are new; whether the bracket that closes the first one is among
        them."""
        while mark := MARK.search(text, self._scanned):
            self._scanned = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif mark[0] in "{}" and not self._in_string:
                self._depth += 1 if mark[0] == "{" else -1
                if self._depth == 0:
                    return True
        self._scanned = max(self._scanned, len(text) - text.endswith("\\"))
        return False


def read_object(text: str, at: int) -> tuple[dict[str, Any], int] | Literal["open", "none"]:
    """The JSON object at a place of a text, and where it ends; "open": more text may complete it."""
    try:
        value, stop = json.JSONDecoder().raw_decode(text, at)
    except json.JSONDecodeError as error:
        unfinished = error.msg.startswith("Unterminated") or error.pos + LONGEST_WORD > len(text.rstrip())
        return "open" if unfinished else "none"
    except (ValueError, RecursionError):  # a number of too many digits
        return "none"
    return (value, stop) if isinstance(value, dict) else "none"


def held_back(text: str, marks: Sequence[str]) -> int:
    """The characters at the end of a text that may be the beginning of a mark."""
    return max((_overlap(text, mark) for mark in marks), default=0)


def _overlap(text: str, mark: str) -> int:
    """The characters at the end of a text with which a mark begins, but for the whole mark."""
    tail = text[len(text) - min(len(text), len(mark) - 1) :]
    return next(
        (len(tail) - at for at in range(len(tail)) if tail[at] == mark[0] and mark.startswith(tail[at:])), 0
    )
