"""The bound of DiffusionGemma: each canvas is predicted by transformers' own forward pass, given the clean text
before it."""

from __future__ import annotations

import torch

from tests.diffusion_gemma import CANVAS, loaded, published_model
from tests.helpers import partly_slow
from unmask.diffusion.likelihood import bound_views, elbo
from unmask.diffusion.log_probs import noise_groups, view_log_probs
from unmask.diffusion.mixing import negative_divergence
from unmask.diffusion.views import MaskRNG


@partly_slow("prompt, answer", [(3, CANVAS), (5, 2 * CANVAS), (9, 2 * CANVAS + 3)], 2)
@torch.no_grad()
def test_the_bound_is_that_of_canvases_after_clean_text(prompt, answer, tmp_path):
    lm, model = loaded(tmp_path / "model"), published_model()
    ids_BT = torch.randint(lm.vocab_size, (2, prompt + answer), generator=torch.Generator().manual_seed(0))
    maskable_BT = torch.arange(prompt + answer).expand_as(ids_BT) >= prompt
    draw = MaskRNG(0, torch.arange(2))
    group_BT = noise_groups(lm, maskable_BT, None)
    assert group_BT[0, prompt:].unique().numel() == -(-answer // CANVAS)
    views = bound_views(lm, ids_BT, group_BT, draw, num_views=4, complementary=True)
    assert views.replaced is not None
    found_BMT = view_log_probs(lm, ids_BT, None, views)
    for start in range(prompt, prompt + answer, CANVAS):
        part = slice(start, start + CANVAS)
        for view in range(4):
            seen_BK = views.replaced.ids_BMT[:, view, part]
            logits_BKV = model(input_ids=ids_BT[:, :start], decoder_input_ids=seen_BK).logits
            planes = (plane_BMT[:, view, part].flatten() for plane_BMT in views.replaced)
            [expected_N] = negative_divergence(
                logits_BKV.flatten(0, 1), ids_BT[:, part].flatten(), *planes, (1.0, -1)
            )
            torch.testing.assert_close(found_BMT[:, view, part].flatten(), expected_N, rtol=1e-4, atol=1e-4)
    found = elbo(lm, ids_BT, None, maskable_BT, draw, samples=4)
    assert found.value_B.isfinite().all() and (found.value_B < 0).all()


@torch.no_grad()
def test_padding_and_packing_change_nothing(tmp_path):
    """Canvases begin at the first hidden token of each document."""
    lm, draw = loaded(tmp_path / "model"), MaskRNG(0, torch.arange(1))
    ids_1T = torch.randint(lm.vocab_size, (1, 21), generator=torch.Generator().manual_seed(1))
    maskable_1T = (torch.arange(21) >= 5)[None]
    alone = noise_groups(lm, maskable_1T, None)
    views = bound_views(lm, ids_1T, alone, draw, num_views=2)
    expected_1MT = view_log_probs(lm, ids_1T, None, views)
    before_1T = torch.randint(lm.vocab_size, (1, 11), generator=torch.Generator().manual_seed(2))

    def after(first, plane_BMT):
        return torch.cat([first.expand(*plane_BMT.shape[:-1], -1), plane_BMT], -1)

    hidden_11T = (torch.arange(11) >= 8)[None, None]
    whole = views.of_planes(
        lambda plane_BMT: after(torch.zeros_like(hidden_11T, dtype=plane_BMT.dtype), plane_BMT)
    )
    whole.target_BMT[:, :, :11] = whole.hidden_BMT[:, :, :11] = hidden_11T
    assert whole.replaced is not None
    whole.replaced.ids_BMT[:, :, :11] = before_1T
    document_1T = torch.cat([torch.ones_like(before_1T), torch.full_like(ids_1T, 2)], 1)
    found_1MT = view_log_probs(lm, after(before_1T, ids_1T), document_1T, whole)
    torch.testing.assert_close(found_1MT[:, :, 11:], expected_1MT, rtol=1e-4, atol=1e-4)
