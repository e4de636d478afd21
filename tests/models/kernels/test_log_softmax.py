"""Log-probabilities at targets and their gradients are those of a softmax, in plain operations and in
compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import needs_cuda, partly_nightly
from unmask.models.hooks.head import token_log_probs
from unmask.models.kernels import log_softmax

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def test_log_probabilities_are_those_of_a_softmax():
    logits, target = (
        torch.tensor([[1.0, 3.0, -torch.inf], [0.0, 0.0, 0.0]], dtype=torch.float64),
        torch.tensor([1, 2]),
    )
    torch.testing.assert_close(
        token_log_probs(logits, target), logits.log_softmax(-1)[[0, 1], target], **EXACT
    )
    assert token_log_probs(logits, torch.tensor([2, 2]))[0] == -torch.inf


def test_their_gradients_are_those_of_a_softmax():
    logits, target = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randint(6, (5, 3))
    scale, forbidden = torch.randn(5, 3, dtype=torch.float64), torch.arange(7) == 6
    masked = logits.masked_fill(forbidden, -torch.inf)
    [expected] = torch.autograd.grad(
        ((masked / 0.7).log_softmax(1).gather(1, target) * scale).sum(), logits, retain_graph=True
    )
    [found] = torch.autograd.grad((token_log_probs(masked, target, 0.7) * scale).sum(), logits)
    torch.testing.assert_close(found, expected, **EXACT)


def rows(
    dtype: torch.dtype, targets: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, of which a token is forbidden, targets, and the gradient of their log-probabilities."""
    logits_NV = torch.randn(6, 50, device=device).mul_(4).to(dtype)
    logits_NV[:, 7] = -torch.inf
    return (
        logits_NV.requires_grad_(),
        torch.randint(8, 50, (6, targets), device=device),
        torch.randn(6, targets, device=device),
    )


def found(
    logits_NV: torch.Tensor, target_NJ: torch.Tensor, grad_NJ: torch.Tensor, temperature: float
) -> list[torch.Tensor]:
    scores_NJ = token_log_probs(logits_NV, target_NJ, temperature)
    return [scores_NJ, *torch.autograd.grad(scores_NJ, logits_NV, grad_NJ)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("targets", [1, 3])
def test_logits_in_16_bits_count_as_float32(dtype, targets, temperature):
    logits_NV, target_NJ, grad_NJ = rows(dtype, targets)
    scores_NJ, grad_NV = found(logits_NV, target_NJ, grad_NJ, temperature)
    exact_NJ, exact_NV = found(logits_NV.detach().float().requires_grad_(), target_NJ, grad_NJ, temperature)
    assert scores_NJ.dtype == torch.float32 and torch.equal(scores_NJ, exact_NJ)
    assert grad_NV.dtype == dtype and torch.equal(grad_NV, exact_NV.to(dtype)) and (grad_NV[:, 7] == 0).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor uses it
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@partly_nightly("temperature", [0.7, 1.0], 2)
def test_compiled_kernels_compute_the_same(dtype, temperature, monkeypatch):
    logits_NV, target_N1, grad_N1 = rows(dtype, 1)
    expected, compiled, compile_one = (
        found(logits_NV, target_N1, grad_N1, temperature),
        [],
        log_softmax.compiled_kernel,
    )
    monkeypatch.setattr(log_softmax, "usable", lambda logits_NV: True)
    monkeypatch.setattr(
        log_softmax, "compiled_kernel", lambda function: compiled.append(function) or compile_one(function)
    )
    torch.testing.assert_close(found(logits_NV, target_N1, grad_N1, temperature), expected)
    assert compiled == [log_softmax.norm, log_softmax.gradient_at_one]
    assert all(hasattr(compile_one(function), "get_compiler_config") for function in compiled)


@pytest.fixture
def asked_again():
    log_softmax.can_compile.cache_clear()
    yield
    log_softmax.can_compile.cache_clear()


@pytest.mark.parametrize("missing", ["", "triton", "gcc", "Python.h"])
def test_without_a_compiler_plain_operations_are_used(missing, monkeypatch, tmp_path, asked_again):
    (tmp_path / "Python.h").write_text("")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(log_softmax, "has_triton", lambda: missing != "triton")
    monkeypatch.setattr(
        log_softmax.shutil, "which", lambda name: name if name == "gcc" and missing != "gcc" else None
    )
    monkeypatch.setattr(
        log_softmax.sysconfig,
        "get_path",
        lambda name: tmp_path / ("nowhere" if missing == "Python.h" else ""),
    )
    assert log_softmax.usable(SimpleNamespace(is_cuda=True)) == (not missing)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("targets", [1, 3])
def test_a_gpu_computes_the_same(targets):
    given = rows(torch.bfloat16, targets)
    there = [each.detach().to("cuda") for each in given]
    for here, on_gpu in zip(
        found(*given, 0.7), found(there[0].requires_grad_(), *there[1:], 0.7), strict=True
    ):
        torch.testing.assert_close(on_gpu.cpu(), here)
