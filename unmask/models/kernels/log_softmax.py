"""Log-probabilities at target tokens, from logits of any precision: the gradient takes one copy of the
logits, where autograd takes three.

On a GPU two compiled kernels read the logits as they are; of plain operations each reads and writes all of
them in float32.

Shapes: N rows, V vocabulary, J targets of a row.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._triton import has_triton


def at_least_float32(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class LogSoftmaxAt(torch.autograd.Function):
    """log softmax(logits / temperature) [N, J] at the targets, at least in float32."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_NJ: Tensor, temperature: float) -> Tensor:
        # one kernel with and without gradient
        norm_N1 = (compiled_kernel(norm) if usable(logits_NV) else norm)(logits_NV.detach(), temperature)
        ctx.save_for_backward(logits_NV, target_NJ, norm_N1)
        ctx.temperature = temperature
        return scaled(logits_NV.gather(1, target_NJ), temperature) - norm_N1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NJ: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, target_NJ, norm_N1 = ctx.saved_tensors
        fused = usable(logits_NV) and target_NJ.shape[1] == 1
        gradient = compiled_kernel(gradient_at_one) if fused else gradient_at_many
        return gradient(logits_NV, target_NJ, norm_N1, grad_NJ, ctx.temperature), None, None


def usable(logits_NV: Tensor) -> bool:
    """Whether the compiled kernels are used: on a GPU, where they can be made. A model that is compiled
    contains them already."""
    return logits_NV.is_cuda and not torch.compiler.is_compiling() and can_compile()


@cache
def can_compile() -> bool:
    """Whether Triton is there, and the C compiler and header that it needs; images of torch for running alone
    have none."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return has_triton() and bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


@cache
def compiled_kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of a function. It adds in the same order for every number of rows, and in every process."""
    return torch.compile(
        function, dynamic=True, options={"split_reductions": False, "dynamic_scale_rblock": False}
    )


def scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    logits_NV = at_least_float32(logits_NV)
    return logits_NV if temperature == 1.0 else logits_NV / temperature


def norm(logits_NV: Tensor, temperature: float) -> Tensor:
    """The log of the sum of a row's exponentials [N, 1]."""
    return scaled(logits_NV, temperature).logsumexp(1, keepdim=True)


def gradient_at_many(
    logits_NV: Tensor, target_NJ: Tensor, norm_N1: Tensor, grad_NJ: Tensor, temperature: float
) -> Tensor:
    """The gradient [N, V] of the logits."""
    probability_NV = (scaled(logits_NV, temperature) - norm_N1).exp_()
    grad_NV = probability_NV.mul_(-grad_NJ.sum(1, keepdim=True)).scatter_add_(1, target_NJ, grad_NJ)
    return (grad_NV if temperature == 1.0 else grad_NV.div_(temperature)).to(logits_NV.dtype)


def gradient_at_one(
    logits_NV: Tensor, target_N1: Tensor, norm_N1: Tensor, grad_N1: Tensor, temperature: float
) -> Tensor:
    """The same for one target, elementwise, so that a compiler makes one kernel of it."""
    probability_NV = (scaled(logits_NV, temperature) - norm_N1).exp()
    is_target_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == target_N1
    return (torch.where(is_target_NV, 1 - probability_NV, -probability_NV) * (grad_N1 / temperature)).to(
        logits_NV.dtype
    )
