"""Token rows of prompts with completions, for supervised fine-tuning and preferences.

Only the completion is trained on, with its end token and the EOS tokens that fill the positions after it,
because a sampler fills these too: the rest of the last attention block of a block-causal model, or the whole
canvas if `canvas_length` is set. A truncated completion has neither an end token nor a filling. Rows are as
in `unmask.data.rows`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import (
    EQUAL_RESPONSES,
    Ends,
    Learn,
    encode_example,
    encode_preference,
    encode_turns,
    known_tokens,
    template_options,
)
from unmask.data.formats import PREFERENCES, SUPERVISED, Example, Reader, RecordFormat
from unmask.data.report import DataReport
from unmask.data.rows import TokenRow, in_order, make_row, or_error, refuse_mask, required
from unmask.errors import DataError

Ids = Sequence[int]
Examples = Iterable[Mapping[str, Any] | DataError]
"""Rows in a format of `unmask.data.formats`, or the errors of lines that could not be read."""


@dataclass(frozen=True)
class RowLimits:
    """The limits of a row and how it is filled."""

    max_length: int  # tokens of a row at most
    # tokens to which each completion is filled with EOS; None: to the end of its last block
    canvas_length: int | None = None
    block_size: int = 1  # of block-causal attention; 1: no blocks
    # if the completion does not fit, cut the beginning of the prompt (after BOS)
    truncate_prompt: bool = False
    truncate_completion: bool = False  # cut a completion that is too long, to whole blocks
    context: int | None = None  # tokens that the model reads at most; None: any number
    from_prompt: bool = False  # blocks begin where the prompt ends, not at the beginning of a row

    def fit(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Ids, *completions: Ids
    ) -> tuple[Ids, list[Ids]]:
        """A prompt and the completions that may follow it, truncated where this is allowed. Raises DataError
        if they are too long."""
        longest = max(map(len, completions))
        if self.canvas_length is not None and longest > self.canvas_length:
            raise DataError(
                f"{longest} completion tokens, but canvas_length is {self.canvas_length}",
                remedy=f"Raise canvas_length: training.canvas_length={longest}",
                reason="longer than the canvas",
            )
        length = len(prompt) + (self.canvas_length or longest)
        excess, bos = length - self.max_length, int([*prompt[:1]] == [tokenizer.bos_token_id])
        if excess <= 0:
            return prompt, [*completions]
        if self.truncate_prompt and excess + bos < len(prompt):
            return [*prompt[:bos], *prompt[bos + excess :]], [*completions]
        kept = self.max_length - len(prompt)
        kept -= (kept if self.from_prompt else self.max_length) % self.block_size
        if self.truncate_completion and kept > 0:
            return prompt, [completion[:kept] for completion in completions]
        what, remedy = (
            f"{length} tokens, but a row holds {self.max_length}",
            f"Raise max_length (training.max_length={length})",
        )
        if self.context is not None and length > self.context:
            what, remedy = f"{what}, and the model's context is {self.context}", "Shorten or remove the row"
        cuttable = excess + bos < len(prompt)
        cut = ", or cut the prompt with training.truncation_mode=keep_end" if cuttable else ""
        raise DataError(what, remedy=f"{remedy}{cut}", reason="too long")

    def filling(self, prompt: int, completion: int) -> int:
        """The number of EOS tokens that fill a row after a prompt and a completion of these lengths."""
        if self.canvas_length is not None:
            return self.canvas_length - completion
        row = completion if self.from_prompt else prompt + completion
        return min(-row % self.block_size, self.max_length - prompt - completion)


def pair_rows(
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    limits: RowLimits,
    report: DataReport,
    *,
    ends: Ends = (),
    formats: Sequence[RecordFormat] = SUPERVISED,
    learn: Learn | None = None,
    processes: int | None = None,
) -> Iterator[TokenRow]:
    """Token rows in which only the completion is trained on; with `label` if the example has one.

    Args:
        examples: rows in one of the formats.
        limits: the limits of a row.
        report: counts rows, and skips bad ones or raises their errors.
        ends: the model's end tokens; empty: only the tokenizer's EOS.
        formats: `SUPERVISED` or `UNPAIRED`.
        learn: which turns of `messages` are trained on; None: the whole conversation.
        processes: how many tokenize; None: as `in_order` has it.

    Raises:
        DataError: a bad row, if the report does not skip it; or no row is left.
    """
    encode, number = partial(_encode_parts, tokenizer, learn=learn, ends=ends), 0
    for index, found in enumerate(_encoded(encode, examples, formats, processes)):
        row = None
        with report.row(index):
            converted, (prompt, completion, trained) = required(found)
            refuse_mask(tokenizer, [*prompt, *completion])
            report.unknown.count(tokenizer, [*prompt, *completion], converted)
            report.record_lengths(
                prompt=len(prompt) - sum(trained), completion=sum(trained) + len(completion)
            )
            kept, [answer] = limits.fit(tokenizer, prompt, completion)
            cut = len(answer) < len(completion)
            open_ended = "input_ids" in converted and completion[-1] not in {*ends, tokenizer.eos_token_id}
            filling = 0 if cut or open_ended else limits.filling(len(kept), len(answer))
            row = _row(tokenizer, kept, answer, filling, number, _last(trained, len(kept)))
            if "label" in converted:
                row["label"] = converted["label"]
            report.answers += 1 + sum(is_trained for is_trained, _ in groupby(row["maskable"][: len(kept)]))
            report.record_cuts(prompt=len(kept) < len(prompt), completion=cut)
        if row is not None:
            number += 1
            yield row
    report.check()


def preference_rows(
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    limits: RowLimits,
    report: DataReport,
    *,
    ends: Ends = (),
    processes: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Pairs of token rows, `chosen` and `rejected`, of rows in a format of `PREFERENCES`.

    Arguments and errors are as for `pair_rows`. Equal responses are a bad row.
    """
    encode, number = partial(encode_preference, tokenizer, ends=ends), 0
    for index, found in enumerate(_encoded(encode, examples, PREFERENCES, processes)):
        rows: list[TokenRow] = []
        with report.row(index):
            converted, (prompt, chosen, rejected) = required(found)
            report.unknown.count(tokenizer, [*prompt, *chosen, *rejected], converted)
            if chosen == rejected:
                if not report.skip:
                    report.unknown.check("")  # which may be why they are the same
                raise DataError(
                    "chosen and rejected are the same",
                    where="chosen, rejected",
                    remedy="Remove the row: it states no preference.",
                    reason=EQUAL_RESPONSES,
                )
            refuse_mask(tokenizer, [*prompt, *chosen, *rejected])
            report.record_lengths(prompt=len(prompt), chosen=len(chosen), rejected=len(rejected))
            kept, answers = limits.fit(tokenizer, prompt, chosen, rejected)
            if answers[0] == answers[1]:
                raise DataError(
                    "chosen and rejected are the same where they were cut",
                    where="chosen, rejected",
                    remedy="Raise max_length, or remove the row",
                    reason=EQUAL_RESPONSES,
                )
            fillings = [limits.filling(len(kept), len(answer)) for answer in answers]
            rows = [
                _row(tokenizer, kept, *side, number, [False] * len(kept))
                for side in zip(answers, fillings, strict=True)
            ]
            cut = sum(map(len, answers)) < len(chosen) + len(rejected)
            report.record_cuts(prompt=len(kept) < len(prompt), completion=cut)
        if rows:
            number += 1
            yield {"chosen": rows[0], "rejected": rows[1]}
    report.check()


def joined_preferences(*arguments: Any, **named: Any) -> Iterator[TokenRow]:
    """The pairs of `preference_rows` as rows of two documents: the chosen, then the rejected one."""
    for number, pair in enumerate(preference_rows(*arguments, **named)):
        yield joined([pair["chosen"], pair["rejected"]], number)


def _encoded(
    encode: Callable[[Example], Any],
    examples: Examples,
    formats: Sequence[RecordFormat],
    processes: int | None,
) -> Iterator[tuple[Example, Any] | DataError]:
    """Each example in TRL's columns with what `encode` makes of it, or its error."""
    reader = Reader(formats)
    converted = (or_error(reader.read, example) for example in examples)
    return in_order(partial(_with_parts, encode), converted, processes)


def _with_parts(encode: Callable[[Example], Any], example: Example | DataError) -> Any:
    if isinstance(example, DataError):
        return example
    return or_error(lambda example: (example, encode(example)), example)


def pack(rows: Sequence[TokenRow], max_length: int) -> Iterator[TokenRow]:
    """Packs rows, each a document, into rows of at most `max_length` tokens (best fit, longest first)."""
    lengths = [len(row["input_ids"]) for row in rows]
    # `free`: the free tokens and the index of each pack, in order
    packs, free = list[list[int]](), list[tuple[int, int]]()
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        best = bisect_left(free, (lengths[number],))
        if best == len(free):
            free.append((max_length, len(packs)))
            packs.append([])
        tokens, index = free.pop(best)
        packs[index].append(number)
        insort(free, (tokens - lengths[number], index))
    return (joined([rows[number] for number in pack], index) for index, pack in enumerate(packs))


def joined(rows: Sequence[TokenRow], sample_id: int) -> TokenRow:
    """Concatenates rows of one document each into one row."""
    ids, maskable = ([*chain.from_iterable(row[name] for row in rows)] for name in ("input_ids", "maskable"))
    documents = [number for number, row in enumerate(rows, start=1) for _ in row["input_ids"]]
    return make_row(ids, documents, maskable, sample_id)


def _encode_parts(
    tokenizer: PreTrainedTokenizerBase, example: Example, learn: Learn | None, ends: Ends
) -> tuple[Ids, Ids, Sequence[bool]]:
    """The ids of prompt and completion, and which tokens of the prompt are trained on (earlier answers of a
    conversation, or of a text of tokens, which ends with the last trained one)."""
    if "input_ids" in example:
        ids, trained = known_tokens(tokenizer, example["input_ids"]), example["trained"]
        stop = len(ids) - trained[::-1].index(True)
        start = stop - sum(1 for _ in takewhile(bool, trained[:stop][::-1]))
        return ids[:start], ids[start:stop], trained[:start]
    if learn is not None and "messages" in example:
        return encode_turns(tokenizer, example["messages"], learn, ends, template_options(tokenizer, example))
    prompt, completion = encode_example(tokenizer, example, ends)
    return prompt, completion, [False] * len(prompt)


def _last(trained: Sequence[bool], count: int) -> list[bool]:
    """`trained` of the last tokens of a prompt. An answer whose beginning was cut off is not trained on."""
    kept = trained[len(trained) - count :]
    headless = 0 if count == len(trained) else sum(1 for _ in takewhile(bool, kept))
    return [False] * headless + [*kept[headless:]]


def _row(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Ids,
    completion: Ids,
    filling: int,
    sample_id: int,
    trained: Sequence[bool],
) -> TokenRow:
    """A row filled with EOS. `trained` says which tokens of the prompt are trained on; the first token never
    is."""
    ids = [*prompt, *completion, *[tokenizer.eos_token_id] * filling]
    maskable = [*trained, *[True] * (len(completion) + filling)]
    return make_row(ids, [1] * len(ids), [False, *maskable[1:]], sample_id)
