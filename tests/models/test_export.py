"""A causal model exported as stock equals what transformers saves: any library loads it, with the same
results."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.helpers import partly_slow
from tests.models.configurations import CONFIGURATIONS, VOCABULARY, random_ids, tiny_lm
from unmask.cli import app
from unmask.errors import ModelError
from unmask.models.adapters import add_adapters
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.export import export
from unmask.models.model_card import HISTORY_KEY


@partly_slow("name", CONFIGURATIONS, *range(0, len(CONFIGURATIONS), 2))
def test_plain_transformers_loads_it_and_gives_the_same_logits(name, tmp_path):
    lm = tiny_lm(name)
    setattr(lm.config, HISTORY_KEY, [])
    lm.save(tmp_path / "own")
    before = json.loads((tmp_path / "own/config.json").read_text())
    assert SETTINGS_KEY in before and HISTORY_KEY in before
    export(lm, tmp_path / "out", "hf")
    lm.save(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == before  # the model keeps its keys

    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(plain) is type(lm.model) and plain.config._attn_implementation in ("sdpa", "eager")
    ids = random_ids(2, 9)
    with torch.no_grad():
        expected_BTV, there_BTV = lm.logits(ids)[:, 1:], plain(ids).logits[:, :-1]
    known = [token for token in range(VOCABULARY + 1) if token != lm.mask_token_id]
    torch.testing.assert_close(there_BTV[..., known], expected_BTV[..., known], rtol=0, atol=1e-10)

    config = json.loads((tmp_path / "out/config.json").read_text())
    assert not any("unmask" in key or "attn_implementation" in key or key == "auto_map" for key in config)
    rows = plain.get_input_embeddings().weight.shape[0]
    assert config["vocab_size"] == rows == plain.get_output_embeddings().weight.shape[0] >= len(tokenizer)
    assert (
        tokenizer.mask_token_id == lm.mask_token_id < rows
        and tokenizer("abc").input_ids == lm.tokenizer("abc").input_ids
    )


def test_transformers_never_generates_the_mask_token(tmp_path):
    lm = tiny_lm("llama")
    with torch.no_grad():
        lm.model.get_output_embeddings().weight[lm.mask_token_id] = (
            100 * lm.model.get_output_embeddings().weight[5]
        )
    export(lm, tmp_path, "hf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (
        plain.generation_config.suppress_tokens == [lm.mask_token_id]
        and not plain.generation_config._from_model_config
    )
    ids = random_ids(4, 3)
    assert (plain(ids).logits.argmax(-1) == lm.mask_token_id).any()
    made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert made.shape[1] > 3 and not (made[:, 3:] == lm.mask_token_id).any()


def test_the_base_of_rotary_embeddings_has_its_older_name_too(tmp_path):
    lm = tiny_lm("llama")
    lm.config.rope_parameters["rope_theta"] = 5e5
    export(lm, tmp_path, "hf")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.rope_parameters["rope_theta"] == 5e5
    assert (
        json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )


class Own(LlamaForCausalLM):
    """A model class from outside transformers."""


def test_adapters_are_merged(tmp_path):
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    lm = add_adapters(tiny_lm("llama", dtype=torch.float32), config)
    export(lm, tmp_path / "out", "hf")
    ids_BT = random_ids(2, 5)
    found = unmask.load(tmp_path / "out").logits(ids_BT)
    torch.testing.assert_close(found, lm.logits(ids_BT), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_lm("llama", "bidirectional"),
        lambda: tiny_lm("llama", "block_causal", 4),
        lambda: tiny_lm("llama", shift=False),
        lambda: (lm := tiny_lm("llama")).bind(Own(lm.model.config)),
    ],
    ids=["bidirectional", "block-causal", "no shift", "own class"],
)
def test_what_is_no_stock_causal_model_is_refused(make, tmp_path):
    with raises(ModelError, where="layout") as error:
        export(make(), tmp_path / "out", "hf")
    assert error.value.remedy and not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["llada", "hf"])
def test_a_model_of_uniform_noise_has_no_other_layout(layout, tmp_path):
    lm = tiny_lm("llama", "bidirectional").with_noise("uniform")
    with raises(ModelError, where="layout") as error:
        export(lm, tmp_path / "out", layout)
    assert "unmask serve" in str(error.value.remedy) and "layout" not in str(error.value.remedy)
    assert not (tmp_path / "out").exists()


def test_the_command_line(tmp_path):
    lm = tiny_lm("qwen2", dtype=torch.float32)
    lm.save(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--layout", "hf", "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(app, command).exit_code == 0
    again, ids = unmask.load(tmp_path / "out"), random_ids(2, 5)
    assert again.autoregressive and torch.equal(again.logits(ids), lm.logits(ids))
    assert CliRunner().invoke(app, command).exit_code == 2  # not empty
    tiny_lm("qwen2", "bidirectional").save(tmp_path / "model")
    refused = CliRunner().invoke(app, [*command, "--overwrite"])
    assert refused.exit_code == 2 and "a stock model is causal" in refused.stderr
