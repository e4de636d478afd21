"""The record formats that are accepted, and their conversion to TRL's columns (see `unmask.data.encoding`).

| columns | contents | converted to |
|---|---|---|
| `text` | text, all of which is trained on | unchanged |
| `messages` | a conversation | unchanged |
| `conversations`, optional `system` | a conversation of ShareGPT | `messages` |
| `prompt`, `completion` | text or messages | unchanged |
| `question`, `thinking_trajectories`, `attempt` | a reasoning trace of s1k | `prompt`, `completion` |
| `prompt`, `chosen`, `rejected`; or without `prompt` | text or messages | unchanged |
| `conversations`, `chosen`, `rejected`, `system`? | preference of ShareGPT | `prompt`, `chosen`, `rejected` |
| `prompt`, `completion`, `label` | text or messages, and a boolean | unchanged |
| `prompt` | text or messages | unchanged |
| `input_ids`, with `labels`, `completion_mask` or `assistant_masks` | tokens | `input_ids`, `trained` |
| `prompt_ids`, `chosen_ids`, `rejected_ids` | tokens | unchanged |

A message is `{"role": ..., "content": ...}`, or in ShareGPT's form `{"from": ..., "value": ...}`. An answer
with `"weight": 0`, or Axolotl's `"train": false`, is not trained on. Beside messages a row may have `tools`
and `chat_template_kwargs`, which the chat template reads, as in TRL.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, TypeGuard

from unmask.errors import DataError, prepending_place, require_text, require_values

Example = dict[str, Any]

PROMPTS = ("question", "instruction", "input", "query")
"""Other names of a prompt column."""
ANSWERS = ("answer", "output", "response", "target", "attempt")
"""Other names of a completion column."""
RENDERED: dict[str, type[Any]] = {"tools": list, "chat_template_kwargs": dict}
"""Columns that a chat template reads beside the messages, and their types; JSON text is decoded."""
MEDIA = dict.fromkeys(
    ("images", "image", "videos", "video", "audios", "audio"), "Remove it: models of text are trained."
)
UNREAD = {
    **dict.fromkeys(
        ("system", "system_prompt", "history"),
        "Write it into the prompt (a system message), or remove the column.",
    ),
    **dict.fromkeys(("documents",), "Write them into the prompt, or remove the column."),
    **dict.fromkeys(("functions",), "Rename it to tools, or remove the column."),
    **MEDIA,
}
"""Columns that would change a prompt and are not read, and what to do about them."""
UNREAD_IN_MESSAGES = {
    **dict.fromkeys(("function_call",), "Write it as tool_calls."),
    **dict.fromkeys(("train_detail",), "Learn whole answers, with weight or train."),
    **MEDIA,
}
REFERENCE = dict.fromkeys(
    ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"),
    "Remove it: the log-probabilities of the reference are estimated, and stored with reference: stored.",
)
"""Columns that TRL adds to preferences, and what to do about them."""
IGNORED = -100
"""The label of a token that is not trained on."""
LABELS = {"true": True, "false": False, "1": True, "0": False}
"""Labels of a table without booleans."""
SPEAKERS = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"},
    **{"observation": "tool", "tool": "tool", "function_call": "assistant"},
}
"""Roles by ShareGPT's names of the speaker."""
TRACE_INSTRUCTIONS = (
    "Think step by step. Answer in this form:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
)
"""Begins the prompt of a reasoning trace. The form is that of the tasks of reinforcement learning."""


def conversation(row: Example) -> Any:
    """The messages of a ShareGPT row, with its `system` column as the first."""
    messages, system = row["conversations"], row.get("system")
    if not isinstance(system, str | None):
        raise DataError(
            f"a system prompt cannot be {system!r:.40}",
            where="system",
            remedy="Give a string.",
            reason="wrong type",
        )
    if not system or not _is_chat(messages):
        return messages
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise DataError(
            f"there are two system prompts, {system!r:.40} and {messages[0]['content']!r:.40}",
            where="system",
            remedy="Keep one of them.",
            reason="two system prompts",
        )
    return messages


def trace(row: Example) -> Example:
    """A reasoning trace as prompt and completion: the first trajectory, and the attempt as the answer."""
    thoughts = row["thinking_trajectories"]
    if (
        not isinstance(thoughts, Sequence)
        or isinstance(thoughts, str)
        or not all(isinstance(text, str) for text in thoughts)
    ):
        raise DataError(
            f"{thoughts!r:.40} is not a list of strings",
            where="thinking_trajectories",
            remedy="Give a list of strings.",
            reason="wrong type",
        )
    if not (thoughts and thoughts[0].strip()):
        raise DataError(
            "there is no trace", where="thinking_trajectories", remedy="Remove the row.", reason="empty"
        )
    answer = f"<reasoning>\n{thoughts[0].strip()}\n</reasoning>\n<answer>\n{row['attempt']}\n</answer>"
    return {
        "prompt": [{"role": "user", "content": f"{TRACE_INSTRUCTIONS}\n\n{row['question']}"}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def preference(row: Example) -> Example:
    """A preference. The prompt is left out if `chosen` and `rejected` are conversations that repeat it: their
    common beginning is used."""
    prompt, chosen, rejected = row["prompt"], row["chosen"], row["rejected"]
    if isinstance(prompt, str) and _is_chat(chosen) and _is_chat(rejected):
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        if any(message["role"] == "user" and message.get("content") == prompt for message, _ in shared):
            return {"chosen": chosen, "rejected": rejected}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def unpaired(row: Example) -> Example:
    """A completion with a boolean label, which may be written as 1 or 0."""
    written = row["label"]
    written = written.item() if hasattr(written, "item") else written  # of a tensor or an array
    label = LABELS.get(f"{written:g}" if isinstance(written, int | float) else str(written).strip().lower())
    if label is None:
        raise DataError(
            f"{written!r:.40} is neither true nor false",
            where="label",
            remedy="Write true for a good completion, false for a bad one.",
            reason="wrong type",
        )
    return {"prompt": row["prompt"], "completion": row["completion"], "label": label}


def tokens(row: Example) -> Example:
    """The tokens of a row of TRL, and which are trained on: those with a label other than -100, or those that
    all its masks name. Padding (`attention_mask` 0) is left out. Raises DataError for several packed texts,
    as by `seq_lengths`, by `position_ids` that begin again, or by numbers in `attention_mask`."""
    ids = [int(each) for each in row["input_ids"]]
    if "labels" in row:
        labels = [int(each) for each in row["labels"]]
        trained = [label != IGNORED for label in labels]
        if any(label not in (IGNORED, token) for label, token in zip(labels, ids, strict=False)):
            remedy = "Label a token with its own id, or with -100: they are not shifted"
            raise DataError("differ from input_ids", where="labels", remedy=remedy, reason="wrong type")
    else:
        masks = [row[name] for name in ("completion_mask", "assistant_masks") if name in row]
        trained = [all(bits) for bits in zip(*masks, strict=False)] if masks else [True] * len(ids)
    shown = row.get("attention_mask", [1] * len(ids))
    positions = row.get("position_ids", range(len(ids)))
    order = [position for position, number in zip(positions, shown, strict=False) if number]
    begins_again = any(after <= before for before, after in pairwise(order))
    packed = "seq_lengths" in row or max(shown, default=0) > 1 or begins_again
    if packed or not len(ids) == len(trained) == len(shown) == len(positions):
        what = "are several packed texts" if packed else "are more or fewer than the masks say"
        remedy = "Give one text a row, with as many labels or mask values as tokens (packing=True packs them)"
        raise DataError(what, where="input_ids", remedy=remedy, reason="wrong type")
    kept = [each for each in zip(ids, trained, shown, strict=True) if each[2]]
    if not any(is_trained for _, is_trained, _ in kept[1:]):
        what = "no token after the first is trained on"
        raise DataError(what, where="input_ids", remedy="Remove the row.", reason="empty")
    return {"input_ids": [each[0] for each in kept], "trained": [each[1] for each in kept]}


def template_columns(row: Mapping[str, Any]) -> Example:
    """The columns of `RENDERED` that a row has and that are not empty. Raises DataError for one of another
    type."""
    columns = {}
    for name, kind in RENDERED.items():
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = row[name]
        if not value:
            continue
        if not isinstance(value, kind) or (
            kind is list and not all(isinstance(tool, Mapping) or callable(tool) for tool in value)
        ):
            remedy = (
                f"Give {'a list of functions as JSON schemas' if kind is list else 'an object'}, or remove "
                "the column."
            )
            raise DataError(
                f"{value!r:.80} is of another type", where=name, remedy=remedy, reason="wrong type"
            )
        columns[name] = value
    if "tools" in columns and "tools" in columns.get("chat_template_kwargs", {}):
        raise DataError(
            "tools are given twice, as a column and in chat_template_kwargs",
            where="tools",
            remedy="Keep the column.",
            reason="wrong type",
        )
    return columns


def call_arguments(value: Any) -> Any:
    """The arguments of a call as chat templates read them; a text they would write with quotes. The JSON text
    of an object is this object, an empty text and null are an empty one. Anything else is unchanged."""
    if not isinstance(value, str | None):
        return value
    try:
        decoded = json.loads((value or "").strip() or "null")
    except (ValueError, RecursionError):
        return value
    return {} if decoded is None else decoded if isinstance(decoded, dict) else value


def with_decoded_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose tool calls have their `call_arguments`."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_decoded_call, calls)]} if isinstance(calls, list) else message


def _decoded_call(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(called := call.get("function"), Mapping):
        return {**call, "function": _decoded_call(called)}
    return {**call, "arguments": call_arguments(call.get("arguments"))}


@dataclass(frozen=True)
class RecordFormat:
    """The columns of a record format."""

    columns: tuple[str, ...]  # identify the format
    texts: tuple[str, ...]  # those that hold text or messages
    # to TRL's columns, from a row whose messages have roles; None: they are TRL's
    convert: Callable[[Example], Example] | None = None
    reads: tuple[str, ...] = ()  # of `UNREAD`: the columns that it does read, or that cannot change its text
    # further columns that would change the training; a row that has one is refused
    others: tuple[str, ...] = ()

    def identity(self) -> tuple[str, ...]:
        """What distinguishes it from others."""
        return self.columns

    def read(self, row: Example) -> Example:
        """A row in TRL's columns, with those of `RENDERED` that it has. Raises DataError if a text is blank
        or of another type, or the row has a column that would change the prompt, but is not read."""
        texts = {name: _messages(row[name]) for name in self.texts}
        rendered = template_columns(row) if texts else {}
        in_text = () if not rendered or any(map(_is_chat, texts.values())) else rendered
        for name in (
            name for name in (*UNREAD, *self.others) if name not in self.reads and _is_given(row.get(name))
        ):
            raise DataError(
                f"the column {name} is not supported",
                where=name,
                remedy=(UNREAD | REFERENCE).get(name, UNREAD["system"]),
                reason=f"with {name}",
            )
        for name in in_text:
            raise DataError(
                "a text has no chat template to read it",
                where=name,
                remedy="Give messages, or remove the column.",
                reason=f"with {name}",
            )
        for name, value in texts.items():
            if _is_blank(value):
                raise DataError(
                    "is empty", where=name, remedy="Fill it in, or remove the row.", reason="empty"
                )
            if not (isinstance(value, str) or _is_chat(value)):
                raise DataError(
                    f"neither a text nor messages: {value!r:.80}",
                    where=name,
                    remedy='Give a text, or [{"role": "user", "content": "..."}, ...].',
                    reason="wrong type",
                )
        row = row | texts
        return (self.convert(row) if self.convert else {name: row[name] for name in self.columns}) | rendered

    def described(self, row: Example) -> str:
        """The columns and the types of the row's texts, such as "prompt, completion (text)"."""
        types = dict.fromkeys(_type(row[name]) for name in self.texts) or {"tokens": None}
        return f"{', '.join(self.columns)} ({' and '.join(types)})"


PLAIN = RecordFormat(("text",), ("text",), reads=tuple(UNREAD.keys() - MEDIA.keys()))
CHAT = RecordFormat(("messages",), ("messages",))
SHAREGPT = RecordFormat(
    ("conversations",), ("conversations",), lambda row: {"messages": conversation(row)}, ("system",)
)
TRACE = RecordFormat(("question", "thinking_trajectories", "attempt"), ("question", "attempt"), trace)
PAIR = RecordFormat(("prompt", "completion"), ("prompt", "completion"))
TOKENS = RecordFormat(("input_ids",), (), tokens, reads=tuple(UNREAD.keys() - MEDIA.keys()))
SUPERVISED = (TOKENS, PLAIN, CHAT, SHAREGPT, TRACE, PAIR)
"""For supervised fine-tuning. A row that has the columns of several formats is of the first."""
PREFERENCES = (
    RecordFormat(("prompt_ids", "chosen_ids", "rejected_ids"), (), others=tuple(REFERENCE)),
    RecordFormat(
        ("conversations", "chosen", "rejected"),
        ("conversations", "chosen", "rejected"),
        lambda row: {"prompt": conversation(row), "chosen": row["chosen"], "rejected": row["rejected"]},
        ("system",),
        tuple(REFERENCE),
    ),
    RecordFormat(
        ("prompt", "chosen", "rejected"),
        ("prompt", "chosen", "rejected"),
        preference,
        others=tuple(REFERENCE),
    ),
    RecordFormat(("chosen", "rejected"), ("chosen", "rejected"), others=(*PROMPTS, *REFERENCE)),
)
UNPAIRED = (
    RecordFormat(
        ("prompt", "completion", "label"), ("prompt", "completion"), unpaired, others=tuple(REFERENCE)
    ),
)
PROMPT = RecordFormat(("prompt",), ("prompt",))
"""For reinforcement learning and evaluation."""


def _require_columns(row: Mapping[str, Any], names: Sequence[str]) -> None:
    """Like `require_values`. The error of a missing prompt or completion names the columns that seem to be
    meant."""
    try:
        require_values(row, names, "")
    except DataError as error:
        others = {"prompt": PROMPTS, "completion": ANSWERS}
        found = {
            ours: next(filter(row.__contains__, theirs), None)
            for ours, theirs in others.items()
            if ours in names and ours not in row
        }
        renamed = " and ".join(f"{theirs} to {ours}" for ours, theirs in found.items() if theirs)
        raise DataError(
            error.what,
            remedy=f"Rename {renamed}: docs/data.md lists the columns of each verb"
            if renamed
            else error.remedy,
            reason=error.reason,
        ) from error


def read_prompt(row: Mapping[str, Any]) -> Example:
    """The prompt of a row, a text, messages or token ids, with the columns of `RENDERED`. Raises DataError as
    `RecordFormat.read`, but the prompt may be an empty text."""
    if isinstance(row, Mapping):
        _require_columns(row, PROMPT.columns)
        prompt = row["prompt"]
        if (isinstance(prompt, str) and not prompt.strip()) or is_ids(prompt):
            PROMPT.read({**row, "prompt": "text"})
            return {"prompt": prompt}
    return Reader([PROMPT]).read(row)


def check_row(
    verb: str,
    row: Mapping[str, Any],
    where: str,
    *,
    text_column: str,
    loss_type: str | None = None,
    completes: bool = False,
) -> None:
    """Raise DataError for a row at `where` that a training verb cannot read. `loss_type` is that of
    preferences, if it was given; `completes`: whether the model completes prompts."""
    if completes:
        with prepending_place(where):
            read_prompt(row)
        return
    if verb == "pretrain" or (verb == "convert" and {"completion", "messages"}.isdisjoint(row)):
        require_text(row, text_column, where, "data.text_column")
        return
    preferences = UNPAIRED if loss_type == "kto" and "label" in row else PREFERENCES
    with prepending_place(where):
        Reader(preferences if verb == "dpo" else SUPERVISED).read(row)


class Reader:
    """Reads rows of one format: that of the first good row. Later rows must have the same format, and the
    same types of text.

    `formats` are those accepted, in order of precedence.
    """

    def __init__(self, formats: Sequence[RecordFormat]):
        self.formats = formats
        self.format: RecordFormat | None = None
        self.described = ""
        self.count = self.first = 0  # rows read; index of the row that set the format

    def read(self, row: Mapping[str, Any] | DataError) -> Example:
        """A row in TRL's columns.

        Raises:
            DataError: the row itself, if it is one (a line that could not be read); a row that lacks columns,
                has another format or type than the first, or is empty.
        """
        self.count += 1
        if isinstance(row, DataError):
            raise row
        if not isinstance(row, Mapping):
            raise DataError(
                f"a row cannot be {row!r:.80}",
                remedy='Give objects with columns, as {"prompt": ..., "completion": ...}.',
                reason="wrong type",
            )
        filled = {name: value for name, value in row.items() if value is not None}
        format_ = next((known for known in self.formats if filled.keys() >= {*known.columns}), None)
        if format_ is None:
            _require_columns(row, (self.format or self._nearest(row, filled)).columns)
        assert format_ is not None
        for other in self.formats:
            # null in a column of `other` is an error, not another format
            if {*format_.columns} < {*other.columns} <= row.keys():
                require_values(row, other.columns, "")
        example = format_.read(filled)
        if len({isinstance(example[name], str) for name in example.keys() - {"label", *RENDERED}}) > 1:
            return example  # mixes text and messages: rendering refuses it, so it must not set the format
        described = format_.described(filled)
        if self.format is None:
            self.format, self.described, self.first = format_, described, self.count - 1
        if described != self.described:
            raise DataError(
                f"a row of {described} after rows of {self.described} (such as row {self.first})",
                remedy="Keep one format in a file.",
                reason="another format",
            )
        return example

    def _nearest(self, row: Mapping[str, Any], filled: Example) -> RecordFormat:
        """The format with the most columns that have a value in the row; among equals, the one with the most
        columns present. A question alone is no trace."""
        formats = [
            known
            for known in reversed(self.formats)
            if known is not TRACE or not row.keys().isdisjoint(TRACE.columns[1:])
        ]
        return max(
            formats,
            key=lambda known: [sum(name in cells for name in known.columns) for cells in (filled, row)],
        )


def is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(item, int) for item in value)
    )


def _type(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    first = value if isinstance(value, Mapping) else value[0]
    return "messages" if first.get("role") is not None else "messages of ShareGPT"


def _is_chat(value: Any) -> bool:
    """Whether the value is one message or a list of them, with roles or in ShareGPT's form. A null value
    counts as absent."""
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, Sequence) or len(messages) == 0:
        return False
    return all(
        isinstance(each, Mapping) and (each.get("role") is not None or each.get("from") is not None)
        for each in messages
    )


def _messages(value: Any) -> Any:
    """Messages with roles; any other value unchanged."""
    return (
        [_message(message) for message in ([value] if isinstance(value, Mapping) else value)]
        if _is_chat(value)
        else value
    )


def _message(message: Mapping[str, Any]) -> Example:
    role, content = message.get("role"), message.get("content")
    if role is None:
        speaker, content = message["from"], message.get("value")
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise DataError(
                f"unknown speaker {speaker!r:.40}",
                where="from",
                remedy=f"Use one of {', '.join(SPEAKERS)}.",
                reason="wrong type",
            )
    if not isinstance(role, str):
        raise DataError(
            f"a role cannot be {role!r:.40}", where="role", remedy="Give a string.", reason="wrong type"
        )
    if isinstance(content, list):
        content = "".join(map(_part, content))
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise DataError(
            f"a message cannot be {message!r:.80}",
            where="content",
            remedy='Write {"role": "user", "content": "..."}.',
            reason="wrong type",
        )
    for name in (name for name in UNREAD_IN_MESSAGES if _is_given(message.get(name))):
        raise DataError(
            f"{name} of a message is not supported",
            where=name,
            remedy=UNREAD_IN_MESSAGES[name],
            reason=f"with {name}",
        )
    calls = message.get("tool_calls")
    rest = {
        name: value
        for name, value in with_decoded_calls(message).items()
        if value is not None and name not in ("from", "value", "train")
    }
    if calls and not (isinstance(calls, list) and all(map(_is_call, rest["tool_calls"]))):
        raise DataError(
            f"calls cannot be {calls!r:.80}",
            where="tool_calls",
            remedy='Write [{"type": "function", "function": {"name": "...", "arguments": {...}}}].',
            reason="wrong type",
        )
    return rest | {"role": role, "content": content} | _weight(message, role)


def _weight(message: Mapping[str, Any], role: str) -> Example:
    """The weight of a message, if it has one, or Axolotl's `train`."""
    given = {name: message[name] for name in ("weight", "train") if message.get(name) is not None}
    for name, value in given.items():
        if value not in ((0, 1) if role == "assistant" else (0,)):
            raise DataError(
                f"the {role}'s message has {name} {value!r:.40}",
                where=name,
                remedy="Write 0 or 1 for an answer, and none for others.",
                reason="wrong type",
            )
    if len({*map(int, given.values())}) > 1:
        raise DataError(
            "weight and train differ", where="train", remedy="Keep one of them.", reason="wrong type"
        )
    return (
        {"weight": given["weight"]}
        if "weight" in given
        else {"weight": 0}
        if given.get("train", True) in (0,)
        else {}
    )


def _is_call(call: Any) -> bool:
    """Whether a call, with or without `function` around it, has arguments by name."""
    called = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(called, Mapping) and isinstance(called.get("arguments"), Mapping)


def _is_given(value: Any) -> bool:
    """Whether a column has any content; an array has no truth value."""
    return len(value) > 0 if hasattr(value, "__len__") else bool(value)


def _part(part: Any) -> str:
    """The text of a part of a message's content (OpenAI's format). Raises DataError for other parts, such as
    images."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise DataError(
        f"a part of a message cannot be {part!r:.80}",
        where="content",
        remedy='Write {"type": "text", "text": "..."}.',
        reason="wrong type",
    )


def _is_blank(value: Any) -> bool:
    """Whether a text is blank, or all messages are, or one of the assistant's is; a message with a tool call
    is not."""
    if isinstance(value, str):
        return not value.strip()
    if not _is_chat(value):
        return isinstance(value, Sequence) and len(value) == 0
    blank = [message for message in value if not (message.get("tool_calls") or message["content"].strip())]
    return len(blank) == len(value) or any(message["role"] == "assistant" for message in blank)
