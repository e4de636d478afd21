"""Examples as people write them, and the same in TRL's words (see `unmask.data.chat`).

| columns | what they hold | read as |
|---|---|---|
| `text` | text, all of which is learnt | the same |
| `messages` | a conversation | the same |
| `conversations`, perhaps `system` | a conversation, as ShareGPT writes it | `messages` |
| `prompt`, `completion` | text or messages | the same |
| `question`, `thinking_trajectories`, `attempt` | a reasoning trace, as s1k writes it | `prompt`, `completion` |
| `prompt`, `chosen`, `rejected`; or without `prompt` | text or messages | the same |
| `conversations`, `chosen`, `rejected`, perhaps `system` | the same, as ShareGPT writes it | `prompt`, `chosen`, `rejected` |
| `prompt`, `completion`, `label` | text or messages, and true or false | the same |

A message is `{"role": ..., "content": ...}`, or as ShareGPT writes it `{"from": ..., "value": ...}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from unmask.data.rows import require_values
from unmask.errors import DataError

Example = dict[str, Any]

PROMPTS = ("question", "instruction", "input", "query")
"""What others call a prompt."""
SPEAKERS = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    **{"observation": "tool", "tool": "tool", "function_call": "assistant"},
}
"""Who speaks: ShareGPT's word, and the role."""
TRACE_INSTRUCTIONS = "Think step by step. Answer in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
"""What the prompt of a reasoning trace asks for, before the question: the form of the tasks of reinforcement learning."""


def conversation(row: Example) -> Any:
    """The messages of a ShareGPT row, after its system prompt, if it has one apart."""
    messages, system = row["conversations"], row.get("system")
    if not isinstance(system, str | None):
        raise DataError(f"a system prompt cannot be {system!r:.40}", where="system", remedy="Give a string.", reason="of another type")
    if not system or not _is_chat(messages):
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        what = f"the system prompt {system!r:.40} stands beside another, {messages[0]['content']!r:.40}"
        raise DataError(what, where="system", remedy="Keep one of them.", reason="two system prompts")
    return messages


def trace(row: Example) -> Example:
    """A reasoning trace as prompt and completion: the first trajectory, and the attempt as the answer."""
    thoughts = row["thinking_trajectories"]
    if not isinstance(thoughts, Sequence) or isinstance(thoughts, str) or not all(isinstance(one, str) for one in thoughts):
        remedy = "Give a list of strings."
        raise DataError(f"{thoughts!r:.40} is no list of texts", where="thinking_trajectories", remedy=remedy, reason="of another type")
    if not (thoughts and thoughts[0].strip()):
        raise DataError("there is no trace", where="thinking_trajectories", remedy="Remove the row.", reason="empty")
    answer = f"<reasoning>\n{thoughts[0].strip()}\n</reasoning>\n<answer>\n{row['attempt']}\n</answer>"
    return {
        "prompt": [{"role": "user", "content": f"{TRACE_INSTRUCTIONS}\n\n{row['question']}"}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def preference(row: Example) -> Example:
    """A preference. Of two whole conversations that begin with the prompt, the prompt is what both begin with."""
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    if isinstance(prompt, str) and _is_chat(chosen) and _is_chat(rejected):
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        if any(one["role"] == "user" and one.get("content") == prompt for one, _ in shared):
            return {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def unpaired(row: Example) -> Example:
    """A completion that is liked or not."""
    if not isinstance(row["label"], bool):
        what = f"{row['label']!r:.40} is neither true nor false"
        raise DataError(what, where="label", remedy="Write true for a good completion, false for a bad one.", reason="of another type")
    return {name: row[name] for name in ("prompt", "completion", "label")}


@dataclass(frozen=True)
class Layout:
    """One way to write examples.

    Attributes:
        columns: by which it is told.
        texts: those of them that hold text or messages.
        convert: a row, whose messages have a role and content, to TRL's words; None: these columns as they are.
        unread: columns of other layouts that would change the prompt; a row with them is refused.
    """

    columns: tuple[str, ...]
    texts: tuple[str, ...]
    convert: Callable[[Example], Example] | None = None
    unread: tuple[str, ...] = ("tools", "system", "history")

    def read(self, row: Example) -> Example:
        """A row in TRL's words. A blank text, what is neither a text nor messages, or a column that would be left unread: DataError."""
        for name in self.unread:
            if row.get(name):
                what, remedy = f"a row with {name}, which is not read", "Write it into the prompt (a system message), or remove the column."
                raise DataError(what, where=name, remedy=remedy, reason=f"with {name}")
        texts = {name: _messages(row[name]) for name in self.texts}
        for name, value in texts.items():
            if _is_blank(value):
                raise DataError("is empty", where=name, remedy="Fill it in, or remove the row.", reason="empty")
            if not (isinstance(value, str) or _is_chat(value)):
                remedy = 'Give a text, or [{"role": "user", "content": "..."}, ...].'
                raise DataError(f"neither a text nor messages: {value!r:.80}", where=name, remedy=remedy, reason="of another type")
        row = row | texts
        return self.convert(row) if self.convert else {name: row[name] for name in self.columns}

    def style(self, row: Example) -> str:
        """What its texts are."""
        return " and ".join(dict.fromkeys(_style(row[name]) for name in self.texts))


PLAIN = Layout(("text",), ("text",), unread=("tools",))
CHAT = Layout(("messages",), ("messages",))
SHAREGPT = Layout(("conversations",), ("conversations",), lambda row: {"messages": conversation(row)}, ("tools", "history"))
TRACE = Layout(("question", "thinking_trajectories", "attempt"), ("question", "attempt"), trace)
PAIR = Layout(("prompt", "completion"), ("prompt", "completion"))
SUPERVISED = (PLAIN, CHAT, SHAREGPT, TRACE, PAIR)
"""Of supervised fine-tuning. Where a row has the columns of several layouts, it is of the first."""
PREFERENCES = (
    Layout(
        ("conversations", "chosen", "rejected"),
        ("conversations", "chosen", "rejected"),
        lambda row: {"prompt": conversation(row), "chosen": row["chosen"], "rejected": row["rejected"]},
        ("tools", "history"),
    ),
    Layout(("prompt", "chosen", "rejected"), ("prompt", "chosen", "rejected"), preference),
    Layout(("chosen", "rejected"), ("chosen", "rejected"), unread=("tools", "system", "history", *PROMPTS)),
)
UNPAIRED = (Layout(("prompt", "completion", "label"), ("prompt", "completion"), unpaired),)


class Reader:
    """Reads rows of one layout: of those given, the one of the first that can be read, with strings and kinds of messages as there.

    Args:
        layouts: those that are known, the most special first.
    """

    def __init__(self, layouts: Sequence[Layout]):
        self.layouts = layouts
        self.layout: Layout | None = None
        self.style = ""
        self.count = self.first = 0  # the rows so far, and which of them the layout is of

    def read(self, row: Mapping[str, Any] | DataError) -> Example:
        """A row in TRL's words.

        Raises:
            DataError: the row itself, if it is one (a line that could not be read); a row without its columns, of another layout than
                the first, of another type, or empty.
        """
        self.count += 1
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, Mapping):
            remedy = 'Give objects with columns, as {"prompt": ..., "completion": ...}.'
            raise DataError(f"a row cannot be {row!r:.80}", remedy=remedy, reason="of another type")
        given = {name: value for name, value in row.items() if value is not None}
        layout = next((layout for layout in self.layouts if given.keys() >= {*layout.columns}), None)
        if layout is None:
            require_values(row, (self.layout or self._nearest(row, given)).columns, "")
        assert layout is not None
        for other in self.layouts:
            if {*layout.columns} < {*other.columns} <= row.keys():  # a null does not make it another layout
                require_values(row, other.columns, "")
        example = layout.read(given)
        if len({isinstance(example[name], str) for name in example.keys() - {"label"}}) > 1:
            return example  # a text beside messages, which is refused where it is rendered, and decides nothing
        style = layout.style(given)
        if self.layout is None:
            self.layout, self.style, self.first = layout, style, self.count - 1
        if (layout, style) != (self.layout, self.style):
            what = f"a row of {_told(layout, style)} after rows of {_told(self.layout, self.style)} (as row {self.first} is)"
            raise DataError(what, remedy="Keep one layout in a file.", reason="of another layout")
        return example

    def _nearest(self, row: Mapping[str, Any], given: Example) -> Layout:
        """The layout of which a row has most values, and of these most columns."""
        return max(reversed(self.layouts), key=lambda layout: [sum(name in cells for name in layout.columns) for cells in (given, row)])


def _told(layout: Layout, style: str) -> str:
    return f"{', '.join(layout.columns)} ({style})"


def _style(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    first = value if isinstance(value, Mapping) else value[0]
    return "messages" if first.get("role") is not None else "messages of ShareGPT"


def _is_chat(value: Any) -> bool:
    """Whether it is a message or several, of either kind. In a table each may have the columns of the other, without a value."""
    messages = [value] if isinstance(value, Mapping) else value
    return (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(isinstance(one, Mapping) and (one.get("role") is not None or one.get("from") is not None) for one in messages)
    )


def _messages(value: Any) -> Any:
    """Messages with a role and content; anything else as it is."""
    if not _is_chat(value):
        return value
    return [_message(one) for one in ([value] if isinstance(value, Mapping) else value)]


def _message(message: Mapping[str, Any]) -> Example:
    role, content = message.get("role"), message.get("content")
    if role is None:
        speaker, content = message["from"], message.get("value")
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            remedy = f"Use one of {', '.join(SPEAKERS)}."
            raise DataError(f"unknown speaker {speaker!r:.40}", where="from", remedy=remedy, reason="of another type")
    if not isinstance(role, str):
        raise DataError(f"a role cannot be {role!r:.40}", where="role", remedy="Give a string.", reason="of another type")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, str) and not message.get("tool_calls"):
        remedy = 'Write {"role": "user", "content": "..."}.'
        raise DataError(f"a message cannot be {message!r:.80}", where="content", remedy=remedy, reason="of another type")
    rest = {name: value for name, value in message.items() if value is not None and name not in ("from", "value")}
    return rest | {"role": role, "content": content}


def _part(part: Any) -> str:
    """The text of a part of a message's content, as OpenAI writes it. Of another kind (an image): DataError."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    remedy = 'Write {"type": "text", "text": "..."}.'
    raise DataError(f"a part of a message cannot be {part!r:.80}", where="content", remedy=remedy, reason="of another type")


def _is_blank(value: Any) -> bool:
    """Whether a text is blank, or all messages are, or one that is the assistant's."""
    if isinstance(value, str):
        return not value.strip()
    if not _is_chat(value):
        return isinstance(value, Sequence) and len(value) == 0
    blank = {index for index, one in enumerate(value) if isinstance(one["content"], str) and not one["content"].strip()}
    return len(blank) == len(value) or any(value[index]["role"] == "assistant" and not value[index].get("tool_calls") for index in blank)
