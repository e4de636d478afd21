"""A model is trained and saved as what it is, whichever way a trainer gets it."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.errors import raises
from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, equal, prepared, settings, weights
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError
from unmask.models.load import load


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def as_in_memory(folder):
    """As transformers read the folder before models had a type of their own."""
    config = json.loads((folder / "config.json").read_text())
    config |= config["unmask"].pop("stock", {})
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder)


WAYS = {
    "path": str,
    "auto class": AutoModelForCausalLM.from_pretrained,
    "plain object": as_in_memory,
    "DiffusionLM": load,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", ["sft", "dpo", "grpo"])
def test_its_own_settings_count(verb, way, adapters, tmp_path):
    lm = llama_lm("block_causal", block_size=2)
    lm.save(tmp_path / "model")
    model = WAYS[way](tmp_path / "model")
    more = {"bound": "elbo"} if verb == "dpo" else {}
    more |= {"processing_class": AutoTokenizer.from_pretrained(tmp_path / "model")}
    if adapters and way in ("path", "DiffusionLM"):
        more["peft_config"] = lora()
    elif adapters:
        model = get_peft_model(model, lora())
    trainer = prepared(verb, tmp_path / "run", model, **more)
    assert trainer.lm.pattern == lm.pattern
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    assert saved.settings == lm.settings and not equal(weights(saved), weights(lm))
    assert "block-causal, in blocks of 2 tokens" in (tmp_path / "saved" / "README.md").read_text()


def test_a_path_is_loaded_with_the_configs_arguments(tmp_path):
    llama_lm().save(tmp_path / "model")
    for verb in ("sft", "dpo", "grpo"):
        more = {"model_init_kwargs": {"dtype": "bfloat16"}} | ({"bound": "elbo"} if verb == "dpo" else {})
        trainer = prepared(verb, tmp_path / verb, str(tmp_path / "model"), **more)
        assert trainer.lm.dtype == torch.bfloat16
        with raises(ConfigError, where="model_init_kwargs"):
            prepared(verb, tmp_path / verb, llama_lm(), **more)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("why", ["not trainable", "prompt tuning", "another name"])
def test_adapters_that_cannot_be_trained_are_refused(why, tmp_path):
    llama_lm("causal", logit_shift=True).save(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = (
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2) if why == "prompt tuning" else lora()
    )
    model = get_peft_model(base, config, adapter_name="default" if why != "another name" else "mine")
    if why == "not trainable":
        model.requires_grad_(False)
    with pytest.raises(ConfigError) as refused:
        prepared(
            "sft", tmp_path / "run", model, processing_class=AutoTokenizer.from_pretrained(tmp_path / "model")
        )
    assert "lora" in str(refused.value.where)


@pytest.mark.parametrize("verb", ["pretrain", "sft", "dpo", "grpo", "convert"])
def test_adapters_that_are_no_config_of_peft_are_refused(verb, tmp_path):
    causal = llama_lm("causal", logit_shift=True)
    args = ConvertConfig(**settings(tmp_path, attention="bidirectional", max_steps=10))
    for given in ({"r": 2}, "lora", [lora()]):
        with raises(ConfigError, where="lora (peft_config)"):
            if verb == "convert":
                ConvertTrainer(causal, args, train_dataset=TEXTS, peft_config=given)
            else:
                prepared(verb, tmp_path, causal, peft_config=given)
