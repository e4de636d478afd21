"""The hardware recipes: valid for every verb, complete, and read as they train."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import replace

import pytest
from transformers import LlamaConfig, PhiConfig

from tests.errors import raises
from tests.helpers import REPOSITORY
from tests.models.configurations import ALPHABET, CONFIGURATIONS
from unmask.cli.run import training_arguments
from unmask.cli.verbs import VERBS
from unmask.config.layers import hardware_recipe_names, read_layers, read_recipe
from unmask.config.run import HardwareConfig, resolve
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError
from unmask.planning import hardware
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import MARGIN, RUNTIME_BYTES, Workload
from unmask.planning.estimates import device_limit, estimate_step, first_change_that_fits, largest_batch
from unmask.planning.hardware import HardwareRecipe, StepEstimator

NAMES = [
    *["cpu", "a100-40gb", "a40-48gb-x3", "a40-48gb-x3-ddp", "a6000-48gb", "a6000-48gb-a4500-20gb"],
    *["h100-80gb", "h200-141gb", "multi-node", "rtx3090-24gb", "rtx4080-16gb"],
]


SETTINGS = {"attention": "causal", "block_size": None, "logit_shift": True}
PHI = PhiConfig(
    vocab_size=51_200,
    max_position_embeddings=2048,
    hidden_size=2560,
    intermediate_size=10_240,
    num_hidden_layers=32,
    num_attention_heads=32,
)


@pytest.fixture(scope="module")
def tiny() -> StepEstimator:
    return StepEstimator(
        ModelSpec("llama", CONFIGURATIONS["llama"], character_tokenizer(ALPHABET), SETTINGS),
        Workload(sequence_length=32),
    )


@pytest.fixture(scope="module")
def three_billion() -> StepEstimator:
    """A conversion of a model of the size and shape of Phi-2, 2.78B parameters, in rows of 512 tokens."""
    return StepEstimator(
        ModelSpec("phi", PHI, character_tokenizer(ALPHABET), SETTINGS), Workload(sequence_length=512)
    )


def test_three_billion_parameters_are_trained_whole_on_48_gb_as_the_recipe_says(
    three_billion: StepEstimator,
) -> None:
    estimate = three_billion.estimate(HardwareRecipe.read("a6000-48gb"))
    assert (
        estimate.fits
        and estimate.workload.batch >= 4
        and estimate.workload.checkpointing
        and estimate.workload.optimizer == "adamw_8bit"
    )


@pytest.mark.slow
def test_three_billion_parameters_are_trained_whole_on_24_gb_with_bfloat16_weights(
    three_billion: StepEstimator,
) -> None:
    estimate = three_billion.estimate(HardwareRecipe.read("rtx3090-24gb"))
    assert not estimate.fits and estimate.advice.startswith("the recipe bfloat16")
    recipe = read_recipe("bfloat16")
    estimate = three_billion.estimate(HardwareRecipe.read("rtx3090-24gb", dtype=recipe["model"]["dtype"]))
    assert estimate.fits and estimate.workload.precision == "bfloat16"
    assert estimate.memory.parameters + estimate.memory.optimizer == pytest.approx(
        2.78e9 * (2 + 2.03), rel=0.01
    )


LLAMA = {"vocab_size": 32_000, "max_position_embeddings": 2048}
SIZES = {
    "1.1B (TinyLlama)": LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        **LLAMA,
    ),
    "2.8B (Phi-2)": PHI,
    "6.7B (LLaMA)": LlamaConfig(
        hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32, **LLAMA
    ),
    "13B (LLaMA)": LlamaConfig(
        hidden_size=5120, intermediate_size=13_824, num_hidden_layers=40, num_attention_heads=40, **LLAMA
    ),
}
CARDS = {
    "16 GB": "rtx4080-16gb",
    "24 GB": "rtx3090-24gb",
    "48 GB": "a6000-48gb",
    "80 GB": "h100-80gb",
    "2 x 48 GB": "a6000-48gb",
}


def cell(estimator: StepEstimator, card: str) -> str:
    """The smallest change with which a model of this size trains on a card, and the rows that then fit."""
    recipe = HardwareRecipe.read(CARDS[card])
    limit = device_limit(recipe.hardware.devices[0], recipe.hardware.max_memory_gb) - RUNTIME_BYTES["gpu"]
    work = replace(recipe.workload(estimator.work), checkpointing=True, optimizer="adamw_8bit")
    found: tuple[str, Workload] | None = ("8-bit AdamW", work)
    if card.startswith("2 x"):  # two cards give no more rows, and bitsandbytes does not support shards
        work = replace(work, optimizer="adamw", shards=2)
        fits = largest_batch(estimator.network("mixed"), work, limit)
        found = ("FSDP", work) if fits else ("FSDP, cpu_offload", replace(work, offload=True))
    elif not largest_batch(estimator.network("mixed"), work, limit):
        found = first_change_that_fits(estimator.network, work, recipe.hardware, limit)
    assert found is not None
    name, fitting = found
    rows = largest_batch(estimator.network(fitting.precision), fitting, limit)
    return f"{name.removeprefix('the ')}: {rows}" if rows else "-"


@pytest.mark.nightly
def test_the_table_of_sizes_in_the_docs_is_the_planners() -> None:
    lines = ["| | " + " | ".join(CARDS) + " |", "|---" * (len(CARDS) + 1) + "|"]
    for size, config in SIZES.items():
        blueprint = ModelSpec(size, config, character_tokenizer(ALPHABET), SETTINGS)
        estimator = StepEstimator(blueprint, Workload(sequence_length=512))
        lines.append(f"| {size} | " + " | ".join(cell(estimator, card) for card in CARDS) + " |")
    table = "\n".join(lines)
    assert table in (REPOSITORY / "docs" / "planning.md").read_text(encoding="utf-8"), table


def test_the_recipe_bfloat16_is_planned_as_it_trains() -> None:
    layers = read_layers(recipes=["rtx3090-24gb", "bfloat16"], overrides=["model.path=m", "output_dir=out"])
    work = HardwareRecipe.of(resolve(layers)).workload(Workload(sequence_length=8))
    assert (work.precision, work.optimizer, work.checkpointing) == ("bfloat16", "adamw_8bit", True)


def test_float64_is_not_planned() -> None:
    with raises(ConfigError, where="--dtype, model.dtype"):
        HardwareRecipe.read("cpu", dtype="float64")


def test_all_presets_are_there() -> None:
    assert hardware_recipe_names() == NAMES


def test_the_recipe_offload_is_planned_as_it_trains() -> None:
    layers = read_layers(recipes=["rtx3090-24gb", "offload"], overrides=["model.path=m", "output_dir=out"])
    work = HardwareRecipe.of(resolve(layers)).workload(Workload(sequence_length=8))
    assert (work.precision, work.optimizer, work.host_optimizer) == ("bfloat16", "adamw", True)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_valid_for_every_verb(name: str, verb: str) -> None:
    config = resolve(read_layers(recipes=[name], overrides=["model.path=m", "output_dir=out"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bf16 was asked for")  # on a GPU without bfloat16
        args = training_arguments(verb, config)
    work = HardwareRecipe.read(name).workload(Workload(sequence_length=8))
    recompute = bool(
        args.activation_checkpointing or (args.fsdp_config or {}).get("activation_checkpointing")
    )
    assert (work.checkpointing, work.optimizer == "adamw_8bit", work.shards > 1) == (
        recompute,
        "8bit" in args.optim,
        bool(args.fsdp),
    )
    assert config.hardware is not None and (
        name == "cpu" or all(device.tflops and device.bandwidth_gb_s for device in config.hardware.devices)
    )


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"gradient_accumulation_steps": 2}, {"accumulate": True}),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": True}}, {"offload": True, "shards": 3}),
        ({"deepspeed": "zero3"}, {"shards": 3}),
        ({"deepspeed": "zero2", "gradient_accumulation_steps": 1}, {}),
    ],
)
def test_the_switches_of_training_reach_the_plan(training: dict, expected: dict) -> None:
    recipe = HardwareRecipe.read("a40-48gb-x3")
    base = {name: value for name, value in recipe.training.items() if not name.startswith("fsdp")} | {
        "gradient_accumulation_steps": 1
    }
    plain = dataclasses.replace(recipe, training=base).workload(Workload(sequence_length=8))
    changed = dataclasses.replace(recipe, training=base | training).workload(Workload(sequence_length=8))
    assert changed == dataclasses.replace(plain, **expected)


def test_the_smaller_of_an_unequal_pair_sets_the_plan(tiny: StepEstimator) -> None:
    estimate = tiny.estimate(HardwareRecipe.read("a6000-48gb-a4500-20gb"))
    assert (estimate.limit, estimate.devices, estimate.workload.shards) == (20 * MARGIN * 1e9, 2, 1)


@pytest.mark.slow
def test_a_model_that_is_split_has_the_memory_of_both_cards(three_billion: StepEstimator) -> None:
    name = "a6000-48gb-a4500-20gb"
    apart, split = (
        three_billion.estimate(HardwareRecipe.read(name, device_map=how)) for how in (None, "balanced")
    )
    assert not apart.fits and split.fits
    assert (
        split.limit == pytest.approx((48 + 20) * MARGIN * 1e9) and split.runtime == 2 * RUNTIME_BYTES["gpu"]
    )
    assert (split.devices, split.workload.split) == (1, 2) and "split over 2" in split.describe(name)["with"]
    batch = split.workload.batch
    large, small = (
        estimate_step(
            three_billion.network, three_billion.costs, replace(split.workload, split=1), one, batch=batch
        ).seconds
        for one in alone(name)
    )
    assert large < split.seconds < small


def alone(name: str) -> list[HardwareConfig]:
    """The devices of a machine, each in one of its own."""
    hardware = HardwareRecipe.read(name).hardware
    return [hardware.model_copy(update={"devices": [device]}) for device in hardware.devices]


def test_the_cpu_is_this_computer(tiny: StepEstimator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "host_memory_gb", lambda: 7.0)
    monkeypatch.setattr(hardware, "calibrate", lambda blueprint, network, work: 12.5)
    estimate = tiny.estimate(HardwareRecipe.read("cpu"))
    assert (estimate.limit, estimate.seconds) == (7 * MARGIN * 1e9, 12.5)
    assert tiny.estimate(HardwareRecipe.read("cpu", max_memory_gb=0.1)).advice


@pytest.mark.parametrize(("seconds", "bound"), [(12.5, "arithmetic"), (0.001, "launches")])
def test_a_step_on_the_cpu_is_bound_by_its_operations_if_they_take_half_of_it(
    seconds: float, bound: str, tiny: StepEstimator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "calibrate", lambda blueprint, network, work: seconds)
    estimate = tiny.estimate(HardwareRecipe.read("cpu"), batch=1)
    assert estimate.bound == estimate.describe("cpu")["bound by"] == bound
    assert estimate.launches > 100 and estimate.reads > 0


def test_a_tiny_model_waits_for_launches_on_a_gpu_and_has_no_figures_for_generation_on_a_cpu(
    tiny: StepEstimator,
) -> None:
    gpu = HardwareRecipe.read("h100-80gb")
    assert tiny.estimate(gpu, batch=1).bound == "launches"
    assert {batch: time.bound for batch, time in tiny.generation(gpu).items()} == dict.fromkeys(
        hardware.GENERATION_BATCHES, "launches"
    )
    assert tiny.generation(gpu)[1].describe().endswith(", launches")
    assert tiny.generation(HardwareRecipe.read("cpu")) == {}


def test_an_unknown_preset_names_the_nearest() -> None:
    with raises(ConfigError, where="--hardware"):
        HardwareRecipe.read("h200-141")


@pytest.mark.parametrize(
    ("name", "overrides", "precision"),
    [
        ("rtx3090-24gb", ["training.bf16=null"], "mixed"),
        ("rtx3090-24gb", ["training.bf16=false"], "float32"),
        ("rtx3090-24gb", ["training.bf16=null", "training.fp16=true"], "float32"),
        ("cpu", ["training.bf16=null"], "float32"),
    ],
)
def test_a_run_is_planned_in_the_precision_that_it_would_choose(
    name: str, overrides: list[str], precision: str
) -> None:
    config = resolve(
        read_layers(
            recipes=[name], overrides=["model.path=m", "output_dir=out", "model.dtype=float32", *overrides]
        )
    )
    assert HardwareRecipe.of(config).workload(Workload(sequence_length=8)).precision == precision
