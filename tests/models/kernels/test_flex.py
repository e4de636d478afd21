"""FlexAttention's masks and outputs are those of the attention function."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask, flex_attention

from tests.helpers import last_tokens
from unmask.models.attention import Layout, make_mask, unmask_attention
from unmask.models.kernels import flex

PATTERNS = [
    ("causal", None, None),
    ("causal", None, 3),
    ("block_causal", 4, None),
    ("bidirectional", None, None),
]
ROWS = {
    "whole": [[1] * 150],
    "padded": [[0] * 20 + [1] * 130, [1] * 140 + [0] * 10],
    "packed": [[1] * 70 + [2] * 60 + [3] * 20, [1] * 10 + [2] * 130 + [0] * 10],
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def layout(rows: str, noised_copies: int) -> Layout:
    plain = Layout.of(torch.tensor(ROWS[rows]))
    return plain.with_noised_copies(noised_copies) if noised_copies else plain


def tensors(rows: Layout) -> list[torch.Tensor]:
    """Queries of four heads over keys and values of two."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(len(rows.document_BT), heads, rows.document_BT.shape[1], 16, generator=generator)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize("noised_copies", [0, 1, 2])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("pattern", "block_size", "window"), PATTERNS)
def test_the_rule_and_the_tensor_are_one_mask(pattern, block_size, window, rows, noised_copies):
    keys = layout(rows, noised_copies)
    for queries in (keys, last_tokens(keys, 7)):
        mask = make_mask(pattern, block_size, queries, keys).within(window)
        batch, count = queries.document_BT.shape
        made = create_mask(mask.block_mask.mask_mod, batch, None, count, keys.document_BT.shape[1], "cpu")
        assert torch.equal(made, mask.allowed_B1QK)


def test_tiles_that_nobody_sees_are_skipped():
    packed = Layout.of(torch.arange(1, 9).repeat_interleave(128)[None])
    assert make_mask("bidirectional", None, packed, packed).block_mask.sparsity() == 100 * (1 - 1 / 8)


def compare(
    pattern: str,
    block_size: int | None,
    window: int | None,
    rows: Layout,
    monkeypatch: pytest.MonkeyPatch,
    **options: float,
) -> None:
    """Compare the attention function on FlexAttention with the same on SDPA."""
    keys = Layout(
        *(
            part.to(options.get("device", "cpu"))
            for part in (rows.document_BT, rows.position_BT, rows.copy_BT)
        )
    )
    device = options.pop("device", "cpu")
    inputs = [part.to(device).requires_grad_(device == "cuda") for part in tensors(keys)]
    mask = make_mask(pattern, block_size, keys, keys)
    results = []
    for through_flex in (False, True):
        monkeypatch.setattr(flex, "usable", lambda query, through_flex=through_flex: through_flex)
        results.append(
            unmask_attention(
                torch.nn.Identity(), *inputs, None, unmask_mask=mask, sliding_window=window, **options
            )[0]
        )
    # the GPU multiplies in TF32
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if device == "cpu" else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(*results, **tolerance)
    if device == "cuda":  # on a CPU there is no backward pass
        for one, other in zip(
            *(torch.autograd.grad(out.square().sum(), inputs) for out in results), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.1, "softcap": 1.5}])
@pytest.mark.parametrize(("pattern", "block_size", "window"), PATTERNS)
def test_attention_is_the_same(pattern, block_size, window, options, monkeypatch):
    # the definition, not the kernel: fast on a CPU
    monkeypatch.setattr(flex, "compiled_kernel", lambda: flex_attention)
    compare(pattern, block_size, window, layout("packed", int(pattern != "causal")), monkeypatch, **options)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: for a CPU torch 2.13 writes C++ that does not compile"
)
@pytest.mark.parametrize("options", [{}, {"scaling": 0.1, "softcap": 1.5}])
@pytest.mark.parametrize(("pattern", "block_size", "window"), PATTERNS)
def test_the_compiled_kernel_gives_the_same_with_its_gradients(
    pattern, block_size, window, options, monkeypatch
):
    compare(
        pattern,
        block_size,
        window,
        layout("packed", int(pattern != "causal")),
        monkeypatch,
        device="cuda",
        **options,
    )


def test_it_serves_long_rows_on_gpus_alone():
    long = torch.zeros(1, 1, flex.LEAST_QUERIES, 64)
    assert not flex.usable(long)
    if torch.cuda.is_available():
        assert (
            flex.usable(long.cuda())
            and not flex.usable(long[:, :, 1:].cuda())
            and not flex.usable(long[..., :48].cuda())
        )
