"""No loss of any verb holds more logits than a chunk: neither in its forward pass, nor for its backward pass,
nor within it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, low_ids, make, settings
from unmask.convert.config import ConvertConfig
from unmask.convert.on_policy import complete
from unmask.convert.trainer import ConvertTrainer
from unmask.models.hooks import head
from unmask.rl.methods import METHODS
from unmask.rl.trainer import GRPOTrainer

VOCABULARY, WIDTH, CHUNK = 1009, 32, 3
"""A prime: a number of elements that it divides belongs to logits, or to a table of the model, whose width is
no number of rows here."""
DISTILLED = {"attention": "block_causal", "block_size": 4, "logit_shift": True, "causal_context": True}
DISTILLED |= {"distillation": 1.0, "alignment": 0.1, "stages": [{"lm_loss": 0.5}]}
ON_POLICY = {"states": "sampler", "distillation": 1.0, "max_new_tokens": 6, "stages": [{}]}
BIDIRECTIONAL, BLOCKS = ("bidirectional", None), ("block_causal", 4)
CASES: dict[str, tuple[str, tuple[str, int | None], dict[str, Any]]] = {
    "pretrain": ("pretrain", ("causal", None), {}),
    "convert": ("convert", ("causal", None), {"attention": "bidirectional", "stages": [{}]}),
    "convert, distilled": ("convert", ("causal", None), DISTILLED),
    "convert, on-policy": ("convert", ("causal", None), {"attention": "block_causal"} | ON_POLICY),
    "sft": ("sft", BIDIRECTIONAL, {"views": 2}),
    "sft, blocks": ("sft", BLOCKS, {}),
    "sft, quality head": ("sft", BIDIRECTIONAL, {"quality_head": "alone"}),
    "sft, blocks and a quality head": ("sft", BLOCKS, {"quality_head": "joint"}),
    "sft, gaps": ("sft", BIDIRECTIONAL, {"max_gap": 3}),
    "dpo": ("dpo", BIDIRECTIONAL, {}),
    "dpo, frozen reference": ("dpo", BIDIRECTIONAL, {"reference": "frozen"}),
    "dpo, blocks": ("dpo", BLOCKS, {}),
    "kto": ("kto", BIDIRECTIONAL, {}),
    "grpo, causal": ("grpo", ("causal", None), {"beta": 0.04, "kl_to": "reference"}),
}
for NAME, METHOD in METHODS.items():
    USES_KL = {"beta": 0.04, "kl_to": "reference"} if hasattr(METHOD, "beta") else {}
    CASES[f"grpo, {NAME}"] = (
        "grpo",
        BIDIRECTIONAL,
        {"method": NAME, "epsilon": getattr(METHOD, "epsilon", None), **USES_KL},
    )


class Watch(TorchDispatchMode):
    """The most rows [rows, vocabulary] of a tensor that an operation inside made, those of backward passes
    too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.numel() % VOCABULARY == 0
                and tensor.numel() // VOCABULARY != WIDTH
            ):
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


def unwatched(sample: Callable[..., Any]) -> Callable[..., Any]:
    def sampled(*arguments: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return sample(*arguments, **named)

    return sampled


def rows_held(verb: str, pattern: tuple[str, int | None], folder: Path, more: dict[str, Any]) -> int:
    """The most rows of logits that exist at once in a training step. Sampling is no part of a loss."""
    lm = llama_lm(*pattern, vocab_size=VOCABULARY)
    more = {"max_steps": 1} | more
    if verb == "convert":
        args = ConvertConfig(**settings(folder, max_length=32, packing=False, **more))
        trainer: Any = ConvertTrainer(
            lm, args, train_dataset=[row | {"prompt": row["text"]} for row in TEXTS]
        )
    else:
        trainer = make(verb, folder, lm, **({"reward": low_ids} if verb == "grpo" else {}), **more)
    if isinstance(trainer, GRPOTrainer):
        trainer.sample = unwatched(trainer.sample)  # type: ignore[method-assign]
    with mock.patch("unmask.convert.trainer.complete", unwatched(complete)), Watch() as watch:
        trainer.train()
    return watch.rows


QUICK = (
    "pretrain",
    "convert, distilled",
    "convert, on-policy",
    "sft",
    "sft, blocks and a quality head",
    "dpo",
    "grpo, diffu-grpo",
)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_step_never_holds_more_logits_than_a_chunk(case, tmp_path, monkeypatch):
    verb, pattern, more = CASES[case]
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))
    assert rows_held(verb, pattern, tmp_path, more) == CHUNK


def test_with_a_chunk_large_enough_all_are_held(tmp_path):
    """So the watch sees them."""
    assert rows_held("sft", BIDIRECTIONAL, tmp_path, {}) > CHUNK
