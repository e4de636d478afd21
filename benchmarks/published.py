"""The samplers of published diffusion language models: the baseline of the benchmarks.

Every step computes the logits of all positions, one noise value per vocabulary entry (where the temperature
is not 0), a softmax in float64, and chooses what to reveal row by row (Nie et al. 2025, "Large Language
Diffusion Models", algorithm 5, and its code).

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.models.diffusion_lm import DiffusionLM


@torch.no_grad()
def generate(
    lm: DiffusionLM, prompt_BP: Tensor, length: int, block: int, steps: int, temperature: float
) -> Tensor:
    """Prompt and completion [B, P + length], on the CPU; each of `length / block` blocks takes `steps * block
    / length` steps."""
    batch, start = prompt_BP.shape
    ids_BT = torch.full((batch, start + length), lm.mask_token_id, device=prompt_BP.device)
    ids_BT[:, :start] = prompt_BP
    hidden_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    hidden_BT[:, start:] = True
    per_block, rest = divmod(steps * block, length)
    assert per_block > 0 and rest == 0, "the same number of steps for every block"
    for stop in range(start + block, start + length + 1, block):
        for step in range(per_block):
            logits_BTV = lm.logits(ids_BT)
            token_BT = noisy(logits_BTV, temperature).argmax(-1)
            confidence_BT = logits_BTV.double().softmax(-1).gather(-1, token_BT[..., None])[..., 0]
            confidence_BT[:, stop:] = -torch.inf
            confidence_BT = torch.where(hidden_BT, confidence_BT, -torch.inf)
            count = block // per_block + (step < block % per_block)
            for row in range(batch):
                best = confidence_BT[row].topk(count).indices
                ids_BT[row, best] = token_BT[row, best]
                hidden_BT[row, best] = False
    return ids_BT.cpu()


def noisy(logits_BTV: Tensor, temperature: float) -> Tensor:
    """The Gumbel trick in its exponential form, in float64: its argmax is a draw at this temperature."""
    if temperature == 0:
        return logits_BTV
    noise_BTV = torch.rand_like(logits_BTV, dtype=torch.float64)
    return logits_BTV.double().exp() / (-noise_BTV.log()) ** temperature
