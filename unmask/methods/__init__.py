"""Reinforcement-learning methods, one a file. To add one, write its `plan` and list it here."""

from __future__ import annotations

from unmask.errors import ConfigError
from unmask.methods.base import Method, Rollout
from unmask.methods.diffu_grpo import DIFFU_GRPO
from unmask.methods.trajectory import CJ_GRPO

METHODS = {method.name: method for method in (DIFFU_GRPO, CJ_GRPO)}


def get_method(name: str) -> Method:
    """The method of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}", where="method", remedy=f"Use one of {', '.join(METHODS)}")
    return METHODS[name]


__all__ = ["METHODS", "Method", "Rollout", "get_method"]
