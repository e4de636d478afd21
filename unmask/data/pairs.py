"""Token rows of prompts and what follows them: completions that are learnt, and answers that are compared.

Only the completion is learnt, with the token that ends it. What is beyond that end is what a sampler will have to fill with something,
and is therefore learnt too. It is the tokenizer's EOS, whichever token ended the text: the rest of the attention block of a block-causal
model, whose sampler stops at the end of the block that ends the text, or a whole canvas, where one is asked for. A completion that was cut
has no end, and nothing beyond.

A row is as in `unmask.data.rows`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from unmask.data.chat import EQUAL, Ends, Learn, render, render_preference, render_turns
from unmask.data.formats import PREFERENCES, SUPERVISED, Example, Layout, Reader
from unmask.data.report import DataReport, Rows
from unmask.data.rows import Row, make_row, refuse_mask
from unmask.errors import DataError

Ids = Sequence[int]
Examples = Iterable[Mapping[str, Any] | DataError]
"""Rows in one of the layouts of `unmask.data.formats`, or the errors of lines that could not be read."""


@dataclass(frozen=True)
class Room:
    """What a row may hold, and how it is filled.

    Attributes:
        max_length: tokens at most.
        canvas_length: tokens that each completion is filled to with EOS; None: the rest of its last block.
        block_size: of block-causal attention; 1: no blocks.
        truncate_prompt: keep only the end of a prompt that leaves no room for the completion, behind its beginning of sequence.
        truncate_completion: cut a completion that is too long, to whole blocks.
    """

    max_length: int
    canvas_length: int | None = None
    block_size: int = 1
    truncate_prompt: bool = False
    truncate_completion: bool = False

    def fit(self, tokenizer: PreTrainedTokenizerBase, prompt: Ids, *completions: Ids) -> tuple[Ids, list[Ids]]:
        """A prompt and the completions that may follow it, as much of each as a row holds.

        Raises:
            DataError: they are too long, and must not be cut.
        """
        longest = max(map(len, completions))
        if self.canvas_length is not None and longest > self.canvas_length:
            what = f"{longest} completion tokens, but canvas_length is {self.canvas_length}"
            raise DataError(what, remedy="Raise canvas_length", reason="longer than the canvas")
        length = len(prompt) + (self.canvas_length or longest)
        excess, bos = length - self.max_length, int([*prompt[:1]] == [tokenizer.bos_token_id])
        if excess <= 0:
            return prompt, [*completions]
        if self.truncate_prompt and excess + bos < len(prompt):
            return [*prompt[:bos], *prompt[bos + excess :]], [*completions]
        kept = self.max_length - self.max_length % self.block_size - len(prompt)
        if self.truncate_completion and kept > 0:
            return prompt, [completion[:kept] for completion in completions]
        remedy = "Raise max_length as far as the model's context goes, or drop the row"
        raise DataError(f"{length} tokens, but a row holds {self.max_length}", remedy=remedy, reason="too long")

    def filling(self, prompt: int, completion: int) -> int:
        """How many tokens there are beyond the end of a completion."""
        if self.canvas_length is not None:
            return self.canvas_length - completion
        return min(-(prompt + completion) % self.block_size, self.max_length - prompt - completion)


def pair_rows(
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    room: Room,
    report: DataReport,
    *,
    ends: Ends = (),
    layouts: Sequence[Layout] = SUPERVISED,
    learn: Learn | None = None,
    packed: bool = False,
) -> Rows[Row]:
    """Rows of which only the completion is learnt, with the `label` of those that have one.

    Args:
        tokenizer: of the model.
        examples: rows of one of the layouts.
        room: what a row may hold.
        report: counts them, and decides what becomes of bad ones.
        ends: the model's end tokens; none: the tokenizer's EOS alone.
        layouts: `SUPERVISED` or `UNPAIRED`.
        learn: which turns of `messages` are learnt; None: all of the conversation is.
        packed: lay examples together in rows, without labels; they do not see one another.

    Raises:
        DataError: a bad row, if it must not be left out; or no row is left.
    """
    reader, rows = Reader(layouts), list[Row]()
    for index, example in enumerate(examples):
        with report.row(index):
            read = reader.read(example)
            prompt, completion, learnt = _render(tokenizer, read, learn, ends)
            refuse_mask(tokenizer, [*prompt, *completion])
            report.measure(prompt=len(prompt), completion=len(completion))
            kept, [answer] = room.fit(tokenizer, prompt, completion)
            cut = {"prompt": len(kept) < len(prompt), "completion": len(answer) < len(completion)}
            row = _row(tokenizer, kept, answer, room, len(rows), cut=cut["completion"], learnt=_last(learnt, len(kept)))
            rows.append(row | ({"label": read["label"]} if "label" in read else {}))
            report.cut(**cut)
    made = report.of(pack(rows, room.max_length) if packed else rows)
    if packed:
        report.packed = len(made)
    return made


def preference_rows(
    tokenizer: PreTrainedTokenizerBase, examples: Examples, room: Room, report: DataReport, *, ends: Ends = ()
) -> Rows[dict[str, Any]]:
    """Rows of a preference: `chosen` and `rejected`, each a row of its own.

    Args:
        tokenizer, room, report, ends: as in `pair_rows`; answers are never cut.
        examples: rows of a layout of `PREFERENCES`.

    Raises:
        DataError: as `pair_rows`; answers that are equal are a bad row.
    """
    reader, pairs = Reader(PREFERENCES), list[dict[str, Any]]()
    for index, example in enumerate(examples):
        with report.row(index):
            prompt, chosen, rejected = render_preference(tokenizer, reader.read(example), ends)
            if chosen == rejected:
                remedy = "Remove the row: it states no preference."
                raise DataError("chosen and rejected are the same", where="chosen, rejected", remedy=remedy, reason=EQUAL)
            refuse_mask(tokenizer, [*prompt, *chosen, *rejected])
            report.measure(prompt=len(prompt), chosen=len(chosen), rejected=len(rejected))
            kept, answers = room.fit(tokenizer, prompt, chosen, rejected)
            sides = [_row(tokenizer, kept, side, room, len(pairs)) for side in answers]
            pairs.append({"chosen": sides[0], "rejected": sides[1]})
            report.cut(prompt=len(kept) < len(prompt))
    return report.of(pairs)


def pack(rows: Sequence[Row], max_length: int) -> list[Row]:
    """Rows laid together in rows of at most `max_length` tokens by best fit, the longest first, each a document of its own."""
    packs, space = list[list[Row]](), list[tuple[int, int]]()  # of each pack the tokens left, in order, and its number
    for row in sorted(rows, key=lambda row: -len(row["input_ids"])):
        at = bisect_left(space, (len(row["input_ids"]),))
        if at == len(space):
            space.append((max_length, len(packs)))
            packs.append([])
        left, number = space.pop(at)
        packs[number].append(row)
        insort(space, (left - len(row["input_ids"]), number))
    return [joined(pack, sample_id) for sample_id, pack in enumerate(packs)]


def joined(rows: Sequence[Row], sample_id: int) -> Row:
    """Rows of one document each as one row."""
    ids, maskable = ([*chain.from_iterable(row[name] for row in rows)] for name in ("input_ids", "maskable"))
    documents = [number for number, row in enumerate(rows, start=1) for _ in row["input_ids"]]
    return make_row(ids, documents, maskable, sample_id)


def _render(tokenizer: PreTrainedTokenizerBase, example: Example, learn: Learn | None, ends: Ends) -> tuple[Ids, Ids, Sequence[bool]]:
    """Prompt, completion, and what of the prompt is learnt: of a conversation earlier answers."""
    if learn is not None and "messages" in example:
        return render_turns(tokenizer, example["messages"], learn, ends)
    prompt, completion = render(tokenizer, example, ends)
    return prompt, completion, [False] * len(prompt)


def _last(learnt: Sequence[bool], count: int) -> list[bool]:
    """What is learnt of the last tokens of a prompt: nothing of an answer that lost its beginning."""
    kept = [*learnt[len(learnt) - count :]]
    cut = sum(1 for _ in takewhile(bool, kept)) if count < len(learnt) else 0
    return [False] * cut + kept[cut:]


def _row(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Ids,
    completion: Ids,
    room: Room,
    sample_id: int,
    *,
    cut: bool = False,
    learnt: Sequence[bool] = (),
) -> Row:
    """One row: the completion, unless it was cut filled with EOS, is learnt, and of the prompt what `learnt` says."""
    filling = 0 if cut else room.filling(len(prompt), len(completion))
    ids = [*prompt, *completion, *[tokenizer.eos_token_id] * filling]
    maskable = [*(learnt or [False] * len(prompt))] + [True] * (len(completion) + filling)
    return make_row(ids, [1] * len(ids), [False, *maskable[1:]], sample_id)  # the first token has nothing to follow from
