"""Chat templates: those that come with Unmask, rendering, and the token that ends a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from unmask.artifacts import read_file
from unmask.errors import ConfigError, DataError
from unmask.models.limited_templates import LimitError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "zqxj"  # no template writes it

TEMPLATES = {
    "simple": r"{{ bos_token }}{% for message in messages %}{{ message['role'] + ':\n' + message['content'] "
    r"}}"
    r"{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}",
}
"""Chat templates by name, for tokenizers without one. They need no special tokens: roles are plain words."""


SIMPLE = "data.chat_template=simple"
"""The setting that gives any tokenizer a template."""


def read_template(name_or_path: str) -> str:
    """A chat template: one of `TEMPLATES` by its name, or the content of a Jinja file. Raises ConfigError if
    it is neither."""
    if name_or_path in TEMPLATES:
        return TEMPLATES[name_or_path]
    try:
        return read_file(name_or_path)
    except (OSError, UnicodeDecodeError) as error:
        what = f"{name_or_path!r} is neither a template of Unmask nor a readable text file ({error})"
        raise ConfigError(
            what, where="data.chat_template", remedy=f"Use {SIMPLE}, or the path of a Jinja file"
        ) from error


def render_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any
) -> str:
    """Render messages with the tokenizer's chat template; `options` as of `apply_chat_template`.

    Raises:
        DataError: there is no template, it is malformed, it exceeds the limits of `limited_templates.py`, or
            it refuses the messages.
    """
    if not tokenizer.chat_template:
        gives = f"{SIMPLE}, in Python lm.set_chat_template('simple'), which gives it one"
        remedy = f"Train with {gives}; use an instruction-tuned model; or give prompts as strings."
        raise DataError(
            "the tokenizer has no chat template, which messages need",
            where=tokenizer.name_or_path or None,
            remedy=remedy,
        )
    try:
        return str(
            tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
        )
    except (LimitError, RecursionError) as error:
        remedy = f"Use another template, as {SIMPLE}"
        raise DataError(
            f"the chat template is stopped: {error}", where=tokenizer.name_or_path or None, remedy=remedy
        ) from error
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is malformed: {error}", remedy=f"Fix it, or use another one, as {SIMPLE}"
        ) from error
    except Exception as error:  # user code: templates raise anything
        what = f"the chat template refuses {messages!r:.80}: {error}"
        raise DataError(what, remedy="Fix the messages.", reason="refused by the chat template") from error


def without_start(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages, the answers among them without the white space that the template writes before an answer. A
    model that writes it, too, as the beginning of an answer, is shown its answer as it was."""
    start = _answer_start(tokenizer) if any(map(_begins_with_space, messages)) else ""
    return [
        {**message, "content": message["content"].removeprefix(start)}
        if _begins_with_space(message)
        else dict(message)
        for message in messages
    ]


def _begins_with_space(message: Mapping[str, Any]) -> bool:
    """Whether a message is an answer that begins with white space."""
    content = message.get("content")
    return message["role"] == "assistant" and isinstance(content, str) and content[:1].isspace()


def _answer_start(tokenizer: PreTrainedTokenizerBase) -> str:
    """The white space that the chat template writes between the opened turn of the assistant and its
    answer."""
    question = {"role": "user", "content": "a"}
    try:
        opened = render_template(tokenizer, [question], add_generation_prompt=True)
        answered = render_template(tokenizer, [question, {"role": "assistant", "content": ANSWER}])
    except DataError:
        return ""
    start = answered.removeprefix(opened).partition(ANSWER)[0]
    return start if answered.startswith(opened) and start.isspace() else ""


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that the chat template writes after an assistant's answer: `<|im_end|>` in ChatML,
    `<|eot_id|>` in Llama 3.

    Found by rendering a last answer, so that the start of the next turn is not mistaken for an end. White
    space may precede it. None: the template ends a turn with plain text or not at all, does not render, or is
    missing.
    """
    try:
        text = render_template(
            tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        )
    except DataError:
        return None
    after = text.rpartition(ANSWER)[2].lstrip()
    added = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if number != tokenizer.mask_token_id
    }
    found = [token for token in added if token.strip() and after.startswith(token)]
    return added[max(found, key=len)] if found else None
