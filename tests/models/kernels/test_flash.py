"""FlashAttention equals the attention function under its mask, if no token is invisible within its
document."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.tiny import llama_lm
from unmask.models.attention import Layout, make_mask, unmask_attention
from unmask.models.kernels import flash

ROWS = {
    "whole": [[1] * 30] * 2,
    "padded": [[0] * 5 + [1] * 25, [1] * 28 + [0] * 2, [1] * 30],
    "packed": [[1] * 10 + [2] * 15 + [3] * 5, [1] * 2 + [2] * 25 + [0] * 3],
    "one document after another": [[1] * 30, [1] * 30, [0] * 29 + [1]],
}


def by_definition(
    query: Any, key: Any, value: Any, bounds: Any, _: Any, longest: int, __: int, **options: Any
) -> torch.Tensor:
    """`varlen_attn` by its definition."""
    assert bounds.dtype == torch.int32 and longest == int(bounds.diff().max()) and bounds[-1] == len(query)
    assert options["window_size"] in ((-1, -1), (-1, 0)) and options["enable_gqa"] == (
        query.shape[1] != key.shape[1]
    )
    rows = [
        [part[start:end].transpose(0, 1) for part in (query, key, value)]
        for start, end in pairwise(bounds.tolist())
    ]
    settings = {
        "scale": options["scale"],
        "is_causal": options["window_size"] == (-1, 0),
        "enable_gqa": options["enable_gqa"],
    }
    return torch.cat([F.scaled_dot_product_attention(*row, **settings).transpose(0, 1) for row in rows])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use the definition in place of the kernel, which needs a GPU; a list of the number of tokens of each
    call."""
    calls: list[int] = []
    monkeypatch.setattr(
        flash,
        "varlen_attn",
        lambda query, *rest, **more: (calls.append(len(query)), by_definition(query, *rest, **more))[1],
    )
    monkeypatch.setattr(flash, "usable", lambda query: True)
    return calls


def compare(
    rows: str, pattern: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> None:
    """Compare outputs and gradients, except at padding, with those of the same function under the mask
    only."""
    document_BT = torch.tensor(ROWS[rows], device=device)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(len(document_BT), heads, 30, 16, generator=generator).to(device, dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    layout = Layout.of(document_BT)
    plain = make_mask(pattern, None, layout, layout)
    asked = replace(plain, documents=flash.documents(document_BT, causal=pattern == "causal"))
    real_BT = document_BT > 0
    results = []
    for mask in (plain, asked):
        out = unmask_attention(torch.nn.Identity(), *inputs, None, unmask_mask=mask, **options)[0][real_BT]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 2e-2, "atol": 5e-2}
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.1}])
@pytest.mark.parametrize("pattern", ["causal", "bidirectional"])
@pytest.mark.parametrize("rows", ROWS)
def test_attention_within_documents_is_that_under_the_mask(rows, pattern, options, kernel):
    compare(rows, pattern, **options)
    assert kernel == [sum(token > 0 for row in ROWS[rows] for token in row)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pattern", ["causal", "bidirectional"])
@pytest.mark.parametrize("rows", ROWS)
def test_the_kernel_gives_the_same(rows, pattern):
    compare(rows, pattern, "cuda", torch.bfloat16)


def test_soft_caps_windows_and_dropout_are_left_to_others(kernel):
    for options in ({"softcap": 1.5}, {"dropout": 0.1}, {"sliding_window": 3}):
        layout = Layout.of(torch.ones(1, 30))
        mask = replace(
            make_mask("causal", None, layout, layout),
            documents=flash.documents(layout.document_BT, causal=True),
        )
        unmask_attention(
            torch.nn.Identity(),
            *(torch.randn(1, 2, 30, 16) for _ in range(3)),
            None,
            unmask_mask=mask,
            **options,
        )
    assert not kernel


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_a_model_that_asks_for_it_gives_the_same_logits(attention, kernel):
    lm = llama_lm(attention)
    ids = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    for mask in (None, padding):
        expected = lm.logits(ids, mask)
        lm.flash_attention = True
        found = lm.logits(ids, mask)
        lm.flash_attention = False
        real = torch.ones(2, 9, dtype=torch.bool) if mask is None else mask.bool()
        real[:, 0] &= attention == "bidirectional"  # a shifted model predicts no first token
        real[1, 3] &= attention == "bidirectional"
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
    assert kernel == [18, 18, 15, 15]  # in both layers


def test_what_is_autocast_is_computed_in_16_bits(kernel, monkeypatch):
    lm, ids, kinds = llama_lm(), torch.tensor([[4, 5, 6, 7]]), []
    definition = flash.varlen_attn

    def seen(*parts: Any, **options: Any) -> torch.Tensor:
        kinds.extend(part.dtype for part in parts[:3])
        return definition(*parts, **options)

    monkeypatch.setattr(flash, "varlen_attn", seen)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = lm.logits(ids)
        lm.flash_attention = True
        torch.testing.assert_close(lm.logits(ids), expected, rtol=0, atol=1e-2)
    assert kinds == [torch.bfloat16] * 6


def test_it_serves_16_bits_on_gpus_alone():
    assert not flash.usable(torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16))
    if torch.cuda.is_available():
        query = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16, device="cuda")
        assert flash.usable(query) and not flash.usable(query.float()) and not flash.usable(query[..., :4])
        with torch.autocast("cuda", torch.bfloat16):
            assert flash.usable(query.float())
