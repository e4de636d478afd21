"""The command line: what it passes on, what it prints, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import unmask
from tests.helpers import REPOSITORY, work_unit
from unmask.cli import app
from unmask.cli.train import VERB_HELP
from unmask.config.constraint import ConstraintConfig
from unmask.config.revise import ReviseConfig
from unmask.config.run import ModelConfig, RunConfig
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError, ModelError

OTHERS = [
    "generate",
    "chat",
    "serve",
    "evaluate",
    "inspect",
    "config",
    "new",
    "demo",
    "profile",
    "migrate",
    "doctor",
]
ALL_VERBS = [*VERB_HELP, *OTHERS]
REQUIRED = ["--model", "m", "--task", "sudoku", "--output"]


def run(*args: str, **options: Any) -> Any:
    return CliRunner().invoke(app, list(args), **options)


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", **environment}
    return subprocess.run(
        [sys.executable, *args], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )


def replace(monkeypatch: pytest.MonkeyPatch, module: str, **contents: Any) -> None:
    """Replace a module that the command line imports by one with these contents."""
    fake = ModuleType(module)
    vars(fake).update(contents)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, RunConfig, bool]]:
    """The calls to `run_verb`."""
    calls: list[tuple[str, RunConfig, bool]] = []
    replace(
        monkeypatch,
        "unmask.cli.run",
        run_verb=lambda verb, config, folder, _: calls.append((verb, config, folder.resume)),
    )
    unmeasured = SimpleNamespace(finish=lambda _: None, result=None)
    replace(monkeypatch, "unmask.cli.measurements", Measurements=lambda _: unmeasured)
    return calls


def test_help_is_quick_and_imports_no_torch() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from unmask.cli import app
for verb in {ALL_VERBS}:
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0 and "--help" in result.output, verb
assert not {{"torch", "transformers", "numpy", "datasets"}} & sys.modules.keys()
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    seconds = []  # processor time, which other programs do not affect
    for _ in range(3):
        start = os.times()
        result = python("-m", "unmask", "sft", "--help")
        end = os.times()
        seconds.append(end.children_user + end.children_system - start.children_user - start.children_system)
    assert "KEY=VALUE" in result.stdout and "quality_head" in result.stdout
    assert 0 < min(seconds) < 100 * work_unit()


def test_the_verbs_are_listed_in_the_order_of_the_pipeline() -> None:
    output = run("--help").output
    assert sorted(ALL_VERBS, key=lambda verb: output.index(f" {verb} ")) == ALL_VERBS


def test_of_several_processes_only_the_first_prints_and_each_shows_its_errors() -> None:
    assert python("-m", "unmask", "--version", RANK="0").stdout == f"{unmask.__version__}\n"
    assert python("-m", "unmask", "--version", RANK="1").stdout == ""
    failed = python("-m", "unmask", "sft", RANK="1")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: ")


@pytest.mark.parametrize("verb", VERB_HELP)
def test_flags_are_short_for_settings(verb: str, stages: list[Any], tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"Puzzle": "1003340220004001", "Solution": "1243341221344321"}')
    (tmp_path / "manifest.json").write_text("{}")  # of the run to resume
    flags = ["--model", "123", "--data", str(data), "--task", "sudoku", "--output", str(tmp_path), "--resume"]
    result = run(verb, *flags, "training.learning_rate=1e-4", "sampler.steps=8")
    assert result.exit_code == 0, result.output
    [(called, config, resume)] = stages
    assert (called, resume) == (verb, True)
    assert config == RunConfig(
        model={"path": "123"},
        data={"train": str(data), "task": "sudoku"},
        sampler={"steps": 8},
        training={"learning_rate": 1e-4},
        output_dir=str(tmp_path),
    )


@pytest.mark.parametrize(
    "form", [["--resume", "PATH"], ["--resume=PATH"], ["training.resume_from_checkpoint=PATH"]]
)
@pytest.mark.parametrize("verb", VERB_HELP)
def test_a_run_goes_on_from_the_checkpoint_that_is_named(
    verb: str, form: list[str], stages: list[Any], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    checkpoint.mkdir()
    form = [part.replace("PATH", str(checkpoint)) for part in form]
    result = run(verb, *REQUIRED, str(tmp_path), *form, "training.max_steps=3")
    assert result.exit_code == 0, result.output
    [(_, config, resume)] = stages
    assert resume == str(checkpoint) and config.training == {"max_steps": 3}


@pytest.mark.parametrize(
    "form", [["--resume"], ["--resume", "--overwrite"], ["training.resume_from_checkpoint=true"]]
)
def test_resume_without_a_path_is_the_last_checkpoint(
    form: list[str], stages: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    result = run("sft", *REQUIRED, str(tmp_path), *form, "training.max_steps=3")
    assert result.exit_code == 0 and stages[0][2] is True, result.output


def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_read(
    stages: list[Any], tmp_path: Path
) -> None:
    result = run("sft", *REQUIRED, str(tmp_path / "out"), "--resume", str(tmp_path / "none"))
    assert result.exit_code == 2 and "--resume: there is no folder" in result.stderr and not stages
    result = run(
        "sft", *REQUIRED, str(tmp_path), "--resume", str(tmp_path), "training.resume_from_checkpoint=/other"
    )
    assert result.exit_code == 2 and "two checkpoints" in result.stderr and not stages


def test_a_checkpoint_of_another_run_is_no_leave_to_write_into_a_full_folder(
    stages: list[Any], tmp_path: Path
) -> None:
    for name in ("other/checkpoint-2", "out/checkpoint-2"):
        (tmp_path / name).mkdir(parents=True)
    result = run("sft", *REQUIRED, str(tmp_path / "out"), "--resume", str(tmp_path / "other"))
    assert result.exit_code == 2 and "the output folder is not empty" in result.stderr and not stages


def test_recipes_files_environment_and_overrides_apply_in_this_order(
    stages: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "a.yaml").write_text(
        "training: {learning_rate: 1, save_steps: 1, max_steps: 1, logging_steps: 1}"
    )
    (tmp_path / "b.yaml").write_text("training: {save_steps: 2, max_steps: 2, logging_steps: 2}")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml"), "--recipe", "tiny"]
    environment = {"UNMASK_TRAINING__MAX_STEPS": "3", "UNMASK_TRAINING__LOGGING_STEPS": "3"}
    result = run("sft", *REQUIRED, str(tmp_path / "out"), *files, "training.logging_steps=4", env=environment)
    assert result.exit_code == 0, result.output
    training = stages[0][1].training
    assert [training[key] for key in ("learning_rate", "save_steps", "max_steps", "logging_steps")] == [
        1,
        2,
        3,
        4,
    ]
    assert training["adam_beta2"] == 0.95  # the recipe's


def test_print_config_prints_yaml_of_the_whole_config_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "in_use").touch()
    result = run("dpo", *REQUIRED, str(tmp_path), "lora.r=4", "--print-config")
    assert result.exit_code == 0
    printed = RunConfig(**parse_yaml(result.stdout, "stdout"))
    expected = RunConfig(
        model={"path": "m"}, data={"task": "sudoku"}, lora={"r": 4}, output_dir=str(tmp_path)
    )
    assert printed.model_copy(update={"training": {}}) == expected
    # the verb's own defaults
    assert printed.training["beta"] == 0.1 and printed.training["learning_rate"] == 1e-6
    assert "trust_remote_code: false" in result.stdout  # defaults included
    assert [path.name for path in tmp_path.iterdir()] == ["in_use"]
    refused = run("dpo", *REQUIRED, str(tmp_path), "training.bta=1", "--print-config")
    assert refused.exit_code == 2 and "Did you mean 'beta'" in refused.stderr


def test_an_output_folder_in_use_is_refused_unless_asked_for(stages: list[Any], tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    refused = run("sft", *REQUIRED, str(tmp_path))
    assert refused.exit_code == 2
    assert str(tmp_path) in refused.stderr
    assert not stages
    assert run("sft", *REQUIRED, str(tmp_path), "--overwrite").exit_code == 0
    assert "there is nothing to resume" in run("sft", *REQUIRED, str(tmp_path), "--resume").stderr
    (tmp_path / "manifest.json").write_text('{"verb": "sft"}')
    assert run("sft", *REQUIRED, str(tmp_path), "--resume").exit_code == 0
    assert run("sft", *REQUIRED, str(tmp_path), "overwrite=true").exit_code == 0
    assert [config.overwrite for _, config, _ in stages] == [True, False, True]
    assert (tmp_path / "kept.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "environment", "message"),
    [
        ([], {}, "model: is required and not set"),
        (
            ["--model", "m", "--output", "o", "sampler.setps=3"],
            {},
            "sampler.setps (command line): is not a known key. Did you mean 'steps'?",
        ),
        (
            ["--model", "m", "--output", "o"],
            {"UNMASK_DATA__MAX_ROWS": "none"},
            (
                "data.max_rows (environment variable UNMASK_DATA__MAX_ROWS): 'none' is not valid. It "
                "should be a valid integer."
            ),
        ),
        (["--config", "absent.yaml"], {}, "absent.yaml: cannot be read"),
        (
            ["--model", "m", "--output", "o", "--data", "a" * 5000],
            {},
            f"{'a' * 60}...: File name too long",
        ),
        (
            ["--model", "m", "--output", "a" * 5000, "--data", "d"],
            {},
            f"{'a' * 60}...: File name too long",
        ),
        (["--recipe", "absent"], {}, "there is no recipe 'absent'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    args: list[str], environment: dict[str, str], message: str
) -> None:
    result = run("sft", *args, env=environment)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_path_that_may_not_be_read_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/of another")

    monkeypatch.setattr("unmask.training.run.folder.check_output_folder", refuse)
    result = run("sft", *REQUIRED, "o")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: runs/of another: Permission denied. ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("path", [["full/disk"], []])
@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.EROFS, errno.ENOSPC])
def test_a_path_that_cannot_be_written_is_one_error(
    code: int, path: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), *path)

    monkeypatch.setattr("unmask.cli.new.check_output_folder", refuse)
    result = run("new", "mine")
    assert result.exit_code == 2
    assert re.fullmatch(rf"error: {'full/disk: ' if path else ''}[A-Z][^:]+\.\n", result.stderr)


def test_an_error_of_the_run_names_the_source_of_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("is not a known key", where="training.lr", remedy="Did you mean\n'learning_rate'?")

    replace(monkeypatch, "unmask.cli.run", run_verb=refuse)
    result = run("sft", *REQUIRED, str(tmp_path), "training.lr=1")
    assert (
        result.stderr
        == "error: training.lr (command line): is not a known key. Did you mean 'learning_rate'?\n"
    )


@pytest.mark.parametrize(
    "debug", [{"args": ["--debug"], "env": {}}, {"args": [], "env": {"UNMASK_DEBUG": "1"}}]
)
def test_debug_lets_the_traceback_through(debug: dict[str, Any]) -> None:
    result = run(*debug["args"], "sft", env=debug["env"])
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)


def test_control_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    replace(monkeypatch, "unmask.cli.run", run_verb=interrupt)
    assert run("sft", *REQUIRED, str(tmp_path)).exit_code == 130


# The verbs that use a model


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `unmask.load` and `unmask.generate` were called with; the completions are the prompts."""
    calls: dict[str, Any] = {}

    def load(path: str, **options: Any) -> str:
        calls["model"] = ModelConfig(path=path, **options)
        return "the model"

    def generate(lm: str, prompts: list[str], config: SamplerConfig) -> SimpleNamespace:
        calls.update(lm=lm, prompts=prompts, sampler=config)
        generated = {
            "texts": prompts,
            "tokens": [[1, 2]] * len(prompts),
            "log_probs": [[-0.5, -1.0]] * len(prompts),
        }
        return SimpleNamespace(**generated, agreement=0.75 if config.lossy else None, gaps=None)

    monkeypatch.setitem(vars(unmask), "load", load)
    monkeypatch.setitem(vars(unmask), "generate", generate)
    monkeypatch.setitem(vars(unmask), "infill", generate)
    return calls


COMMON = {
    **{
        "max_new_tokens": 7,
        "block_size": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.01,
        "stop_at_eos": False,
        "seed": 1,
        "batch_size": 2,
    },
    **{
        "trace": True,
        "repetition_penalty": 1.2,
        "cfg_scale": 0.5,
        "allowed_tokens": [3, 4, 5],
        "forbidden_tokens": [4, 6],
    },
    **{"reveal_last": [3, 5], "max_batch_tokens": 99, "deterministic": True, "top_log_probs": 2},
}
SAMPLERS = [
    SamplerConfig(
        **COMMON, steps=3, remasking="margin", schedule="dream", order_temperature=0.5, remask_fraction=0.3
    ),
    SamplerConfig(
        **COMMON,
        tokens_per_step=3,
        filtered_confidence=True,
        cache="dual",
        refresh_interval=4,
        agreement_prompts=3,
    ),
    SamplerConfig(
        **COMMON, threshold=0.9, early_commit=0.5, constraint={"choice": ["yes", "no"]}, top_forbidden=2
    ),
    SamplerConfig(**(COMMON | {"cfg_scale": 0.0}), factor=1.5, num_speculative_tokens=2, sub_block_size=2),
    SamplerConfig(**COMMON, remasking="entropy", entropy_bound=0.5, entropy_rule="sum-minus-max"),
    SamplerConfig(
        **COMMON, revise={"schedule": "loop", "eta": 0.5, "temperature": 1.0, "below": 0.9, "t_on": 0.6}
    ),
    SamplerConfig(
        **{name: value for name, value in COMMON.items() if name != "block_size"}, sub_block_size=2
    ),
    SamplerConfig(
        max_denoising_steps=9, t_min=0.1, t_max=0.9, stability_threshold=2, confidence_threshold=0.1
    ),
    SamplerConfig(mode="self-speculative", num_speculative_tokens=3, num_branches=2, temperature=1.0),
]


def test_the_samplers_here_set_everything() -> None:
    assert (
        set().union(*(sampler.model_fields_set for sampler in SAMPLERS)) == SamplerConfig.model_fields.keys()
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_generate_passes_every_option_on(model: dict[str, Any], sampler: SamplerConfig) -> None:
    network = ModelConfig(
        path="m",
        attention="block_causal",
        block_size=4,
        logit_shift=False,
        dtype="float64",
        trust_remote_code=True,
    )
    args = [*options(sampler), *options(network, block_size="attention-block-size")]
    for more in ([], ["--infill"]):
        result = run("generate", "m", "--prompt", "a", "--prompt", "b", *args, *more)
        assert result.exit_code == 0, result.output
        assert result.stdout == "a\nb\n"
        assert model == {"model": network, "lm": "the model", "prompts": ["a", "b"], "sampler": sampler}
        assert ("75.0% of the tokens are those of the exact sampler" in result.stderr) == (
            sampler.lossy is not None
        )


def test_infill_finds_the_lengths_of_gaps(model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def infill(lm: str, texts: list[str], config: SamplerConfig, **search: Any) -> SimpleNamespace:
        model.update(lm=lm, texts=texts, search=search)
        gaps = [[SimpleNamespace(start=1, length=2)]]
        return SimpleNamespace(
            texts=["text"], tokens=[[1, 2]], log_probs=[[0.0, -1.0]], agreement=None, gaps=gaps
        )

    monkeypatch.setitem(vars(unmask), "infill", infill)
    result = run(
        "generate", "m", "--infill", "--prompt", "a [] b", "--max-gap", "9", "--gap-mark", "[]", "--json"
    )
    assert result.exit_code == 0, result.output
    assert model["texts"] == ["a [] b"] and model["search"] == {
        "length": "auto",
        "max_gap": 9,
        "gap_mark": "[]",
    }
    assert (
        run("generate", "m", "--infill", "--prompt", "a <gap> b", "--max-gap", "9", "--search").exit_code == 0
    )
    assert model["search"] == {"length": "search", "max_gap": 9, "gap_mark": "<gap>"}
    assert json.loads(result.stdout)["gaps"] == [{"start": 1, "length": 2}]
    refused = run("generate", "m", "--prompt", "a <gap> b", "--max-gap", "9")
    assert refused.exit_code == 2 and "Add --infill" in refused.stderr


def test_generate_takes_prompts_as_messages(model: dict[str, Any]) -> None:
    result = run("generate", "m", "--prompt", "a", "--prompt", "b", "--chat", "--json")
    assert result.exit_code == 0, result.output
    assert model["prompts"] == [[{"role": "user", "content": text}] for text in "ab"]
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["a", "b"]
    refused = run("generate", "m", "--prompt", "a", "--chat", "--infill")
    assert refused.exit_code == 2 and "a text to fill in is no message" in refused.stderr
    refused = run("generate", "m", "--infill", "--prompt", "a <gap> b", "--max-gap", "9", "--show-steps")
    assert refused.exit_code == 2 and "texts whose length is known" in refused.stderr


def options(config: SamplerConfig | ModelConfig, **renamed: str) -> list[str]:
    """A config as command-line options."""
    args = []
    for field in config.model_fields_set - {"path"}:
        name, value = renamed.get(field, field.replace("_", "-")), getattr(config, field)
        if isinstance(value, ConstraintConfig):
            name, value = f"{name}-{value.kind.replace('_', '-')}", getattr(value, value.kind)
        if isinstance(value, ReviseConfig):
            args += [
                text
                for each in value.model_fields_set
                for text in (f"--{name}-{each.replace('_', '-')}", str(getattr(value, each)))
            ]
            continue
        values = value if isinstance(value, list) else [value]
        args += (
            [f"--{name}" if value else f"--no-{name}"]
            if isinstance(value, bool)
            else [x for v in values for x in (f"--{name}", str(v))]
        )
    return args


@pytest.mark.parametrize(
    "option, value, constraint",
    [
        ("--constraint-regex", "a+", {"regex": "a+"}),
        ("--constraint-json-schema", '{"type": "null"}', {"json_schema": '{"type": "null"}'}),
        ("--constraint-json-schema", "FILE", {"json_schema": '{"type": "integer"}'}),
        ("--constraint-json", None, {"json": True}),
    ],
)
def test_generate_takes_a_constraint(
    model: dict[str, Any], tmp_path: Path, option: str, value: str | None, constraint: dict
) -> None:
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    given = [] if value is None else [value.replace("FILE", str(tmp_path / "schema.json"))]
    result = run("generate", "m", "--prompt", "a", option, *given)
    assert result.exit_code == 0, result.output
    assert model["sampler"] == SamplerConfig(constraint=constraint)


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["--constraint-json", "--constraint-regex", "a"],
            "constraint.json: regex and json contradict one another",
        ),
        (["--constraint-json-schema", "absent.json"], "neither a text with '{' nor a file"),
        (["--gap-mark", "[gap]"], "has no effect without --max-gap"),
        (["--search"], "has no effect without --max-gap"),
        (["--constraint-grammar", "absent.lark"], "neither a text with 'start:' nor a file"),
        (["--constraint-json-schema", "{"], "is not JSON"),
    ],
)
def test_generate_refuses_a_constraint_that_is_not_one(
    model: dict[str, Any], args: list[str], message: str
) -> None:
    result = run("generate", "m", "--prompt", "a", *args)
    assert result.exit_code == 2 and message in result.stderr and "sampler" not in model


def test_generate_has_the_defaults_of_the_configs(model: dict[str, Any]) -> None:
    assert run("generate", "m", "--prompt", "a").exit_code == 0
    assert (model["model"], model["sampler"]) == (ModelConfig(path="m"), SamplerConfig())


def test_an_option_may_have_underscores_as_its_setting_has(model: dict[str, Any]) -> None:
    assert run("generate", "m", "--prompt", "a", "--max_new_tokens", "3").exit_code == 0
    assert model["sampler"] == SamplerConfig(max_new_tokens=3)


def test_generate_reads_stdin_and_writes_json_lines(model: dict[str, Any]) -> None:
    result = run("generate", "m", "--prompt", "first", "--prompt", "-", "--json", input="seçond\nthird\n")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"prompt": prompt, "text": prompt, "tokens": [1, 2], "log_probs": [-0.5, -1.0]}
        for prompt in ("first", "seçond", "third")
    ]
    result = run("generate", "m", "--prompt", "-", "--json", input="one\u2028line\n\fanother")
    assert [json.loads(line)["prompt"] for line in result.stdout.split("\n")[:-1]] == [
        "one\u2028line",
        "\fanother",
    ]
    assert run("generate", "m", "--prompt", "-", input="").exit_code == 2


def test_a_sampler_value_out_of_range_is_an_error_before_the_model_is_loaded(model: dict[str, Any]) -> None:
    result = run("generate", "m", "--prompt", "a", "--top-p", "1.5")
    assert result.exit_code == 2
    assert result.stderr == "error: top_p: 1.5 is not valid. It should be less than or equal to 1.\n"
    assert not model


def test_a_model_that_cannot_be_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: str, **_: Any) -> None:
        raise ModelError("there is no model", where=path, remedy="Give a folder.")

    monkeypatch.setitem(vars(unmask), "load", load)
    result = run("generate", "absent", "--prompt", "a")
    assert (result.exit_code, result.stderr) == (2, "error: absent: there is no model. Give a folder.\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model without its weights."""
    from tests.tiny import build_config, tokenizer_of

    path = str(tmp_path_factory.mktemp("model"))
    tokenizer = tokenizer_of("abc")
    build_config("llama", tokenizer, intermediate_size=24).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_inspect_plans_from_config_and_tokenizer_alone(folder: str) -> None:
    command = ["inspect", folder, "--sequence-length", "32"]
    result = run(
        *command, "--hardware", "h100-80gb", "--hardware", "multi-node", "--max-memory-gb", "2", "--json"
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert printed["facts"]["architecture"] == "LlamaForCausalLM"
    assert printed["conversion"]["embeddings"].startswith("full: they grow from")
    assert list(printed["plans"]) == ["h100-80gb", "multi-node"]
    one, many = printed["plans"].values()
    assert one["limit"] == many["limit"] == 2e9 and one["fits"] and one["peak"] <= 2e9 and one["seconds"] > 0
    assert many["devices"] == many["workload"]["shards"] == 16
    assert one["bound"] in ("memory", "launches") and one["launches"] > 100 and one["reads"] > 0
    assert [time["bound"] for time in printed["generation"]["h100-80gb"].values()] == ["launches"] * 3

    table = run(*command, "--hardware", "h100-80gb", "--batch-size", "3")
    assert (
        "h100-80gb" in table.stdout
        and "tokens/s" in table.stdout
        and "compile, or larger batches" in " ".join(table.stdout.split())
    )


@pytest.mark.slow
def test_inspect_plans_in_the_type_of_the_weights_that_is_asked_for(folder: str) -> None:
    command = [
        "inspect",
        folder,
        "--sequence-length",
        "8",
        "--hardware",
        "h100-80gb",
        "--batch-size",
        "1",
        "--json",
    ]
    mixed, half = (
        json.loads(run(*command, *more).stdout)["plans"]["h100-80gb"]
        for more in ([], ["--dtype", "bfloat16"])
    )
    assert (mixed["workload"]["precision"], half["workload"]["precision"]) == ("mixed", "bfloat16")
    assert half["memory"]["parameters"] == mixed["memory"]["parameters"] / 2


@pytest.mark.slow
def test_inspect_plans_quantized_weights_under_adapters(folder: str) -> None:
    command = [
        "inspect",
        folder,
        "--sequence-length",
        "8",
        "--hardware",
        "h100-80gb",
        "--batch-size",
        "1",
        "--lora-rank",
        "4",
        "--json",
    ]
    whole, eight, four = (
        json.loads(run(*command, *more).stdout)
        for more in ([], *(["--quantization", bits] for bits in ("8bit", "4bit")))
    )
    stored = [found["plans"]["h100-80gb"]["memory"]["parameters"] for found in (whole, eight, four)]
    assert stored[0] > stored[1] > stored[2]
    # 4 bytes, 1, and half of one
    assert stored[1] - stored[2] == pytest.approx((stored[0] - stored[1]) * (1 - 0.5 - 0.127 / 8) / 3)
    assert "4bit weights" in run(*command[:-1], "--quantization", "4bit").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hardware", "h100"], "there is no hardware 'h100'. Did you mean 'h100-80gb'?"),
        (["--sequence-length", "65"], "65 tokens, but the model's context is 64. Use at most 64"),
        (
            ["--hardware", "a40-48gb-x3", "--sequence-length", "8", "--measure"],
            "this machine has no such device. Leave out --measure, or run it there",
        ),
        (
            [
                "--sequence-length",
                "8",
                "--lora-rank",
                "4",
                "--quantization",
                "4bit",
                "--device-map",
                "balanced",
                "--hardware",
                "a6000-48gb",
            ],
            (
                "--device-map and --quantization: quantized weights are not spread over devices. Leave one "
                "of the two out"
            ),
        ),
        (
            ["--quantization", "4bit"],
            "quantization: quantized weights take no gradients. Train adapters (LoRA), or leave it out",
        ),
        (
            [
                "--hardware",
                "cpu",
                "--sequence-length",
                "8",
                "--lora-rank",
                "4",
                "--quantization",
                "8bit",
                "--measure",
            ],
            "steps on quantized weights are not measured. Leave one of the two out",
        ),
    ],
)
def test_inspect_refuses_what_it_cannot_plan(options: list[str], message: str, folder: str) -> None:
    result = run("inspect", folder, *options)
    assert result.exit_code == 2
    assert message in result.stderr


BARE = [
    (["--learning_rate", "1e-6"], ["training.learning_rate=1e-6"]),
    (["--learning-rate=1e-6", "--max-rows", "3"], ["training.learning_rate=1e-6", "data.max_rows=3"]),
    (
        ["learning_rate=1e-6", "max_rows=3", "quantization=4bit"],
        ["training.learning_rate=1e-6", "data.max_rows=3", "model.quantization=4bit"],
    ),
    (
        ["--bf16", "--no-fp16", "--tf32", "false"],
        ["training.bf16=true", "training.fp16=false", "training.tf32=false"],
    ),
    (
        ["--bf16", "training.seed=1", "--no_use_cpu"],
        ["training.bf16=true", "training.seed=1", "training.use_cpu=false"],
    ),
    (["--temperature", "0.5", "--max-steps", "-1"], ["PLACE.temperature=0.5", "training.max_steps=-1"]),
    (["--sampler.top-k", "3", "--lora.r=2"], ["sampler.top_k=3", "lora.r=2"]),
    (["--seed", "1", "--", "training.seed=2"], ["training.seed=2"]),
    (["training.seed=2", "--seed", "1"], ["training.seed=1"]),
    (
        ["--optim_args", "a=b,c=d", "--dataloader_num_workers=1"],
        ["training.optim_args=a=b,c=d", "training.dataloader_num_workers=1"],
    ),
    (["--lr-scheduler-kwargs.num_cycles", "2"], ["training.lr_scheduler_kwargs.num_cycles=2"]),
    (["lr_scheduler_kwargs.num_cycles=2"], ["training.lr_scheduler_kwargs.num_cycles=2"]),
]
"""Settings without their section, and the same as KEY=VALUE."""


@pytest.mark.parametrize("verb", VERB_HELP)
@pytest.mark.parametrize(("given", "meant"), BARE)
def test_settings_are_named_without_their_section(
    verb: str, given: list[str], meant: list[str], stages: list[Any], tmp_path: Path
) -> None:
    place = "training" if verb in ("convert", "grpo") else "sampler"  # the temperature of rollouts
    for words in (given, [word.replace("PLACE", place) for word in meant]):
        for around in ([*REQUIRED, str(tmp_path), *words], [*words, *REQUIRED, str(tmp_path)]):
            result = run(verb, *around)
            assert result.exit_code == 0, result.output
    assert all(called == stages[0] for called in stages)


@pytest.mark.parametrize("given", [given for given, _ in BARE[:2]])
def test_a_profile_takes_settings_without_their_section(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiled: list[RunConfig] = []
    replace(
        monkeypatch,
        "unmask.cli.profile",
        profile_run=lambda verb, settings, *_: profiled.append(settings) or {},
    )
    assert run("profile", "sft", *REQUIRED, "out", *given).exit_code == 0
    assert profiled[0].training == {"learning_rate": 1e-6}


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("sft", ["--beta", "3"], "--beta: is no setting or option of sft"),
        (
            "sft",
            ["--learning-rat", "3"],
            "--learning-rat: is no setting or option of sft. Did you mean training.learning_rate?",
        ),
        (
            "sft",
            ["learning_rat=3"],
            "learning_rat: is no setting or option of sft. Did you mean training.learning_rate?",
        ),
        (
            "sft",
            ["trainig.max_steps=3"],
            "trainig.max_steps: is no setting or option of sft. Did you mean training.max_steps?",
        ),
        (
            "sft",
            ["--model_name_or_path", "m"],
            "--model_name_or_path: is no setting or option of sft. Did you mean --model?",
        ),
        ("sft", ["--config"], "--config: has no value. Write --config VALUE, or --config=VALUE"),
        ("sft", ["--task", "--overwrite"], "--task: has no value"),
        ("sft", ["--data="], "data.train (command line): '' is not valid"),
        ("sft", ["--epochs", "3"], "Did you mean training.num_train_epochs?"),
        ("sft", ["--lr", "3"], "--lr: is no setting or option of sft. Did you mean training.learning_rate?"),
        ("sft", ["--ouput", "o"], "Did you mean --output?"),
        ("sft", ["--resum"], "Did you mean --resume?"),
        (
            "sft",
            ["model=m"],
            (
                "model (command line): is a section of settings, not the value 'm'. Set model.path, or "
                "another of its keys"
            ),
        ),
        ("sft", ["--text-column", "7"], "7 is not valid. It should be a valid string, in quotes: '\"7\"'."),
        ("sft", ["--xyzzy"], "`unmask config sft` lists all settings"),
        ("sft", ["--block-size", "3"], "--block-size: may be model.block_size or sampler.block_size"),
        (
            "sft",
            ["batch_size=3"],
            "batch_size: may be training.per_device_train_batch_size or sampler.batch_size",
        ),
        ("convert", ["recipe=block"], "recipe: is an option, not a setting. Write --recipe"),
        ("sft", ["--seed"], "--seed: has no value. Write --seed VALUE, of the type int"),
        ("sft", ["--seed", "--bf16"], "--seed: has no value"),
        (
            "grpo",
            ["--rewards", "a.py:a", "--rewards", "b.py:b"],
            "--rewards: is given twice, and the second value would replace the first",
        ),
        ("sft", ["--no-seed"], "--no-seed: this form is for switches"),
        ("sft", ["--no-bf16=true"], "--no-bf16: this form is for switches, and takes no value"),
        ("sft", ["--eval-rows", "none"], "data.eval_rows (command line, --eval-rows): 'none' is not valid"),
        ("sft", ["eval_rows=none"], "data.eval_rows (command line, eval_rows): 'none' is not valid"),
        ("sft", ["--eval-rows", "[1"], "command line, --eval-rows, line 1: "),
    ],
)
def test_a_setting_that_is_misnamed_is_one_error(
    verb: str, given: list[str], message: str, stages: list[Any]
) -> None:
    result = run(verb, *REQUIRED, "out", *given)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2 and len(errors) == 1 and message in errors[0], result.output
    assert not stages


def test_a_setting_of_another_section_than_training_is_reported(stages: list[Any], tmp_path: Path) -> None:
    result = run("sft", *REQUIRED, str(tmp_path), "--max-rows", "3", "max_steps=2", "overwrite=true")
    assert result.stderr == "--max-rows is read as data.max_rows\n"


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which --quick would set
    replace(monkeypatch, "unmask.demo", run_demo=lambda **options: calls.append(options), QUICK="quick")
    assert run("demo").exit_code == 0
    assert (
        run("demo", "--task", "countdown", "--output", "o", "--seed", "3", "--quick", "--overwrite").exit_code
        == 0
    )
    assert calls == [
        {"task": "sudoku", "output": Path("runs/demo"), "seed": 0, "overwrite": False, "settings": None},
        {"task": "countdown", "output": Path("o"), "seed": 3, "overwrite": True, "settings": "quick"},
    ]


def test_an_option_with_one_dash_is_refused_as_any_other() -> None:
    result = run("grpo", "-r16")
    assert result.exit_code == 2 and "No such option: -r" in result.stderr


def test_later_lines_of_a_log_record_are_indented() -> None:
    code = """
import logging
from unmask.cli.serve import show_requests
show_requests()
try:
    raise ValueError("x\\n2026-01-01 00:00:00,000 forged")
except ValueError:
    logging.getLogger("unmask.serving").exception("a\\n2026-01-01 00:00:00,000 forged")
"""
    result = python("-c", code)
    assert (
        result.stderr.count("    2026-01-01 00:00:00,000 forged") == 2
        and "\n2026-01-01 00:00:00,000 forged" not in result.stderr
    )
