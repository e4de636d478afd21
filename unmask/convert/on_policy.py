"""On-policy distillation: the student completes prompts with its own sampler, and learns the causal teacher's
predictions in the states that the sampler visited (OPDLM, 2606.06712).

A step goes from prompts to completions (`complete`), to one of the visited states of each block
(`state_batch`), to views that hide what is hidden there (`state_views`). Their loss is that of
`unmask.convert.distillation`: the teacher reads the clean prefix of each hidden token in the final text.

Shapes: B completions, T positions of the canvas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.data.prompts import prompt_ids
from unmask.data.row_store import TOKENS, stored_rows
from unmask.data.rows import TokenRow, check_dataset, make_row
from unmask.data.unknown_tokens import UnknownTokens
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import MaskRNG, Views, exact_count_views
from unmask.generation.output import Generation
from unmask.generation.rollout import Rollout, cut_at_end
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.tensor_checks import check_tensors
from unmask.training.config import row_length


def conversion_prompts(
    lm: DiffusionLM, args: ConvertConfig, dataset: Iterable[Mapping[str, Any]], where: str
) -> Sequence[TokenRow]:
    """The token rows of prompts, each of which fits into a row with a completion. Errors are those of
    `prompt_ids`."""
    check_dataset(dataset, where, streams=False)
    unknown = UnknownTokens(args.max_unknown)
    make = partial(
        _prompt_token_rows,
        lm.tokenizer,
        dataset,
        unknown,
        max_length=row_length(lm, args),
        max_new_tokens=args.max_new_tokens,
        setting="max_new_tokens",
        context=lm.context_length,
        where=where,
        variables=None,
        processes=args.dataset_num_proc,
    )
    rows = stored_rows(make, TOKENS, unknown)
    unknown.check(where)
    return rows


def _prompt_token_rows(
    tokenizer: PreTrainedTokenizerBase,
    dataset: Iterable[Mapping[str, Any]],
    unknown: UnknownTokens,
    **limits: Any,
) -> Iterator[TokenRow]:
    """Token rows in which nothing is trained on yet. Arguments as of `prompt_ids`."""
    for sample_id, row in enumerate(prompt_ids(tokenizer, dataset, unknown, **limits)):
        ids = row["ids"]
        yield make_row(ids, [1] * len(ids), [False] * len(ids), sample_id)


def prompts_of(batch: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of the prompts of a batch, without padding."""
    rows = zip(batch["input_ids"].tolist(), (batch["documents"] > 0).sum(1).tolist(), strict=True)
    return [ids[:length] for ids, length in rows]


def complete(
    writers: Sequence[tuple[DiffusionLM, SamplerConfig]],
    prompts: Sequence[list[int]],
    keys: Sequence[int],
    writer_of: Sequence[int],
) -> Generation:
    """Complete each prompt (token ids) with the model and sampler of its writer, up to the first end token.

    Args:
        writers: models of one tokenizer, and how they write.
        keys: of the random numbers, one per prompt.
        writer_of: the index of each prompt's writer.

    Raises:
        GenerationError: a sampler does not fit its model, or a prompt is empty or too long.
    """
    order, parts = list[int](), list[Generation]()
    for number, (lm, sampler) in enumerate(writers):
        mine = [place for place, writer in enumerate(writer_of) if writer == number]
        if mine:
            made = generate(lm, [prompts[at] for at in mine], sampler, [keys[at] for at in mine])
            parts.append(cut_at_end(lm, made))
            order += mine
    lists: dict[str, Any] = {}
    for name, rows in vars(parts[0]).items():
        if isinstance(rows, list):
            joined = [row for part in parts for row in getattr(part, name)]
            lists[name] = [row for _, row in sorted(zip(order, joined, strict=True), key=itemgetter(0))]
    return replace(parts[0], **lists)


def visited_states(rollout: Rollout, draw: MaskRNG) -> Tensor:
    """What was hidden [B, T] at one denoising step of each block, or of the whole completion in a
    bidirectional model: any of the steps that revealed tokens of it, with equal probability.

    Args:
        rollout: completions whose steps were traced.
        draw: with a key for each completion.
    """
    check_tensors(ids_BT=rollout.ids_BT, key_B=draw.key_B)
    step_BT, canvas_BT = rollout.step_BT, rollout.group_BT >= 0
    revealed_BT, block_BT = canvas_BT & (step_BT >= 0), rollout.group_BT.clamp_min(0)
    # the step with the largest of the block's random numbers, of which each step has one
    number_BT = draw.uniform(step_BT.clamp_min(0), 1, RngStream.STATE).squeeze(1)
    number_BT = torch.where(revealed_BT, number_BT, -1.0)
    chosen_BT = revealed_BT & (number_BT == _largest(number_BT, block_BT))
    begin_BT = _largest(torch.where(chosen_BT, step_BT, -1), block_BT)
    return canvas_BT & (~revealed_BT | (step_BT >= begin_BT))


def _largest(value_BT: Tensor, block_BT: Tensor) -> Tensor:
    """The largest value of each position's block [B, T]; no value is below -1."""
    largest_BK = torch.full_like(value_BT, -1).scatter_reduce(1, block_BT, value_BT, "amax")
    return largest_BK.gather(1, block_BT)


def random_states(rollout: Rollout, draw: MaskRNG) -> Tensor:
    """The same of completions that another model wrote: of each block a random number of tokens, any of
    them, as if the student revealed one at a time in random order (OPDLM hides each with a random
    probability)."""
    return exact_count_views(rollout.noised_groups_BT, draw, num_views=1).hidden_BMT[:, 0] | rollout.beyond_BT


def taught_tokens(rollout: Rollout, hidden_BT: Tensor, excluded: Sequence[int] = ()) -> Tensor:
    """The hidden tokens [B, T] of the completions, which end with their first end token; without the
    `excluded` ones."""
    is_excluded_BT = torch.isin(rollout.ids_BT, rollout.ids_BT.new_tensor([*excluded]))
    return hidden_BT & rollout.completion_BT & ~is_excluded_BT


def state_batch(
    rollout: Rollout, from_student_B: Tensor, draw: MaskRNG, excluded: Sequence[int] = ()
) -> dict[str, Any]:
    """A batch of completions, each in one state: `hidden` says what the student does not see, and `maskable`
    which of it the teacher teaches. `draw` as of `visited_states`, `excluded` of `taught_tokens`."""
    from_student_B, key_B = (each.to(rollout.ids_BT.device) for each in (from_student_B, draw.key_B))
    draw = replace(draw, key_B=key_B)
    visited_BT, random_BT = visited_states(rollout, draw), random_states(rollout, draw)
    hidden_BT = torch.where(from_student_B[:, None], visited_BT, random_BT)
    return {
        "input_ids": rollout.ids_BT,
        "documents": rollout.document_BT,
        "one_document": rollout.one_document,
        "hidden": hidden_BT,
        "maskable": taught_tokens(rollout, hidden_BT, excluded),
    }


def state_views(hidden_BT: Tensor, target_BT: Tensor) -> Views:
    """A view of each row whose targets have equal weights, in all 1; 0 in rows without targets. The loss is
    to be divided by the rows of the whole batch."""
    check_tensors(hidden_BT=hidden_BT, target_BT=target_BT)
    weight_BT = target_BT.float() / target_BT.sum(1, keepdim=True).clamp_min(1)
    return Views(hidden_BT[:, None], target_BT[:, None], weight_BT[:, None])
