"""Forward passes over cached keys: exact ones of causal and block-causal models, lossy ones of bidirectional models.

Shapes: B sequences of a pass, Q queries, K keys, N hidden rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unmask.generation.slots import Slots, Window
from unmask.models.attention import AttentionMask, Layout
from unmask.models.diffusion_lm import DiffusionLM, Reading


def cached_pass(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], member_N: Tensor, position_N: Tensor) -> Tensor:
    """The block in work of every sequence, over cached keys. The pass also commits the clean tokens before it that the cache lacks.

    With a logit shift the last clean token before the block is read again, since it predicts the block's first one.
    """
    shift = int(lm.logit_shift)
    base = [window.base(lm) for window in windows]
    read = [min(window.clean, max(first - shift, 0)) for window, first in zip(windows, base, strict=True)]
    stop = [first if lm.autoregressive else window.stop for window, first in zip(windows, base, strict=True)]
    base_B1, read_B1, stop_B1 = torch.tensor(list(zip(base, read, stop, strict=True)), device=member_N.device)[:, :, None].unbind(1)
    clean = max(first - start for first, start in zip(base, read, strict=True))
    work = max(last - first for first, last in zip(base, stop, strict=True))
    at_BQ = base_B1 + torch.arange(-clean, work, device=member_N.device)
    index_N = member_N * at_BQ.shape[1] + clean + position_N - base_B1[member_N, 0] - shift
    return _run(lm, slots, windows, at_BQ, read_B1, stop_B1, base_B1, index_N)


def commit(lm: DiffusionLM, slots: Slots, windows: Sequence[Window]) -> None:
    """Read the clean tokens before the blocks in work into the cache."""
    base_B1, read_B1 = torch.tensor([(window.base(lm), window.clean) for window in windows], device=slots.ids_SC.device)[:, :, None].unbind(
        1
    )
    at_BQ = read_B1 + torch.arange(int((base_B1 - read_B1).max()), device=base_B1.device)
    _run(lm, slots, windows, at_BQ, read_B1, base_B1, base_B1, base_B1.new_zeros(1))


def partial_pass(lm: DiffusionLM, slots: Slots, windows: Sequence[Window], member_N: Tensor, position_N: Tensor) -> Tensor:
    """Lossy: some positions of a bidirectional model, over keys of the others that were computed when other tokens stood there
    (Wu et al. 2025, "Fast-dLLM")."""
    device, shift = member_N.device, int(lm.logit_shift)
    spans = [window.read for window in windows if window.read is not None]
    read_B1, stop_B1 = torch.tensor(spans, device=device)[:, :, None].unbind(1)
    read_B1 = (read_B1 - shift).clamp_min(0)
    at_BQ = read_B1 + torch.arange(int((stop_B1 - read_B1).max()), device=device)
    index_N = member_N * at_BQ.shape[1] + position_N - read_B1[member_N, 0] - shift
    length_B1 = torch.tensor([[window.length] for window in windows], device=device)
    return _run(lm, slots, windows, at_BQ, read_B1, stop_B1, length_B1, index_N)


def _run(
    lm: DiffusionLM,
    slots: Slots,
    windows: Sequence[Window],
    at_BQ: Tensor,
    read_B1: Tensor,
    stop_B1: Tensor,
    base_B1: Tensor,
    index_N: Tensor,
) -> Tensor:
    """One pass over cached keys. Queries are the positions from `read` to `stop`: those before `base` are clean and see what is clean
    up to the end of their block (with a causal context up to themselves), the others see everything before `stop`."""
    real_BQ = (at_BQ >= read_B1) & (at_BQ < stop_B1)
    position_BQ = torch.where(real_BQ, at_BQ, 0)
    slot_B = torch.tensor([window.slot for window in windows], device=at_BQ.device)
    hidden_BQ = real_BQ & slots.hidden_SC[slot_B[:, None], position_BQ]
    if lm.attention == "bidirectional":
        noisy_BQ, end_BQ = torch.zeros_like(real_BQ), base_B1.expand_as(at_BQ)
        hidden_B1 = slots.hidden_SC[slot_B].sum(1, keepdim=True)
        share_BT = (hidden_B1 / base_B1).expand_as(at_BQ)
    else:
        grid = lm.block_size or 1
        noisy_BQ = real_BQ & (at_BQ >= base_B1)
        own_end_BQ = position_BQ + 1 if lm.causal_context or grid == 1 else (position_BQ // grid + 1) * grid
        end_BQ = torch.where(noisy_BQ, stop_B1, torch.minimum(own_end_BQ, base_B1)).clamp_min(1)  # padding sees the first key
    layout = Layout(real_BQ.long(), position_BQ, noisy_BQ.long())
    if lm.attention != "bidirectional" and lm.has_time_embedding:
        share_BT = lm.hidden_share(hidden_BQ & noisy_BQ, layout)
    key_K = torch.arange(int(end_BQ.max()), device=at_BQ.device)
    positions = (position_BQ, key_K.expand(len(slot_B), -1)) if lm.attention == "causal" else None
    assert slots.cache is not None
    reading = Reading(
        ids_BT=slots.ids_SC[slot_B[:, None], position_BQ],
        layout=layout,
        mask=AttentionMask((key_K < end_BQ[:, :, None])[:, None], positions),
        index_N=index_N,
        share_BT=share_BT if lm.has_time_embedding else None,
        pruned=True,
    )
    column_BQ = torch.where(real_BQ, position_BQ, slots.cache.shape[1])
    return lm.forward(reading, slots.cache.read([window.slot for window in windows], column_BQ, len(key_K)))
