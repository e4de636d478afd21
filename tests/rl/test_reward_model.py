"""The reward of a classifier is its logit, the same in a batch and alone."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.errors import raises
from tests.tiny import build_config, llama_lm
from unmask.cli.train import check_inputs
from unmask.config.run import RunConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError, ModelError
from unmask.models.alignment import ALIGNMENT
from unmask.rl.reward_model import RewardModel
from unmask.rl.weighted_rewards import Rewards, reward_functions_named, reward_identities

SIZES = {"width": 8, "layers": 1, "intermediate_size": 16, "num_labels": 1, "ids": ()}


def test_a_sequence_classifier_is_a_reward(tmp_path):
    tokenizer = character_tokenizer("abc")
    config = build_config("llama", tokenizer, **SIZES)
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = RewardModel(str(tmp_path))
    assert not any(weight.data_ptr() % ALIGNMENT for weight in reward.model.parameters())
    model.config.pad_token_id = tokenizer.pad_token_id
    expected = [model(**tokenizer([text], return_tensors="pt")).logits.item() for text in ("abc", "caba")]
    assert reward(["ab", "c"], ["c", "aba"]) == pytest.approx(expected)
    assert RewardModel(tmp_path)(["ab", "c"], ["c", "aba"]) == pytest.approx(expected)
    assert reward_identities([tmp_path]) == reward_identities(str(tmp_path))
    for path in (tmp_path, [tmp_path]):
        assert isinstance(Rewards(path).functions[0], RewardModel)

    LlamaForSequenceClassification(LlamaConfig(**{**config.to_dict(), "num_labels": 2})).save_pretrained(
        tmp_path
    )
    with raises(ModelError, where=str(tmp_path)):
        RewardModel(str(tmp_path))
    with raises(ModelError, where=str(tmp_path / "absent")):
        RewardModel(f"{tmp_path}/absent")
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with raises(ModelError, where=str(tmp_path)):
        RewardModel(str(tmp_path))
    LlamaConfig(**{**config.to_dict(), "num_labels": 1, "hidden_size": 12}).save_pretrained(tmp_path)
    with raises(ModelError, where=str(tmp_path)):
        RewardModel(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["./no-such", "models/rm", "./texts/rm", "tests/rm/last", "sort_rm/ckpt", "rm"]
)
def test_a_path_that_leads_nowhere_is_no_folder(name, tmp_path, monkeypatch):
    """Also one that almost begins with the name of a task; a name without a slash may be meant as a task."""
    monkeypatch.chdir(tmp_path)
    with raises((ConfigError, ModelError), where=name if "/" in name else "task") as caught:
        reward_functions_named(name)
    assert "no such folder" in caught.value.what or "no folder" in caught.value.what


@pytest.mark.parametrize("name", ["./no-such", "model:./no-such"])
def test_the_command_line_finds_such_a_path_before_it_loads_anything(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llama_lm().save("model")
    run = RunConfig(model={"path": "model"}, data={"task": "sudoku"}, rewards=[name], output_dir="run")
    with raises(ModelError, where="./no-such"):
        check_inputs("grpo", run)


def test_special_tokens_in_texts_and_messages_are_text(tmp_path):
    tokenizer = character_tokenizer("abc</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    LlamaForSequenceClassification(build_config("llama", tokenizer, **SIZES)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward, end = RewardModel(str(tmp_path)), tokenizer.eos_token_id
    assert end not in reward.token_ids("a</s>", "b</s>")
    assert (
        reward.token_ids(
            [{"role": "user", "content": "a</s>"}], [{"role": "assistant", "content": "b"}]
        ).count(end)
        == 2
    )
