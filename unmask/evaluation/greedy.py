"""Whether a completion is the greedy one, without decoding all of it.

Shapes: T tokens, N hidden tokens of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unmask.config.run import SamplerConfig
from unmask.evaluation.likelihood import causal_inputs
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating


@torch.no_grad()
def is_greedy(lm: DiffusionLM, prompt: Sequence[int], completion: Sequence[int]) -> bool:
    """Whether `generate` writes exactly these tokens after the prompt, with one token a step, the most
    confident first, and a canvas of their number. It stops at the first other token. Arguments are token ids.
    Of a causal model the last one may lie beyond the context."""
    goal = [*prompt, *completion]
    with evaluating(lm):
        if lm.autoregressive:
            ids_1T = torch.tensor([goal], device=lm.device)
            return lm.forward(causal_inputs(lm, ids_1T, len(completion))).argmax(-1).tolist() == list(
                completion
            )
        request = make_requests(lm, [list(prompt)], SamplerConfig(max_new_tokens=len(completion)))[0]
        ids, hidden = list(request.ids), list(request.hidden)
        for start, stop in request.blocks:
            visible = len(goal) if lm.attention == "bidirectional" else stop
            while positions := [position for position in range(start, stop) if hidden[position]]:
                hidden_1T = torch.tensor([hidden[:visible]], device=lm.device)
                rows_1T = torch.zeros_like(hidden_1T)
                rows_1T[0, positions] = True
                logits_NV = lm.logits(
                    torch.tensor([ids[:visible]], device=lm.device), rows_BT=rows_1T, hidden_BT=hidden_1T
                )
                confidence_N, token_N = logits_NV.log_softmax(-1).max(-1)
                best = int(confidence_N.argmax())
                position = positions[best]
                if int(token_N[best]) != goal[position]:
                    return False
                ids[position], hidden[position] = goal[position], False
    return True
