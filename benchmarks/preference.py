"""Preference optimization: variance of the margin, memory of a step, and accuracy after training.

    python -m benchmarks.preference runs/preference --stories260k MODEL --stories STORIES.txt --pairs
        llamafactory_dpo_en_demo.json [--only variance|memory|sudoku|file] [--threads 1]

variance: stories260K converted, then 200 steps of DPO on continuations of stories against the same words in
random order; the variance of the margin over redraws on held-out pairs. memory: a step of DPO with a stored
reference, compared with one of SFT on the same rows. sudoku: the demo's model after SFT, correct solutions
against corrupted ones. file: a real file of conversations, a small model with random weights; stopped in the
middle and resumed. The starting models are kept in the folder.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import unmask
from benchmarks import stories
from benchmarks.generation import random_model
from benchmarks.harness import peak_bytes, report
from benchmarks.methods import make_start
from unmask.cli.margin_variance import COMPLEMENTARY, DEFAULT, ESTIMATORS, INDEPENDENT, variances
from unmask.data.sources import load_examples, load_rows
from unmask.demo import Demo, DemoSettings
from unmask.evaluation.tasks import evaluate_task
from unmask.models.chat_template import read_template
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.training.trainer import DiffusionTrainer

Pairs = list[dict[str, Any]]
CONVERSION: dict[str, Any] = {"recipe": "full", "steps": 1000, "batch": 16, "rate": 3e-3}
PROMPT, ANSWER, FEWEST = 20, 40, 35  # words
SHAPE = (512, 8, 32_000)


def arguments(folder: Path, steps: int, batch: int, rate: float, **more: Any) -> dict[str, Any]:
    """The arguments of every run."""
    shape = {
        "max_steps": steps,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "learning_rate": rate,
    }
    quiet = {
        "save_strategy": "no",
        "logging_steps": max(1, steps // 10),
        "disable_tqdm": True,
        "use_cpu": True,
    }
    schedule = {"lr_scheduler_type": "cosine", "warmup_steps": min(10, steps // 4), "max_length": 1024}
    return {"output_dir": str(folder), **shape, **quiet, **schedule, **more}


def fresh(folder: Path) -> Path:
    """An output folder without an earlier run."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


# The variance of the margin.


def story_pairs(texts: Sequence[str]) -> Pairs:
    """The words that follow a beginning, and the same in random order."""
    rng, pairs = random.Random(0), []
    for text in texts:
        words = text.split()[: PROMPT + ANSWER]
        if len(words) >= PROMPT + FEWEST:
            mixed = rng.sample(words[PROMPT:], len(words) - PROMPT)
            prompt, chosen, rejected = (" ".join(part) for part in (words[:PROMPT], words[PROMPT:], mixed))
            pairs.append({"prompt": prompt, "chosen": " " + chosen, "rejected": " " + rejected})
    return pairs


def measure_variance(folder: Path, model: str, path: str, steps: int) -> None:
    texts = load_rows(path)["text"]
    trained, held_out = texts[: -stories.HELD_OUT], texts[-stories.HELD_OUT :]
    if not (folder / "converted").exists():
        lm, _ = stories.train(model, texts=trained, **CONVERSION)
        lm.save(folder / "converted")
    policy = unmask.load(folder / "converted")
    trainer = unmask.DPOTrainer(
        policy,
        args=unmask.DPOConfig(beta=0.2, **arguments(fresh(folder / "dpo"), steps, 8, 2e-5)),
        train_dataset=story_pairs(trained),
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "margin" in line]
    along = {"reference": "frozen", "ref_model": str(folder / "converted")}
    args = unmask.DPOConfig(beta=0.2, **arguments(folder / "measured", 1, 16, 0.0, **along))
    measured = unmask.DPOTrainer(policy, args=args, train_dataset=story_pairs(held_out)[:32])
    found, margin = variances(measured, budgets=(1, 8), redraws=16)
    rows = [
        (
            "margin in training, first and last tenth, nats",
            f"{log[0]['margin']:.2f}, {log[-1]['margin']:.2f}",
            "",
        )
    ]
    rows += [("margin of 32 held-out pairs, nats", f"{margin:.2f}", "")]
    for name in ESTIMATORS:
        bar = "at least 6" if name in (DEFAULT, COMPLEMENTARY) else ""
        less = found[INDEPENDENT][8] / found[name][8]
        rows.append((name, f"{found[name][1]:.3g}, {found[name][8]:.3g}; {less:.1f} x less", bar))
    report(
        (
            f"variance of the margin in nats squared after {steps} steps of DPO, at 1 and 8 passes for "
            "each response"
        ),
        rows,
    )


# Memory.


def peak_of_step(trainer: DiffusionTrainer, *, micro_batches: int = 1) -> tuple[int, int]:
    """The peak bytes of a step in addition to those before it, and those of weights and optimizer states."""
    trainer.create_optimizer_and_scheduler(2)
    made: list[Any] = list(trainer.train_dataset)

    def step() -> None:
        trainer.model.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            batch = trainer.data_collator(made)
            trainer.training_step(trainer.model, batch, trainer.count_items(batch))
        trainer.optimizer.step()

    peak = peak_bytes(step)
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    trainer.model.zero_grad(set_to_none=True)
    return peak, sum(tensor.nbytes for tensor in (*trainer.model.parameters(), *states))


def measure_memory(folder: Path, pairs: int, length: int) -> None:
    rng = random.Random(0)
    rows = [
        {name: "".join(rng.choices("abcdef", k=length)) for name in ("prompt", "chosen", "rejected")}
        for _ in range(pairs)
    ]
    single = [
        {"prompt": row["prompt"], "completion": row[side]} for side in ("chosen", "rejected") for row in rows
    ]

    def sft() -> DiffusionTrainer:
        lm = random_model(*SHAPE, "bidirectional")
        return unmask.SFTTrainer(
            lm,
            unmask.SFTConfig(**arguments(fresh(folder / "memory"), 2, 2 * pairs, 1e-6)),
            train_dataset=single,
        )

    sft_peak, held = peak_of_step(sft())
    accumulating, _ = peak_of_step(sft(), micro_batches=2)
    args = unmask.DPOConfig(beta=0.2, **arguments(fresh(folder / "memory"), 2, pairs, 1e-6))
    dpo, _ = peak_of_step(
        unmask.DPOTrainer(random_model(*SHAPE, "bidirectional"), args=args, train_dataset=rows)
    )
    report(
        (
            f"a step on {2 * pairs} rows of {2 * length + 2} tokens: hidden {SHAPE[0]}, {SHAPE[1]} layers, "
            f"vocabulary {SHAPE[2]:,}"
        ),
        [
            ("weights and optimizer states, MB", f"{held / 1e6:,.0f}", ""),
            ("beside these: SFT, one view, MB", f"{sft_peak / 1e6:,.0f}", ""),
            ("the same with two such micro-batches in a step, MB", f"{accumulating / 1e6:,.0f}", ""),
            ("DPO, stored reference, 8 views one at a time, MB", f"{dpo / 1e6:,.0f}", ""),
            ("DPO / SFT, all together", f"{(dpo + held) / (sft_peak + held):.3f}", "at most 1.15"),
            ("DPO / SFT that accumulates", f"{(dpo + held) / (accumulating + held):.3f}", ""),
        ],
    )


# Corrupted solutions.


def measure_sudoku(folder: Path, steps: int, rate: float, batch: int = 32) -> None:
    start = folder / "sudoku"
    if not (start / "model").exists():
        make_start("sudoku", start)
    demo = Demo("sudoku", start, 0, DemoSettings())
    lm, rng = unmask.load(start / "model"), random.Random(3)

    def corrupted(rows: Sequence[Mapping[str, Any]]) -> Pairs:
        return [
            {"prompt": row["prompt"], "chosen": row["completion"], "rejected": demo.task.corrupt(row, rng)}
            for row in rows
        ]

    before = evaluate_task(lm, demo.task, demo.test)
    shape = arguments(
        fresh(folder / "sudoku-dpo"), steps, batch, rate, canvas_length=demo.task.max_completion
    )
    args = unmask.DPOConfig(beta=0.2, **shape | {"per_device_eval_batch_size": 100})
    trainer = unmask.DPOTrainer(
        lm,
        args=args,
        train_dataset=corrupted(demo.train[: steps * batch]),
        eval_dataset=corrupted(demo.test[:400]),
    )
    trainer.train()
    metrics = trainer.evaluate()
    after = evaluate_task(lm, demo.task, demo.test)
    gain = after.gain_over(before)
    report(
        f"Sudoku, right solutions against corrupted ones: {steps} steps of {batch} pairs at {rate:g}",
        [
            ("reward accuracy on 400 held-out pairs", f"{metrics['eval_accuracy']:.1%}", "at least 95%"),
            ("their margin, nats", f"{metrics['eval_margin']:.2f}", ""),
            ("solved of 800, before", f"{before.metrics['solved'].mean:.1%}", ""),
            ("solved of 800, after", f"{after.metrics['solved'].mean:.1%}", "not less"),
            (
                "gain, paired, with its 95% interval",
                f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})",
                "",
            ),
        ],
    )


# A real file.


def byte_pair_tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Trained on the texts."""
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        texts, vocab_size=size, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False
    )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=learner._tokenizer, **special)
    tokenizer.chat_template = read_template("simple")
    return tokenizer


def small_random_model(tokenizer: PreTrainedTokenizerFast) -> DiffusionLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
    }
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return make_diffusion(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **heads, **sizes, **ids)),
        tokenizer,
        attention="bidirectional",
    )


def measure_file(folder: Path, path: str, steps: int, longest: int) -> None:
    read: Any = load_examples(path)
    texts = [
        message["value"]
        for row in read
        for message in (*row["conversations"], row["chosen"], row["rejected"])
    ]
    tokenizer = byte_pair_tokenizer(texts, 4000)
    train, held_out = read[: -len(read) // 8], read[-len(read) // 8 :]
    common = {
        "max_length": longest,
        "bad_rows": "skip",
        "samples": 4,
        "logging_steps": 5,
        "save_strategy": "steps",
        "save_steps": steps // 2,
    }

    small_random_model(tokenizer).save(folder / "small")

    def made(name: str) -> Any:
        args = unmask.DPOConfig(beta=0.2, **arguments(folder / name, steps, 4, 1e-3) | common)
        return unmask.DPOTrainer(folder / "small", args=args, train_dataset=train, eval_dataset=held_out)

    fresh(folder / "file")
    straight = made("file")
    before = straight.evaluate()
    straight.train()
    after = straight.evaluate()
    resumed = made("file")
    resumed.train(resume_from_checkpoint=str(folder / "file" / f"checkpoint-{steps // 2}"))
    weights = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    trained, told = (rows.report.kept for rows in (straight.train_dataset, straight.eval_dataset))
    report(
        (
            f"{Path(path).name}: {len(read)} conversations, {trained} and {told} of at most {longest} "
            f"tokens; {steps} steps of 4 pairs"
        ),
        [
            (
                f"margin of the {told} held-out pairs",
                f"{before['eval_margin']:.3f} to {after['eval_margin']:.3f}",
                "rises",
            ),
            ("their reward accuracy", f"{after['eval_accuracy']:.1%}", ""),
            (
                f"resumed at step {steps // 2}: the same weights, bit for bit",
                str(all(torch.equal(*pair) for pair in weights)),
                "True",
            ),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stories260k")
    parser.add_argument("--stories")
    parser.add_argument("--pairs")
    parser.add_argument("--only", choices=["variance", "memory", "sudoku", "file"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, help="of DPO; unset: 200, 80 and 60 of variance, sudoku and file"
    )
    parser.add_argument("--rate", type=float, default=1e-5, help="of sudoku")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a row of the file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.only in (None, "variance"):
        measure_variance(options.folder, options.stories260k, options.stories, options.steps or 200)
    if options.only in (None, "memory"):
        for length in (128, 256):
            measure_memory(options.folder, pairs=4, length=length)
    if options.only in (None, "sudoku"):
        measure_sudoku(options.folder, options.steps or 80, options.rate)
    if options.only in (None, "file"):
        measure_file(options.folder, options.pairs, options.steps or 60, options.longest)


if __name__ == "__main__":
    main()
