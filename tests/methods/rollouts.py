"""Rollouts of tiny models, for the tests of methods."""

from __future__ import annotations

import torch

from tests.generation.conftest import tiny
from unmask.config import SamplerConfig
from unmask.generation import sampler
from unmask.methods import Rollout
from unmask.training.rollouts import make_rollout

PROMPTS = [[4, 5, 6], [7], [4, 5, 6], [9, 8, 7, 6, 5], [7, 4], [6, 6]]


def stopping(attention="causal", block_size=None, logit_shift=None):
    """A model that often ends early: part of its canvases is never denoised."""
    return tiny("phi", attention, block_size, logit_shift, eos_bias=1.0)


def rollout_of(lm, **settings):
    """A generation at temperature 1 and the rollout made of it; settings are those of the sampler."""
    defaults = {"max_new_tokens": 8, "temperature": 1.0, "trace": True}
    generation = sampler.generate(lm, PROMPTS, SamplerConfig(**(defaults | settings)))
    return generation, make_rollout(lm, generation, slice(None))


def one(rollout: Rollout, row: int) -> Rollout:
    """A row of a rollout by itself, without its padding."""
    own_T = rollout.documents_BT[row] > 0
    return Rollout(**{name: tensor_BT[row][None, own_T] for name, tensor_BT in vars(rollout).items()})


def keys(rollout: Rollout) -> torch.Tensor:
    """A key for each completion, by its place in the batch."""
    return torch.arange(len(rollout.ids_BT))
