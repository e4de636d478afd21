"""Encodes examples in TRL's formats as token ids.

| type | standard | conversational |
|---|---|---|
| language modeling | `text`: str | `messages`: a list of messages |
| prompt only | `prompt`: str | `prompt`: messages |
| prompt and completion | `prompt`, `completion`: str | `prompt`, `completion`: messages |
| preference | `chosen`, `rejected`: str; `prompt`: str, or their common beginning | the same with messages |

A message is `{"role": ..., "content": ...}`. Prompt and completion are tokenized separately, because sampling
sees only the prompt. The beginning of sequence (BOS) belongs to the prompt, if the tokenizer adds one. A
completion ends with exactly one end token, which is trained on: the one in the text or from the template,
otherwise the tokenizer's EOS. Nothing is truncated here.

Special tokens that a user's text spells stay text (`special_tokens.py`), except an end token at the end of a
completion. Those that a chat template writes are tokens.

`ends` are the model's end tokens (`DiffusionLM.eos_token_ids`); empty: only the tokenizer's EOS. `options`
are what the chat template reads beside the messages: `tools`, and the items of `chat_template_kwargs`
(`template_options`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import numpy as np

from unmask.data.decoding import has_text
from unmask.data.formats import is_ids, with_decoded_calls
from unmask.data.special_tokens import END, START, as_text, encode, encode_texts, pattern, without_marks
from unmask.errors import DataError
from unmask.models.chat_template import ANSWER, render_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MessageFields = Mapping[str, Any]
TextOrMessages = str | Sequence[MessageFields]
Prompt = TextOrMessages | Sequence[int]
Side = TypeVar("Side", str, Sequence[MessageFields])
Learn = Literal["all", "last"]
"""The assistant's turns that are trained on."""
Ends = Sequence[int]
"""The ids of end tokens."""

Options = Mapping[str, Any]
"""Arguments of the chat template."""
NO_OPTIONS: Options = {}

FIELDS = ("prompt", "completion", "chosen", "rejected", "messages")
EQUAL_RESPONSES = "chosen equals rejected"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's reasoning, which templates write where it is the last message."""
WRITTEN = ("tool_calls", "function_calls", "functions", "tools", *REASONING)
"""Parts of messages that templates write beside the content, or leave out."""


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether the example has messages rather than strings."""
    return any(is_messages(example.get(field)) for field in FIELDS)


def template_options(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> Options:
    """What the chat template reads beside the messages of an example (`unmask.data.formats`): `tools` and
    `chat_template_kwargs`.

    Raises:
        DataError: `chat_template_kwargs` has what rendering itself sets.
    """
    given = example.get("chat_template_kwargs") or {}
    ours = (
        inspect.signature(tokenizer.apply_chat_template).parameters.keys() - {"tools", "documents"}
        | {"messages"}
        if given
        else ()
    )
    if own := next((name for name in given if name in ours), None):
        raise DataError(
            f"{own!r} cannot differ by row",
            where="chat_template_kwargs",
            remedy="Set data.chat_template." if own == "chat_template" else "Leave it out.",
            reason="wrong type",
        )
    options = {"tools": example.get("tools"), **given}
    return {name: value for name, value in options.items() if name != "tools" or value}


def encode_row(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any]) -> list[int]:
    """The ids of the prompt of an example, which its completion follows in any verb."""
    return encode_prompt(tokenizer, example["prompt"], options=template_options(tokenizer, example))


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    keep: Collection[str | None] = (),
    options: Options = NO_OPTIONS,
) -> list[int]:
    """The ids of a prompt: a string (after BOS, if the tokenizer adds one), messages, or ids (unchanged). The
    special tokens in `keep` are tokens also in users' texts, and what follows one continues the text."""
    if isinstance(prompt, str):
        ids, bos = _encode_marked(tokenizer, as_text(tokenizer, prompt, keep), keep), [tokenizer.bos_token_id]
        return bos + ids if ids[:1] != bos and tokenizer("")["input_ids"][:1] == bos else ids
    if is_messages(prompt):
        messages, options = (
            as_text(tokenizer, [*map(with_decoded_calls, prompt)], keep),
            as_text(tokenizer, options, keep),
        )
        text = _prompt_text(tokenizer, messages, options)
        _require_written(tokenizer, messages, options, text, partial(_prompt_text, tokenizer))
        return _encode_marked(tokenizer, text, keep)
    if is_ids(prompt):
        return list(prompt)
    raise DataError(
        f"a prompt cannot be {prompt!r:.80}",
        where="prompt",
        remedy="Give a string, messages, or a list of token ids.",
        reason="wrong type",
    )


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[MessageFields],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The ids of a prompt of messages, for a model that may call tools, which the chat template renders (as
    JSON schemas of functions)."""
    options = {"tools": as_text(tokenizer, tools)} if tools else NO_OPTIONS
    return encode(tokenizer, _prompt_text(tokenizer, as_text(tokenizer, messages), options))


def encode_completion(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str, keep: Collection[str | None] = ()
) -> list[int]:
    """The ids of a text that continues a prompt, without the space that tokenizers such as SentencePiece's
    add before a text, if the prompt has text: `text_after` gives the text back. `keep` as in
    `encode_prompt`."""
    continues = has_text(tokenizer, prompt) if is_ids(prompt) else bool(prompt)
    return _encode_marked(tokenizer, as_text(tokenizer, text, keep), keep, continues=continues)


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase, text: str, keep: Collection[str | None], *, continues: bool = False
) -> list[int]:
    """The ids of a text that `as_text` has marked. A tokenizer that adds a space before a text adds it after
    special tokens, too: none is added after those in `keep`, nor before a text that continues another one."""
    if not (keep or continues) or not _adds_space(tokenizer, len(tokenizer)):
        return encode(tokenizer, text)
    names = "|".join(_pattern(tokenizer, name) for name in keep if name)
    first, *others = re.split(f"({names})", text) if names else [text]
    ids = _continuation(tokenizer, first) if continues else encode(tokenizer, first)
    for name, part in zip(others[::2], others[1::2], strict=True):
        ids.append(tokenizer.convert_tokens_to_ids(name.strip()))
        ids += _continuation(tokenizer, part) if part else []
    return ids


def _pattern(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Matches a special token, with the white space beside it that the tokenizer drops."""
    token = tokenizer.added_tokens_decoder[tokenizer.convert_tokens_to_ids(name)]
    return r"\s*" * token.lstrip + re.escape(name) + r"\s*" * token.rstrip


@lru_cache(maxsize=8)  # asked for every text
def _adds_space(tokenizer: PreTrainedTokenizerBase, size: int) -> bool:
    """Whether the tokenizer, of this `size`, adds a space before a text, as SentencePiece does."""
    letter = encode(tokenizer, "a")
    return (
        encode(tokenizer, "\na") != encode(tokenizer, "\n") + letter or tokenizer.decode(letter * 2) == "a a"
    )


def _continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text without the space that the tokenizer adds: encoded after another text, whose ids are
    dropped. That is the first one after which the text comes back when it is decoded, if there is any. After
    some it does not: a normalizer may drop line breaks, or a token be of both texts. What follows a special
    token is not compared: decoders may write a space after one."""
    starts = _starts(tokenizer, len(tokenizer))
    letter, found = starts["a"], []
    expected, *more = pattern(tokenizer).split("a" + without_marks(text), maxsplit=1)
    for start, before in starts.items():
        ids = encode(tokenizer, start + text)
        if ids[: len(before)] == before:
            found.append(ids[len(before) :])
            # an array: of a list, each item would be looked at first
            decoded = str(tokenizer.decode(np.array([*letter, *found[-1]])))
            if decoded == expected or (more and decoded.startswith(expected)):
                return found[-1]
    return found[0] if found else encode(tokenizer, text)


@lru_cache(maxsize=8)
def _starts(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[str, list[int]]:
    """Texts that others may follow, with their ids."""
    return {start: encode(tokenizer, start) for start in ("\n", ".", "a")}


def encode_pair(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    completion: TextOrMessages,
    ends: Ends = (),
    options: Options = NO_OPTIONS,
) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of its completion: both strings, or both messages.

    Raises:
        DataError: one is a string and the other messages; the completion is not a single answer of the
            assistant; the tokenizer lacks a chat template or an EOS; or the template renders the prompt
            differently if a completion follows, or does not write tools or the calls of them.
    """
    if isinstance(completion, str) and not is_messages(prompt):
        text, end = _split_end(tokenizer, completion, ends)
        ids = encode_prompt(tokenizer, prompt)
        return ids, _finish(tokenizer, [*encode_completion(tokenizer, ids, text), *end], ends)
    if not (is_messages(prompt) and is_messages(completion)):
        raise DataError(
            f"prompt and completion are of different types: {prompt!r:.40} and {completion!r:.40}",
            where="prompt, completion",
            remedy="Give two strings, or two lists of messages.",
            reason="wrong type",
        )
    _require_answer(prompt, completion)
    answer = as_text(tokenizer, [_without_end(tokenizer, message, ends) for message in completion])
    asked: Sequence[MessageFields] = as_text(tokenizer, prompt)
    return _encode_answer(tokenizer, asked, answer, ends, as_text(tokenizer, options))


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[MessageFields],
    answer: Sequence[MessageFields],
    ends: Ends,
    options: Options,
) -> tuple[list[int], list[int]]:
    """The ids of messages that `as_text` has marked, and of the one message that answers them."""
    start = _prompt_text(tokenizer, prompt, options)
    whole = render_template(tokenizer, [*prompt, *answer], **options)
    _require_prefix(start, whole, prompt)
    _require_written(tokenizer, [*prompt, *answer], options, whole)
    return encode(tokenizer, start), _finish(
        tokenizer, _encode_marked(tokenizer, whole[len(start) :], (), continues=bool(start)), ends
    )


def encode_example(
    tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any], ends: Ends = ()
) -> tuple[list[int], list[int]]:
    """The prompt ids and completion ids of an example with `text` or `messages`, whose prompt is only BOS, if
    any, or with `prompt` and `completion`."""
    if "text" in example:
        text = example["text"]
        if not isinstance(text, str):
            raise DataError(
                f"not a text: {text!r:.80}", where="text", remedy="Give a string.", reason="wrong type"
            )
        _require_eos(tokenizer)
        return encode_prompt(tokenizer, ""), encode_documents(tokenizer, [text], ends)[0]
    if "messages" in example:
        _require_messages(example["messages"])
        if any(not _weight(message) for message in example["messages"]):
            raise DataError(
                "the whole conversation is trained on",
                where="weight",
                remedy="Leave the weight out, or fine-tune with sft, which reads it.",
                reason="with weight",
            )
        messages = as_text(
            tokenizer, [_without_end(tokenizer, message, ends) for message in example["messages"]]
        )
        options = as_text(tokenizer, template_options(tokenizer, example))
        text = render_template(tokenizer, messages, **options)
        _require_written(tokenizer, messages, options, text)
        ids = encode(tokenizer, text)
        start = int(ids[:1] == [tokenizer.bos_token_id])
        return ids[:start], _finish(tokenizer, ids[start:], ends)
    return encode_pair(
        tokenizer, example["prompt"], example["completion"], ends, template_options(tokenizer, example)
    )


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ends: Ends = ()
) -> list[list[int]]:
    """The ids of documents after BOS, with one end token each: that after the text, otherwise the tokenizer's
    EOS, if it has one."""
    cut = [
        (short, end) if short.strip() else (text, [])
        for text in texts
        for short, end in [_cut_end(tokenizer, text, ends)]
    ]
    documents, bos = [], [tokenizer.bos_token_id]
    for ids, (_, end) in zip(encode_texts(tokenizer, [text for text, _ in cut]), cut, strict=True):
        body = [*(ids[1:] if ids[:1] == bos else ids), *end]
        documents.append(body if tokenizer.eos_token_id is None else _finish(tokenizer, body, ends))
    return documents


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[MessageFields],
    learn: Learn,
    ends: Ends = (),
    options: Options = NO_OPTIONS,
) -> tuple[list[int], list[int], list[bool]]:
    """The ids before the last answer of a conversation, the ids of this answer, and which of the former are
    trained.

    The ids are those of `encode_pair`, whether all answers are trained on or only the last. Answers with
    `"weight": 0` are not trained on; messages after the last answer that is are left out. An earlier answer
    is trained with the end that the template writes, without white space after it.

    Raises:
        DataError: the assistant has no turn that is trained on, or one that follows no other role's; the
            template renders a turn differently if others follow, or does not end it; the tokenizer has no
            character offsets.
    """
    _require_messages(messages)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise DataError(
            "there is no turn of the assistant",
            where="messages",
            remedy="Remove the row.",
            reason="without an answer",
        )
    for turn in answers:
        if turn == 0 or messages[turn - 1]["role"] == "assistant":
            raise DataError(
                f"message {turn} is the assistant's, but follows no message to answer",
                where="messages",
                remedy="Begin with a user, and join turns.",
                reason="answer without a question",
            )
    answers = [turn for turn in answers if _weight(messages[turn])]
    if not answers:
        raise DataError(
            "all answers have weight 0", where="weight", remedy="Remove the row.", reason="without an answer"
        )
    messages = as_text(tokenizer, [_without_end(tokenizer, message, ends) for message in messages])
    options = as_text(tokenizer, options)
    last = answers.pop()
    prompt, answer = _encode_answer(tokenizer, messages[:last], messages[last : last + 1], ends, options)
    trained = [False] * len(prompt)
    if learn == "all" and answers:
        whole = _prompt_text(tokenizer, messages[:last], options)
        for turn in answers:
            before = _prompt_text(tokenizer, messages[:turn], options)
            through = render_template(tokenizer, messages[: turn + 1], **options)
            _require_prefix(before, through, messages[:turn])
            _require_prefix(through, whole, messages[: turn + 1])
            ended, message = through, messages[turn]
            # an end looks like a call: the template writes a plain answer
            if message.get("tool_calls"):
                message = {"role": "assistant", "content": ANSWER}
                ended = render_template(tokenizer, [*messages[:turn], message], **options)
            _require_end(ended[len(before) :], message)
            inside = _tokens_between(tokenizer, whole, prompt, len(before), len(through))
            for index in inside[: _learnt_length(tokenizer, [prompt[index] for index in inside], ends)]:
                trained[index] = True
    return prompt, answer, trained


def encode_preference(
    tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any], ends: Ends = ()
) -> tuple[list[int], list[int], list[int]]:
    """The ids of the prompt, the chosen and the rejected completion. A missing prompt is the common beginning
    of the two. Tokens are unchanged."""
    if "chosen_ids" in example:
        prompt_ids, chosen_ids, rejected_ids = (
            known_tokens(tokenizer, example[name]) for name in ("prompt_ids", "chosen_ids", "rejected_ids")
        )
        return prompt_ids, chosen_ids, rejected_ids
    prompt, chosen, rejected = example.get("prompt"), example["chosen"], example["rejected"]
    if prompt is None:
        prompt, chosen, rejected = split_implicit_prompt(chosen, rejected)
        if not prompt or (isinstance(prompt, str) and not prompt.strip()):
            raise DataError(
                "they have no common beginning to be the prompt",
                where="chosen, rejected",
                remedy="Give a prompt, or remove the row.",
                reason="empty",
            )
    options = template_options(tokenizer, example)
    prompt_ids, chosen_ids = encode_pair(tokenizer, prompt, chosen, ends, options)
    asked = prompt_ids if isinstance(prompt, str) and isinstance(rejected, str) else prompt
    return prompt_ids, chosen_ids, encode_pair(tokenizer, asked, rejected, ends, options)[1]


def known_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """The ids as a list. Raises DataError if there are none, or one is not of the tokenizer."""
    unknown = [int(each) for each in ids if not 0 <= each < len(tokenizer)]
    if unknown or not len(ids):
        what = f"token {unknown[0]} of {len(tokenizer):,}" if unknown else "no token"
        raise DataError(what, remedy="Encode the text with the model's tokenizer.", reason="unknown token")
    return [int(each) for each in ids]


def split_implicit_prompt(chosen: Side, rejected: Side) -> tuple[Side, Side, Side]:
    """Prompt, chosen and rejected completion of two texts (or conversations), neither empty, that begin with
    the same prompt.

    The prompt is the longest common beginning that leaves both a completion; a space before the difference
    goes to the completions. Raises DataError if the two are equal.
    """
    if chosen == rejected:
        raise DataError(
            f"chosen and rejected are the same: {chosen!r:.80}",
            where="chosen, rejected",
            remedy="Remove the row: it states no preference.",
            reason=EQUAL_RESPONSES,
        )
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    if common and chosen[common - 1] == " ":
        common -= 1
    return chosen[:common], chosen[common:], rejected[common:]


def is_messages(value: Any) -> TypeGuard[Sequence[MessageFields]]:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(item, Mapping) and "role" in item for item in value)
    )


def _tokens_between(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], start: int, stop: int
) -> Sequence[int]:
    """The indices of the tokens of text[start:stop]; `ids` are those of the text."""
    if START in text or END in text:  # the tokenizer has no offsets of such a text
        before, through = encode(tokenizer, text[:start]), encode(tokenizer, text[:stop])
        if through != ids[: len(through)] or before != ids[: len(before)]:
            raise DataError(
                "a special token in the text hides where an answer begins",
                where="messages",
                remedy="Write it differently, or learn only the last turn with training.learn=last.",
                reason="special token in the text",
            )
        return range(len(before), len(through))
    if not tokenizer.is_fast:
        raise DataError(
            "a slow tokenizer has no offsets to locate earlier answers",
            where=tokenizer.name_or_path or None,
            remedy="Use a fast one, or set training.learn=last.",
        )
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # Offsets may exclude white space, so that a token of only white space has an empty span.
    return [index for index, (first, end) in enumerate(spans) if start <= first and start < end <= stop]


def _prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[MessageFields], options: Options
) -> str:
    """The text before the model's answer: its turn is opened, or continued if the last message is the
    assistant's."""
    answering = messages[-1]["role"] == "assistant"
    return render_template(
        tokenizer, messages, add_generation_prompt=not answering, continue_final_message=answering, **options
    )


def _require_messages(value: Any) -> None:
    if not is_messages(value):
        raise DataError(
            f"not a list of messages: {value!r:.80}",
            where="messages",
            remedy='Write [{"role": "user", "content": "..."}, ...].',
            reason="wrong type",
        )


def _require_answer(prompt: Sequence[MessageFields], completion: Sequence[MessageFields]) -> None:
    """Raise a DataError if a completion is not a single answer of the assistant that follows another role."""
    if others := [message["role"] for message in completion if message["role"] != "assistant"]:
        raise DataError(
            f"a completion has a turn of the {others[0]}",
            where="completion",
            remedy="Move all but the last answer to the prompt, or remove the row.",
            reason="other roles in the answer",
        )
    if not _weight(completion[-1]):
        raise DataError(
            "the answer has weight 0", where="weight", remedy="Remove the row.", reason="without an answer"
        )
    if len(completion) > 1 or prompt[-1]["role"] == "assistant":
        raise DataError(
            "a turn of the assistant follows another",
            where="prompt, completion",
            remedy="Join the turns.",
            reason="answer without a question",
        )


def _without_end(tokenizer: PreTrainedTokenizerBase, message: MessageFields, ends: Ends) -> MessageFields:
    """The message, an assistant's without end tokens at its end: the template writes one, or `_finish` adds
    it."""
    if message["role"] != "assistant" or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": _split_end(tokenizer, message["content"], ends)[0]}


def _split_end(tokenizer: PreTrainedTokenizerBase, answer: str, ends: Ends) -> tuple[str, list[int]]:
    """Like `_cut_end`. Raises DataError if the answer is empty without its end, or if another end token is
    inside it."""
    answer, first = _cut_end(tokenizer, answer, ends)
    if first and not answer.strip():
        raise DataError(
            "an answer is only an end token",
            where="completion",
            remedy="Fill it in, or remove the row.",
            reason="empty",
        )
    texts = _end_texts(tokenizer, ends)
    if inside := next((text for text in texts if text in answer), None):
        raise DataError(
            f"the answer has the end token {inside!r} before its end",
            where="completion",
            remedy="Remove it, or write it differently.",
            reason="end token inside the text",
        )
    return answer, first


def _cut_end(tokenizer: PreTrainedTokenizerBase, text: str, ends: Ends) -> tuple[str, list[int]]:
    """A text without the end tokens at its end, and the first of these, if any. Each end token is removed at
    most once."""
    texts = _end_texts(tokenizer, ends)
    first, remaining = list[int](), list(texts)
    while closing := next((end for end in remaining if text.rstrip().endswith(end)), None):
        text, first = text.rstrip().removesuffix(closing), [texts[closing]]
        remaining.remove(closing)
    return text, first


def _end_texts(tokenizer: PreTrainedTokenizerBase, ends: Ends) -> dict[str, int]:
    """The end tokens by their texts."""
    return _texts_of(tokenizer, len(tokenizer), tuple(_all_ends(tokenizer, ends)))


@lru_cache(maxsize=8)
def _texts_of(tokenizer: PreTrainedTokenizerBase, size: int, ids: Ends) -> dict[str, int]:
    return {text: token for token in ids if (text := str(tokenizer.decode([token])))}


def _require_prefix(start: str, whole: str, messages: Any) -> None:
    """Raise a DataError if messages are rendered differently when others follow: sampling would see other
    prompts than training."""
    if not whole.startswith(start):
        raise DataError(
            "the chat template renders the prompt differently if a completion follows",
            where=f"prompt {messages!r:.80}",
            remedy="Use a template that only appends, as data.chat_template=simple, or give both as strings.",
            reason="rendered differently when more turns follow",
        )


def _require_written(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[MessageFields],
    options: Options,
    text: str,
    render: Callable[[Sequence[MessageFields], Options], str] | None = None,
) -> None:
    """Raise a DataError if the template leaves out the tools of a prompt, or what a message has of `WRITTEN`:
    `text`, which it has rendered, is the same without them. Reasoning may be left out once other messages
    follow.

    Args:
        render: how the text was rendered; None: as a whole conversation.
    """

    def whole(messages: Sequence[MessageFields], options: Options) -> str:
        return render_template(tokenizer, messages, **options)

    render = render or whole
    if options.get("tools"):
        fewer = {name: value for name, value in options.items() if name != "tools"}
        _require_differ("tools", lambda: text, partial(render, messages, fewer))
    for index, message in enumerate(messages):
        for name in (name for name in WRITTEN if str(message.get(name) or "").strip()):
            same = REASONING if name in REASONING else (name,)
            without, before = (
                {key: value for key, value in message.items() if key not in same},
                messages[:index],
            )
            if name in REASONING:
                _require_differ(
                    name,
                    partial(whole, [*before, message], options),
                    partial(whole, [*before, without], options),
                )
            else:
                _require_differ(
                    name, lambda: text, partial(render, [*before, without, *messages[index + 1 :]], options)
                )


def _require_differ(name: str, with_it: Callable[[], str], without: Callable[[], str]) -> None:
    """Raise a DataError if a template renders the same with and without a part of a row. One that refuses
    either needs it."""
    try:
        same = with_it() == without()
    except DataError:
        return
    if same:
        raise DataError(
            f"the chat template does not write {name}",
            where=name,
            remedy="Use a model whose template writes them, remove the row, or write them as text.",
            reason="not written by the chat template",
        )


def _weight(message: MessageFields) -> bool:
    """Whether a message that is an answer is trained on."""
    return message.get("weight") is None or bool(message["weight"])


def _require_end(text: str, message: MessageFields) -> None:
    """Raise a DataError if the template writes no end after an answer that others follow: its end could not
    be trained on."""
    if text.strip() == str(message.get("content") or "").strip():
        raise DataError(
            "the chat template does not end a turn of the assistant that others follow, so that its end "
            "cannot be trained on",
            remedy=(
                "Learn only the last turn with training.learn=last, or use a template that ends turns, as "
                "data.chat_template=simple."
            ),
        )


def _all_ends(tokenizer: PreTrainedTokenizerBase, ends: Ends) -> Ends:
    return ends or [token for token in [tokenizer.eos_token_id] if token is not None]


def _learnt_length(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: Ends) -> int:
    """The number of tokens of a turn up to the first end token that is followed only by white space and other
    end tokens."""
    known, length, checked = {*_all_ends(tokenizer, ends)}, len(ids), len(ids)
    if known.isdisjoint(ids):
        return length
    for index in reversed([index for index, token in enumerate(ids) if token in known]):
        if not _is_space(tokenizer, len(tokenizer), tuple(ids[index + 1 : checked])):
            break
        length, checked = index + 1, index
    return length


@lru_cache(maxsize=64)  # what a template writes after an answer is the same for most rows
def _is_space(tokenizer: PreTrainedTokenizerBase, size: int, ids: Ends) -> bool:
    """Whether tokens, if there are any, are only white space."""
    return not (ids and str(tokenizer.decode(ids)).strip())


def _finish(tokenizer: PreTrainedTokenizerBase, ids: list[int], ends: Ends) -> list[int]:
    """A completion cut after its first closing end token, or with the tokenizer's EOS added if it has
    none."""
    _require_eos(tokenizer)
    ended = ids[: _learnt_length(tokenizer, ids, ends)]
    return ended if ended and ended[-1] in _all_ends(tokenizer, ends) else [*ended, tokenizer.eos_token_id]


def _require_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no EOS token",
            where=tokenizer.name_or_path or None,
            remedy="Set its `eos_token`.",
        )
