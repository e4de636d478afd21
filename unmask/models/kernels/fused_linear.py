"""Liger's fused linear cross-entropy on a GPU (Hsu et al. 2024, if `liger-kernel` is installed):
log-probabilities from hidden states.

The kernel computes loss and gradient in place, in chunks of logits that are no larger than the hidden states.

Shapes: N rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

MIN_VERSION = (0, 8, 5)
"""Up to 0.8.1 the gradients are wrong where tokens have different weights in the loss. This version was
compared with torch."""
LEAST_ROWS = 512
"""Rows of a chunk of the kernel (N * D / V) below which its products do not fill a GPU, and it is slower than
larger chunks without it."""


@functools.cache
def installed() -> bool:
    """Whether a version is installed that gives each token its own gradient."""
    try:
        return Version(version("liger-kernel")).release >= MIN_VERSION
    except PackageNotFoundError:
        return False


def usable(head: nn.Module, hidden_ND: Tensor) -> bool:
    """Whether the kernel computes what this head does with these hidden states, and faster: on a GPU, a
    linear layer and nothing more."""
    if torch.compiler.is_compiling() or not hidden_ND.is_cuda or hidden_ND.dtype == torch.float64:
        return False
    if not isinstance(head, nn.Linear) or hidden_ND.numel() < LEAST_ROWS * head.out_features:
        return False
    return (
        type(head) is nn.Linear
        and "forward" not in vars(head)
        and type(head.weight) is nn.Parameter
        and installed()
    )


def log_probs(head: Any, hidden_ND: Tensor, target_N: Tensor, forbidden: tuple[int, ...]) -> Tensor:
    """log softmax(logits) [N] of the targets, in nats, float32. The forbidden tokens have no probability."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
    forbidden_V = torch.zeros(len(head.weight), dtype=torch.bool, device=hidden_ND.device)
    for token in forbidden:  # one at a time: a GPU waits for a list
        forbidden_V[token].fill_(True)
    bias_V = (
        forbidden_V.new_zeros(len(head.weight), dtype=dtype) if head.bias is None else head.bias.to(dtype)
    )
    bias_V = bias_V.masked_fill(forbidden_V, -torch.inf)
    no_class_weights, ignored, z_loss, smoothing, soft_cap, accumulated = (
        None,
        -100,
        0.0,
        0.0,
        None,
        torch.float32,
    )
    loss_N, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        *(
            hidden_ND,
            head.weight,
            target_N,
            bias_V,
            no_class_weights,
            ignored,
            z_loss,
            smoothing,
            "none",
            soft_cap,
            False,
            accumulated,
        )
    )
    return -loss_N
