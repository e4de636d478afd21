"""Chat templates, those that come with Unmask among them, and the tokens that end a turn or a text.

The tokenizer names one end token, which also fills canvases; configs and the chat template may name others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from unmask.artifacts import read_file
from unmask.errors import ConfigError, DataError, ModelError
from unmask.models.limited_templates import LimitError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

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
        raise ConfigError(
            f"{name_or_path!r} is neither a template of Unmask nor a readable text file ({error})",
            where="data.chat_template",
            remedy=f"Use {SIMPLE}, or the path of a Jinja file",
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
        raise DataError(
            "the tokenizer has no chat template, which messages need",
            where=tokenizer.name_or_path or None,
            remedy=f"Train with {gives}; use an instruction-tuned model; or give prompts as strings.",
        )
    try:
        return str(
            tokenizer.apply_chat_template([dict(message) for message in messages], tokenize=False, **options)
        )
    except (LimitError, RecursionError) as error:
        raise DataError(
            f"the chat template is stopped: {error}",
            where=tokenizer.name_or_path or None,
            remedy=f"Use another template, as {SIMPLE}",
        ) from error
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is malformed: {error}", remedy=f"Fix it, or use another one, as {SIMPLE}"
        ) from error
    except Exception as error:  # user code: templates raise anything
        raise DataError(
            f"the chat template refuses {messages!r:.80}: {error}",
            remedy="Fix the messages.",
            reason="refused by the chat template",
        ) from error


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


def resolve_end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int] | None
) -> tuple[int, ...]:
    """The end tokens of a model: the tokenizer's EOS first, the others in order. Also sets them in its
    generation config.

    `eos_token_ids` are those besides the tokenizer's EOS; None: those of generation config, config and chat
    template. Raises ModelError if one of them is the mask token or outside the vocabulary.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    for token in as_ids(eos_token_ids):
        if not isinstance(token, int):
            raise ModelError(
                f"{token!r} is not a token id",
                where="eos_token_ids",
                remedy="Give ids of end tokens, as integers",
            )
        if token == tokenizer.mask_token_id or not 0 <= token < rows:
            is_mask = token == tokenizer.mask_token_id
            what = "the mask token" if is_mask else f"outside the vocabulary of {rows}"
            raise ModelError(
                f"{token} is {what}",
                where="eos_token_ids",
                remedy="Give ids of tokens that end a text, or leave it out",
            )
    ends = eos_first(
        tokenizer, _declared_end_tokens(model, tokenizer) if eos_token_ids is None else as_ids(eos_token_ids)
    )
    set_end_tokens(model, ends)
    return ends


def _declared_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens that the chat template and the configs name. Those of configs count only among the
    tokens added to the vocabulary: the default of a config class (2 in Llama's) is a word in many
    vocabularies."""
    configs = [model.config, model.config.get_text_config(), getattr(model, "generation_config", None)]
    named = {
        token
        for config in configs
        for token in as_ids(getattr(config, "eos_token_id", None))
        if isinstance(token, int)
    }
    return named & (tokenizer.added_tokens_decoder.keys() - {tokenizer.mask_token_id}) | {
        *as_ids(turn_end(tokenizer))
    }


def eos_first(tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """The end tokens with the tokenizer's EOS, which comes first."""
    return tuple(dict.fromkeys([*as_ids(tokenizer.eos_token_id), *sorted(eos_token_ids)]))


def as_ids(value: int | Collection[int] | None) -> Collection[int]:
    """The ids of an `eos_token_id`, which may be one, several or None."""
    return [] if value is None else value if isinstance(value, Collection) else [value]


def set_end_tokens(model: Any, ends: Sequence[int]) -> None:
    """Set the end tokens of generation_config.json, at which transformers, vLLM and other engines stop."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and ends and {*as_ids(generation.eos_token_id)} != {*ends}:
        generation.eos_token_id = list(ends) if len(ends) > 1 else ends[0]
        generation._from_model_config = False  # else transformers may rebuild it from the config


def accept_generation_config(generation: GenerationConfig | None) -> None:
    """Let transformers save a generation config unchanged. Many published ones have a temperature without
    `do_sample`. It refuses to save these after a change, such as of the end tokens here or of special tokens
    in its trainer."""
    if generation is not None:
        generation._original_object_hash = hash(generation)
