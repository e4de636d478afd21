"""Time of a run whose server samples the next rollout while the trainer trains (`max_staleness`), against
taking turns.

    python -m benchmarks.rollouts_ahead [--steps 32] [--updates 4] [--rollouts 12] [--rounds 3]

Float32, --hidden 256, --layers 4, vocabulary 8k, bidirectional; diffu-GRPO with a reference; one group of 8
completions of 64 tokens after prompts of 64. One server process and one trainer process (this one), of one
thread each. Both ways train equally often on equally many completions; the server, the model and the prompts
are the same. The time is that of a whole run, with the first rollout, for which either waits. Running ahead
can save most where the server needs as long as the trainer: --steps sets that. Processor seconds of both
processes are reported too: where other programs take the cores, the times of the runs say little.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from benchmarks.generation import random_model
from benchmarks.grpo import reward
from benchmarks.harness import report, timed
from unmask.models.load import load
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.variables import ADMIN_KEY

GROUP, PROMPT, LENGTH, BLOCK, VOCABULARY = 8, 64, 64, 32, 8000
BAR = 0.65


@contextmanager
def serving(model: Path, weights: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server in a process of its own, of one thread, and the process."""
    words = [
        sys.executable,
        "-m",
        "unmask",
        "serve",
        str(model),
        "--port",
        "0",
        "--batch-size",
        str(GROUP),
        "--weights-from",
        str(weights),
    ]
    process = subprocess.Popen(
        words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield (
            next(line for line in process.stdout if "is served as" in line).split()[-1],
            psutil.Process(process.pid),
        )
    finally:
        process.terminate()
        process.wait()


def processor_seconds(server: psutil.Process) -> tuple[float, float]:
    """Of this process, and of the server's."""
    spent = server.cpu_times()
    return time.process_time(), spent.user + spent.system


def trainer_of(
    model: Path, folder: Path, url: str, options: argparse.Namespace, max_staleness: int
) -> GRPOTrainer:
    """A trainer of a run of `--rollouts` rollouts."""
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        num_iterations=options.updates,
        max_steps=options.updates * options.rollouts,
        max_staleness=max_staleness,
        rollout={"backend": "server", "url": url},
        max_completion_length=LENGTH,
        block_size=BLOCK,
        steps=options.steps,
        beta=0.04,
        stop_at_eos=False,
        learning_rate=1e-6,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    ids_NP = torch.randint(4, 1000, (options.rollouts, PROMPT), generator=torch.Generator().manual_seed(1))
    return GRPOTrainer(load(model), reward, args, [{"prompt": ids} for ids in ids_NP.tolist()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {
        "hidden": 256,
        "layers": 4,
        "steps": 32,
        "updates": 4,
        "rollouts": 12,
        "rounds": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ[ADMIN_KEY] = "benchmark"
    busy: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, numbers = Path(name), itertools.count()
        random_model(options.hidden, options.layers, VOCABULARY, "bidirectional").save(folder / "model")
        with serving(folder / "model", folder) as (url, server):

            def run(max_staleness: int) -> None:
                started = processor_seconds(server)
                trainer = trainer_of(
                    folder / "model", folder / str(next(numbers)), url, options, max_staleness
                )
                trainer.train()
                trainer.source.backend.close()
                busy[max_staleness] = tuple(
                    after - before for before, after in zip(started, processor_seconds(server), strict=True)
                )  # type: ignore[assignment]

            ways = {"turns": 0, "ahead": options.updates}
            seconds = timed({way: lambda most=most: run(most) for way, most in ways.items()}, options.rounds)  # type: ignore[misc]
    rows = [
        (
            f"{way}, seconds",
            f"{seconds[way]:.1f}",
            "processor: trainer {:.1f}, server {:.1f} (last round)".format(*busy[most]),
        )
        for way, most in ways.items()
    ]
    rows.append(("ahead / turns", f"{seconds['ahead'] / seconds['turns']:.3f}", f"at most {BAR}"))
    title = (
        f"{options.rollouts} rollouts of {options.steps} denoising steps, {options.updates} updates on each"
    )
    report(title, rows)


if __name__ == "__main__":
    main()
