"""The plan of DiffusionGemma, compared with models that are built."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode
from transformers import DiffusionGemmaConfig
from typer.testing import CliRunner

from tests.diffusion_gemma import ALPHABET, LAYERS, TEXT, VISION, loaded, save_published
from tests.errors import raises
from tests.helpers import partly_slow
from tests.planning.test_launches import Counter
from unmask.cli import app
from unmask.config.run import ModelConfig
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError, ModelError
from unmask.generation.sampler import generate
from unmask.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion
from unmask.models.load import load, pattern_settings
from unmask.planning.blueprint import ModelSpec, with_layers
from unmask.planning.calibration import Step, build_model
from unmask.planning.cost_model import Workload, matmul_flops, peak_memory, trained_parameters
from unmask.planning.hardware import HardwareRecipe, StepEstimator
from unmask.planning.step_time import DenoisingPass, pass_launches

CANVAS, LENGTH = 16, 40
WIDER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
PUBLISHED: dict[str, Any] = {
    "vocab_size": 262_144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "sliding_window": 1024,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
"""The sizes of google/diffusiongemma-26B-A4B."""


def spec(config: DiffusionGemmaConfig) -> ModelSpec:
    tokenizer = character_tokenizer(ALPHABET)
    return ModelSpec("tiny", config, tokenizer, pattern_settings(config, None, None, None))


@cache
def tiny(vocabulary: int = 64) -> ModelSpec:
    text = TEXT | WIDER | {"vocab_size": vocabulary}
    return spec(DiffusionGemmaConfig(text_config=text, vision_config=VISION, canvas_length=CANVAS))


@cache
def published() -> ModelSpec:
    return spec(DiffusionGemmaConfig(text_config=PUBLISHED))


def workload(model: ModelSpec, lora_rank: int | None = None, **changes: Any) -> Workload:
    return replace(model.workload(None, LENGTH, 1, lora_rank, canvases=1), **changes)


def test_a_row_has_a_canvas_and_its_clean_tokens() -> None:
    work = workload(tiny(), batch=3)
    assert (work.attention, work.noise, work.rows) == ("block_causal", "uniform", 3)
    assert work.row_length == CANVAS + LENGTH and work.predicted == 3 * (CANVAS + LENGTH)
    assert work.forward_only_passes == 1  # the first pass of self-conditioning
    assert f"canvases of {CANVAS}" in work.describe()
    with raises(ConfigError, where="copies"):
        tiny().workload(None, LENGTH, 2, None, canvases=1)
    with raises(ModelError, where="quantization"):
        tiny().workload(None, LENGTH, 1, 4, quantization="4bit")


def test_facts_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    save_published(tmp_path)
    lm, model = load(tmp_path), ModelSpec.read(ModelConfig(path=str(tmp_path)))
    assert isinstance(lm.model, DiffusionGemmaForBlockDiffusion)
    weights = dict(lm.model.named_parameters())
    total = sum(weight.numel() for weight in weights.values())
    idle = sum(
        weight.numel() // (2 if ".experts." in name else 1)  # 2 of 4
        for name, weight in weights.items()
        if ".experts." in name or not weight.requires_grad
    )
    facts = model.facts()
    assert facts["parameters"] == f"{total:,}, {total - idle:,} active"
    assert (facts["noise"], facts["attention block"], facts["mask token"]) == ("uniform", "8", "-")
    assert model.changes() == {}


@partly_slow("rank", [None, 4], 1)
def test_a_step_trains_and_multiplies_what_was_counted(rank: int | None) -> None:
    """The counter of FLOPs leaves out grouped products and, on a CPU, attention."""
    model = tiny(512)
    work = workload(model, rank, batch=2)
    network, step = model.network(work), Step(build_model(model, work), work)
    assert trained_parameters(network, work) == sum(weight.numel() for weight in step.parameters)
    with FlopCounterMode(display=False) as counter:
        step()
    planned = work.rounds * matmul_flops(replace(network, experts=()), work)
    assert planned == pytest.approx(counter.get_total_flops(), rel=0.1)
    layers = build_model(model, workload(model)).model.model.decoder.layers
    assert network.attention_width * 3 == sum(layer.self_attn.q_proj.out_features for layer in layers)
    assert network.key_width * 3 == sum(layer.self_attn.k_proj.out_features for layer in layers)


@partly_slow(
    "vocabulary, rank, checkpointing",
    [(64, None, False), (64, 4, True), (64, None, True), (64, 4, False), (8192, 4, True)],
    1,
)
def test_peak_memory_is_predicted_within_a_tenth(
    vocabulary: int, rank: int | None, checkpointing: bool
) -> None:
    model = tiny(vocabulary)
    work = workload(model, rank, batch=4, checkpointing=checkpointing)
    step = Step(build_model(model, work), work)
    step()
    predicted = peak_memory(model.network(work), work).total
    assert predicted == pytest.approx(step.peak_bytes(), rel=0.1)


def test_more_layers_keep_their_kinds() -> None:
    model = tiny()
    assert model.depths == (3, 6)
    text = with_layers(model.config, 6).text_config
    assert text.layer_types == LAYERS * 2
    assert [text.per_layer_config[layer].head_dim for layer in range(6)] == [16, 16, 32] * 2


@pytest.mark.slow
def test_the_launches_and_reads_of_a_denoising_step_are_predicted(tmp_path: Path) -> None:
    lm = loaded(tmp_path)
    model = spec(lm.config)
    config = SamplerConfig(max_new_tokens=16, confidence_threshold=1e-9, stop_at_eos=False)
    counter = Counter()
    generate(lm, [[5, 6, 7, 8]] * 2, config)  # temperatures are kept
    with counter.counting():
        passes = max(generate(lm, [[5, 6, 7, 8]] * 2, config).forward_passes)
    launches, reads = counter.both
    work = model.workload(None, 24, 1, None, canvases=1)
    one = DenoisingPass(context=24, attention="block_causal", block=8, noise="uniform", conditioned=True)
    cost = model.pass_costs(replace(work, sequence_length=0, canvas=8)).forward
    assert pass_launches(model.network(work), cost, one) == pytest.approx(launches / passes, rel=0.1)
    assert one.reads == pytest.approx(reads / passes, abs=0.3)


def test_the_published_model_has_the_size_of_its_name() -> None:
    """Without the sizes of its vision tower, which add 0.4 billion to those of the default one."""
    total, active = (
        int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", published().facts()["parameters"])
    )
    assert total == pytest.approx(25.8e9, rel=0.02) and active == pytest.approx(3.8e9, rel=0.02)


@pytest.mark.slow
def test_what_of_the_published_model_fits_on_one_h200() -> None:
    recipe = HardwareRecipe.read("h200-141gb", dtype="bfloat16")
    whole, adapters = (
        StepEstimator(published(), published().workload(None, 1024, 1, rank, canvases=1)).estimate(recipe)
        for rank in (None, 16)
    )
    assert not whole.fits and whole.advice
    assert adapters.fits and adapters.workload.batch > 1
    assert adapters.memory.parameters == pytest.approx(51e9, rel=0.01)
    assert adapters.tokens_per_second is not None and adapters.tokens_per_second > 1000


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.:FutureWarning")
def test_inspect_plans_it(tmp_path: Path) -> None:
    save_published(tmp_path)
    words = ["inspect", str(tmp_path), "--hardware", "h200-141gb", "--sequence-length", "32"]
    lora = CliRunner().invoke(app, [*words, "--lora-rank", "4"])
    assert lora.exit_code == 0 and "canvases of 8" in lora.output and "convert" not in lora.output
    refused = CliRunner().invoke(app, [*words, "--lora-rank", "4", "--quantization", "4bit"])
    assert refused.exit_code != 0 and "quantization" in refused.output
