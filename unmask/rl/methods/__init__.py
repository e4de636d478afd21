"""Reinforcement-learning methods: what is hidden, and what the scores become. docs/rl.md shows how to add one."""

from __future__ import annotations

from unmask.errors import ConfigError, did_you_mean
from unmask.rl.methods.base import Loss, Method, Rollout, Scores
from unmask.rl.methods.coupled import COUPLED_GRPO
from unmask.rl.methods.diffu_grpo import DIFFU_GRPO, WD1
from unmask.rl.methods.sequence import BGPO, ESPO, GDPO, UNI_GRPO
from unmask.rl.methods.spg import SPG
from unmask.rl.methods.trajectory import AGRPO, CJ_GRPO, DIPO, JUST_GRPO, STEP_MERGE, TRACE_RL

BUILT_IN = [DIFFU_GRPO, UNI_GRPO, COUPLED_GRPO, WD1, SPG, ESPO, GDPO, BGPO, CJ_GRPO, STEP_MERGE, TRACE_RL, DIPO, AGRPO, JUST_GRPO]
METHODS = {method.name: method for method in BUILT_IN}


def register(method: Method) -> Method:
    """Let `GRPOConfig(method=...)` name a method of one's own. One of the same name is replaced."""
    METHODS[method.name] = method
    return method


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}", where="method", remedy=did_you_mean(name, METHODS))
    return METHODS[name]


__all__ = ["METHODS", "Loss", "Method", "Rollout", "Scores", "get_method", "register"]
