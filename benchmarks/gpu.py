"""What one GPU can show: use of its arithmetic in training, and of arithmetic and memory in generation,
beside its own ceilings.

    python -m benchmarks.gpu --out figures            # writes figures.json and figures.md python -m
    benchmarks.gpu --scale 64               # everything 64 times narrower: a rehearsal, on a CPU too

Random weights in the shapes of released models. Training: `SFTTrainer` on rows of 2,048 tokens; model FLOPs
are those of the products of forward and backward pass (6 per weight and position, 4 for frozen weights under
adapters), without what is computed twice. Generation: tokens per second, and the share of the least time that
the passes take by the measured ceilings. The host's waits are counted by torch. A figure below its bar comes
with the three kernels that took most of the time.

Shapes: B batch, P prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback
from transformers.integrations.liger import apply_liger_kernel

import unmask
from benchmarks import grpo
from benchmarks.harness import heading
from unmask.models.kernels import fused_linear
from unmask.models.load import make_diffusion, random_model

SHAPES: dict[
    str, tuple[type[PretrainedConfig], dict[str, int]]
] = {  # hidden, intermediate, layers, attention heads, key heads, width, words
    "Qwen3-0.6B": (Qwen3Config, dict(zip("hilakdv", (1024, 3072, 28, 16, 8, 128, 151_936), strict=True))),
    "SDAR-4B": (Qwen3Config, dict(zip("hilakdv", (2560, 9728, 36, 32, 8, 128, 151_936), strict=True))),
    "LLaDA-8B": (LlamaConfig, dict(zip("hilakdv", (4096, 12_288, 32, 32, 32, 128, 126_464), strict=True))),
}
ROW = 2048
LAYERS = {
    "rope": True,
    "rms_norm": True,
    "swiglu": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": False,
}
FUSED = "CUDA graphs, fused layers"
PARTS = ["0.6B", "8B", "LLaDA", "SDAR", "GRPO"]
Row = dict[str, Any]


def build(name: str, options: argparse.Namespace, dtype: torch.dtype, **pattern: Any) -> unmask.DiffusionLM:
    kind, size = SHAPES[name]
    narrow = {key: max(1, size[key] // options.scale) for key in "hiakv"}
    words = max(narrow["v"], 600)
    config = kind(
        hidden_size=max(64, narrow["h"]),
        intermediate_size=max(64, narrow["i"]),
        num_hidden_layers=2 if options.scale > 1 else size["l"],
        num_attention_heads=max(2, narrow["a"]),
        num_key_value_heads=max(2, narrow["k"]) if narrow["a"] > 1 else 2,
        head_dim=size["d"] if options.scale == 1 else 32,
        vocab_size=words,
        max_position_embeddings=4096,
        tie_word_embeddings=name == "Qwen3-0.6B",
    )
    vocabulary = {f"t{number}": number for number in range(words - 2)} | {
        "<eos>": words - 2,
        "<mask>": words - 1,
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="<eos>", mask_token="<mask>"
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        return make_diffusion(random_model(config, dtype), fast, **pattern)


def settle(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], options: argparse.Namespace, rounds: int = 3) -> float:
    """Median time of a call after a first one that is not counted."""
    times = []
    for _ in range(rounds + 1):
        settle(options)
        started = time.perf_counter()
        call()
        settle(options)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def ceilings(options: argparse.Namespace) -> tuple[float, float]:
    """FLOPs per second of a product of bfloat16 matrices, and bytes per second of a copy, read and
    written."""
    width = 8192 // options.scale
    one, other = (torch.randn(width, width, device=options.device, dtype=torch.bfloat16) for _ in range(2))
    data = torch.randn(2**30 // options.scale // 4, device=options.device)
    target = torch.empty_like(data)
    flops = 10 * 2 * width**3 / seconds(lambda: [one @ other for _ in range(10)], options)
    return flops, 10 * 2 * 4 * data.numel() / seconds(
        lambda: [target.copy_(data) for _ in range(10)], options
    )


def costs(call: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    """The share of a call's time in which the GPU computes, its kernels, its waits, and the three largest
    costs."""
    if options.device != "cuda":
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        call()
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchroniz" in str(each.message) for each in caught)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
    events = [
        event
        for event in record.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        spent[event.name] += event.device_time_total
    total = sum(spent.values())
    largest = sorted(spent, key=spent.__getitem__, reverse=True)
    if options.profiles:
        lines = [
            f"{spent[name] / 1e3:10.2f} ms {sum(event.name == name for event in events):6d}  {name}"
            for name in largest[:40]
        ]
        with options.profiles.open("a") as file:
            file.write(f"{taken * 1e3:.1f} ms, GPU {total / 1e3:.1f} ms\n" + "\n".join(lines) + "\n")
            file.write(
                record.key_averages().table(
                    sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60
                )
                + "\n\n"
            )
    return {
        "GPU busy": f"{total / 1e6 / taken:.0%} (profiled)",
        "kernels": len(events),
        "waits": waits,
        "largest costs": "; ".join(f"{name[:60]} {spent[name] / total:.0%}" for name in largest[:3]),
    }


class Timing(TrainerCallback):
    """Seconds of each step, and what the last one consists of."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.seconds = options, []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        settle(self.options)
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        settle(self.options)
        self.seconds.append(time.perf_counter() - self.started)


def training(
    name: str,
    options: argparse.Namespace,
    peak: float,
    batch: int,
    dtype: torch.dtype,
    pattern: Row,
    lora: bool = False,
    **more: Any,
) -> Iterator[Row]:
    """MFU of fine-tuning; the batch is halved while it does not fit."""
    row = ROW // options.scale
    while True:
        lm = build(name, options, dtype, **pattern)
        generator = torch.Generator().manual_seed(1)
        word_NT = torch.randint(2, 590, (batch * 8, row - 2), generator=generator)
        rows = [
            {"prompt": "t2", "completion": " ".join(f"t{word}" for word in words)}
            for words in word_NT.tolist()
        ]
        settings = {
            "max_steps": 8,
            "per_device_train_batch_size": batch,
            "max_length": row,
            "logging_steps": 1000,
            "save_strategy": "no",
        }
        settings |= {
            "learning_rate": 1e-5,
            "disable_tqdm": True,
            "report_to": "none",
            "use_cpu": options.device == "cpu",
        } | more
        timing, adapters = Timing(options), LoraConfig(r=16, target_modules="all-linear") if lora else None
        try:
            with tempfile.TemporaryDirectory() as folder:
                args = unmask.SFTConfig(output_dir=folder, **settings)
                trainer = unmask.SFTTrainer(
                    lm, args, train_dataset=rows, callbacks=[timing], peft_config=adapters
                )
                trainer.train()
                data = trainer.data_collator([trainer.train_dataset[number] for number in range(batch)])
            break
        except torch.OutOfMemoryError:
            trainer = lm = None  # type: ignore[assignment]
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            batch //= 2
    config = lm.model.config
    linear = sum(
        p.numel() for n, p in lm.model.named_parameters() if p.ndim == 2 and "layers" in n and "lora" not in n
    )
    copies = 2 if lm.attention == "block_causal" else 1
    positions, hidden = batch * row * copies, batch * row / 2
    pairs = row if lm.attention == "bidirectional" else row / 2  # keys that a position sees
    attention = (
        4 * positions * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    )
    head = 2 * hidden * config.hidden_size * config.vocab_size
    flops = (2 if lora else 3) * (2 * linear * positions + head) + 3 * attention
    step = statistics.median(timing.seconds[3:])
    memory = torch.cuda.max_memory_allocated() / 1e9 if options.device == "cuda" else 0.0
    found = {
        "tokens/s": round(batch * row / step),
        "step, s": round(step, 4),
        "batch": batch,
        "memory, GB": round(memory, 1),
    }

    def one() -> None:
        moved = {
            key: value.to(lm.device) if isinstance(value, torch.Tensor) else value
            for key, value in data.items()
        }
        trainer.training_step(trainer.model_wrapped, moved)

    what = (
        f"SFT, {name}, {lm.attention}{', LoRA' if lora else ''}, "
        f"{str(dtype)[6:]}{''.join(f', {k}={v}' for k, v in more.items())}"
    )
    yield {
        "what": what,
        "figure": f"MFU {flops / step / peak:.1%}",
        "bar": "45%",
        **found,
        **costs(one, options),
    }


def ways(options: argparse.Namespace) -> list[str]:
    """How the sampler runs its passes."""
    return [
        "as it is",
        *(["CUDA graphs"] if options.device == "cuda" else []),
        *([FUSED] if liger(options) else []),
    ]


def liger(options: argparse.Namespace) -> Row:
    """The setting of fused layers, where Liger is installed."""
    return {"use_liger_kernel": True} if options.device == "cuda" and fused_linear.installed() else {}


def generation(
    name: str, options: argparse.Namespace, peaks: tuple[float, float], pattern: dict[str, Any], settings: Row
) -> Iterator[Row]:
    """Tokens per second, and the share of the limit, by batch: as it is, with CUDA graphs, and with these and
    fused layers."""
    lm = build(name, options, torch.bfloat16 if options.device == "cuda" else torch.float32, **pattern)
    config, prompt, length = lm.model.config, 128, settings["max_new_tokens"]
    linear = sum(p.numel() for n, p in lm.model.named_parameters() if p.ndim == 2 and "layers" in n)
    head = config.hidden_size * config.vocab_size
    for way, batch in itertools.product(ways(options), options.batches):
        lm.cuda_graphs = way != "as it is"
        if way == FUSED:
            apply_liger_kernel(lm.model, LAYERS)  # what follows has them as well
        prompts = torch.randint(
            2, 590, (batch, prompt), generator=torch.Generator().manual_seed(batch)
        ).tolist()
        config_ = unmask.SamplerConfig(stop_at_eos=False, batch_size=batch, **settings)
        out: list[Any] = []

        def call(prompts: Any = prompts, config_: Any = config_, out: list[Any] = out) -> None:
            out[:] = [unmask.generate(lm, prompts, config_)]

        call()  # with graphs, the second call records the last of them
        call()
        taken = seconds(call, options, rounds=2)
        passes = max(out[0].forward_passes)
        whole = lm.attention == "bidirectional"
        queries, rows = (
            (prompt + length, 16)
            if whole
            else (settings.get("block_size") or lm.block_size or 1, lm.block_size or 1)
        )
        flops = batch * (2 * linear * queries + 2 * head * rows)
        cached = (
            0
            if whole
            else 2
            * batch
            * (prompt + length)
            * config.num_key_value_heads
            * config.head_dim
            * config.num_hidden_layers
        )
        least = passes * max(flops / peaks[0], 2 * (linear + head + cached) / peaks[1])
        kind = f"{lm.attention}, T={settings.get('temperature', 0.0)}"
        figure = {
            "what": f"generate, {name}, {kind}, batch {batch}, {way}",
            "figure": f"{least / taken:.1%} of the limit",
            "bar": "50%",
        }
        few = config_.model_copy(
            update={"max_new_tokens": 32, "steps": settings["steps"] // 4 if "steps" in settings else None}
        )
        yield (
            figure
            | {
                "tokens/s": round(batch * length / taken),
                "passes": passes,
                "ms a pass": round(1e3 * taken / passes, 2),
            }
            | (costs(lambda few=few: call(config_=few), options) if least < 0.5 * taken else {})  # type: ignore[misc]
        )


def reinforcement(options: argparse.Namespace) -> Iterator[Row]:
    """One update of GRPO beside the plain loop of `benchmarks.grpo`, without and with CUDA graphs."""
    lm = build(
        "Qwen3-0.6B",
        options,
        torch.bfloat16 if options.device == "cuda" else torch.float32,
        attention="bidirectional",
    )
    with tempfile.TemporaryDirectory() as folder:
        first = grpo.trainer_of(lm, folder, grpo.LENGTH // 2)
        plain = grpo.Plain(lm, first.train_dataset[0].prompt, grpo.LENGTH // 2)
        taken = {"plain": seconds(plain.update, options, rounds=2)}
        del plain

        def ours() -> None:
            trainer = grpo.trainer_of(lm, folder, grpo.LENGTH // 2)
            trainer.reference = first.reference
            trainer.train()

        for way in ways(options)[:2]:
            lm.cuda_graphs = way != "as it is"
            taken[way] = seconds(ours, options, rounds=2)
            figure, ratio = f"{taken[way]:.2f} s, plain {taken['plain']:.2f} s", taken["plain"] / taken[way]
            yield {
                "what": f"GRPO, Qwen3-0.6B, an update, {way}",
                "figure": figure,
                "plain / ours": round(ratio, 2),
            }


@contextmanager
def reported(rows: list[Row], what: str) -> Iterator[None]:
    """A part that fails is reported, and the others go on."""
    try:
        yield
    except Exception as error:
        rows.append(
            {
                "what": what,
                "figure": f"failed: {type(error).__name__}: {str(error)[:200]}",
                "trace": traceback.format_exc(),
            }
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("gpu"))
    parser.add_argument("--profiles", type=Path, help="a file for the kernels of each part")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    peaks = ceilings(options)
    rows: list[Row] = [
        {
            "what": f"ceilings of {card}",
            "figure": f"{peaks[0] / 1e12:.0f} TFLOP/s, {peaks[1] / 1e12:.2f} TB/s",
        }
    ]
    wide, low = {"attention": "bidirectional"}, torch.bfloat16 if options.device == "cuda" else torch.float32
    blocks = {"attention": "block_causal", "block_size": 4}
    parts: list[tuple[str, str, Callable[[], Iterator[Row]]]] = [
        (
            "0.6B",
            "16 bits",
            lambda: training("Qwen3-0.6B", options, peaks[0], 8, low, wide, **liger(options)),
        ),
        (
            "0.6B",
            "mixed",
            lambda: training("Qwen3-0.6B", options, peaks[0], 8, torch.float32, wide, **liger(options)),
        ),
        (
            "0.6B",
            "blocks",
            lambda: training("Qwen3-0.6B", options, peaks[0], 4, torch.float32, blocks, **liger(options)),
        ),
        (
            "0.6B",
            "compiled",
            lambda: training("Qwen3-0.6B", options, peaks[0], 8, torch.float32, wide, torch_compile=True),
        ),
        (
            "8B",
            "adapters",
            lambda: training("LLaDA-8B", options, peaks[0], 4, low, wide, lora=True, **liger(options)),
        ),
        (
            "LLaDA",
            "T=0",
            lambda: generation(
                "LLaDA-8B", options, peaks, wide, {"max_new_tokens": 128, "block_size": 32, "steps": 16}
            ),
        ),
        ("GRPO", "an update", lambda: reinforcement(options)),
        (
            "SDAR",
            "T=1",
            lambda: generation("SDAR-4B", options, peaks, blocks, {"max_new_tokens": 64, "temperature": 1.0}),
        ),
    ]
    for group, title, part in parts:
        if group in options.only:
            with reported(rows, f"{group}, {title}"):
                for row in part():
                    rows.append(row)
                    print({key: value for key, value in row.items() if key != "trace"}, flush=True)
            options.out.with_suffix(".json").write_text(
                json.dumps({"machine": heading(), "card": card, "rows": rows}, indent=1)
            )
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "trace"))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    options.out.with_suffix(".md").write_text(f"{card}; {heading()}\n\n" + "\n".join(lines) + "\n")
    print(options.out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
