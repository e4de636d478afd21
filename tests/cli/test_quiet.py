"""Nothing on the terminal that is not ours: commands as a user starts them, on a small model."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.evaluation.harness.local_tasks import CHOICES, write_task
from tests.helpers import REPOSITORY
from tests.training.tiny_runs import QUICK
from unmask.cli.quiet import debugging
from unmask.tasks import get_task

OURS = re.compile(
    r"[┏┡┃└┌│├].*"  # a table
    r"|\[ *\d+%\] \S.* (\d+%|done in [\d:]+)( · .*)?"  # progress
    r"|(next:|or:  ) unmask .*"
    r"|resumed after step \d+(:| of) .*"
)
COMMAND = [sys.executable, "-m", "unmask"]
LAUNCH = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "2",
    "-m",
    "unmask",
]
TASK = ["--task", "sudoku", *QUICK]
GRPO = ["training.num_generations=2", "training.max_completion_length=17"]
AFTER_MAIN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in ("deepspeed", "bitsandbytes", "torch") if name in sys.modules])))
from unmask.cli import main
main()
"""


def environment(**more: str) -> dict[str, str]:
    names = ("PATH", "HOME", "UNMASK_SHARED", "OMP_NUM_THREADS")
    return (
        {name: os.environ[name] for name in names if name in os.environ}
        | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        | more
    )


def run(folder: Path, *arguments: str | Path, command: list[str] = COMMAND, **more: str) -> str:
    """What a command writes, in this folder, to both streams."""
    words = [*command, *map(str, arguments)]
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def foreign(text: str) -> list[str]:
    """The lines that are not ours. The line above a table is its title."""
    lines = text.splitlines()
    titles = {number - 1 for number, line in enumerate(lines) if line[:1] in ("┌", "┏")}
    return [line for number, line in enumerate(lines) if number not in titles and not OURS.fullmatch(line)]


def summary(text: str) -> dict[str, str]:
    """The rows of the last table, and the command below it."""
    *_, last = text.split("finished")
    command = re.search(r"^next: (.*)$", last, re.M)
    assert command, text
    return dict(re.findall(r"│ (\S.*?) +│ (.*?) +│", last)) | {"next": command[1]}


@pytest.mark.slow
def test_a_run_shows_only_lines_of_ours_and_imports_only_what_it_uses(model: Path, text: Path) -> None:
    folder = text.parent
    shown = run(
        folder,
        "pretrain",
        "--model",
        model,
        "--data",
        text.name,
        "--output",
        "pre",
        *QUICK,
        command=[sys.executable, "-c", AFTER_MAIN],
    )
    lines, _, imported = shown.rstrip().rpartition("\n")
    assert json.loads(imported) == ["torch"]
    assert foreign(lines) == []
    assert max(map(len, lines.splitlines())) <= 100
    found = summary(lines)
    last = [json.loads(line) for line in (folder / "pre" / "training_logs.json").read_text().splitlines()][-2]
    assert found["model"] == "pre/model" and found["time"].endswith(", 2 steps")
    assert found["training loss"].endswith(f"{last['loss']:.4g}") and "tokens per second" in found
    assert found["next"] == f"unmask convert --model pre/model --data {text.name} --output convert"


@pytest.mark.parametrize(
    ("arguments", "environ", "debug"),
    [
        (["sft", "--debug"], {}, True),
        (["--debug", "sft"], {}, True),
        (["sft"], {"UNMASK_DEBUG": "1"}, True),
        (["sft"], {"UNMASK_DEBUG": "0"}, False),
    ],
)
def test_debug_is_found_before_the_command_line_is_parsed(
    arguments: list[str], environ: dict[str, str], debug: bool
) -> None:
    assert debugging(arguments, environ) is debug


def test_warnings_of_ours_and_of_the_user_stay_and_those_of_libraries_do_not(tmp_path: Path) -> None:
    code = """
import logging, typer, warnings
from unmask.cli.quiet import silence_libraries
from unmask.errors import UnmaskWarning
silence_libraries()
warnings.warn("memory is short\\x1b[2J", UnmaskWarning)
warnings.warn("mine")
warnings.warn_explicit("theirs", FutureWarning, typer.__file__, 1)
warnings.warn_explicit("their C code's", FutureWarning, "<frozen importlib>", 1)
source = "logger.setLevel(logging.DEBUG); logger.warning(f'a warning of {name}'); logger.error(f'an error of {name}')"
for name, file in (("theirs", typer.__file__), ("unmask.rl", typer.__file__), ("mine", "rewards.py")):
    logger = logging.getLogger(name)
    exec(compile(source, file, "exec"))
"""
    (tmp_path / "script.py").write_text(code)
    lines = run(tmp_path, tmp_path / "script.py", command=[sys.executable]).splitlines()
    assert lines == [
        "warning: memory is short\\u001b[2J",
        f"{tmp_path / 'script.py'}:7: UserWarning: mine",
        '  warnings.warn("mine")',
        "an error of theirs",
        "a warning of unmask.rl",
        "an error of unmask.rl",
        "a warning of mine",
        "an error of mine",
    ]


@pytest.fixture(scope="module")
def diffusion(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a converted model in `convert/model`."""
    folder = tmp_path_factory.mktemp("quiet")
    rows = get_task("sudoku").generate("train", 12, 0)
    (folder / "text.txt").write_text("\n".join(row["prompt"] + row["completion"] for row in rows))
    pairs = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["completion"][::-1] + "1"}
        for row in rows
    ]
    (folder / "PREFERENCES.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "tasks").mkdir()
    questions = [{"query": row["prompt"], "choices": ["12", "34"], "gold": 0} for row in rows]
    write_task(folder / "tasks", "quiz", CHOICES, questions)
    shown = run(
        folder,
        "convert",
        "--model",
        model,
        "--data",
        "text.txt",
        "--output",
        "convert",
        *QUICK,
        "training.max_steps=12",
    )
    assert (
        foreign(shown) == []
        and summary(shown)["next"] == "unmask sft --model convert/model --data PAIRS.jsonl --output sft"
    )
    return folder


SFT = ["sft", "--model", "convert/model", *TASK]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [
            "evaluate",
            "convert/model",
            "--task",
            "sudoku",
            "--rows",
            "4",
            "--likelihood",
            "text.txt",
            "--output",
            "result.json",
        ],
        *(
            pytest.param(arguments, marks=pytest.mark.nightly)
            for arguments in (
                ["grpo", "--model", "convert/model", "--output", "grpo", *TASK, *GRPO],
                ["dpo", "--model", "convert/model", "--data", "PREFERENCES.jsonl", "--output", "dpo", *QUICK],
                [
                    "convert",
                    "--model",
                    "convert/model",
                    "--data",
                    "text.txt",
                    "--output",
                    "dry",
                    *QUICK,
                    "--max-steps=12",
                    "--dry-run",
                ],
                [*SFT, "--output", "dry", "--dry-run"],
                ["profile", "--steps", "1", *SFT, "--output", "profile"],
                [
                    "evaluate",
                    "convert/model",
                    "--lm-eval",
                    "quiz",
                    "--include-path",
                    "tasks",
                    "--rows",
                    "4",
                    "--samples",
                    "4",
                ],
                ["inspect", "convert/model"],
            )
        ),
    ],
    ids=lambda arguments: f"{arguments[0]}{' --dry-run' * ('--dry-run' in arguments)}",
)
def test_verbs_show_only_lines_of_ours(diffusion: Path, arguments: list[str]) -> None:
    shown = run(diffusion, *arguments)
    lines = [line for line in foreign(shown) if not line.endswith("open it in https://ui.perfetto.dev")]
    assert lines == [] and max(map(len, shown.splitlines())) <= 100


@pytest.mark.slow
def test_generate_shows_the_text_alone(diffusion: Path) -> None:
    shown = run(
        diffusion, "generate", "convert/model", "--prompt", "1003340220004001=", "--max-new-tokens", "4"
    )
    assert re.fullmatch(r"[\d=\n]{0,4}\n", shown)


@pytest.mark.slow
def test_a_resumed_run_shows_its_changes_and_its_last_loss(diffusion: Path) -> None:
    arguments = [*SFT, "--output", "resumed", "training.logging_steps=10", "training.save_steps=2"]
    first = run(diffusion, *arguments)
    resumed = run(diffusion, *arguments, "training.max_steps=4", "--resume")
    assert (
        foreign(first + resumed) == []
        and "resumed after step 2 of 4\nresumed after step 2: training.max_steps was 2, now 4" in resumed
    )
    for text in (first, resumed):  # shorter than `logging_steps`
        assert float(summary(text)["training loss"].split()[-1]) > 0 and " · loss " in text
    assert summary(resumed)["next"] == "unmask grpo --model resumed/model --task sudoku --output grpo"
    assert "held-out solved" in summary(resumed)


@pytest.mark.slow
def test_of_two_processes_only_the_first_prints(diffusion: Path) -> None:
    shown = run(
        diffusion,
        *SFT,
        "--output",
        "two",
        "training.per_device_train_batch_size=2",
        command=LAUNCH,
        OMP_NUM_THREADS="1",
    )
    assert foreign(shown) == []
    assert shown.count("sft: finished") == 1 and len(re.findall(r"\] sft done in", shown)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "more"),
    [(80, {}), *(pytest.param(160, more, marks=pytest.mark.nightly) for more in ({}, {"NO_COLOR": "1"}))],
)
def test_on_a_terminal_lines_fit_it(diffusion: Path, columns: int, more: dict[str, str]) -> None:
    output = f"terminal-{columns}-{len(more)}"
    shown = on_a_terminal(diffusion, columns, *SFT, "--output", output, TERM="xterm-256color", **more)
    if more:
        assert "\x1b" not in shown and "\r" not in shown.replace("\r\n", "")
    else:
        assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown))
    assert max(map(len, lines)) <= min(columns, 100)
    assert f"next: unmask grpo --model {output}/model" in shown and "sft: finished" in shown


def on_a_terminal(folder: Path, columns: int, *arguments: str, **more: str) -> str:
    """What a command writes to a terminal of this width."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=environment(**more), stdin=its, stdout=its, stderr=its
    ) as process:
        os.close(its)
        written = b"".join(iter(lambda: _read(own), b""))
    os.close(own)
    assert process.returncode == 0, written
    return written.decode()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # on Linux the other end's close
        return b""
