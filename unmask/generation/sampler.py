"""The batched sampler: the reference's tokens, with the output head only at the rows that are read.

Shapes: B sequences in the batch, T positions, N hidden rows of the current blocks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unmask.config import SamplerConfig
from unmask.generation.policies import decide, first_by_priority
from unmask.generation.trace import Generation, Request, Trace, make_generation, make_requests
from unmask.models.diffusion_lm import DiffusionLM, evaluating


@torch.no_grad()
def generate(lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig | None = None, keys: Sequence[int] | None = None) -> Generation:
    """Complete prompts by denoising.

    Args:
        lm: any attention pattern; a causal model decodes token by token.
        prompts: strings, chat messages or lists of token ids, of any lengths.
        config: policy, steps, temperature, ...
        keys: of the random numbers, one per prompt; None: a hash of each prompt and its repeat number.

    Returns:
        One completion per prompt, in order. It does not depend on the other prompts.

    Raises:
        GenerationError: an empty or too long prompt, or a decoding block that does not fit the model.
    """
    config = config or SamplerConfig()
    requests = make_requests(lm, prompts, config, keys)
    by_length = sorted(range(len(requests)), key=lambda i: requests[i].length)
    traces: dict[int, Trace] = {}
    with evaluating(lm):
        for first in range(0, len(requests), config.batch_size):
            batch = by_length[first : first + config.batch_size]
            traces.update(zip(batch, _Batch(lm, [requests[i] for i in batch], config).run(), strict=True))
    return make_generation(lm, requests, [traces[i] for i in range(len(requests))], config)


class _Batch:
    """Sequences that are denoised together. A finished one leaves; each keeps its own block and step."""

    def __init__(self, lm: DiffusionLM, requests: list[Request], config: SamplerConfig):
        self.lm, self.requests, self.config = lm, requests, config
        device, count = lm.device, len(requests)
        self.length_B = torch.tensor([r.length for r in requests], device=device)
        self.prompt_B = torch.tensor([len(r.prompt) for r in requests], device=device)
        self.key_B = torch.tensor([r.key for r in requests], device=device)
        width = max(r.length for r in requests)
        self.position_T = torch.arange(width, device=device)
        self.ids_BT = torch.full((count, width), lm.mask_token_id, device=device)
        for row, request in enumerate(requests):
            self.ids_BT[row, : len(request.prompt)] = torch.tensor(request.prompt, device=device)
        inside_BT = self.position_T < self.length_B[:, None]
        self.hidden_BT = inside_BT & (self.position_T >= self.prompt_B[:, None])
        self.padding_BT = None if inside_BT.all() else inside_BT.long()
        self.step_BT = torch.full_like(self.ids_BT, -1)
        self.log_prob_BT = torch.zeros_like(self.ids_BT, dtype=torch.float64)
        self.plans = [_flat_plan(r) for r in requests]
        self.done = [0] * count

    def run(self) -> list[Trace]:
        active = list(range(len(self.requests)))
        while active:
            self._step(torch.tensor(active, device=self.lm.device), [self.plans[row][self.done[row]] for row in active])
            for row in active:
                self.done[row] += 1
            active = [row for row in active if not self._finished(row)]
        return [self._trace(row) for row in range(len(self.requests))]

    def _step(self, row_B: Tensor, plan: list[tuple[int, int, int, bool]]) -> None:
        start_B, stop_B, count_B, _ = torch.tensor(plan, device=row_B.device).unbind(1)
        width = self.ids_BT.shape[1] if self.lm.attention == "bidirectional" else int(stop_B.max())
        hidden_BT = self.hidden_BT[row_B, :width]
        rows_BT = hidden_BT & (self.position_T[:width] >= start_B[:, None]) & (self.position_T[:width] < stop_B[:, None])
        padding_BT = None if self.padding_BT is None else self.padding_BT[row_B, :width]
        logits_NV = self.lm.logits(self.ids_BT[row_B, :width], padding_BT, rows_BT, hidden_BT)
        batch_N, position_N = rows_BT.nonzero(as_tuple=True)
        step_B = torch.tensor([self.done[row] for row in row_B.tolist()], device=row_B.device)
        decision = decide(logits_NV, self.config, self.key_B[row_B][batch_N], step_B[batch_N], position_N)
        priority_BT = torch.full(rows_BT.shape, -torch.inf, dtype=decision.priority_N.dtype, device=row_B.device)
        priority_BT[batch_N, position_N] = decision.priority_N
        chosen_N = first_by_priority(priority_BT, count_B)[batch_N, position_N]
        row_C, position_C = row_B[batch_N[chosen_N]], position_N[chosen_N]
        self.ids_BT[row_C, position_C] = decision.token_N[chosen_N]
        self.log_prob_BT[row_C, position_C] = decision.log_prob_N[chosen_N].double()
        self.step_BT[row_C, position_C] = step_B[batch_N[chosen_N]]
        self.hidden_BT[row_C, position_C] = False

    def _finished(self, row: int) -> bool:
        plan, done = self.plans[row], self.done[row]
        if done == len(plan):
            return True
        _, stop, _, ends_block = plan[done - 1]
        if not (ends_block and self.config.stop_at_eos) or self.lm.eos_token_id is None:
            return False
        return bool((self.ids_BT[row, len(self.requests[row].prompt) : stop] == self.lm.eos_token_id).any())

    def _trace(self, row: int) -> Trace:
        at = slice(len(self.requests[row].prompt), self.requests[row].length)
        steps, log_probs = self.step_BT[row, at].tolist(), self.log_prob_BT[row, at].tolist()
        return Trace(self.ids_BT[row, at].tolist(), steps, log_probs, self.done[row])


def _flat_plan(request: Request) -> list[tuple[int, int, int, bool]]:
    """(block start, block stop, tokens to reveal, whether the block ends here) for every step."""
    return [
        (start, stop, count, index == len(counts) - 1)
        for (start, stop), counts in zip(request.blocks, request.counts, strict=True)
        for index, count in enumerate(counts)
    ]
