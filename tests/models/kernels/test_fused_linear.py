"""Liger's fused linear cross-entropy: when it is chosen, and that the log-probabilities and gradients are
those of the chunks."""

from __future__ import annotations

import importlib.metadata
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.helpers import needs_cuda, needs_gpu
from tests.models.configurations import VOCABULARY, tiny_lm
from tests.models.hooks.test_head import CHUNK, CLOSE, asked, assert_same, scored
from unmask.models.hooks import head
from unmask.models.kernels import fused_linear

HIDDEN = SimpleNamespace(dtype=torch.float32, is_cuda=True, numel=lambda: fused_linear.LEAST_ROWS * 8)


@pytest.fixture(autouse=True)
def fresh():
    fused_linear.installed.cache_clear()
    yield
    fused_linear.installed.cache_clear()


def version_is(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_linear, "version", lambda name: {"liger-kernel": number}[name])


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_it_is_chosen_on_a_gpu_where_a_version_is_installed_whose_gradients_are_right(monkeypatch):
    linear = nn.Linear(4, 8)
    for number, right in (
        ("0.8.1", False),
        ("0.8.5", True),
        ("0.8.5rc1", True),
        ("0.8.5.dev20261027042432", True),
        ("0.10.0", True),
    ):
        version_is(number, monkeypatch)
        fused_linear.installed.cache_clear()
        assert fused_linear.usable(linear, HIDDEN) == right, number
        assert not fused_linear.usable(linear, torch.zeros(2, 4))  # on a CPU
    monkeypatch.setattr(fused_linear, "version", absent)
    fused_linear.installed.cache_clear()
    assert not fused_linear.usable(linear, HIDDEN)


def test_it_is_not_chosen_where_it_would_compute_something_else(monkeypatch):
    version_is("0.8.5", monkeypatch)
    assert fused_linear.usable(nn.Linear(4, 8), HIDDEN)

    class Adapted(nn.Linear):
        pass

    replaced = nn.Linear(4, 8)
    replaced.forward = lambda hidden: hidden  # type: ignore[method-assign]
    assert not fused_linear.usable(Adapted(4, 8), HIDDEN) and not fused_linear.usable(replaced, HIDDEN)
    assert not fused_linear.usable(
        nn.Linear(4, 8), SimpleNamespace(**vars(HIDDEN) | {"dtype": torch.float64})
    )
    assert not fused_linear.usable(nn.Linear(4, 9), HIDDEN)  # chunks of too few rows


class Definition:
    """The kernel's definition, where its call has the kernel's arguments."""

    def __init__(self) -> None:
        self.calls = 0

    def apply(
        self, hidden_ND: Any, weight_VD: Any, target_N: Any, bias_V: Any, *settings: Any
    ) -> tuple[torch.Tensor, None, None, None]:
        assert settings == (None, -100, 0.0, 0.0, "none", None, False, torch.float32)
        self.calls += 1
        return (
            F.cross_entropy(hidden_ND @ weight_VD.t() + bias_V, target_N, reduction="none"),
            None,
            None,
            None,
        )


@pytest.fixture
def defined(monkeypatch) -> Definition:
    """The kernel is chosen for every linear layer, and computed from its definition; logits are otherwise in
    chunks."""
    kernel = Definition()
    modules = SimpleNamespace(LigerFusedLinearCrossEntropyFunction=kernel)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_cross_entropy", modules)
    monkeypatch.setattr(fused_linear, "usable", lambda head, _: type(head) is nn.Linear)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))
    return kernel


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_its_log_probabilities_and_gradients_are_those_of_the_chunks(name, defined, monkeypatch):
    lm = tiny_lm(name, "bidirectional")
    fused = scored(lm)
    assert defined.calls == 1
    monkeypatch.setattr(fused_linear, "usable", lambda *_: False)
    assert_same(scored(lm), fused, **CLOSE)
    assert defined.calls == 1


def test_forbidden_tokens_have_no_probability(defined):
    lm = tiny_lm("llama", "bidirectional")
    inputs, target = asked(lm)
    assert (
        lm.log_probs(inputs, torch.full_like(target, lm.mask_token_id)) == -torch.inf
    ).all() and defined.calls == 1


@pytest.mark.parametrize(
    ("name", "more"), [("llama", {"temperature": 0.6}), ("llama", {"targets": 3}), ("gemma2", {})]
)
def test_other_losses_and_heads_use_the_chunks(name, more, defined):
    """A temperature, several targets of a row, a soft cap after the head."""
    scored(tiny_lm(name, "bidirectional"), **more)
    assert defined.calls == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@needs_cuda
@needs_gpu[0]
def test_on_a_gpu_the_kernel_is_its_definition(dtype):
    pytest.importorskip("liger_kernel")
    torch.manual_seed(0)
    linear = nn.Linear(64, 100, bias=False, device="cuda", dtype=dtype)
    hidden_ND = torch.randn(900, 64, device="cuda", dtype=dtype, requires_grad=True)
    target_N, weight_N = torch.randint(99, (900,), device="cuda"), torch.rand(900, device="cuda")
    assert fused_linear.usable(linear, hidden_ND)
    found = []
    for fused in (True, False):
        log_prob_N = (
            fused_linear.log_probs(linear, hidden_ND, target_N, (99,))
            if fused
            else defined_log_probs(linear, hidden_ND, target_N)
        )
        found.append(
            [log_prob_N, *torch.autograd.grad((weight_N * log_prob_N).sum(), [hidden_ND, linear.weight])]
        )
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.float(), other.float(), **close)


def defined_log_probs(linear: nn.Linear, hidden_ND: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    logits_NV = linear(hidden_ND).float()
    logits_NV[:, 99] = -torch.inf
    return head.token_log_probs(logits_NV, target_N)
