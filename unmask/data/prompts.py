"""The tokens of prompts that a model completes during training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import encode_row
from unmask.data.formats import is_ids, read_prompt
from unmask.data.rows import in_order, or_error, required
from unmask.data.unknown_tokens import UnknownTokens
from unmask.errors import DataError, prepending_place


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    dataset: Iterable[Mapping[str, Any]],
    unknown: UnknownTokens,
    *,
    max_length: int,
    max_new_tokens: int,
    setting: str,
    context: int | None,
    where: str,
    variables: Mapping[str, Any] | None,
    processes: int | None,
) -> Iterator[dict[str, Any]]:
    """The tokens of prompts, as rows with `ids`.

    Args:
        dataset: rows with `prompt`: text, messages or ids; other columns are not read.
        unknown: counts tokens that are unknown to the tokenizer.
        max_length: tokens of a row at most.
        max_new_tokens: those of them that a completion may have; `setting` is the name of this setting.
        context: tokens that the model reads at most; None: any number.
        variables: of the chat template; those in a row's column come first.
        processes: how many tokenize; None: as `in_order` has it.

    Raises:
        DataError: a prompt does not fit, or is malformed, or too many of the tokens are unknown.
    """
    encode = partial(or_error, partial(_encoded, tokenizer, variables))
    for index, found in enumerate(in_order(encode, dataset, processes)):
        with prepending_place(f"{where}, row {index}"):
            example, ids = required(found)
            if not is_ids(example["prompt"]):
                unknown.count(tokenizer, ids, example)
            tokens = len(ids) + max_new_tokens
            if tokens > max_length:
                bound, more = "max_length", f", raise it (training.max_length={tokens})"
                if max_length == context:
                    bound, more = "the model's context", ""
                lower = f" to {max_length - len(ids)}" if max_length > len(ids) else ""
                raise DataError(
                    f"{tokens} tokens with the completion, but {bound} is {max_length}",
                    remedy=f"Lower training.{setting}{lower}{more} or drop the row",
                )
        yield {"ids": ids}
    unknown.check(where)


def _encoded(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None, row: Mapping[str, Any]
) -> Any:
    """A prompt in TRL's columns with its ids."""
    example = read_prompt(_with_variables(row, variables))
    return example, encode_row(tokenizer, example)


def _with_variables(row: Mapping[str, Any], variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A row with variables of the chat template beside those of its column, which come first."""
    own = row.get("chat_template_kwargs") if variables and isinstance(row, Mapping) else ()
    if own is None or isinstance(own, Mapping):
        return {**row, "chat_template_kwargs": {**(variables or {}), **(own or {})}}
    return row
