"""The tokenizer of a new model: trained on the data, or another one; and where models and data are looked
for."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.cli.test_run import GRPO, assert_refused
from tests.training.tiny_runs import QUICK, unmask
from unmask.config.run import ModelConfig
from unmask.errors import UnmaskWarning
from unmask.models.load import initialize, load
from unmask.models.model_files import read_tokenizer
from unmask.planning.blueprint import ModelSpec

STORY = "Once upon a time there was a cat. The cat sat on a mat, and the mat was red.\n"


@pytest.fixture
def story(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY * 20)
    return path


def pretrain(model, data, output, *more):
    return unmask(
        "pretrain",
        "--model",
        model,
        "--data",
        data,
        "--output",
        output,
        *QUICK,
        "training.max_length=32",
        *more,
    )


def test_a_model_from_scratch_gets_a_tokenizer_trained_on_its_data(model, story, tmp_path):
    assert_refused(
        pretrain(model, story, tmp_path / "out", "model.from_scratch=true"),
        "story.txt",
        "unknown to the tokenizer",
        "'t'",
    )
    for name in ("one", "two"):
        result = pretrain(
            model, story, tmp_path / name, "model.from_scratch=true", "--tokenizer", "train:280"
        )
        assert result.exit_code == 0, (result.output, result.exception)
    lm = load(tmp_path / "one" / "model")
    tokens = lm.tokenizer.tokenize(STORY.strip())
    assert len(tokens) < len(STORY) / 2 and lm.tokenizer.unk_token_id is None
    assert lm.model.config.vocab_size == len(lm.tokenizer) == 281  # with the mask token
    assert [lm.config.bos_token_id, lm.config.eos_token_id] == [
        lm.tokenizer.bos_token_id,
        lm.tokenizer.eos_token_id,
    ]
    assert lm.eos_token_ids == (lm.tokenizer.eos_token_id,)
    for name in ("tokenizer.json", "model.safetensors"):
        assert (tmp_path / "one" / "model" / name).read_bytes() == (
            tmp_path / "two" / "model" / name
        ).read_bytes()
    generated = unmask(
        "generate", tmp_path / "one" / "model", "--prompt", "Once upon", "--max-new-tokens", "4", "--json"
    )
    assert generated.exit_code == 0 and json.loads(generated.stdout)["prompt"] == "Once upon"

    other = pretrain(
        model, story, tmp_path / "other", "model.from_scratch=true", "--tokenizer", tmp_path / "one" / "model"
    )
    assert other.exit_code == 0, (other.output, other.exception)
    assert load(tmp_path / "other" / "model").tokenizer.get_vocab() == lm.tokenizer.get_vocab()


def test_it_is_trained_on_a_stream_too(model, story, tmp_path):
    streamed = ["data.streaming=true", "model.from_scratch=true", "model.tokenizer=train:280"]
    assert pretrain(model, story, tmp_path / "streamed", *streamed).exit_code == 0
    assert pretrain(model, story, tmp_path / "read", *streamed[1:]).exit_code == 0
    made = [read_tokenizer(str(tmp_path / name / "model")).get_vocab() for name in ("streamed", "read")]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    ("verb", "options", "words"),
    [
        (
            "pretrain",
            ["--tokenizer", "train:300"],
            ["model.tokenizer", "keeps the tokenizer", "model.from_scratch=true"],
        ),
        ("sft", ["--tokenizer", "train:300"], ["model.tokenizer", "model.from_scratch=true (pretrain only)"]),
        (
            "pretrain",
            ["--tokenizer", "train:100", "model.from_scratch=true"],
            ["model.tokenizer", "'train:100' has no size from 259", "train:8000"],
        ),
        (
            "pretrain",
            ["--tokenizer", "train:8k", "model.from_scratch=true"],
            ["model.tokenizer", "'train:8k' has no size", "train:8000"],
        ),
        (
            "pretrain",
            ["--tokenizer", "nowhere", "model.from_scratch=true"],
            ["nowhere", "cannot be had from the hub"],
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_had_is_refused(verb, options, words, model, story, tmp_path):
    result = unmask(verb, "--model", model, "--data", story, "--output", tmp_path / "out", *QUICK, *options)
    assert_refused(result, *words)
    assert not (tmp_path / "out").exists()


def test_without_data_no_tokenizer_is_trained(model, tmp_path):
    run = [
        "pretrain",
        "--model",
        model,
        "--output",
        tmp_path / "out",
        *QUICK,
        "model.from_scratch=true",
        "--tokenizer",
        "train:300",
    ]
    assert_refused(unmask(*run), "data.train", "no training data", "--data FILE_OR_ID or --task NAME")
    (tmp_path / "empty.txt").write_text("\n")
    assert_refused(unmask(*run, "--data", tmp_path / "empty.txt"), "empty.txt", "empty")


def test_commands_that_make_no_model_have_no_option_for_its_tokenizer(model):
    assert "--tokenizer" not in unmask("generate", "--help").output
    assert unmask("generate", model, "--prompt", "1", "--tokenizer", "train:300").exit_code == 2


def test_the_folder_of_a_run_stands_for_the_model_in_it(model, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    (run / "config.yaml").write_text("model: {path: elsewhere}\n")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished/manifest.json").write_text("{}")
    refused = unmask("generate", tmp_path / "unfinished", "--prompt", "1=")
    assert_refused(
        refused, "unfinished: is the folder of a run that has not saved its model. Finish it with --resume"
    )
    assert load(run).settings == load(model).settings and initialize(run, seed=0).tokenizer.get_vocab()
    assert ModelSpec.read(ModelConfig(path=str(run))).config.hidden_size == load(model).config.hidden_size
    for verb in (
        ["inspect", run, "--hardware", "h100-80gb"],
        ["generate", run, "--prompt", "1=", "--max-new-tokens", "4"],
    ):
        result = unmask(*verb)
        assert result.exit_code == 0, (result.output, result.exception)
    (run / "manifest.json").write_text('{"state": "finished"}')
    load(run)
    (run / "manifest.json").write_text('{"state": "interrupted"}')
    with pytest.warns(
        UnmaskWarning,
        match=r"the run has not finished \(interrupted\), so .*model may be the model of an earlier one",
    ):
        load(run)
    (run / "manifest.json").unlink()
    trained = unmask("pretrain", "--model", run, "--task", "sudoku", "--output", tmp_path / "out", *QUICK)
    assert trained.exit_code == 0, (trained.output, trained.exception)
    assert (
        unmask(
            "evaluate", tmp_path / "out", "--task", "sudoku", "--rows", "2", "--max-new-tokens", "17"
        ).exit_code
        == 0
    )


def test_a_folder_with_a_config_of_its_own_is_the_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "outer")
    shutil.copytree(model, tmp_path / "outer" / "model")
    (tmp_path / "outer" / "model" / "config.json").write_text("broken")
    assert load(tmp_path / "outer").attention == "causal"


def test_a_run_reads_a_pattern_and_a_split_of_a_folders_config(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rows/a", "rows/deep/b", "hub/c", "hub/d"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": "1", "completion": "2"}) + "\n")
    (tmp_path / "hub/README.md").write_text(
        "---\nconfigs:\n- config_name: easy\n  data_files: [{split: test, path: c.jsonl}]\n---\n"
    )
    held_out = 'data.eval=[{path: "hub:easy", split: test}]'
    words = ["--model", model, "--data", "rows/**/*.jsonl", "--output", "out", *QUICK, held_out]
    done = unmask("sft", *words)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out/data_report.json").read_text())
    assert (report["train"]["read"], report["eval"]["read"]) == (2, 1)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        *((verb, ["--data", "nowhere.jsonl"]) for verb in ("pretrain", "convert", "sft", "dpo", "grpo")),
        *(
            (verb, ["--data", "there.jsonl", "data.eval=nowhere.jsonl"])
            for verb in ("pretrain", "convert", "sft", "dpo", "grpo")
        ),
        *(
            (verb, ["--task", "sudoku", "data.eval=nowhere.jsonl"])
            for verb in ("pretrain", "convert", "sft", "dpo", "grpo")
        ),
        ("pretrain", ["--data", "nowhere.jsonl", "data.streaming=true"]),
        ("convert", ["data.train=[{path: there.jsonl}, {path: nowhere.jsonl}]"]),
        ("convert", ["data.train=[{path: there.jsonl}, {path: nowhere.jsonl}]", "data.streaming=true"]),
        ("sft", ["--data", "there.jsonl", "retention.likelihood=nowhere.jsonl"]),
        ("evaluate", ["--likelihood", "nowhere.jsonl"]),
        ("evaluate", ["--likelihood", "nowhere.jsonl", "--against", "MODEL"]),
    ],
)
def test_missing_data_is_found_before_the_model_is_loaded(verb, options, model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.chdir(tmp_path)
    for module in ("cli.inputs", "cli.evaluation"):
        monkeypatch.setattr(f"unmask.{module}.load", refuse)
    rows = {"text": "1", "prompt": "1", "completion": "2", "chosen": "2", "rejected": "3"}
    columns = {
        "sft": ("prompt", "completion"),
        "dpo": ("prompt", "chosen", "rejected"),
        "grpo": ("prompt",),
    }.get(verb, ("text",))
    (tmp_path / "there.jsonl").write_text(json.dumps({name: rows[name] for name in columns}) + "\n")
    options = [str(model) if option == "MODEL" else option for option in options]
    if verb == "evaluate":
        assert_refused(unmask(verb, model, *options), "nowhere.jsonl", "no such file")
        return
    more = [*GRPO, 'rewards=["sudoku"]'] if verb == "grpo" else []
    assert_refused(
        unmask(verb, "--model", model, "--output", "out", *QUICK, *more, *options),
        "nowhere.jsonl",
        "no such file",
    )


@pytest.mark.parametrize("verb", ["pretrain", "convert"])
def test_what_nobody_reads_may_hold_anything(verb, model, tmp_path):
    """An integer that no table can hold, a lone surrogate, and values of several types."""
    path, others = tmp_path / "rows.jsonl", ["123456789012345678901234567890", r'"\ud800"', '{"a": [1, "b"]}']
    path.write_text("\n".join(f'{{"text": "1234123412", "other": {other}}}' for other in others))
    tiny = [*QUICK, "training.max_length=32", *(["training.max_steps=10"] if verb == "convert" else [])]
    result = unmask(verb, "--model", model, "--data", path, "--output", tmp_path / "out", *tiny)
    assert result.exit_code == 0, (result.output, result.exception)
    path.write_text('{"text": "123"}\n{"text": "1\\ud800"}')
    for more in ([], ["model.from_scratch=true", "--tokenizer", "train:280"] if verb == "pretrain" else []):
        result = unmask(verb, "--model", model, "--data", path, "--output", tmp_path / "other", *tiny, *more)
        assert_refused(result, "rows.jsonl, row 1", "not valid Unicode")
