"""Denoising steps on canvases of random tokens (`unmask.generation.canvas`). The host reads one thing: which
blocks are done. With a constraint it also reads the tokens that are known and the chances of texts. What a
trace records of each step is read when its sequence is finished.

Shapes: B sequences, N positions of their blocks, J those of some sequences, M the most of one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from unmask.config.sampler import SamplerConfig
from unmask.generation.canvas import CanvasSettings, accept, is_confident, propose, random_tokens
from unmask.generation.constraints.decide import Window, windows_of
from unmask.generation.engine.host import moved, moved_together, padded, ranks, starts
from unmask.generation.engine.sequence import RecordedStep, SequenceState, by_settings
from unmask.generation.engine.slots import BatchEntry, BatchState, Predictions
from unmask.generation.output import CanvasStep
from unmask.models.diffusion_lm import DiffusionLM


def begin_canvases(
    lm: DiffusionLM, slots: BatchState, sequences: list[SequenceState], entries: list[BatchEntry]
) -> None:
    """Fill the blocks that begin with random tokens."""
    chosen = [index for index, sequence in enumerate(sequences) if sequence.step == 0]
    if not chosen:
        return
    member_N, slot_N, position_N = slots.hidden_positions([entries[index] for index in chosen])
    if lm.canvas:
        slots.soft_SWD[moved(np.array([entries[index].slot for index in chosen]), slot_N.device)] = 0
    own = [sequences[index] for index in chosen]
    key_B, step_B, seed_B = np.array(
        [(each.request.key, each.steps_done, each.config.seed) for each in own]
    ).T
    for seed in np.unique(seed_B).tolist():
        index_J = np.flatnonzero(seed_B[member_N] == seed)
        at_J = moved(index_J, slot_N.device)
        key_J, step_J = moved_together(slot_N.device, key_B[member_N[index_J]], step_B[member_N[index_J]])
        slot_J, position_J = slot_N[at_J], position_N[at_J]
        slots.ids_SC[slot_J, position_J] = random_tokens(lm, seed, key_J, step_J, position_J)


def denoise_canvases(
    lm: DiffusionLM, slots: BatchState, sequences: list[SequenceState], predictions: Predictions
) -> None:
    """One denoising step, without its forward pass."""
    done: list[torch.Tensor] = []
    order: list[SequenceState] = []
    recorded: list[tuple[SequenceState, RecordedStep]] = []
    for _, uses_B in by_settings(sequences):
        chosen = np.flatnonzero(uses_B)
        number_B = np.full(len(sequences), -1)
        number_B[chosen] = np.arange(len(chosen))
        own = predictions.at(np.flatnonzero(uses_B[predictions.member_N]), number_B)
        group = [sequences[member] for member in chosen]
        done.append(_denoise(lm, slots, group, own, recorded))
        order += group
    for sequence, is_done in zip(order, torch.cat(done).tolist(), strict=True):
        if is_done:
            sequence.num_hidden = 0
    for sequence, step in recorded:
        sequence.recorded_steps.append(step)


def read_canvas_steps(sequence: SequenceState) -> list[CanvasStep]:
    """The recorded steps of a sequence, on the host."""
    if not sequence.recorded_steps:
        return []
    firsts, tokens, log_probs, temperatures = zip(*sequence.recorded_steps, strict=True)
    sizes = [part_2N.shape[1] for part_2N in tokens]
    planes = (*torch.cat(tokens, 1).cpu(), torch.cat(log_probs).cpu())
    columns = ([part_N.tolist() for part_N in plane.split(sizes)] for plane in planes)
    return [CanvasStep(*step) for step in zip(firsts, *columns, temperatures, strict=True)]


def _denoise(
    lm: DiffusionLM,
    slots: BatchState,
    sequences: list[SequenceState],
    predictions: Predictions,
    recorded: list[tuple[SequenceState, RecordedStep]],
) -> torch.Tensor:
    """A step of sequences with the same settings. Returns which are done [B], and adds to what is
    recorded."""
    config, device = sequences[0].config, predictions.position_N.device
    settings, member_N = CanvasSettings.of(lm, config), predictions.member_N
    at, logits_NV = (predictions.slot_N, predictions.position_N), predictions.logits_NV
    count_B = predictions.counts(len(sequences))
    row_N = moved(member_N, device)
    key_B, steps_B, step_B, slot_B = moved_together(
        device,
        *np.array([(each.request.key, each.steps_done, each.step, each.slots[0]) for each in sequences]).T,
    )
    key_N, step_N = key_B[row_N], steps_B[row_N]
    temperatures = np.array([settings.temperature(each.step) for each in sequences])
    temperature_N = moved(temperatures[member_N], device).to(logits_NV.dtype)
    form = (
        _known(slots, slot_B, row_N, config, logits_NV.shape[1]),
        _windows(slots, sequences, count_B, device),
    )
    found = propose(lm, logits_NV, config, temperature_N, key_N, step_N, at[1], *form)
    if found.soft_ND is not None:
        _keep_soft(lm, slots, sequences, at, row_N, found.soft_ND)
    entropy_BM = padded(found.entropy_N, count_B, torch.inf)

    changed_B = torch.zeros_like(step_B).index_add_(
        0, row_N, (found.decision.token_N != slots.best_SC[at]).long()
    )
    same_B = torch.where((changed_B > 0) | (step_B == 0), 0, slots.unchanged_S[slot_B] + 1)
    slots.best_SC[at], slots.unchanged_S[slot_B] = found.decision.token_N, same_B
    confident_B = is_confident(entropy_BM, moved(count_B, device), settings.confidence_threshold)
    last_B = step_B == settings.max_denoising_steps - 1
    done_B = (same_B >= settings.stability_threshold) & confident_B | last_B

    kept_N = accept(entropy_BM, settings.entropy_bound)[row_N, moved(ranks(count_B), device)]
    renewed_N = random_tokens(lm, config.seed, key_N, step_N + 1, at[1])
    canvas_N, done_N = torch.where(kept_N, found.drawn_N, renewed_N), done_B[row_N]
    if found.drawn_log_prob_N is not None:
        kept_N = kept_N & ~done_N
        tokens_2N = torch.stack([slots.ids_SC[at], torch.where(kept_N, found.drawn_N, -1)])
        log_prob_N = torch.where(kept_N, found.drawn_log_prob_N, 0)
        firsts = [each.request.hidden.index(True, each.span[0]) - each.request.start for each in sequences]
        parts = (part.split(count_B.tolist(), -1) for part in (tokens_2N, log_prob_N))
        recorded += zip(sequences, map(RecordedStep, firsts, *parts, temperatures.tolist()), strict=True)
    slots.write(at, found.decision, slice(None), torch.where(done_N, step_N, -1))
    slots.ids_SC[at], slots.hidden_SC[at] = torch.where(done_N, slots.ids_SC[at], canvas_N), ~done_N
    slots.sum_S.index_add_(0, at[0], found.entropy_N)
    return done_B


def _known(
    slots: BatchState, slot_B: torch.Tensor, row_N: torch.Tensor, config: SamplerConfig, vocabulary: int
) -> torch.Tensor | None:
    """The tokens [N, V] that each sequence knows, for a repetition penalty."""
    return slots.present(slot_B, vocabulary)[row_N] if config.repetition_penalty != 1 else None


def _windows(
    slots: BatchState, sequences: list[SequenceState], count_B: np.ndarray, device: torch.device
) -> list[Window]:
    """The windows of all sequences. The host reads the blocks that are finished."""
    windows: list[Window] = []
    for sequence, first in zip(sequences, starts(count_B).tolist(), strict=True):
        if sequence.config.constraint is None:
            continue
        request = sequence.request
        ids = slots.ids_SC[sequence.slots[0], : request.length].tolist()
        own = windows_of(request.gaps, sequence.span, ids, request.hidden, device)
        windows += [replace(window, row_N=window.row_N + first) for window in own]
    return windows


def _keep_soft(
    lm: DiffusionLM,
    slots: BatchState,
    sequences: list[SequenceState],
    at: tuple[torch.Tensor, torch.Tensor],
    row_N: torch.Tensor,
    soft_ND: torch.Tensor,
) -> None:
    """Keep the mean embeddings of what was predicted; of a token that is given, its own embedding."""
    table = lm.model.get_input_embeddings()
    for sequence in sequences:
        start, stop = sequence.span
        if sequence.step == 0 and sequence.block_size < stop - start:
            [slot] = sequence.slots
            slots.soft_SWD[slot, : stop - start] = table(slots.ids_SC[slot, start:stop])
    start_B = moved(np.array([sequence.span[0] for sequence in sequences]), row_N.device)
    slots.soft_SWD[at[0], at[1] - start_B[row_N]] = soft_ND
