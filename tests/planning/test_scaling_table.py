"""The table of docs/scaling.md: what `inspect` says of three models on 1 to 256 GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.helpers import REPOSITORY
from tests.models.configurations import ALPHABET
from unmask.data.characters import character_tokenizer
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.planning.hardware import HardwareRecipe, StepEstimator

QWEN3 = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "head_dim": 128, "num_key_value_heads": 8}
MODELS = {
    "0.6B (Qwen3)": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
        **QWEN3,
    ),
    "8B (Qwen3)": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
        **QWEN3,
    ),
    "30B-A3B (Qwen3-MoE)": Qwen3MoeConfig(
        **QWEN3 | {"num_key_value_heads": 4},
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
}
GPUS = [1, 8, 16, 64, 256]
SETTINGS = {"attention": "causal", "block_size": None, "logit_shift": True}


def on(gpus: int) -> HardwareRecipe:
    """The recipe for one H100, or that for nodes of eight with this many GPUs."""
    if gpus == 1:
        return HardwareRecipe.read("h100-80gb")
    recipe = HardwareRecipe.read("multi-node")
    return replace(
        recipe, name=f"{gpus} H100", hardware=recipe.hardware.model_copy(update={"nodes": gpus // 8})
    )


def cell(estimator: StepEstimator, gpus: int) -> str:
    """Rows per GPU, seconds of a step, tokens per second; or what is missing."""
    estimate = estimator.estimate(on(gpus))
    if not estimate.fits:
        return f"no: {estimate.advice}"
    return (
        f"{estimate.workload.batch} rows, {estimate.seconds:.2g} s, "
        f"{estimate.tokens_per_second / 1e3:,.0f}k tokens/s, {estimate.bound}"
    )


@pytest.mark.slow
def test_the_table_in_the_docs_is_the_planners() -> None:
    lines = ["| | " + " | ".join(f"{gpus} H100" for gpus in GPUS) + " |", "|---" * (len(GPUS) + 1) + "|"]
    for name, config in MODELS.items():
        estimator = StepEstimator(
            ModelSpec(name, config, character_tokenizer(ALPHABET), SETTINGS), Workload(sequence_length=2048)
        )
        lines.append(f"| {name} | " + " | ".join(cell(estimator, gpus) for gpus in GPUS) + " |")
    table = "\n".join(lines)
    assert table in (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8"), table
