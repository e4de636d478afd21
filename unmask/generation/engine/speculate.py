"""A round of mode self-speculative: verify the drafts of sequences, reveal the tokens, and draft the next
ones. One forward pass.

Shapes: B sequences, G drafts, J = G + 1 nodes of their tree, D depths, K candidates, V vocabulary, N
positions of several sequences, M some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.forward import buckets
from unmask.generation.engine.kv_cache import SlotCache
from unmask.generation.engine.sequence import SequenceState, Speculation, by_settings
from unmask.generation.engine.slots import BatchState, SpeculativeEntry, as_columns
from unmask.generation.engine.speculative_forward import draft_pass, speculative_pass
from unmask.generation.output import end_of
from unmask.generation.policies import Decision
from unmask.generation.remote.verify import server_logits
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.generation.requests import Request
from unmask.generation.speculation import Tree, draw_drafts, num_drafts, tree_of, verify
from unmask.models.diffusion_lm import DiffusionLM

Verifier = DiffusionLM | RemoteLM


def begin(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Speculation:
    """The state before the first round, which has no drafts."""
    none = torch.zeros(0, dtype=torch.long, device=lm.device)
    shape = (0, tree_of(lm, config).width, lm.vocab_size)
    return Speculation(
        request.start, request.start, none, torch.zeros(shape, dtype=lm.log_prob_dtype, device=lm.device)
    )


def speculate(
    lm: DiffusionLM,
    verifier: Verifier | None,
    slots: BatchState,
    sequences: Sequence[SequenceState],
    alone: bool,
) -> list[SequenceState]:
    """One round of each sequence. Those of different settings or very different lengths have separate passes;
    with `alone`, all have. Returns the finished ones. `verifier`: the causal model that verifies, here or on
    a server; None: the model itself."""
    finished: list[SequenceState] = []
    for config, uses_B in by_settings(sequences):
        alike, tree = [*compress(sequences, uses_B)], tree_of(lm, config)
        for bucket in buckets([_state(sequence).position - sequence.num_cached for sequence in alike], alone):
            members = [alike[index] for index in bucket]
            if verifier is None:
                finished += _round(lm, slots, members, tree)
            else:
                finished += _round_of_two(lm, verifier, slots, members, tree)
    return finished


def _state(sequence: SequenceState) -> Speculation:
    assert sequence.speculation is not None
    return sequence.speculation


def _entries(sequences: Sequence[SequenceState], num_masks: int) -> list[SpeculativeEntry]:
    """The sequences, with their drafts to verify."""
    entries = []
    for sequence in sequences:
        state, slot, length = _state(sequence), sequence.slots[0], sequence.request.length
        first = min(sequence.num_cached, state.position - 1)
        entries.append(SpeculativeEntry(slot, length, first, state.position, state.draft_G, num_masks))
    return entries


def _round(
    lm: DiffusionLM, slots: BatchState, sequences: list[SequenceState], tree: Tree
) -> list[SequenceState]:
    entries = _entries(sequences, num_drafts(lm, sequences[0].config) + 1)
    causal_BJV, masked_BJDV = speculative_pass(lm, slots, entries, tree)
    last, finished = _reveal(lm, slots, sequences, tree, causal_BJV, slots.cache)
    going_on = [member for member, sequence in enumerate(sequences) if sequence not in finished]
    if going_on:
        at = torch.tensor([(member, last[member]) for member in going_on], device=masked_BJDV.device)
        _draft(slots, [sequences[member] for member in going_on], tree, masked_BJDV[at[:, 0], at[:, 1]])
    return finished


def _round_of_two(
    lm: DiffusionLM, verifier: Verifier, slots: BatchState, sequences: list[SequenceState], tree: Tree
) -> list[SequenceState]:
    """A round of two models, of a pass each: the tokens are known when the next ones are drafted."""
    count = num_drafts(lm, sequences[0].config)
    entries = _entries(sequences, 0)
    if isinstance(verifier, DiffusionLM):
        causal_BJV, _ = speculative_pass(verifier, slots, entries, tree, cache=slots.verifier_cache)
    else:
        ids_BT = [slots.ids_SC[entry.slot, : entry.base].tolist() for entry in entries]
        causal_BJV = server_logits(verifier, lm, ids_BT, entries, tree, sequences[0].config)
    _, finished = _reveal(lm, slots, sequences, tree, causal_BJV, slots.verifier_cache)
    going_on = [sequence for sequence in sequences if sequence not in finished]
    if going_on:
        entries = []
        for sequence in going_on:
            state, slot, length = _state(sequence), sequence.slots[0], sequence.request.length
            first, none = min(state.num_drafter_cached, state.position - 1), state.draft_G[:0]
            entries.append(SpeculativeEntry(slot, length, first, state.position, none, count + 1))
            state.num_drafter_cached = state.position
        _draft(slots, going_on, tree, draft_pass(lm, slots, entries)[:, :count])
    return finished


def _reveal(
    lm: DiffusionLM,
    slots: BatchState,
    sequences: list[SequenceState],
    tree: Tree,
    logits_BJV: Tensor,
    cache: SlotCache | None,
) -> tuple[list[int], list[SequenceState]]:
    """Reveal the tokens that are decided. Returns the last node of each sequence that was kept, and the
    finished sequences.

    Args:
        cache: holds the keys of all drafts. Those that were kept move to the columns of their positions.
            None: a server has them.
    """
    shape = logits_BJV.shape[:2]
    decision, rank_N = _verify(slots, sequences, logits_BJV, tree)
    last, finished, revealed, moved = [], [], [], []
    nodes = torch.stack([rank_N.view(shape), decision.token_N.view(shape)], 1).tolist()
    for member, (sequence, (ranks, tokens)) in enumerate(zip(sequences, nodes, strict=True)):
        state, request, path = _state(sequence), sequence.request, [0]
        while ranks[path[-1]] >= 0:
            path.append(tree.children[path[-1]][ranks[path[-1]]])
        last.append(path[-1])
        tokens = [tokens[node] for node in path[: request.length - state.position]]
        ends = lm.eos_token_ids if request.stop_at_eos else ()
        count = end_of(tokens, ends)
        slot, start = sequence.slots[0], state.position
        revealed += [
            (member, node, slot, start + depth, sequence.steps_done)
            for depth, node in enumerate(path[:count])
        ]
        moved += [
            (slot, start + node - 1, start + depth)
            for depth, node in enumerate(path[1:count])
            if node - 1 != depth
        ]
        state.num_drafted += len(state.draft_G)
        state.num_accepted += min(len(path) - 1, count)
        state.position += count
        if state.position == request.length or tokens[count - 1] in ends:
            finished.append(sequence)
        sequence.num_cached = state.position - 1
        sequence.steps_done += 1
        sequence.num_forward_passes += 1
    member_N, node_N, slot_N, position_N, step_N = torch.tensor(revealed, device=rank_N.device).unbind(1)
    slots.write((slot_N, position_N), decision, member_N * shape[1] + node_N, step_N)
    if moved and cache is not None:  # a server keeps its own
        cache.move(*torch.tensor(moved, device=rank_N.device).unbind(1))
    return last, finished


def _verify(
    slots: BatchState, sequences: list[SequenceState], logits_BJV: Tensor, tree: Tree
) -> tuple[Decision, Tensor]:
    """The token after each node [B * J] if the path to it is kept, and the rank of the candidate that it is,
    or -1."""
    config, (size, count, vocabulary) = sequences[0].config, logits_BJV.shape
    states = [_state(sequence) for sequence in sequences]
    draft_BJ = F.pad(pad_sequence([state.draft_G for state in states], batch_first=True), (1, 0))
    drafted_BDKV = pad_sequence([state.drafted_DKV for state in states], batch_first=True)
    depth_J = tree.depth_J[:count].to(draft_BJ.device)
    key_N, position_N = _keys(sequences, depth_J)
    present_NV = None
    if config.repetition_penalty != 1:
        earlier_BJV = (
            tree.path_JJ[:count, :count].to(depth_J.device).float() @ F.one_hot(draft_BJ, vocabulary).float()
        )
        present_NV = _present(slots, sequences, count, vocabulary) | (earlier_BJV > 0).flatten(0, 1)
    candidates = []
    for rank in range(tree.width):
        if pairs := tree.ranked(rank, count):
            parent_M, child_M = torch.tensor(pairs, device=depth_J.device).unbind(1)
            index_BM = torch.arange(size, device=depth_J.device)[:, None] * count + parent_M
            drafted_BMV = drafted_BDKV[:, depth_J[parent_M], rank]
            candidates.append((index_BM.flatten(), draft_BJ[:, child_M].flatten(), drafted_BMV.flatten(0, 1)))
    return verify(logits_BJV.flatten(0, 1), candidates, config, key_N, position_N, present_NV)


def _draft(slots: BatchState, sequences: list[SequenceState], tree: Tree, logits_BDV: Tensor) -> None:
    """Draw the candidates of the next tokens, as far as the sequence goes."""
    config, (count, vocabulary) = sequences[0].config, logits_BDV.shape[1:]
    key_N, position_N = _keys(sequences, torch.arange(count, device=logits_BDV.device))
    present_NV = _present(slots, sequences, count, vocabulary) if config.repetition_penalty != 1 else None
    draft_NK, drafted_NKV = draw_drafts(
        logits_BDV.flatten(0, 1), tree.width, config, key_N, position_N, present_NV
    )
    index_G = ((tree.depth_J - 1) * tree.width + tree.rank_J)[1:].to(draft_NK.device)
    drafts = zip(
        sequences,
        draft_NK.view(-1, count * tree.width)[:, index_G],
        drafted_NKV.unflatten(0, (-1, count)),
        strict=True,
    )
    for sequence, draft_G, drafted_DKV in drafts:
        state = _state(sequence)
        rest = sequence.request.length - state.position
        state.draft_G, state.drafted_DKV = draft_G[: tree.num_drafts(rest)], drafted_DKV[:rest]


def _keys(sequences: list[SequenceState], offset_J: Tensor) -> tuple[Tensor, Tensor]:
    """Key and position of each sequence, at offsets from its first position that is not decided."""
    states = [_state(sequence) for sequence in sequences]
    values = [(each.request.key, state.position) for each, state in zip(sequences, states, strict=True)]
    key_B1, position_B1 = as_columns(values, offset_J.device)
    return key_B1.repeat(1, len(offset_J)).flatten(), (position_B1 + offset_J).flatten()


def _present(slots: BatchState, sequences: list[SequenceState], count: int, vocabulary: int) -> Tensor:
    """The tokens that occur in each sequence [B * count, V]."""
    slot_B = torch.tensor([sequence.slots[0] for sequence in sequences], device=slots.ids_SC.device)
    return slots.present(slot_B, vocabulary).repeat_interleave(count, 0)
