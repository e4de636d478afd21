"""Time and memory until a run has made its first step, when its rows are made and when they are stored,
beside TRL on the same files.

    python -m benchmarks.row_store MODEL WORDS.txt [--rows 100000] [--only sft dpo pretrain]

Every run is a process of its own with one step of one row; rows are made of the words of a text.
`--processes` sets `dataset_num_proc` for both. Time is of the whole process, memory its largest resident
size.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import report

GOALS = {"first": "45 s", "second": "8 s"}
TRL = """
import sys
import datasets, transformers, trl
from unmask.models.chat_template import read_template
verb, model, file, processes, output = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
tokenizer.chat_template = read_template("simple")
tokenizer.pad_token = tokenizer.eos_token
trainer, config = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[verb]
args = config(
    output, max_length=512, max_steps=1, per_device_train_batch_size=1, save_strategy="no", report_to=[],
    dataset_num_proc=int(processes), use_cpu=True, bf16=False,
)
rows = datasets.load_dataset("json", data_files=file, split="train")
model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
trainer(model, args=args, train_dataset=rows, processing_class=tokenizer).train()
"""


def rows_of(verb: str, words: list[str], count: int) -> Iterator[str]:
    """Lines of a file: conversations, preferences, or documents."""
    draw = random.Random(0)

    def text(length: int) -> str:
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    for number in range(count):
        if verb == "pretrain":
            yield text(200) + "\n"
        elif verb == "dpo":
            yield json.dumps({"prompt": f"{number} {text(40)}", "chosen": text(60), "rejected": text(59)})
        else:
            asked, answer = {"role": "user", "content": f"{number} {text(25)}"}, text(60)
            yield json.dumps({"messages": [asked, {"role": "assistant", "content": answer}]})


def measured(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """The seconds and the gigabytes of a process. Raises RuntimeError if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            log.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {log.read()[-1000:]}")
    return seconds, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("words", type=Path)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["sft", "dpo", "pretrain"])
    options = parser.parse_args()
    words, lines = options.words.read_text().split(), list[tuple[str, str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        for verb in options.only:
            file = Path(folder) / (f"{verb}.txt" if verb == "pretrain" else f"{verb}.jsonl")
            with file.open("w") as written:
                written.writelines(f"{line}\n" for line in rows_of(verb, words, options.rows))
            environment = os.environ | {"HF_DATASETS_CACHE": f"{folder}/cache-{verb}", "HF_HUB_OFFLINE": "1"}
            own = [
                *(sys.executable, "-m", "unmask", verb, "--model", options.model, "--data", str(file)),
                *(
                    "--output",
                    f"{folder}/out",
                    "--overwrite",
                    "training.max_steps=1",
                    "training.max_length=512",
                ),
                *("training.per_device_train_batch_size=1", "training.save_strategy=no"),
                f"training.dataset_num_proc={options.processes}",
            ]
            own += [] if verb == "pretrain" else ["data.chat_template=simple"]
            own += ["training.reference=frozen"] if verb == "dpo" else []
            commands = {"Unmask": own}
            if verb != "pretrain":
                given = [verb, options.model, str(file), str(options.processes), f"{folder}/trl"]
                commands["TRL"] = [sys.executable, "-c", TRL, *given]
            for name, command in commands.items():
                for start in ("first", "second"):
                    seconds, gigabytes = measured(command, environment)
                    size = f"{file.stat().st_size / 1e6:.0f} MB"
                    goal = "" if name == "TRL" else GOALS[start]
                    lines.append(
                        (
                            f"{verb}, {size}, {name}, {start} start",
                            f"{seconds:.1f} s, {gigabytes:.2f} GB",
                            goal,
                        )
                    )
    report("until the first step", lines)


if __name__ == "__main__":
    main()
