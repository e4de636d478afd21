"""Every block of README and docs: Python is run, commands are run or planned with small models, YAML is read
as a config.

A block that cannot be run here says why in a comment before it, `<!-- not run: reason -->`. It is still
parsed, and the configs of its commands are constructed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer
from typer.testing import CliRunner

import unmask as package
from tests.helpers import REPOSITORY, partly_slow
from tests.serving.servers import http_post, served
from tests.tiny import PLAIN_TEMPLATE
from tests.training.tiny_runs import TINY_DEMO
from unmask.cli.entry import app
from unmask.cli.run import training_arguments
from unmask.config.layers import read_layers
from unmask.config.option_per_field import spread_configs
from unmask.config.run import resolve
from unmask.config.yaml import parse_yaml
from unmask.data.characters import character_model, character_tokenizer
from unmask.models.load import load
from unmask.rl.methods import METHODS
from unmask.serving.app import AppSettings
from unmask.tasks import Task, get_task
from unmask.variables import ADMIN_KEY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(<!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
LANGUAGES = {"bash", "python", "yaml", "text"}  # text: output, trees and diagrams, which nothing runs
TRAINING = ("pretrain", "convert", "sft", "dpo", "grpo")
SERVER = "localhost:8000"
# they run until stopped, or need a released model or the files of another project
PARSED = ("serve", "chat", "export", "migrate")
# of its parser, as of those below
LMDEPLOY = {"--dllm-block-length", "--dllm-unmasking-strategy", "--server-port"}
SGLANG = {"--model-path", "--dllm-algorithm", "--port"}
HERE = ["training.use_cpu=true", "training.torch_compile=false", "training.max_steps=2"]
SHORTER = [
    ("max_steps=100", "max_steps=20"),
    ("max_steps=10_000", "max_steps=20"),
    ("max_steps=10,", "max_steps=1,"),
]
VERBS = {"conversion.md": "convert", "preferences.md": "dpo", "data.md": "pretrain"}
PROBLEM = {
    "prompt": "1003340220004001=",
    "completion": "1234341221434321",
    "text": "1234341221434321",
    "group": "a",
}
SUDOKU = {"puzzle": "0234341221434321", "solution": "1234341221434321"}
ROWS = {
    "corpus.jsonl": {"text": "Once upon a time, there was a cat."},
    "pairs.jsonl": {"prompt": "What? ", "completion": "This."},
    "data/pairs.jsonl": {"prompt": "What? ", "completion": "This."},
    "preferences.jsonl": {"prompt": "What? ", "chosen": "This.", "rejected": "That."},
    "prompts.jsonl": {"prompt": "What? "},
    "capitals.jsonl": {"country": "France", "capital": "Paris"},
    "summaries.jsonl": {"prompt": "Say it: ", "answer": "This."},
    "runs/sft/training_logs.json": {"step": 1, "loss": 2.0},
    "runs/grpo/training_logs.json": {"step": 1, "reward": 0.5},
    "runs/demo/grpo/training_logs.json": {"step": 1, "reward": 0.5},
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = FENCE.finditer(text)
    return [
        Block(page.name, text[: each.start()].count("\n") + 1, each["language"], each["text"], each["reason"])
        for each in found
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(block: Block) -> list[list[str]]:
    """The words of each command, without comments, environment variables and `&`."""
    lines = block.text.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    bare = [
        [word for index, word in enumerate(words) if word != "&" and not is_variable(words, index)]
        for words in split
    ]
    return [words for words in bare if words]


def is_variable(words: list[str], index: int) -> bool:
    """Whether a word sets an environment variable: it stands before the command."""
    return all(re.fullmatch(r"[A-Z_]+=\S*", word) for word in words[: index + 1])


COMMANDS = [block for block in BLOCKS if block.language == "bash"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_fenced_and_names_its_language(page):
    assert {block.language for block in blocks_of(page)} <= LANGUAGES
    text = page.read_text(encoding="utf-8")
    outside = FENCE.sub("", text)
    assert "```" not in outside and not re.search(r"^\n {4}\S", outside, re.M)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small models and files at the paths that the pages name."""
    folder = tmp_path_factory.mktemp("docs")
    lm = character_model(get_task("sudoku").alphabet, hidden=16, layers=1, context=128, seed=0)
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = PLAIN_TEMPLATE
    config = lm.config
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 512
    config.bos_token_id, config.eos_token_id, config.pad_token_id = (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    causal, converted = folder / "runs/demo/pretrain", folder / "runs/demo/sft"
    type(lm.model)(config).save_pretrained(causal)
    tokenizer.save_pretrained(causal)
    load(causal, attention="bidirectional").save(converted)
    for name in ("MODEL", "runs/pretrain/model", "runs/served"):
        shutil.copytree(causal, folder / name)
    for name in (
        "runs/demo/convert",
        "runs/demo/grpo",
        "runs/convert/model",
        "runs/sft/model",
        "runs/dpo/model",
    ):
        shutil.copytree(converted, folder / name)
    for name, row in ROWS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for _ in range(64)))
    shutil.copytree(REPOSITORY / "docs" / "samples", folder / "docs" / "samples")
    for name in ("stories.txt", "FILE"):
        (folder / name).write_text("Once upon a time, there was a cat.\n" * 200)
    (folder / "train.yaml").write_text(
        "model_name_or_path: runs/demo/pretrain\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 2\n"
    )
    for block in BLOCKS:
        if name := re.match(r"# (\S+\.(yaml|py))", block.text):
            (folder / name[1]).write_text(block.text)
    return folder


@pytest.fixture
def here(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to work in."""
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@partly_slow("block", COMMANDS, 1, ids=str)  # the whole pipeline, from the README
def test_commands_can_be_given(block, here, monkeypatch):
    # which makes steps to time this machine
    monkeypatch.setattr("unmask.planning.hardware.calibrate", lambda *_: 1.0)
    monkeypatch.setattr("unmask.demo.QUICK", TINY_DEMO)  # tests/test_demo.py runs the quick demo
    for words in commands(block):
        give_words(words, run=block.not_run is None)


@pytest.mark.parametrize(
    "line",
    [
        "unmask sft --modle MODEL",
        "unmask sft --model MODEL --output out training.learning_rat=1",
        "unmask convert --recipe block --model MODEL --output out training.learning_rat=1",
        "unmask export MODEL --layuot hf --output out",
        "unmask serve MODEL --mask-token 3 --block-size nothing",
        "python -m benchmarks.grpo --recipes full",
        "make nothing",
        "ls",
    ],
)
def test_a_mistake_in_a_command_is_noticed(line, here):
    with pytest.raises((AssertionError, SystemExit)):
        give_words(shlex.split(line), run=True)


def give_words(words: list[str], *, run: bool) -> None:
    """Run a command, or check that it is valid."""
    name = Path(words[0]).name
    if name == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.M)
    elif words == ["unmask", "--install-completion"]:
        return  # into the shell that the tests run in, if it knows that one: tests/cli/test_completion.py
    elif name == "unmask":
        give(words[1:], run=run)
    elif name == "lmdeploy":
        assert words[1:3] == ["serve", "api_server"] and flags_of(words) <= LMDEPLOY
    elif name == "export":  # of a variable
        assert all(is_variable(words[1:], index) for index in range(len(words) - 1))
    elif name in ("pytest", "apt-get"):
        assert all((REPOSITORY / word.rstrip(";")).exists() for word in words if word.startswith("tests/"))
    elif name == "curl":
        send(words)
    elif name == "pip":
        extras = re.findall(r"(?:unmask|\.)\[([\w,]+)\]", " ".join(words))[0].split(",")
        declared = re.findall(r"^(\w+) = \[", (REPOSITORY / "pyproject.toml").read_text(), re.M)
        assert set(extras) <= set(declared)
    elif name == "lm_eval":
        parse_harness(words[1:])
    else:
        give_module(words)


def send(words: list[str]) -> None:
    """Send the request of a `curl` to a server of a small model, which takes weights from the folder `runs`.
    It is not refused."""
    [address] = [urlsplit(word) for word in words if word.startswith("http")]
    headers = dict(word.split(": ") for before, word in itertools.pairwise(words) if before == "-H")
    headers = {name: value.replace(f"${ADMIN_KEY}", "admin") for name, value in headers.items()}
    body = words[words.index("-d") + 1]
    with served(
        load("runs/sft/model"), AppSettings(admin_key="admin", weights_from=(Path("runs"),)), name="sft"
    ) as url:
        response = http_post(f"{url}{address.path}", content=body.encode(), headers=headers)
    assert (address.netloc, response.status_code) == (SERVER, 200), response.text


def flags_of(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def give_module(words: list[str]) -> None:
    """A module that python, torchrun or accelerate starts."""
    assert words[0] in ("python", "torchrun", "accelerate"), f"no test knows {words[0]}"
    at = words.index("-m")
    module, arguments = words[at + 1], words[at + 2 :]
    for flag, value in itertools.pairwise(words):
        assert flag != "--config_file" or (REPOSITORY / value).exists()
    if module == "unmask":
        give(arguments, run=False)
    elif module.startswith("benchmarks"):
        parse_benchmark(module, arguments)
    elif module == "sglang.launch_server":
        assert flags_of(arguments) <= SGLANG
    else:
        # tests/generation/remote/test_vllm_client.py reads its flags
        assert module == "vllm.entrypoints.openai.api_server"


def parse_harness(arguments: list[str]) -> None:
    """Pass the arguments to lm-eval's parser, where it is installed."""
    if importlib.util.find_spec("lm_eval") is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["lm_eval", *arguments])
            assert importlib.import_module("lm_eval._cli").HarnessCLI().parse_args().model == "unmask"


def parse_benchmark(module: str, arguments: list[str]) -> None:
    """Pass the arguments to the benchmark's parser, and run no more."""
    parse = argparse.ArgumentParser.parse_args

    def stop_when_parsed(parser: argparse.ArgumentParser) -> None:
        parse(parser)
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stopped:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop_when_parsed)
        patch.setattr(sys, "argv", [module, *arguments])
        importlib.import_module(module).main()
    assert stopped.value.code == 0, (module, arguments)


def give(words: list[str], *, run: bool) -> None:
    """Run a command on small models. Training verbs are rehearsed (`--dry-run`).

    Where that needs a GPU, a server, the hub or hours, the configs are constructed: training verbs print
    theirs, other verbs do nothing with them. tests/cli/test_recipes.py makes a trainer of every command
    with recipes.
    """
    verb, elsewhere = words[0], any(re.fullmatch(r"[A-Z]\w+/\S+", word) or SERVER in word for word in words)
    run &= (
        verb not in PARSED
        and not elsewhere
        and not {"--recipe", "--measure-variance", "--device-map", "cuda"} & set(words)
    )
    group = app if run or verb in TRAINING or verb == "sandbox" else verbs_that_do_nothing()
    words = [
        re.sub(r"^\d{2,}$", "4", word) if before == "--rows" else word
        for before, word in itertools.pairwise(["", *words])
    ]
    if verb in TRAINING:
        words += ["--dry-run" if run else "--print-config", *HERE]
    elif not run and verb == "sandbox":
        words += ["--help"]
    result = CliRunner().invoke(group, words)
    assert result.exit_code == 0, (result.output, result.exception)
    if verb == "migrate" and "--output" in words:
        # read by the next command
        Path(words[words.index("--output") + 1]).write_text("model: {path: MODEL}\noutput_dir: out\n")


@functools.cache
def verbs_that_do_nothing() -> typer.Typer:
    """The verbs that do not train, with their options: they only construct their configs."""
    verbs = typer.Typer()
    for command in app.registered_commands:
        body = command.callback
        if command.name not in TRAINING and body is not None:
            original = getattr(body, "__wrapped__", None)
            nothing = spread_configs(doing_nothing(original)) if original else doing_nothing(body)
            verbs.command(body.__name__, context_settings=command.context_settings)(nothing)
    return verbs


def doing_nothing(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def nothing(**_: Any) -> None:
        pass

    return nothing


PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@partly_slow(
    "page",
    PYTHON,
    *(number for number, page in enumerate(PYTHON) if page.name not in ("README.md", "losses.md")),
    ids=lambda page: page.name,
)
def test_python_runs(page, here, monkeypatch):
    """The blocks of a page one after the other, with fewer steps; `rows` stands for a data set of one's
    own."""
    monkeypatch.setattr("unmask.rl.methods.base.METHODS", dict(METHODS))
    monkeypatch.setattr(Task, "registered", dict(Task.registered))
    names: dict[str, Any] = {"__name__": __name__, "unmask": package, "rows": [PROBLEM] * 64}
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    with (
        running_server()
        if any(SERVER in block.text for block in blocks)
        else contextlib.nullcontext(SERVER) as server
    ):
        run_python(blocks, names, [*SHORTER, (SERVER, server)])


@contextlib.contextmanager
def running_server() -> Iterator[str]:
    """Host and port of a server of a small model; the official client's connections are closed."""
    with served(load("runs/sft/model"), name="sft") as url, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield urlsplit(url).netloc


def run_python(blocks: list[Block], names: dict[str, Any], changes: list[tuple[str, str]]) -> None:
    for block in blocks:
        text = block.text
        for long, short in changes:
            text = text.replace(long, short)
        tree = ast.parse(text, str(block))
        if block.not_run is None:
            exec(compile(tree, str(block), "exec"), names)
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "unmask"
            ):
                assert hasattr(package, node.attr), f"{block}: unmask.{node.attr}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_yaml_is_a_config(block, tmp_path):
    parsed = parse_yaml(block.text, str(block))
    path = tmp_path / "config.yaml"
    path.write_text(block.text)
    given = {"model.path": "m", "output_dir": "out"}
    config = resolve(
        read_layers(
            recipes=re.findall(r"--recipe (\S+)", block.text),
            config_files=[path],
            flags={key: value for key, value in given.items() if key.split(".")[0] not in parsed},
        )
    )
    verb = VERBS.get(block.page) or ("grpo" if "unmask grpo" in block.text else "sft")
    config.training["use_cpu"] = True
    training_arguments(verb, config)
