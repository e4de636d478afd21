"""Examples to token ids, in TRL's formats.

| kind | standard | conversational |
|---|---|---|
| language modelling | `text`: str | `messages`: a list of messages |
| prompt only | `prompt`: str | `prompt`: messages |
| prompt and completion | `prompt`, `completion`: str | `prompt`, `completion`: messages |
| preference | `chosen`, `rejected`: str, and `prompt` or a common beginning | the same of messages |

A message is `{"role": ..., "content": ...}`. Prompt and completion are tokenised apart, for sampling sees the prompt alone. The beginning
of sequence belongs to the prompt, where the tokenizer adds one; a completion ends with exactly one end of sequence, which is supervised.
How to truncate is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from unmask.errors import DataError
from unmask.tasks.files import require_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Text = str | Sequence[Message]
Prompt = Text | Sequence[int]
Side = TypeVar("Side", str, Sequence[Message])

FIELDS = ("prompt", "completion", "chosen", "rejected", "messages")


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether the example's text is given as messages."""
    return any(_is_messages(example.get(field)) for field in FIELDS)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The ids of a prompt: a string (after the beginning of sequence, where the tokenizer adds one), messages, or ids as they are."""
    if isinstance(prompt, str):
        ids, bos = _encode(tokenizer, prompt), _bos(tokenizer)
        return ids if ids[:1] == bos else bos + ids
    if _is_messages(prompt):
        return _encode(tokenizer, _prompt_text(tokenizer, prompt))
    if _is_ids(prompt):
        return list(prompt)
    raise DataError(f"a prompt cannot be {prompt!r:.80}", where="prompt", remedy="Give a string, messages, or a list of token ids.")


def render_pair(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, completion: Text, *, add_eos: bool = True
) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of its completion: both strings, or both messages.

    Raises:
        DataError: where the kinds differ, the tokenizer lacks a chat template or an end of sequence, or the template renders the prompt
            otherwise once the completion follows (so that training would see another prompt than sampling).
    """
    if isinstance(completion, str) and not _is_messages(prompt):
        return encode_prompt(tokenizer, prompt), _finish(tokenizer, _encode(tokenizer, completion), add_eos)
    if not (_is_messages(prompt) and _is_messages(completion)):
        what = f"prompt and completion are of different kinds: {prompt!r:.40} and {completion!r:.40}"
        raise DataError(what, where="prompt, completion", remedy="Give two strings, or two lists of messages.")
    start = _prompt_text(tokenizer, prompt)
    whole = _template(tokenizer, [*prompt, *completion])
    if not whole.startswith(start):
        what = "the chat template renders the prompt otherwise once the completion follows"
        raise DataError(what, where=f"prompt {prompt!r:.80}", remedy="Use a template that only appends, or give both as strings.")
    return _encode(tokenizer, start), _finish(tokenizer, _encode(tokenizer, whole[len(start) :]), add_eos)


def render(tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any], *, add_eos: bool = True) -> tuple[list[int], list[int]]:
    """The prompt ids and completion ids of a language-modelling or prompt-completion example; of the former the prompt is only the
    beginning of sequence, if any. An example of another kind: DataError."""
    if "text" in example:
        return render_pair(tokenizer, "", example["text"], add_eos=add_eos)
    if "messages" in example:
        if not _is_messages(example["messages"]):
            what = f"not a list of messages: {example['messages']!r:.80}"
            raise DataError(what, where="messages", remedy='Write [{"role": "user", "content": "..."}, ...].')
        ids = _encode(tokenizer, _template(tokenizer, example["messages"]))
        start = int(ids[:1] == [tokenizer.bos_token_id])
        return ids[:start], _finish(tokenizer, ids[start:], add_eos)
    require_names(example, ("prompt", "completion"), "an example without `text` or `messages`")
    return render_pair(tokenizer, example["prompt"], example["completion"], add_eos=add_eos)


def render_preference(
    tokenizer: PreTrainedTokenizerBase, example: Mapping[str, Any], *, add_eos: bool = True
) -> tuple[list[int], list[int], list[int]]:
    """The ids of the prompt, the chosen and the rejected completion; an example without `prompt` has it as their common beginning."""
    require_names(example, ("chosen", "rejected"), "a preference example")
    prompt, chosen, rejected = example.get("prompt"), example["chosen"], example["rejected"]
    if prompt is None:
        prompt, chosen, rejected = split_implicit_prompt(chosen, rejected)
    prompt_ids, chosen_ids = render_pair(tokenizer, prompt, chosen, add_eos=add_eos)
    return prompt_ids, chosen_ids, render_pair(tokenizer, prompt, rejected, add_eos=add_eos)[1]


def split_implicit_prompt(chosen: Side, rejected: Side) -> tuple[Side, Side, Side]:
    """Prompt, chosen and rejected completion of two texts (or conversations) that begin with the same prompt.

    The prompt is the longest common beginning that leaves both a completion; a space before the difference goes to the completions.
    Texts that are equal: DataError.
    """
    if chosen == rejected:
        what = f"chosen and rejected are the same: {chosen!r:.80}"
        raise DataError(what, where="chosen, rejected", remedy="Remove the row: it states no preference.")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    if common < 0:
        raise DataError("an empty completion", where="chosen, rejected", remedy="Remove the row.")
    if common and chosen[common - 1] == " ":
        common -= 1
    return chosen[:common], chosen[common:], rejected[common:]


def _is_messages(value: Any) -> TypeGuard[Sequence[Message]]:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(item, Mapping) and "role" in item for item in value)


def _is_ids(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, int) for item in value)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except TypeError as error:  # the tokenizers library of a lone surrogate, which Python makes of bytes that are not UTF-8
        raise DataError(f"{text!r:.80} is not valid Unicode", where="text", remedy="Save it as UTF-8") from error


def _bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning of sequence, if the tokenizer has one and adds it."""
    added = tokenizer("")["input_ids"][:1]
    return [tokenizer.bos_token_id] if added == [tokenizer.bos_token_id] else []


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """Messages up to where the model speaks: its turn is opened, or left open where the last message is the beginning of its answer."""
    answering = messages[-1]["role"] == "assistant"
    return _template(tokenizer, messages, add_generation_prompt=not answering, continue_final_message=answering)


def _template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        remedy = "Use an instruction-tuned model's tokenizer, set its `chat_template`, or give prompts as strings."
        raise DataError("the tokenizer has no chat template, which messages need", where=tokenizer.name_or_path or None, remedy=remedy)
    try:
        return str(tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options))
    except TemplateError as error:
        raise DataError(f"the chat template refuses {messages!r:.80}: {error}", remedy="Mend the messages.") from error


def _finish(tokenizer: PreTrainedTokenizerBase, ids: list[int], add_eos: bool) -> list[int]:
    """A completion that ends with exactly one end of sequence: the template's own, less the white space it puts after it, or a new one."""
    if not add_eos:
        return ids
    eos = tokenizer.eos_token_id
    if eos is None:
        what = "the tokenizer has no end-of-sequence token"
        raise DataError(what, where=tokenizer.name_or_path or None, remedy="Set its `eos_token`.")
    last = max((index for index, token in enumerate(ids) if token == eos), default=len(ids))
    return [*ids[:last], eos] if not str(tokenizer.decode(ids[last + 1 :])).strip() else [*ids, eos]
