"""Which runs a record tells apart: by settings, data, rewards and models; in Python as on the command
line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import PAIRS, equal, make, moved, ranks, share_of_a, weights
from unmask.config.base import Config, OnResume, flat_values, kinds_of
from unmask.config.run import RunConfig
from unmask.errors import ConfigError, TrainingError
from unmask.rl.weighted_rewards import reward_identities
from unmask.supervised.sft import SFTConfig
from unmask.training import distributed
from unmask.training.run.fingerprints import file_fingerprints, rows_fingerprint
from unmask.training.run.record import RECORD_FILE, RunRecord, run_settings

RUN = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CONFIG = RunConfig(
    model={"path": "m"}, output_dir="o", lora={}, hardware={"name": "cpu", "devices": [{"name": "cpu"}]}
)


def stopped(verb: str, folder: Path, **more: Any) -> dict:
    """A run that was stopped after two of four steps; the weights that it would have had."""
    trainer = make(verb, folder, **RUN | more)
    trainer.train()
    shutil.rmtree(folder / "checkpoint-4")
    return weights(trainer.lm)


def resume(verb: str, folder: Path, **more: Any) -> dict:
    trainer = make(verb, folder, **RUN | more)
    trainer.train(resume_from_checkpoint=True)
    return weights(trainer.lm)


def test_unchanged_runs_resume_bit_for_bit_and_other_rows_are_refused(tmp_path):
    straight = stopped("sft", tmp_path)
    for rows in (PAIRS[:-1], PAIRS[::-1]):
        with raises(ConfigError, where="train_dataset"):
            resume("sft", tmp_path, rows=rows)
    with raises(ConfigError, where="seed"):
        resume("sft", tmp_path, seed=1)
    assert equal(resume("sft", tmp_path), straight)


def test_a_batch_may_be_split_otherwise(tmp_path):
    stopped("sft", tmp_path)
    with raises(ConfigError, where="gradient_accumulation_steps"):
        resume("sft", tmp_path, gradient_accumulation_steps=2)
    resume("sft", tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2)


def test_other_adapters_and_other_weights_under_them_are_refused(tmp_path):
    run = {"peft_config": peft.LoraConfig(**LORA)}
    straight = stopped("sft", tmp_path, **run)
    with raises(ConfigError, where="model.adapters"):
        resume("sft", tmp_path, peft_config=peft.LoraConfig(**LORA | {"lora_alpha": 2}))
    with raises(ConfigError, where="model.weights"):
        resume("sft", tmp_path, lm=moved(llama_lm(), among="mlp"), **run)
    assert equal(resume("sft", tmp_path, **run), straight)


def test_a_reference_is_the_model_that_the_run_began_with(tmp_path):
    straight = stopped("grpo", tmp_path / "kl", beta=0.1, reward=ranks)
    with raises(ConfigError, where="model.weights"):
        resume("grpo", tmp_path / "kl", beta=0.1, reward=ranks, lm=moved(llama_lm()))
    assert equal(resume("grpo", tmp_path / "kl", beta=0.1, reward=ranks), straight)
    straight = stopped("grpo", tmp_path / "free", beta=0.0, reward=ranks)
    # the checkpoint has its weights
    assert equal(resume("grpo", tmp_path / "free", beta=0.0, reward=ranks, lm=moved(llama_lm())), straight)


def test_other_rewards_are_refused(tmp_path):
    stopped("grpo", tmp_path, reward=ranks)
    with raises(ConfigError, where="reward_funcs"):
        resume("grpo", tmp_path, reward=share_of_a)


def test_a_tokenizer_of_the_same_size_with_other_tokens_is_refused(tmp_path):
    stopped("grpo", tmp_path, reward=ranks)
    other = llama_lm()
    vocabulary = json.loads(other.tokenizer.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {
        "a": vocabulary["model"]["vocab"]["b"],
        "b": vocabulary["model"]["vocab"]["a"],
    }
    other.tokenizer._tokenizer = type(other.tokenizer.backend_tokenizer).from_str(json.dumps(vocabulary))
    with raises(ConfigError, where="model.vocabulary"):
        resume("grpo", tmp_path, lm=other, reward=ranks)


def test_rewards_are_told_apart_by_their_source(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("def f(completions, **_):\n    return [1.0 for _ in completions]\n")
    one = reward_identities(f"{path}:f")
    path.write_text("def f(completions, **_):\n    return [2.0 for _ in completions]\n")
    assert one[0]["name"] == "f" and reward_identities([f"{path}:f"]) != one
    monkeypatch.chdir(tmp_path)
    assert reward_identities("mine:f") == reward_identities(f"{path}:f")
    assert reward_identities("https://user:secret@host:80/a?token=b") == [{"name": "host:80/a"}]
    assert reward_identities(["sudoku/partial", "model:some/thing"]) == [
        {"name": "sudoku/partial"},
        {"name": "model:some/thing"},
    ]
    assert reward_identities(ranks) == reward_identities([ranks]) != reward_identities(share_of_a)


def test_there_is_nothing_to_resume_in_a_folder_without_a_run(tmp_path):
    with raises(TrainingError, where=str(tmp_path / "uot")):
        resume("sft", tmp_path / "uot")
    assert not (tmp_path / "uot").exists() or not list((tmp_path / "uot").iterdir())


def test_no_secret_is_recorded(tmp_path):
    stopped("grpo", tmp_path, hub_token="hf_secret")
    assert "hf_secret" not in (tmp_path / "checkpoint-2" / RECORD_FILE).read_text()


@pytest.mark.parametrize("name", ["data.seed", "sampler.steps", "data.train"])  # one of each kind
def test_a_setting_of_a_section_is_of_its_declared_kind(name, tmp_path):
    def record(settings: dict) -> RunRecord:
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True)
        args.run_settings = settings
        return RunRecord(args, {}, {})

    settings = run_settings(CONFIG)
    value, kind = settings[name]
    record(settings).write(tmp_path, {})
    now = record(settings | {name: ("another", kind)})
    if kind is OnResume.OTHER:
        with raises(ConfigError, where="data.seed"):
            now.resume(tmp_path, 2)
        with raises(ConfigError, where="data.seed"):
            now.refuse_settings(tmp_path)
    else:
        assert now.resume(tmp_path, 2) == {name: json.loads(json.dumps(value))}
        assert now.changes == [{"step": 2, "setting": name, "old": value, "new": "another"}]


def test_every_setting_of_the_sections_has_a_value_and_a_kind():
    values, kinds = flat_values(CONFIG), kinds_of(RunConfig)
    assert values.keys() == kinds.keys() and set(kinds.values()) == set(OnResume)
    assert values["lora.r"] == 16 and flat_values(CONFIG.model_copy(update={"lora": None}))["lora.r"] is None
    assert (
        kinds["sampler.steps"] is OnResume.ACTS
        and kinds["data.train"] is OnResume.NEUTRAL
        and kinds["data.seed"] is OnResume.OTHER
    )


def test_a_section_with_an_unknown_kind_of_setting_makes_another_run():
    class New(Config):
        added: int = 0

    assert kinds_of(New) == {"added": OnResume.OTHER}


def test_fingerprints_of_rows_and_files(tmp_path):
    row = {"input_ids": [1, 2], "text": "a"}
    same = rows_fingerprint([row, row])
    assert same == rows_fingerprint([dict(reversed(row.items()))] * 2) and same["rows"] == 2
    others = [
        [row],
        [row, {**row, "text": "b"}],
        [row, {**row, "input_ids": [1, 2, 3]}],
        [{**row, "input_ids": [12]}, row],
    ]
    assert len({rows_fingerprint(rows)["sha256"] for rows in [[row, row], *others]}) == 5
    assert rows_fingerprint(None) is None and rows_fingerprint(iter([row]))["rows"] is None
    assert rows_fingerprint([{"ids": torch.tensor([1, 2]), "of": {"b", "a"}}]) == rows_fingerprint(
        [{"ids": [1, 2], "of": ["a", "b"]}]
    )
    keyed = [rows_fingerprint([{"of": of}]) for of in ({(1, 2): 3, "a": 4}, {"a": 4, (1, 2): 3}, {})]
    assert keyed[0] == keyed[1] != keyed[2]
    (tmp_path / "a.txt").write_text("x" * 10**6)
    before = file_fingerprints([str(tmp_path), "owner/dataset"])
    (tmp_path / "a.txt").write_text("x" * 999_999 + "y")
    assert [file["bytes"] for file in before] == [10**6] and file_fingerprints(
        [str(tmp_path / "a.txt")]
    ) != before


def test_only_the_first_process_reads_the_rows(monkeypatch):
    monkeypatch.setattr(
        distributed, "PartialState", lambda: SimpleNamespace(is_main_process=False, num_processes=2)
    )
    monkeypatch.setattr(
        distributed, "broadcast_object_list", lambda answer: answer.__setitem__(0, {"rows": 1})
    )
    assert rows_fingerprint(pytest.fail("reads them") for _ in range(1)) == {"rows": 1}
