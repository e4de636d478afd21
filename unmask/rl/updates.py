"""Updates: the views planned for rollouts, and the log-probabilities that a step reads.

Shapes: B completions, M views, T positions of the canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unmask.diffusion.views import Views
from unmask.errors import TrainingError
from unmask.generation.rollout import Rollout


@dataclass
class Update:
    """A micro-batch of completions with the views and log-probabilities of one inner iteration.

    Attributes:
        rollout: the completions.
        views: the views of this iteration.
        advantage_BT: the advantage of each completion [B, 1] or of each token [B, T] (`token_advantages`).
        loss_mask_BT: the tokens that are trained on.
        old_BMT: log-probabilities under the policy that sampled; None: the weights have not changed since.
        reference_BMT: log-probabilities under the reference; None: there is none.
    """

    rollout: Rollout
    views: Views
    advantage_BT: Tensor
    loss_mask_BT: Tensor
    old_BMT: Tensor | None = None
    reference_BMT: Tensor | None = None

    def select_rows(self, rows: slice, views: slice = slice(None)) -> Update:
        """These completions, with these of their views."""
        old_BMT, reference_BMT = (
            None if each is None else each[rows, views] for each in (self.old_BMT, self.reference_BMT)
        )
        return Update(
            self.rollout.select(rows),
            self.views.select(rows, views),
            self.advantage_BT[rows],
            self.loss_mask_BT[rows],
            old_BMT,
            reference_BMT,
        )


def learnable(rollout: Rollout, views: Views) -> Tensor:
    """The tokens [B, T] that a loss is about: of the completion, and targets after its end."""
    return rollout.completion_BT | views.target_BMT.any(1)


def plan_views(plan: Callable[[Rollout], Views], rollout: Rollout, after_eos: str) -> Views:
    """The views that a plan makes. With `after_eos` "noise" they noise what comes after the end like the
    completion, without making it a target. (With "train" the rollout is `whole` already.)"""
    if after_eos != "noise":
        return plan(rollout)
    views, completion_B1T = plan(rollout.whole()), rollout.completion_BT[:, None]
    return replace(
        views, target_BMT=views.target_BMT & completion_B1T, weight_BMT=views.weight_BMT * completion_B1T
    )


def check_views(views: Views, rollout: Rollout, where: str) -> None:
    """Refuse views of a wrong type, shape or dtype, and views whose targets are visible or outside the
    completion's canvas.

    Raises:
        TrainingError: the views are refused; names `where` they were planned.
    """
    batch, length = rollout.ids_BT.shape
    remedy = (
        "Return Views of hidden tokens, targets (boolean) and weights (floating), [batch, views, tokens]; "
        "`weighted_views` makes them"
    )
    if not isinstance(views, Views):
        raise TrainingError(f"returned {type(views).__name__}, not Views", where=where, remedy=remedy)
    tensors = views.tensors.values()
    dtypes_fit = (
        views.hidden_BMT.dtype == views.target_BMT.dtype == torch.bool
        and views.weight_BMT.is_floating_point()
    )
    shapes = [tuple(part.shape) for part in tensors]
    count = shapes[0][1] if len(shapes[0]) == 3 else 0
    if not dtypes_fit or count == 0 or {*shapes} != {(batch, count, length)}:
        found = ", ".join(f"{part.dtype} {list(part.shape)}" for part in tensors)
        raise TrainingError(
            f"returned tensors of {found} for {batch} rows of {length} tokens", where=where, remedy=remedy
        )
    # which tokens are random, the model does not see
    visible = (views.target_BMT & ~views.hidden_BMT).any() & (views.replaced is None)
    outside = (views.target_BMT & ~(rollout.completion_BT | rollout.beyond_BT)[:, None]).any()
    any_visible, any_outside = torch.stack([visible, outside]).tolist()  # the host waits once
    if any_visible:
        raise TrainingError("a target is not hidden", where=where, remedy="Hide every target")
    if any_outside:
        raise TrainingError(
            "a target is outside the completion", where=where, remedy="Choose targets only from completion_BT"
        )
