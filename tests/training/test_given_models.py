"""A model is trained and saved as what it is, whichever way a trainer gets it."""

from __future__ import annotations

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.errors import raises
from tests.helpers import each_once
from tests.tiny import float64_causal, llama_lm
from tests.training.tiny_runs import PAIRS, TEXTS, equal, make, prepared, settings, weights
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, ModelError
from unmask.models.load import as_diffusion_lm, load
from unmask.supervised.sft import SFTConfig, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
VERBS = ["sft", "dpo", "grpo", "convert"]


def lora() -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


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


def trainer_of(verb, folder, model, **more):
    """A trainer of a block-causal model, or one that makes a bidirectional model of it."""
    if verb == "convert":
        args = ConvertConfig(**settings(folder, attention="bidirectional", max_steps=10, max_length=32))
        return ConvertTrainer(model, args, train_dataset=TEXTS, **more)
    return prepared(verb, folder, model, **more | ({"bound": "elbo"} if verb == "dpo" else {}))


def probabilities(lm):
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6, lm.mask_token_id]])
    return lm.logits(ids, hidden_BT=ids == lm.mask_token_id).detach().softmax(-1)


@pytest.fixture
def folders(tmp_path):
    """A model, and adapters on it."""
    llama_lm("block_causal", block_size=2).save(tmp_path / "model")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), lora())
    adapted.save_pretrained(tmp_path / "adapters")
    return tmp_path / "model", tmp_path / "adapters"


@each_once("saved, attention", ["block_causal", "causal"], ["bidirectional", "block_causal", "causal"])
def test_a_model_keeps_the_pattern_that_it_was_loaded_with(saved, attention, tmp_path):
    size = {"block_size": 2}
    llama_lm(saved, **size if saved == "block_causal" else {}).save(tmp_path / "model")
    lm = load(tmp_path / "model", attention=attention, **size if attention == "block_causal" else {})
    for given in (lm.model, get_peft_model(lm.model, lora())):
        assert as_diffusion_lm(given, lm.tokenizer).pattern == lm.pattern


FORMS = {
    "path": lambda model, _: str(model),
    "auto class": lambda model, _: AutoModelForCausalLM.from_pretrained(model),
    "adapters": lambda _, adapters: str(adapters),
    "merged by the auto class": lambda _, adapters: AutoModelForCausalLM.from_pretrained(adapters),
    "adapters by PEFT": lambda _, adapters: AutoPeftModelForCausalLM.from_pretrained(
        adapters, is_trainable=True
    ),
    "adapters on the auto class": lambda model, _: get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), lora()
    ),
    "adapters and a head": lambda model, _: get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]),
    ),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@each_once("verb, form", VERBS, FORMS)
def test_every_trainer_takes_every_form(verb, form, folders, tmp_path):
    more = {"processing_class": AutoTokenizer.from_pretrained(folders[0])}
    model = FORMS[form](*folders)
    trainer = trainer_of(verb, tmp_path / "run", model, **more)
    before = probabilities(trainer.lm)
    trainer.train()
    after = probabilities(trainer.lm)
    assert not torch.allclose(before, after)
    trainer.save_model(str(tmp_path / "saved"))
    saved = load(tmp_path / "saved")
    assert saved.attention == ("bidirectional" if verb == "convert" else "block_causal")
    assert torch.allclose(probabilities(saved), after, atol=1e-6)
    if hasattr(model, "diffusion_lm"):  # the user's object is the trained model
        assert torch.allclose(probabilities(as_diffusion_lm(model)), after, atol=1e-6)
        whole = model.merge_and_unload() if isinstance(model, PeftModel) else model
        whole.save_pretrained(tmp_path / "by_transformers")
        more["processing_class"].save_pretrained(tmp_path / "by_transformers")
        again = load(tmp_path / "by_transformers")
        assert torch.allclose(probabilities(again), after, atol=1e-6) and again.settings == saved.settings


@pytest.mark.parametrize("attention", ["block_causal", "causal"])
def test_adapters_that_a_model_added_to_itself_are_saved(attention, tmp_path):
    more = {"block_size": 2} if attention == "block_causal" else {"logit_shift": True}
    llama_lm(attention, **more).save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.add_adapter(lora())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    trainer = prepared("sft", tmp_path / "run", model, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "by_trainer"))
    trainer.lm.save(tmp_path / "by_lm")
    model.save_pretrained(tmp_path / "by_transformers")
    tokenizer.save_pretrained(tmp_path / "by_transformers")
    trainer.lm.config.save_pretrained(tmp_path / "by_transformers")
    for name in ("by_trainer", "by_lm", "by_transformers"):
        again = load(tmp_path / name)
        assert again.pattern == trainer.lm.pattern and hasattr(again.model, "peft_config")
        assert torch.allclose(probabilities(again), probabilities(trainer.lm), atol=1e-6), name


@pytest.mark.parametrize("more", [{"max_gap": 4}, {"quality_head": "joint"}], ids=["gaps", "quality head"])
def test_what_training_adds_is_part_of_the_users_object(more, tmp_path):
    llama_lm().save(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trainer = prepared("sft", tmp_path / "run", model, **more)
    trainer.train()
    model.save_pretrained(tmp_path / "saved")
    trainer.processing_class.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.settings == trainer.lm.settings
    assert torch.allclose(probabilities(again), probabilities(trainer.lm), atol=1e-6)


FROZEN = {
    "DiffusionLM": lambda model, _: load(model).frozen_copy(),
    "merged": lambda model, _: get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), lora()
    ).merge_and_unload(),
    "adapters": lambda _, adapters: AutoPeftModelForCausalLM.from_pretrained(adapters),
}


@each_once("verb, form", VERBS, FROZEN)
def test_frozen_models_are_refused_before_training(verb, form, folders, tmp_path):
    where = "lora (peft_config), target_modules or modules_to_save" if form == "adapters" else "model"
    with raises(ConfigError, where=where):
        trainer_of(verb, tmp_path / "run", FROZEN[form](*folders))


@pytest.mark.parametrize("form", FROZEN)
def test_frozen_models_are_references(form, folders, tmp_path):
    frozen = FROZEN[form](*folders)
    trainer = make("dpo", tmp_path / "run", load(folders[0]), ref_model=frozen, bound="elbo")
    before = weights(as_diffusion_lm(frozen))
    trainer.train()
    assert equal(weights(as_diffusion_lm(frozen)), before)


def test_references_may_have_adapters_of_any_name(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    named = PeftModel.from_pretrained(model, folders[1], adapter_name="reference")
    trainer = make("dpo", tmp_path / "run", load(folders[0]), ref_model=named, bound="elbo")
    trainer.train()


def test_frozen_models_are_evaluated(folders, tmp_path):
    frozen = load(folders[0]).frozen_copy()
    trainer = SFTTrainer(frozen, SFTConfig(**settings(tmp_path, max_length=32)), eval_dataset=PAIRS)
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_table_with_adapters_gets_no_mask_token(tmp_path):
    model, tokenizer = float64_causal()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with raises(ModelError, where="PhiForCausalLM"):
        prepared("sft", tmp_path, adapted, processing_class=tokenizer)


@each_once("verb, way, adapters", ["sft", "dpo", "grpo"], WAYS, [False, True])
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


@pytest.mark.filterwarnings("ignore:torch_dtype is deprecated")
def test_a_path_is_loaded_with_the_configs_arguments(tmp_path):
    llama_lm().save(tmp_path / "model")
    for verb, name in (("sft", "dtype"), ("sft", "torch_dtype"), ("dpo", "dtype"), ("grpo", "dtype")):
        more = {"model_init_kwargs": {name: "bfloat16"}} | ({"bound": "elbo"} if verb == "dpo" else {})
        trainer = prepared(verb, tmp_path / verb, str(tmp_path / "model"), **more)
        assert trainer.lm.dtype == torch.bfloat16
        with raises(ConfigError, where="model_init_kwargs"):
            prepared(verb, tmp_path / verb, llama_lm(), **more)


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
