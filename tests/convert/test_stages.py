"""Stages as data: from YAML to which weights are trained, how, and with which attention."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.convert.test_trainer import convert
from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, equal, weights
from unmask.artifacts import MetricsLog
from unmask.cli import app
from unmask.config.yaml import parse_yaml
from unmask.convert.config import ConvertConfig
from unmask.convert.stages import ConversionStage, freezing, stage_ends
from unmask.convert.trainer import StageTrainer
from unmask.errors import ConfigError
from unmask.models.load import load

TWO = "[{share: 0.25, rate: 0.5, train: [attention, mask_token]}, {share: 0.75, lm_loss: 0.2}]"
FIVE = """
    - {share: 1, rate: 0.5, block_size: 1, train: [attention, time_embedding, mask_token]}
    - {share: 1, block_size: 2}
    - {share: 1, attention: bidirectional}
    - {share: 1, train: ['\\.mlp\\.', 'layers\\.1\\.']}
    - {share: 1, rate: 0.3, block_size: 8, lm_loss: 0.1}"""


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run `unmask convert --config` on the tiny model with these lines in the training section."""
    llama_lm("causal").save(tmp_path / "causal")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in TEXTS))

    def invoke(training: str, *more: str, steps: int = 5, output: str = "out") -> Any:
        quick = (
            "{max_steps: %d, logging_steps: 1, max_length: 16, per_device_train_batch_size: 4, use_cpu: "
            "true, save_strategy: 'no'}"
        )
        (tmp_path / "quick.yaml").write_text(
            f"training: {quick % steps}\ndata: {{train: {tmp_path / 'rows.jsonl'}}}"
        )
        (tmp_path / "stages.yaml").write_text(f"training:\n  {training}")
        files = ["--config", str(tmp_path / "quick.yaml"), "--config", str(tmp_path / "stages.yaml")]
        return CliRunner().invoke(
            app,
            [
                "convert",
                "--model",
                str(tmp_path / "causal"),
                "--output",
                str(tmp_path / output),
                *files,
                *more,
            ],
        )

    return invoke


@pytest.mark.parametrize(("stages", "count", "steps"), [(TWO, 2, 4), (FIVE, 5, 5)])
def test_stages_come_from_yaml_and_go_back_into_it(stages, count, steps, run, tmp_path):
    result = run(f"attention: block_causal\n  stages: {stages}", steps=steps)
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [line for line in MetricsLog(tmp_path / "out/training_logs.json").read() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    done = [sum(line["stage"] == number for line in lines) for number in range(1, count + 1)]
    assert done == {2: [1, 3], 5: [1] * 5}[count]
    lm, written = (
        load(tmp_path / "out/model"),
        parse_yaml((tmp_path / "out/config.yaml").read_text(), "config.yaml"),
    )
    assert (lm.attention, lm.block_size) == ("block_causal", 8 if count == 5 else 4)
    assert len(written["training"]["stages"]) == count and written["training"]["stages"][0]["rate"] == 0.5
    written["output_dir"] = str(tmp_path / "again")
    (tmp_path / "again.yaml").write_text(json.dumps(written))  # JSON is YAML
    again = CliRunner().invoke(app, ["convert", "--config", str(tmp_path / "again.yaml")])
    assert again.exit_code == 0, (again.output, again.exception)
    assert equal(weights(load(tmp_path / "again/model")), weights(lm))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ("[{share: 0}]", "training.stages"),
        ("[{}, {sahre: 1}]", "sahre"),
        ("[{train: attention}]", "training.stages"),
        ("[]", "there are no stages"),
        (
            "[{}, {train: [attention, no_such_layer]}]",
            "stages, stage 2, train: 'no_such_layer' names no parameters of LlamaForCausalLM",
        ),
        ("[{train: []}]", "stages, stage 1, train: the stage names no parameters"),
        ("[{train: [time_embedding]}]", "stages, stage 1, train: the stage names no parameters"),
        ("[{train: ['*.mlp.*']}]", "stages, stage 1, train: '*.mlp.*' is not a regular expression"),
        ("[{}, {block_size: 4}]", "block_size 4 with bidirectional attention"),
        ("[{}]\n  complementary: true\n  num_timesteps: 8", "training.num_timesteps"),
        ("[{}]\n  complementary: true\n  min_time: 0.6", "training.min_time"),
        ("[{}]\n  distillation: 1.0\n  teacher_top_k: -1", "training.teacher_top_k"),
        ("[{}]\n  lmbda: 1.0\n  max_new_tokens: 0", "training.max_new_tokens"),
        ("[{}]\n  attention_annealing: 1.5", "training.attention_annealing"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(stages, words, run, tmp_path):
    result = run(f"stages: {stages}")
    assert result.exit_code == 2, (result.output, result.exception)
    assert words in result.stderr and result.stderr.count("error: ") == 1 and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stages", [None, "full", 5, [5], [None], ["attention"], {"train": "all"}])
def test_what_is_no_list_of_stages_is_refused_in_python_too(stages):
    with raises(ConfigError, where="stages"):
        ConvertConfig(stages=stages)


def test_regular_expressions_choose_parameters_by_name(tmp_path):
    lm = llama_lm("causal")
    start = weights(lm)
    trainer = convert(tmp_path, lm, stages=[{"train": [r"layers\.1\..*mlp", "norm"]}], max_steps=1)
    trainer.train()
    for name, after in weights(trainer.lm).items():
        assert torch.equal(after, start[name]) != bool(re.search(r"layers\.1\..*mlp|norm", name)), name


@pytest.mark.parametrize(
    ("train", "whole"),
    [(["mask_token"], False), (["mask_token", "embed_tokens"], True), (["embed_tokens"], True)],
)
def test_the_mask_row_is_alone_but_where_the_table_is_named_as_well(train, whole, tmp_path):
    lm = llama_lm("causal")
    start = weights(lm)
    trainer = convert(tmp_path, lm, stages=[{"train": train}], max_steps=1, weight_decay=0.1)
    trainer.train()
    changed = {name for name, after in weights(trainer.lm).items() if not torch.equal(after, start[name])}
    assert changed == {"model.embed_tokens.weight"}
    rows = (trainer.lm.model.get_input_embeddings().weight != start["model.embed_tokens.weight"]).any(1)
    assert rows[lm.mask_token_id] and (rows.sum() > 1) == whole


def test_what_a_stage_freezes_it_gives_back_even_after_an_error():
    lm = llama_lm()
    lm.model.lm_head.weight.requires_grad_(False)
    before = {name: parameter.requires_grad for name, parameter in lm.model.named_parameters()}
    with (
        pytest.raises(RuntimeError),
        freezing(lm, ConversionStage(train=["attention", "mask_token", "lm_head"])),
    ):
        trained = {name for name, parameter in lm.model.named_parameters() if parameter.requires_grad}
        assert trained == {name for name in before if "self_attn" in name or "embed_tokens" in name}
        raise RuntimeError
    assert {name: parameter.requires_grad for name, parameter in lm.model.named_parameters()} == before
    lm.logits(torch.tensor([[1, 4, 5]]))[..., 4].sum().backward()
    assert lm.model.get_input_embeddings().weight.grad[1].any()  # no hook is left


def test_each_stage_has_its_own_attention(tmp_path, monkeypatch):
    seen: list[tuple[str, int | None, bool]] = []
    micro_loss = StageTrainer.micro_loss

    def spied(self: StageTrainer, lm: Any, batch: Any) -> Any:
        mask = lm.noised_inputs(batch["input_ids"], batch["documents"]).mask.allowed_B1QK[0, 0]
        seen.append((lm.attention, lm.block_size, bool(mask[0, 1])))
        return micro_loss(self, lm, batch)

    monkeypatch.setattr(StageTrainer, "micro_loss", spied)
    stages = [{"block_size": 1}, {"block_size": 4}, {"attention": "bidirectional"}, {}]
    convert(tmp_path, attention="block_causal", block_size=2, stages=stages, max_steps=4).train()
    assert seen == [
        ("block_causal", 1, False),
        ("block_causal", 4, True),
        ("bidirectional", None, True),
        ("block_causal", 2, True),
    ]


@pytest.mark.parametrize(("share", "number"), [(1e-9, 1), (1e9, 2)])
def test_a_stage_without_a_step_is_refused_before_training(share, number, tmp_path):
    with raises(ConfigError, where=f"stages, stage {number}"):
        convert(tmp_path, stages=[{"share": share}, {"share": 1.0}, {"share": share}], max_steps=4)
    assert not list(tmp_path.iterdir())


@given(shares=st.lists(st.integers(1, 20), min_size=1, max_size=6), steps=st.integers(1, 60))
def test_all_steps_are_shared_out_and_the_number_advised_is_enough(shares, steps):
    stages = [ConversionStage(share=share / 10) for share in shares]
    try:
        ends = stage_ends(stages, steps)
    except ConfigError as error:
        enough = int(re.search(r"at least (\d+)", str(error)).group(1))
        assert enough > steps
        ends = stage_ends(stages, enough)
    else:
        assert ends[-1] == steps
    assert all(first < last for first, last in pairwise([0, *ends]))
