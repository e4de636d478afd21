"""A model with other towers (Qwen3.5 reads images): its language model is taken, and an export gives the
whole model back."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.helpers import partly_slow
from tests.models.configurations import ALPHABET, GROUPED, HEADS, HYBRIDS, VOCABULARY, random_ids
from unmask.cli import app
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError, ModelError
from unmask.models.adapters import add_adapters
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.export import export
from unmask.models.model_card import HISTORY_KEY, history

TEXTS = {name: HYBRIDS[f"{name}_text"].to_dict() for name in ("qwen3_5", "qwen3_5_moe")}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}
IMAGES = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
PICTURES = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def whole_model(kind: str, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel
    if kind == "llama4":
        text = Llama4TextConfig(
            **HEADS, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=64
        )
        parts = {"text_config": text.to_dict(), "vision_config": PICTURES}
        model = Llama4ForConditionalGeneration(Llama4Config(**parts, image_token_index=5))
    else:
        text = TEXTS[kind] | {"tie_word_embeddings": tied}
        parts = {"text_config": text, "vision_config": VISION, "tie_word_embeddings": tied}
        if kind == "qwen3_5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**parts, **IMAGES))
        else:
            model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**parts, **IMAGES))
    return (model if dtype == torch.float32 else model.to(dtype)).eval()


def save_whole(folder, kind: str = "qwen3_5", **how) -> PreTrainedModel:
    model = whole_model(kind, **how)
    model.save_pretrained(folder)
    character_tokenizer(ALPHABET).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    return model


def changed(lm):
    """The model, trained a little."""
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return lm


def text_logits(whole, ids):
    """Those of the whole model; Llama 4 of transformers 5.24 has none without images."""
    return (whole.get_decoder() if hasattr(whole.get_decoder(), "lm_head") else whole)(input_ids=ids).logits


def towers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {
        name: weight
        for name, weight in model.state_dict().items()
        if "language_model." not in name and name != "lm_head.weight"
    }


@pytest.mark.parametrize(
    "kind, tied", [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False), ("llama4", False)]
)
def test_the_language_model_is_taken(kind, tied, tmp_path):
    whole, ids = save_whole(tmp_path / "base", kind, tied=tied), random_ids(2, 9)
    lm = unmask.load(tmp_path / "base")
    with torch.no_grad():
        expected_BTV = text_logits(whole, ids)[:, :-1]
        found_BTV = lm.logits(ids)[:, 1:, :VOCABULARY]
    torch.testing.assert_close(found_BTV, expected_BTV, rtol=0, atol=1e-5)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), type(lm.model))

    blocks = changed(unmask.load(tmp_path / "base", "block_causal", 4))
    blocks.save(tmp_path / "blocks")
    again = unmask.load(tmp_path / "blocks")
    assert (again.attention, again.block_size) == ("block_causal", 4)
    assert torch.equal(again.logits(ids), blocks.logits(ids))
    assert type(lm.model).__name__ in (tmp_path / "blocks/README.md").read_text()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "llama4"])
@partly_slow("pattern", [("causal", None), ("block_causal", 4)], 1)
def test_an_export_is_the_whole_model(kind, pattern, tmp_path):
    base, ids = save_whole(tmp_path / "base", kind), random_ids(2, 9)
    lm = changed(unmask.load(tmp_path / "base", *pattern))
    setattr(lm.config, HISTORY_KEY, [{"verb": "convert", "settings": {}, "versions": {}, "metrics": {}}])
    logits_BTV = lm.logits(ids)
    export(lm, tmp_path / "out", "hf", base=tmp_path / "base")
    assert torch.equal(lm.logits(ids), logits_BTV) and history(lm)  # it is as it was

    whole, info = type(base).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    there, here = towers(whole), towers(base)
    assert here and there.keys() == here.keys()
    assert all(torch.equal(weight, here[name]) for name, weight in there.items())
    language = lm.model.get_decoder().state_dict()
    assert all(torch.equal(each, language[name]) for name, each in whole.get_decoder().state_dict().items())
    assert torch.equal(whole.get_output_embeddings().weight, lm.model.get_output_embeddings().weight)
    assert whole.config.get_text_config().vocab_size == len(lm.tokenizer) == VOCABULARY + 1
    assert (tmp_path / "out/preprocessor_config.json").exists()

    again = unmask.load(tmp_path / "out")
    assert (again.attention, again.block_size) == pattern and torch.equal(again.logits(ids), logits_BTV)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert str(tmp_path) not in json.dumps(config) and SETTINGS_KEY not in config["text_config"]
    if pattern[0] == "causal":
        assert SETTINGS_KEY not in config and HISTORY_KEY not in config
        assert type(AutoModelForImageTextToText.from_pretrained(tmp_path / "out")) is type(base)
        with torch.no_grad():
            found_BTV = text_logits(whole, ids)[:, :-1, :VOCABULARY]
        torch.testing.assert_close(found_BTV, logits_BTV[:, 1:, :VOCABULARY], rtol=0, atol=1e-5)
    else:  # no other library takes it for a causal model
        assert config["model_type"] == "unmask" and history(again)
        export(again, tmp_path / "more", "hf", base=tmp_path / "out")
        assert torch.equal(unmask.load(tmp_path / "more").logits(ids), logits_BTV)


def test_tied_weights_and_types_are_kept(tmp_path):
    save_whole(tmp_path / "base", tied=True, dtype=torch.bfloat16)
    lm = changed(unmask.load(tmp_path / "base", dtype="float32"))  # as training reads it
    export(lm, tmp_path / "out", "hf", base=tmp_path / "base")
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    table = lm.model.get_input_embeddings().weight
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    assert whole.dtype == torch.float32 and torch.equal(whole.get_input_embeddings().weight, table)
    here = towers(Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "base"))
    assert all(torch.equal(weight, here[name].float()) for name, weight in towers(whole).items())


def test_adapters_on_a_model_with_towers(tmp_path):
    save_whole(tmp_path / "base")
    config = peft.LoraConfig(target_modules=["q_proj", "in_proj_qkv"], init_lora_weights=False)
    lm = add_adapters(unmask.load(tmp_path / "base", "block_causal", 4), config)
    lm.save(tmp_path / "adapters")
    again, ids = unmask.load(tmp_path / "adapters"), random_ids(2, 5)
    assert again.attention == "block_causal" and torch.equal(again.logits(ids), lm.logits(ids))
    export(again, tmp_path / "out", "hf", base=tmp_path / "base")
    torch.testing.assert_close(unmask.load(tmp_path / "out").logits(ids), lm.logits(ids), rtol=0, atol=1e-5)


def test_another_base_is_refused(tmp_path):
    save_whole(tmp_path / "base")
    save_whole(tmp_path / "moe", "qwen3_5_moe")
    LlamaForCausalLM(LlamaConfig(**GROUPED)).save_pretrained(tmp_path / "llama")
    wide = Qwen3_5Config(text_config=TEXTS["qwen3_5"] | {"intermediate_size": 32}, vision_config=VISION)
    deep = Qwen3_5Config(
        text_config=TEXTS["qwen3_5"] | {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
        vision_config=VISION,
    )
    for name, config in (("wide", wide), ("deep", deep)):
        Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / name)
    lm = unmask.load(tmp_path / "base")
    for name in ("moe", "llama", "wide", "deep"):
        with raises(ModelError, where=str(tmp_path / name)) as refused:
            export(lm, tmp_path / "out", "hf", base=tmp_path / name)
        assert refused.value.remedy and not (tmp_path / "out").exists()
    with raises(ConfigError, where="base"):
        export(lm, tmp_path / "out", "sdar", base=tmp_path / "base")


def test_the_command_line(tmp_path):
    save_whole(tmp_path / "base")
    command = ["export", str(tmp_path / "base"), "--layout", "hf", "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(app, [*command, "--base", str(tmp_path / "base")]).exit_code == 0
    Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    missing = CliRunner().invoke(app, [*command, "--overwrite", "--base", str(tmp_path / "nothing")])
    assert missing.exit_code == 2 and "no such folder" in missing.stderr
