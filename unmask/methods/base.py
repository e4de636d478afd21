"""What a reinforcement-learning method is: which views score a rollout, and how their scores become a loss.

Shapes: B completions, V views, T positions of the canvas (prompt, completion and what is hidden behind its end).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unmask.diffusion.views import Draw, Views


@dataclass(frozen=True)
class Rollout:
    """Completions as they were sampled.

    Attributes:
        ids_BT: the canvas: prompt, completion, and the mask token where nothing was revealed.
        documents_BT: 1 on the canvas, 0 on padding.
        prompt_BT: True on the prompt.
        completion_BT: True on the completion, up to and including its first EOS.
        steps_BT: the denoising step at which a position was revealed; -1 for the prompt, padding and what stayed hidden.
    """

    ids_BT: Tensor
    documents_BT: Tensor
    prompt_BT: Tensor
    completion_BT: Tensor
    steps_BT: Tensor

    @property
    def beyond_BT(self) -> Tensor:  # noqa: N802
        """The canvas behind the end of the completion."""
        return (self.documents_BT > 0) & ~self.prompt_BT & ~self.completion_BT


@dataclass(frozen=True)
class Method:
    """A member of the GRPO family.

    Attributes:
        name: as in `GRPOConfig(method=...)`.
        plan: (rollout, source of randomness, config) -> views. Made once per rollout and inner iteration; the same views score
            the policy, the old policy and the reference. The log-probability of a token is the weighted sum over its views.
    """

    name: str
    plan: Callable[[Rollout, Draw, Any], Views]
