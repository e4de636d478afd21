"""Solved 4x4 Sudoku at 4 tokens a step, with and without revising, at equal forward passes; and how well
planted errors are found.

    python -m benchmarks.repair --seeds 3

Per seed the demo's model is pretrained and converted, then a quality head is trained on the frozen model, or
jointly with the model. All samplers make the same number of forward passes over the same held-out puzzles;
differences are paired by puzzle, with intervals over solutions.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import logsigmoid

import unmask
from benchmarks.harness import heading
from unmask.console import Progress
from unmask.demo import Demo, DemoSettings
from unmask.evaluation.statistics import paired_difference
from unmask.evaluation.tasks import evaluate_task
from unmask.generation.revise import present_log_probs
from unmask.models.diffusion_lm import DiffusionLM
from unmask.tasks import Puzzle, as_puzzle, get_task

Rows = Sequence[Mapping[str, Any]]
TOKENS = 4
"""Revealed at each step, besides those that are hidden again."""
BY_QUALITY = {"by": "quality", "schedule": "cap", "eta": 1.0, "below": 0.9}
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "remask": {"remask_fraction": 0.5},
    "revise by probability": {"revise": BY_QUALITY | {"by": "probability", "below": 0.5}},
    "revise by quality": {"revise": BY_QUALITY},
}


def fine_tuned(lm: DiffusionLM, rows: Rows, steps: int, seed: int, **settings: Any) -> DiffusionLM:
    """The model after more steps of SFT."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "per_device_train_batch_size": 128,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 20,
            "seed": seed,
            "use_cpu": True,
        }
        quiet = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        args = unmask.SFTConfig(output_dir=folder, max_steps=steps, **shared | quiet | settings)
        trainer = unmask.SFTTrainer(lm, args, train_dataset=rows)
        trainer.train()
    return trainer.lm


def demo_model(task: Puzzle, seed: int) -> DiffusionLM:
    """The demo's model after pretraining and conversion: three minutes on two cores."""
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(task.name, Path(folder), seed, DemoSettings())
        with Progress([("pretrain", 1.0), ("convert", 1.0)]) as progress:
            for name, train in (("pretrain", demo.pretrain), ("convert", demo.convert)):
                with progress.phase(name) as phase:
                    train(phase)
    return demo.lm


def with_planted_errors(
    lm: DiffusionLM, rows: Rows, seed: int, fraction: float = 0.5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts with partly hidden solutions [B, T], one of whose visible cells holds another digit; which
    tokens are hidden; and the visible cells of the solution, with 1 at right ones and 0 at the wrong one (-1
    elsewhere)."""
    rng, bos = random.Random(seed), lm.tokenizer.bos_token_id
    ids, hidden, right = [], [], []
    for row in rows:
        tokens = lm.tokenizer(row["prompt"] + row["completion"], add_special_tokens=False).input_ids
        first = len(tokens) - len(row["completion"])
        cells = list(range(first, len(tokens)))
        gone = set(rng.sample(cells, int(fraction * len(cells))))
        wrong = rng.choice([cell for cell in cells if cell not in gone])
        tokens[wrong] = rng.choice(
            [
                token
                for token in lm.tokenizer("1234", add_special_tokens=False).input_ids
                if token != tokens[wrong]
            ]
        )
        ids.append([bos, *tokens])
        hidden.append([False, *(cell in gone for cell in range(len(tokens)))])
        right.append(
            [-1, *(-1 if cell < first or cell in gone else int(cell != wrong) for cell in range(len(tokens)))]
        )
    return torch.tensor(ids), torch.tensor(hidden), torch.tensor(right)


def auroc(value_N: torch.Tensor, right_N: torch.Tensor) -> float:
    """The probability that a right token has a higher value than a wrong one; ties count half."""
    above = value_N[right_N == 1][:, None] - value_N[right_N == 0][None]
    return float((above > 0).double().mean() + (above == 0).double().mean() / 2)


@torch.no_grad()
def found_errors(lm: DiffusionLM, rows: Rows, seed: int) -> dict[str, float]:
    """The AUROC of finding planted errors by the present probability and, if the model has one, by its
    quality head."""
    ids_BT, hidden_BT, right_BT = with_planted_errors(lm, rows, seed)
    noisy_BT = torch.where(hidden_BT, lm.mask_token_id, ids_BT)
    judged_BT = right_BT >= 0
    with lm.capturing() as seen:
        logits_NV = lm.logits(noisy_BT, rows_BT=judged_BT, hidden_BT=hidden_BT)
    right_N = right_BT[judged_BT]
    found = {"probability": auroc(present_log_probs(logits_NV, ids_BT[judged_BT]), right_N)}
    if lm.quality_head is not None:
        found["quality"] = auroc(logsigmoid(lm.quality_head(seen[0])), right_N)
    return found


def compare(task: Puzzle, lm: DiffusionLM, test: Rows, names: Sequence[str]) -> dict[str, Any]:
    """The result of each sampler."""
    results = {}
    for name in names:
        sampler = unmask.SamplerConfig(
            max_new_tokens=task.max_completion, tokens_per_step=TOKENS, batch_size=256, **SAMPLERS[name]
        )
        results[name] = evaluate_task(lm, task, test, sampler=sampler)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of the head alone, and of joint training")
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--test-rows", type=int, default=800)
    options = parser.parse_args()
    print(heading())
    task, pooled = as_puzzle(get_task("sudoku")), dict[str, list[Any]]()
    for seed in range(options.seeds):
        train, test = (
            task.generate("train", options.rows, seed),
            task.generate("test", options.test_rows, seed + 1),
        )
        more = {"canvas_length": task.max_completion, "quality_tokens": TOKENS}
        plain = demo_model(task, seed)
        state = {name: weight.clone() for name, weight in plain.model.state_dict().items()}
        head = fine_tuned(
            plain,
            train,
            options.steps,
            seed,
            quality_head="alone",
            learning_rate=1e-2,
            weight_decay=0.0,
            **more,
        )
        print(f"seed {seed}, head alone: AUROC of planted errors", found_errors(head, test, seed))
        pooled.setdefault("head alone", []).append(compare(task, head, test, list(SAMPLERS)))
        head.model.load_state_dict(state, strict=False)  # and the head as it begins
        for weight in head.quality_head.parameters():
            weight.data.zero_()
        joint = fine_tuned(head, train, options.steps, seed, quality_head="joint", learning_rate=1e-3, **more)
        print(f"seed {seed}, joint: AUROC of planted errors", found_errors(joint, test, seed))
        pooled.setdefault("joint", []).append(compare(task, joint, test, list(SAMPLERS)))
    for kind, results in pooled.items():
        for name in SAMPLERS:
            print(
                f"{kind}, {name}: solved",
                *(f"{sum(each[name].solved) / len(each[name].solved):.1%}" for each in results),
            )
        for name in list(SAMPLERS)[1:]:
            before, after = (
                [value for each in results for value in each[sampler].solved] for sampler in ("plain", name)
            )
            groups = [group for each in results for group in each[name].groups]
            print(
                f"{kind}, {name} - plain, paired, all seeds: {paired_difference(before, after, groups):.1%}"
            )


if __name__ == "__main__":
    main()
