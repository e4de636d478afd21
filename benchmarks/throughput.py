"""Tokens per second of generation on one device, compared with the limit of its arithmetic and memory.

    python -m benchmarks.throughput --hardware h200-141gb [--compile reduce-overhead] python -m
    benchmarks.throughput --hardware cpu --layers 2 --hidden 128 --vocabulary 1000 --batch 4 --prompt 32
    --length 32

Random weights in the proportions of an 8B model by default (bfloat16 on a GPU). The limit is the larger of
the time that the products of our passes take at the card's dense bfloat16 figure, and that of reading weights
and cached keys once per pass at its bandwidth.

Shapes: B batch, P prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import unmask
from benchmarks import published
from benchmarks.generation import Ours, agree
from benchmarks.harness import report, timed
from unmask.config.run import AttentionName, DeviceConfig
from unmask.data.characters import character_tokenizer
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.planning.hardware import HardwareRecipe


def random_model(
    options: argparse.Namespace, device: str, attention: AttentionName, block_size: int | None = None
) -> DiffusionLM:
    heads = max(1, options.hidden // 128)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=4096,
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config).eval()
    lm = make_diffusion(model, character_tokenizer("abcdef"), attention=attention, block_size=block_size)
    if options.compile:
        lm.compile(mode=options.compile)
    return lm


def of_limit(
    seconds: float,
    lm: DiffusionLM,
    options: argparse.Namespace,
    machine: DeviceConfig,
    passes: int,
    queries: int,
    rows: float,
) -> str:
    """Fraction of the limit that a run reaches, with `passes` passes of `queries` positions and `rows` logits
    rows per sequence."""
    if machine.tflops is None or machine.bandwidth_gb_s is None:
        return "no limit known"
    weights = sum(p.numel() for p in lm.model.model.layers.parameters())
    head, batch, tokens = options.hidden * options.vocabulary, options.batch, options.prompt + options.length
    attention = 4 * queries * tokens * options.hidden * options.layers
    flops = batch * (2 * weights * queries + attention + 2 * head * rows)
    cached = 0 if queries == tokens else 2 * batch * tokens * options.hidden * options.layers
    least = passes * max(
        flops / (machine.tflops * 1e12), 2 * (weights + head + cached) / (machine.bandwidth_gb_s * 1e9)
    )
    return f"{least / seconds:.1%} of the limit"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="h200-141gb", help="a hardware recipe")
    sizes = {
        "hidden": 4096,
        "layers": 32,
        "vocabulary": 126_464,
        "batch": 16,
        "prompt": 256,
        "length": 256,
        "steps": 128,
        "block": 32,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", help="a mode of torch.compile, such as reduce-overhead (CUDA graphs)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    preset = HardwareRecipe.read(options.hardware)
    if preset.device is None:
        parser.error(f"this machine has no {preset.name}")
    machine = preset.hardware.devices[0]
    prompt_BP = torch.randint(
        20, min(7_000, options.vocabulary - 1), (options.batch, options.prompt), device=preset.device
    )
    rows = bidirectional(options, preset.device, machine, prompt_BP) + blocks(
        options, preset.device, machine, prompt_BP
    )
    report(
        f"Tokens per second, {options.layers} layers of {options.hidden}, vocabulary {options.vocabulary}",
        rows,
    )


def bidirectional(
    options: argparse.Namespace, device: str, machine: DeviceConfig, prompt_BP: Tensor
) -> list[tuple[str, str, str]]:
    lm = random_model(options, device, "bidirectional")
    settings = {
        "max_new_tokens": options.length,
        "block_size": options.block,
        "steps": options.steps,
        "stop_at_eos": False,
    }
    contenders: dict[str, Callable[[], Tensor]] = {}
    for temperature in (0.0, 0.9):
        contenders[f"published, T={temperature}"] = partial(
            published.generate, lm, prompt_BP, options.length, options.block, options.steps, temperature
        )
        contenders[f"ours, T={temperature}"] = Ours(
            lm, prompt_BP, unmask.SamplerConfig(temperature=temperature, **settings)
        )
    equal = agree(contenders["ours, T=0.0"](), contenders["published, T=0.0"]())
    seconds = timed(contenders, rounds=2)
    # on average
    tokens, rows = options.batch * options.length, (options.block + options.length / options.steps) / 2
    work = (lm, options, machine, options.steps, options.prompt + options.length, rows)
    return [
        (name, f"{tokens / time:.1f}", of_limit(time, *work) + f"; {equal}" * (name == "ours, T=0.0"))
        for name, time in seconds.items()
    ]


def blocks(
    options: argparse.Namespace, device: str, machine: DeviceConfig, prompt_BP: Tensor
) -> list[tuple[str, str, str]]:
    lm = random_model(options, device, "block_causal", options.block)
    settings = {"max_new_tokens": options.length, "steps": options.steps, "stop_at_eos": False}
    contenders = {
        drafts: Ours(lm, prompt_BP, unmask.SamplerConfig(num_speculative_tokens=drafts, **settings))
        for drafts in options.drafts
    }
    first = contenders[options.drafts[0]]()
    equal = {drafts: agree(first, ours()) for drafts, ours in contenders.items()}
    seconds = timed({str(drafts): ours for drafts, ours in contenders.items()}, rounds=2, warm=True)
    rows = []
    for drafts, ours in contenders.items():
        time, passes = seconds[str(drafts)], ours.engine.num_forward_passes
        limit = of_limit(time, lm, options, machine, passes, options.block * (1 + drafts), options.block / 2)
        figure = f"{options.batch * options.length / time:.1f}"
        rows.append(
            (f"block {options.block}, {drafts} guesses", figure, f"{limit}; {passes} passes; {equal[drafts]}")
        )
    return rows


if __name__ == "__main__":
    main()
