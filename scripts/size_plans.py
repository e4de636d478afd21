"""Print the table of docs/sizes.md: what each training stage takes for models of four sizes, by the planner.

python scripts/size_plans.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from unmask.config.layers import read_layers, read_recipe
from unmask.config.run import resolve
from unmask.convert.config import ConvertConfig
from unmask.data.characters import character_tokenizer
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.planning.estimates import estimate_step
from unmask.planning.hardware import HardwareRecipe, StepEstimator
from unmask.planning.step_time import DenoisingPass, pass_time
from unmask.preference.config import DPOConfig
from unmask.supervised.sft import SFTConfig

CARDS = {"h100-80gb": 3.0, "a100-40gb": 1.5}
"""Hardware recipes, with an assumed price of an hour in dollars."""
LENGTH = 512  # tokens of a row, of a response with its prompt, and of a completion with its prompt
TOKENS, EXAMPLES, EPOCHS, PAIRS = 100_000_000, 10_000, 3, 10_000
ROLLOUTS, COMPLETIONS = 100, 96  # completions of a rollout, and of each of its updates

QWEN2 = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "tie_word_embeddings": True}
MODELS: dict[str, PretrainedConfig] = {  # SmolLM2-135M, Qwen2.5-0.5B and 1.5B, Qwen3-8B
    "0.1B": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49_152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "0.5B": Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        **QWEN2,
    ),
    "1.5B": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        **QWEN2,
    ),
    "8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    ),
}
SETTINGS = {"attention": "block_causal", "block_size": 4, "logit_shift": True}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage as it is planned."""

    name: str
    batch: int  # rows, pairs or completions of an optimizer step
    rate: float
    steps: int
    work: Callable[[int], Workload]  # a forward and backward pass, by its rows
    sampler_passes: int = 0  # for each rollout
    stored: bool = False  # whether the reference scores all rows before the first step


def stages(spec: ModelSpec, adapters: bool) -> Iterator[Stage]:
    """The four stages, for a model that trains whole or with adapters."""
    lora, pairs, rl = (
        read_recipe(name)
        for name in ("lora", "dpo-llada-8b" if adapters else "dpo-rtx4080-16gb", "grpo-gsm8k")
    )
    rank = lora["lora"]["r"] if adapters else None
    plain = Workload(sequence_length=LENGTH, attention="block_causal", lora_rank=rank)
    settings = ["model.path=m", "output_dir=out", "model.attention=block_causal"]
    run = resolve(read_layers(overrides=[*settings, "lora.r=8"]))  # else it looks for adapters in the model

    def preference(rows: int) -> Workload:
        args = DPOConfig(output_dir="out", max_length=LENGTH, per_device_train_batch_size=rows, use_cpu=True)
        work = args.workload(spec, run)
        assert work is not None
        return replace(work, lora_rank=rank)

    def rate(default: float) -> float:
        return float(lora["training"]["learning_rate"]) if adapters else default

    batch = 64
    yield Stage(
        name="convert",
        batch=batch,
        rate=rate(ConvertConfig.learning_rate),
        steps=TOKENS // (batch * LENGTH),
        work=lambda rows: replace(plain, batch=rows, copies=2),
    )
    batch = lora["training"]["gradient_accumulation_steps"]
    yield Stage(
        name="sft",
        batch=batch,
        rate=rate(SFTConfig.learning_rate),
        steps=EXAMPLES * EPOCHS // batch,
        work=lambda rows: replace(plain, batch=rows),
    )
    batch = pairs["training"]["gradient_accumulation_steps"]
    yield Stage(
        name="dpo",
        batch=batch,
        rate=DPOConfig.learning_rate,
        steps=PAIRS // batch,
        work=preference,
        stored=True,
    )
    yield Stage(
        name="grpo",
        batch=COMPLETIONS,
        rate=float(rl["training"]["learning_rate"]),
        steps=ROLLOUTS * rl["training"]["num_iterations"],
        # the old policy and the reference score what the policy does
        work=lambda rows: replace(plain, batch=rows, lora_rank=rl["lora"]["r"], forward_only_passes=2),
        sampler_passes=rl["training"]["steps"],
    )


def plan(estimator: StepEstimator, card: str, stage: Stage) -> tuple[int, float] | None:
    """The rows that a card holds at once, and the hours of a stage; None: not one row fits."""
    recipe = HardwareRecipe.read(card, dtype="bfloat16" if estimator.work.lora_rank else None)
    recipe = replace(recipe, training={**recipe.training, "gradient_accumulation_steps": 2})

    def seconds(work: Workload) -> float | None:
        found = estimate_step(
            estimator.network, estimator.costs, recipe.workload(work), recipe.hardware, batch=work.batch
        )
        return found.seconds if found.fits else None

    for rows in (rows for rows in range(stage.batch, 0, -1) if stage.batch % rows == 0):
        work = stage.work(rows)
        if (step := seconds(work)) is None:
            continue
        if stage.stored:
            before = replace(work, forward_only_passes=work.forward_only_passes + work.passes)
            step = seconds(before) or step
        whole = step * stage.batch / rows * stage.steps
        if stage.sampler_passes:
            one = DenoisingPass(
                context=LENGTH, attention="block_causal", block=4, batch=stage.batch, drawn=True
            )
            cost, device = estimator.cost_of_generation, recipe.hardware.devices[0]
            time = pass_time(estimator.network("bfloat16"), cost, one, device)
            assert time is not None
            whole += time.seconds * stage.sampler_passes * ROLLOUTS
        return rows, whole / 3600
    return None


def fits_whole(spec: ModelSpec) -> bool:
    """Whether a step that trains all weights fits every card."""
    work = Workload(sequence_length=LENGTH, attention="block_causal", copies=2)
    estimator = StepEstimator(spec, work)
    return all(estimator.estimate(HardwareRecipe.read(card)).fits for card in CARDS)


def cells(estimator: StepEstimator, stage: Stage) -> Iterator[str]:
    """For each card the rows at once, the hours and the cost."""
    for card, dollars in CARDS.items():
        found = plan(estimator, card, stage)
        yield (
            "does not fit"
            if found is None
            else (f"{found[0]}: {rounded(found[1], 1)} h, ${rounded(found[1] * dollars, 0)}")
        )


def rounded(value: float, digits: int) -> str:
    """A number below ten with so many digits after the point, at least the smallest of these; else whole."""
    return f"{max(value, 10.0**-digits):.{digits if value < 9.5 else 0}f}"


def table() -> str:
    """The plan of all stages and sizes, in Markdown."""
    head = ["stage", "model", "trains", "batch", "learning rate", "steps", "H100 80 GB", "A100 40 GB"]
    rows: dict[str, list[list[str]]] = {}
    for name, config in MODELS.items():
        spec = ModelSpec(name, config, character_tokenizer("0123456789"), SETTINGS)
        for stage in stages(spec, adapters=not fits_whole(spec)):
            estimator = StepEstimator(spec, stage.work(1))
            trains = f"LoRA {rank}" if (rank := estimator.work.lora_rank) else "all"
            rate = f"{stage.rate:.0e}".replace("e-0", "e-")
            facts = [stage.name, name, trains, str(stage.batch), rate, f"{stage.steps:,}"]
            rows.setdefault(stage.name, []).append([*facts, *cells(estimator, stage)])
    lines = [head, *(row for each in rows.values() for row in each)]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([written[0], "|---" * len(head) + "|", *written[1:]])


if __name__ == "__main__":
    print(table())
