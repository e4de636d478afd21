"""The forward pass of mode self-speculative: it verifies drafts and predicts the next ones.

Its queries are `[clean tokens | drafts | masks after node 0 | masks after node 1 | ...]`, each part as wide
as the longest needs. Node 0 is the clean text, and each other node a draft. A draft sees the clean tokens and
the path of the tree that leads to it, as in reading from left to right; the masks after a node see what it
sees, itself and each other. So the next drafts are there wherever the path of kept drafts ends (as in TiDAR,
Liu et al. 2025).

Shapes: B sequences of a pass, Q queries, K keys, G drafts, J = 1 + G nodes, W masks after each, R rows of
logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from unmask.generation.engine.cached_forward import Queries, run_pass
from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.engine.slots import BatchState, SpeculativeEntry, as_columns
from unmask.generation.speculation import Tree, draft_tree
from unmask.models.diffusion_lm import DiffusionLM


def draft_pass(lm: DiffusionLM, slots: BatchState, entries: Sequence[SpeculativeEntry]) -> Tensor:
    """Logits [B, W, V] of the tokens from `base` on, for entries without drafts. With a logit shift the last
    clean token predicts the first one."""
    clean_BJV, masked_BJWV = speculative_pass(lm, slots, entries, draft_tree(0, 1), skipped=0)
    return torch.cat([clean_BJV, masked_BJWV[:, 0]], 1) if lm.logit_shift else masked_BJWV[:, 0]


def speculative_pass(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[SpeculativeEntry],
    tree: Tree,
    skipped: int = 1,
    cache: SlotCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the pass. Where a sequence has fewer drafts, masks or positions than others, the results are
    undefined.

    Args:
        tree: whose first nodes the drafts are.
        skipped: the masks of each group whose tokens are not predicted.
        cache: another cache than that of the slots.

    Returns:
        [B, J, V]: the causal reading's logits of the token after each node. [B, J, W - skipped, V]: for the
        masks after each node, the logits of their tokens without the first ones; with a logit shift, never
        that of the first one, which the token before it predicts.
    """
    num_clean = max(entry.base - entry.first for entry in entries)
    drafts, width = max(len(entry.draft_G) for entry in entries), max(entry.num_masks for entry in entries)
    columns = max(entry.num_columns for entry in entries)
    queries = _queries(lm, slots, entries, tree, (num_clean, drafts, width), columns)
    text, groups, shift = num_clean + drafts, drafts + 1, int(lm.logit_shift)
    count, device = text + groups * width, slots.ids_SC.device
    mask_JW = torch.arange(text, count, device=device).view(groups, width)
    causal_J = torch.arange(num_clean - 1, text, device=device)
    predicting_JW = mask_JW[:, max(skipped - shift, 0) : max(width - shift, 0)]
    row_R = torch.cat([causal_J, predicting_JW.flatten()])
    index_BR = torch.arange(len(entries), device=device)[:, None] * count + row_R
    logits_NV = run_pass(lm, slots, entries, queries, columns, index_BR.flatten(), windows=True, cache=cache)
    logits_BRV = logits_NV.unflatten(0, index_BR.shape)
    return logits_BRV[:, :groups], logits_BRV[:, groups:].unflatten(1, predicting_JW.shape)


def _queries(
    lm: DiffusionLM,
    slots: BatchState,
    entries: Sequence[SpeculativeEntry],
    tree: Tree,
    sizes: tuple[int, int, int],
    columns: int,
) -> Queries:
    """The queries of a pass. `sizes`: the most clean tokens, drafts, and masks after a node."""
    assert slots.cache is not None
    (num_clean, drafts, width), device = sizes, slots.ids_SC.device
    text, node_J = num_clean + drafts, torch.arange(drafts + 1, device=device)
    # the node before a mask and the number of the mask after it; of clean tokens and drafts the node is -1
    group_Q = F.pad(node_J.repeat_interleave(width), (text, 0), value=-1)
    inside_Q = F.pad(torch.arange(width, device=device).repeat(drafts + 1), (text, 0))
    depth_J, path_JG = (
        tree.depth_J[: drafts + 1].to(device),
        tree.path_JJ[: drafts + 1, 1 : drafts + 1].to(device),
    )
    node_Q = torch.cat([node_J.new_zeros(num_clean), node_J[1:], group_Q[text:]])
    offset_Q = depth_J[node_Q] + inside_Q - (group_Q < 0).long()  # from the first position not decided
    offset_Q[:num_clean] = torch.arange(-num_clean, 0, device=device)
    extents = [
        (entry.slot, entry.first, entry.base, entry.length, len(entry.draft_G), entry.num_masks)
        for entry in entries
    ]
    slot_B1, first_B1, base_B1, length_B1, drafts_B1, masks_B1 = as_columns(extents, device)
    position_BQ = base_B1 + offset_Q
    number_Q = torch.arange(len(group_Q), device=device) - num_clean  # of a draft, from 0
    text_BQ = (group_Q < 0) & (position_BQ >= first_B1) & (number_Q < drafts_B1)
    masked_BQ = (group_Q >= 0) & (group_Q <= drafts_B1) & (inside_Q < masks_B1) & (position_BQ < length_B1)
    position_BQ = torch.where(text_BQ | masked_BQ, position_BQ, 0)
    ids_BQ = slots.ids_SC[slot_B1, position_BQ].masked_fill(masked_BQ, lm.mask_token_id)
    for member, entry in enumerate(entries):
        ids_BQ[member, num_clean : num_clean + len(entry.draft_G)] = entry.draft_G
    # the first column of a group; masks past the end of the sequence have none
    start_BQ = base_B1 + drafts_B1 + group_Q * masks_B1
    stop_BQ = start_BQ + torch.minimum(masks_B1, length_B1 - base_B1 - depth_J[group_Q])
    column_BQ = torch.where(masked_BQ, start_BQ + inside_Q, base_B1 + number_Q)
    # no query sees what is before or after all drafts as a draft
    path_PQ = F.pad(path_JG[node_Q], (1, 1)).T
    drafted_BK = (torch.arange(columns, device=device) - base_B1).clamp(-1, drafts) + 1
    return Queries(
        slot_BQ=slot_B1.expand_as(position_BQ),
        position_BQ=position_BQ,
        document_BQ=(text_BQ | masked_BQ).long(),
        copy_BQ=torch.where(masked_BQ, 1 + group_Q, 0),
        column_BQ=torch.where(text_BQ | masked_BQ, column_BQ, slots.cache.shape[1]),
        end_BQ=torch.where(number_Q < 0, position_BQ + 1, base_B1),
        ids_BQ=ids_BQ,
        hidden_BQ=masked_BQ,
        draft_BQ2=torch.stack([start_BQ, stop_BQ], -1).where(masked_BQ[..., None], 0),
        path_BQK=path_PQ[drafted_BK].transpose(1, 2),
    )
