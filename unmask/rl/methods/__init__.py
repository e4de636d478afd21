"""Reinforcement-learning methods: what views hide, and the loss of their log-probabilities. docs/rl.md shows
how to add one."""

from unmask.generation.rollout import Rollout
from unmask.rl.methods import coupled, diffu_grpo, sequence, spg, trajectory  # each registers its methods
from unmask.rl.methods.base import (
    METHODS,
    Loss,
    LossInputs,
    Method,
    PolicyGradientMethod,
    TokenMethod,
    get_method,
    register,
    weighted_sum,
)

__all__ = [
    "METHODS",
    "Loss",
    "LossInputs",
    "Method",
    "PolicyGradientMethod",
    "Rollout",
    "TokenMethod",
    "coupled",
    "diffu_grpo",
    "get_method",
    "register",
    "sequence",
    "spg",
    "trajectory",
    "weighted_sum",
]
