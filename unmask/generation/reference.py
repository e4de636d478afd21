"""The slow truth: one sequence at a time, the whole model at every step, no cache. The fast sampler must give the same tokens.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unmask.config import SamplerConfig
from unmask.generation.policies import decide
from unmask.generation.trace import Generation, Request, Trace, make_generation, make_requests
from unmask.models.diffusion_lm import DiffusionLM, evaluating


@torch.no_grad()
def generate(lm: DiffusionLM, prompts: Sequence[Any], config: SamplerConfig | None = None, keys: Sequence[int] | None = None) -> Generation:
    """Complete prompts one by one. Arguments, errors and tokens are those of `unmask.generate`."""
    config = config or SamplerConfig()
    requests = make_requests(lm, prompts, config, keys)
    with evaluating(lm):
        traces = [_denoise(lm, request, config) for request in requests]
    return make_generation(lm, requests, traces, config)


def _denoise(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Trace:
    start = len(request.prompt)
    trace = Trace.hidden(request.length - start, lm.mask_token_id)
    ids_T = torch.tensor(request.prompt + trace.canvas, device=lm.device)
    key = torch.tensor([request.key], device=lm.device)
    for (first, stop), counts in zip(request.blocks, request.counts, strict=True):
        visible = request.length if lm.attention == "bidirectional" else stop
        for count in counts:
            step = torch.tensor([trace.forward_passes], device=lm.device)
            hidden_1T = torch.tensor([[False] * start + [step < 0 for step in trace.steps]], device=lm.device)
            logits_TV = lm.logits(ids_T[None, :visible], hidden_BT=hidden_1T[:, :visible])[0]
            candidates = []
            for position in range(first, stop):
                if trace.steps[position - start] < 0:
                    decision = decide(logits_TV[position][None], config, key, step, torch.tensor([position], device=lm.device))
                    candidates.append((-float(decision.priority_N), position, int(decision.token_N), float(decision.log_prob_N)))
            for _, position, token, log_prob in sorted(candidates)[:count]:
                ids_T[position] = trace.canvas[position - start] = token
                trace.steps[position - start], trace.log_probs[position - start] = trace.forward_passes, log_prob
            trace.forward_passes += 1
        if config.stop_at_eos and lm.eos_token_id in trace.canvas[: stop - start]:
            break
    return trace
