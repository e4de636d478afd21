"""Diffusion models as models of transformers: no library takes them for causal ones."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.pipelines import PipelineException

import unmask
from tests.diffusion_gemma import save_published
from tests.errors import raises
from tests.helpers import partly_slow
from tests.tiny import KINDS, llama_lm
from tests.training.tiny_runs import make
from unmask.auto_classes import UnmaskForMaskedDiffusion
from unmask.errors import ConfigError, ModelError, UnmaskWarning
from unmask.models.adapters import with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm, load


@pytest.fixture(
    params=[
        pytest.param(kind, marks=[pytest.mark.slow] * (kind == "bidirectional with a shift"))
        for kind in KINDS
    ]
)
def saved(request, tmp_path):
    attention, block_size, shift = KINDS[request.param]
    lm = llama_lm(attention, block_size=block_size, logit_shift=shift)
    lm.save(tmp_path / "model")
    return lm, tmp_path / "model"


def test_a_diffusion_model_has_a_type_of_its_own(saved):
    lm, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "unmask" and config["hidden_size"] == lm.config.hidden_size
    again = load(folder)
    assert again.settings == lm.settings and type(again.model) is LlamaForCausalLM
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6, lm.mask_token_id]])
    assert torch.equal(again.logits(ids), lm.logits(ids))


def test_a_causal_model_stays_stock(tmp_path):
    llama_lm("causal", logit_shift=True).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is LlamaForCausalLM


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel])
def test_auto_classes_read_it_as_it_is(saved, auto):
    lm, folder = saved
    assert type(AutoConfig.from_pretrained(folder)).__name__ == "UnmaskConfig"
    model = auto.from_pretrained(folder)
    assert isinstance(model, UnmaskForMaskedDiffusion) and isinstance(model, LlamaForCausalLM)
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6], [4, 5, 6, 7]])
    hidden = ids == lm.mask_token_id
    expected = lm.logits(ids, hidden_BT=hidden)
    assert torch.equal(model(ids).logits, expected)
    labels = torch.where(hidden, 6, -100)
    loss = -expected.log_softmax(-1)[0, 2, 6]
    assert torch.allclose(model(ids, labels=labels).loss, loss)


def test_arguments_of_forward_act_or_are_refused_by_name(saved):
    lm, folder = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6], [4, 5, 6, 7]])
    whole = model(ids, labels=ids, return_dict=True)
    loss, logits = model(ids, labels=ids, return_dict=False)
    assert loss == whole.loss and logits.equal(whole.logits)
    assert model(ids, logits_to_keep=1).logits.equal(logits[:, -1:])
    assert model(ids, logits_to_keep=torch.tensor([0, 2])).logits.equal(logits[:, [0, 2]])
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=4).loss, loss * 2)
    nothing = {"token_type_ids": torch.zeros_like(ids), "use_cache": False, "output_attentions": None}
    assert model(ids, **nothing).logits.equal(logits)
    names = ("output_hidden_states", "use_cache", "position_ids", "foo")
    for name, value in [*((name, True) for name in names), ("token_type_ids", torch.ones_like(ids))]:
        with pytest.raises(ModelError) as refused:
            model(ids, **{name: value})
        assert refused.value.what.startswith(name)


def test_a_likelihood_as_of_a_causal_model_is_warned_of(saved):
    lm, folder = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[4, 5, 6]])
    with pytest.warns(UnmaskWarning, match="no token is the mask token"):
        model(ids, labels=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.cat([ids, torch.full((1, 3), lm.mask_token_id)], 1))
        model.generate(ids, max_new_tokens=3)


@partly_slow("how", ["pickle", "torch.save", "deepcopy"], 0, 2)
def test_it_is_copied_as_any_module(saved, how, tmp_path):
    lm, folder = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        other = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        other = copy.deepcopy(model)
    assert type(other) is type(model) and other.diffusion_lm.model is other
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6]])
    with torch.no_grad():
        expected = model(ids).logits
        model.lm_head.weight.zero_()
    assert other(ids).logits.equal(expected)
    assert other.generate(ids[:, :2], max_new_tokens=6).equal(lm.generate(ids[:, :2], max_new_tokens=6))
    other.save_pretrained(tmp_path / "again")
    lm.tokenizer.save_pretrained(tmp_path / "again")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits.equal(expected)


def test_a_loss_is_that_of_the_whole_batch_in_the_trainer_of_transformers(saved, tmp_path):
    lm, folder = saved
    hidden = lm.mask_token_id
    rows = [
        {"input_ids": [1, hidden, hidden], "labels": [-100, 4, 5]},
        {"input_ids": [1, 6, hidden], "labels": [-100, -100, 7]},
    ]
    losses = []
    for size in (1, 2):
        args = TrainingArguments(
            str(tmp_path / "run"),
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=2 // size,
            learning_rate=0.0,
            report_to=[],
            save_strategy="no",
        )
        model = AutoModelForCausalLM.from_pretrained(folder)
        losses.append(Trainer(model, args, train_dataset=rows).train().training_loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@partly_slow("given", ["auto", "stock", "peft", "own"], 0, 2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
def test_embeddings_may_be_resized_for_more_tokens(saved, given, tmp_path):
    lm, folder = saved
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["xx"])
    made = {"stock": LlamaForCausalLM, "own": DiffusionLM}.get(given, AutoModelForCausalLM)
    model = made.from_pretrained(folder)
    if given != "stock":
        with pytest.raises(ModelError, match="processing_class: the tokenizer has 14 tokens"):
            as_diffusion_lm(model, tokenizer)
    (model.model if given == "own" else model).resize_token_embeddings(len(tokenizer))
    if given == "peft":
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    trainer = make("sft", tmp_path / "run", model, max_steps=1, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(tmp_path / "out")
    again = load(tmp_path / "out")
    assert len(again.tokenizer) == len(tokenizer) == again.model.lm_head.weight.shape[0]
    assert again.mask_token_id == lm.mask_token_id and again.attention == lm.attention
    if given == "auto":
        ids = torch.tensor([[4, 5, 13, lm.mask_token_id]])
        torch.testing.assert_close(model(ids).logits, again.logits(ids, hidden_BT=ids == lm.mask_token_id))
        assert model.generate(ids[:, :3], max_new_tokens=2).shape[0] == 1


@pytest.mark.parametrize("saved", ["blocks of three"], indirect=True)
def test_other_processes_refuse_it_without_unmask(saved):
    _, folder = saved
    code = f"from transformers import AutoModelForCausalLM as A; A.from_pretrained({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "model type `unmask`" in done.stderr


@pytest.mark.parametrize("saved", ["blocks of three"], indirect=True)
@partly_slow("first", ["unmask", "transformers"], 0)
def test_importing_unmask_is_enough(saved, first):
    _, folder = saved
    second = {"unmask": "transformers", "transformers": "unmask"}[first]
    code = f"import {first}, {second}; from transformers import AutoModelForCausalLM as A; "
    code += f"print(type(A.from_pretrained({str(folder)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "UnmaskForMaskedDiffusion\n", done.stderr


@pytest.mark.slow
@partly_slow(
    "first",
    [
        "import unmask, transformers",
        "import transformers, unmask",
        "import unmask; from transformers import DiffusionGemmaConfig",
        "from transformers import DiffusionGemmaConfig; import unmask",
    ],
    3,
)
def test_importing_unmask_is_enough_for_diffusion_gemma(first, tmp_path):
    """It is transformers' own, as with AutoModelForMultimodalLM, and is imported when it is needed."""
    save_published(tmp_path)
    code = [
        first,
        "import sys, torch, transformers",
        "from transformers import AutoConfig, AutoModelForCausalLM, pipeline",
        "print(any('modeling_diffusion_gemma' in name for name in sys.modules))",
        f"config = AutoConfig.from_pretrained({str(tmp_path)!r})",
        f"read = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})",
        "for model in (read, AutoModelForCausalLM.from_config(config)):",
        "    print(type(model) is transformers.DiffusionGemmaForBlockDiffusion)",
        "print(read.generate(torch.tensor([[4, 5]]), max_new_tokens=8).sequences.shape)",
        f"pipeline('text-generation', {str(tmp_path)!r})",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False", "True", "True", "torch.Size([1, 10])"], done.stderr
    assert "not supported" not in done.stderr


def test_it_generates_as_unmask_does(saved):
    lm, folder = saved
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [[4, 5, 6], [4]]
    config = unmask.SamplerConfig(max_new_tokens=6)
    expected = unmask.generate(lm, prompts, config).tokens
    ids = torch.tensor([[4, 5, 6], [tokenizer.pad_token_id or 0] * 2 + [4]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    made = model.generate(ids, attention_mask=mask, max_new_tokens=6)
    for row, completion in zip(made[:, 3:].tolist(), expected, strict=True):
        assert row[: len(completion)] == completion
        assert set(row[len(completion) :]) <= {lm.pad_token_id}
    assert made[:, :3].equal(ids)


def test_samples_are_drawn_as_in_transformers(saved):
    lm, folder = saved
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[4, 5, 6]])
    drawing = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, max_length=9, num_return_sequences=3)
    seeds = [set_seed(seed) or model.generate(ids, drawing) for seed in (1, 1, 2)]
    assert seeds[0].equal(seeds[1]) and not seeds[0].equal(seeds[2]) and len(seeds[0]) == 3
    config = unmask.SamplerConfig(max_new_tokens=6, temperature=0.7, top_k=5, seed=8)
    expected = unmask.generate(lm, [[4, 5, 6]] * 3, config).tokens
    made = model.generate(ids, drawing, seed=8)[:, 3:].tolist()
    assert [row[: len(tokens)] for row, tokens in zip(made, expected, strict=True)] == expected
    greedy = model.generate(ids, drawing, do_sample=False, num_return_sequences=1)
    assert greedy.equal(model.generate(ids, max_new_tokens=6))


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("num_baems", 4), ("input_ids", None)])
def test_what_has_no_meaning_is_refused_by_name(saved, name, value):
    _, folder = saved
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(unmask.UnmaskError) as refused:
        model.generate(**{"input_ids": torch.tensor([[4, 5]]), name: value})
    assert refused.value.where == ("generate" if name == "num_baems" else name)


@pytest.mark.parametrize("given", ["folder", "model"])
def test_pipelines_that_work_are_silent(saved, given, caplog, monkeypatch):
    lm, folder = saved
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = str(folder) if given == "folder" else AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    [answer] = pipeline("text-generation", model, tokenizer=tokenizer)("ab", max_new_tokens=4)
    assert answer["generated_text"].startswith("ab")
    best = pipeline("fill-mask", model, tokenizer=tokenizer)(f"ab{lm.tokenizer.mask_token}", top_k=1)[0]
    ids = torch.tensor([tokenizer(f"ab{lm.tokenizer.mask_token}").input_ids])
    assert best["token"] == int(lm.logits(ids, hidden_BT=ids == lm.mask_token_id)[0, -1].argmax())
    assert not caplog.records


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "zero-shot-classification"])
def test_other_pipelines_are_refused_in_a_sentence(saved, task):
    _, folder = saved
    for head in (AutoModelForImageTextToText, AutoModelForSequenceClassification):
        with raises(ModelError, where=str(folder)) as refused:
            head.from_config(AutoConfig.from_pretrained(folder))
    with pytest.raises(PipelineException) as again:
        pipeline(task, model=str(folder))
    assert str(again.value) == str(refused.value) and len(str(refused.value)) < 200 + len(str(folder))


def test_a_model_from_a_config_has_random_weights(saved):
    lm, folder = saved
    config = AutoConfig.from_pretrained(folder)
    made = []
    for auto, seed in ((AutoModelForCausalLM, 1), (AutoModelForMaskedLM, 1), (AutoModel, 2)):
        set_seed(seed)
        made.append(auto.from_config(config))
        assert isinstance(made[-1], UnmaskForMaskedDiffusion) and made[-1].training
        assert made[-1].diffusion_lm.settings == lm.settings
    first, same, other = (model.lm_head.weight for model in made)
    assert first.equal(same) and not first.equal(other) and not first.equal(lm.model.lm_head.weight)
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6]])
    assert torch.isfinite(made[0](ids, labels=torch.where(ids == lm.mask_token_id, 6, -100)).loss)
    assert made[0].eval().generate(ids[:, :2], max_new_tokens=3).shape == (1, 5)
    made[0].save_pretrained(folder)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight, first)


def test_a_model_from_a_config_has_the_asked_type_and_size(saved):
    _, folder = saved
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=1, dtype="float64")
    assert AutoModelForCausalLM.from_config(config).dtype == torch.float64
    for dtype in (torch.bfloat16, "bfloat16"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        assert model.dtype == torch.bfloat16 and len(model.model.layers) == 1


@pytest.mark.parametrize("missing", ["tokenizer", "stock model"])
def test_a_config_that_is_not_a_models_is_refused(saved, missing):
    _, folder = saved
    config = AutoConfig.from_pretrained(folder)
    if missing == "tokenizer":
        config.name_or_path = ""
    else:
        config.unmask = None
    with raises(ModelError, where="UnmaskConfig"):
        AutoModelForCausalLM.from_config(config)


def test_the_attention_of_a_config_is_unmasks(saved):
    _, folder = saved
    config, sdpa = AutoConfig.from_pretrained(folder), {"attn_implementation": "sdpa"}
    for given in ({"config": config, **sdpa}, {"config": AutoConfig.from_pretrained(folder, **sdpa)}):
        with raises(ConfigError, where="attn_implementation"):
            AutoModelForCausalLM.from_config(**given)


CHANGES = {
    "max_position_embeddings": 128,
    "attention_dropout": 0.5,
    "num_labels": 4,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "output_hidden_states": True,
    "attn_implementation": "sdpa",
}


@pytest.mark.parametrize("name", CHANGES)
def test_fields_of_a_config_that_do_not_act_are_refused_by_name(tmp_path, name):
    llama_lm("bidirectional").save(tmp_path)
    change = {name: CHANGES[name]}
    where = "id2label, label2id, num_labels" if name == "num_labels" else name
    for given in (change, {"config": AutoConfig.from_pretrained(tmp_path, **change)}):
        with raises(ConfigError, where=where):
            AutoModelForCausalLM.from_pretrained(tmp_path, **given)


def test_a_config_that_is_the_models_own_acts(saved, tmp_path):
    lm, folder = saved
    copied = shutil.copytree(folder, tmp_path / "copy")
    for given in (
        {"config": AutoConfig.from_pretrained(copied, dtype="bfloat16")},
        {"config": AutoConfig.from_pretrained(folder), "dtype": torch.bfloat16},
        {"dtype": "bfloat16", "use_cache": False, "max_position_embeddings": lm.context_length},
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, **given)
        assert model.dtype == torch.bfloat16 and model.diffusion_lm.settings == lm.settings
    with pytest.raises(ConfigError, match="max_positions"):
        AutoModelForCausalLM.from_pretrained(folder, max_positions=128)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
@partly_slow("how", ["object", "type of its own", "peft"], 0, 2)
def test_its_own_settings_count_however_it_comes(saved, how):
    lm, folder = saved
    if how == "object":  # as it was saved before it had a type of its own
        config = json.loads((folder / "config.json").read_text())
        config |= config["unmask"].pop("stock")
        (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, UnmaskForMaskedDiffusion) == (how != "object")
    if how == "peft":
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    read = as_diffusion_lm(model, AutoTokenizer.from_pretrained(folder))
    assert read.settings == lm.settings
    assert isinstance(read.model, PeftModel) == (how == "peft")
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6, lm.mask_token_id]])
    assert torch.equal(read.logits(ids), lm.logits(ids))
    assert load(folder).settings == lm.settings


@partly_slow("way", ["model", "merged", "trained"], 1, 2)
def test_the_stock_model_inside_is_saved_as_what_it_is(way, saved, tmp_path):
    lm, _ = saved
    out = tmp_path / "out"
    ids = torch.tensor([[4, 5, lm.mask_token_id, 6]])
    if way == "merged":
        config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        lm = with_adapters(lm, config)
        expected = lm.logits(ids)
        model = lm.model.merge_and_unload()
    else:
        if way == "trained":
            trainer = make("sft", tmp_path / "run", lm, max_steps=1)
            trainer.train()
        model, expected = lm.model, lm.logits(ids)
    model.save_pretrained(out)
    lm.tokenizer.save_pretrained(out)
    assert json.loads((out / "config.json").read_text())["model_type"] == "unmask"
    again = load(out)
    assert again.settings == lm.settings
    torch.testing.assert_close(again.logits(ids), expected, rtol=0, atol=1e-5)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.save_pretrained(tmp_path / "copied")
        assert json.loads((tmp_path / "copied/config.json").read_text())["model_type"] == "unmask"


@pytest.mark.parametrize("given", ["auto", "stock"])
def test_arguments_of_save_pretrained_act_as_in_transformers(given, saved, tmp_path):
    lm, folder = saved
    model = AutoModelForCausalLM.from_pretrained(folder) if given == "auto" else lm.model
    model.save_pretrained(tmp_path / "other", False)
    assert not [*(tmp_path / "other").glob("*.json")]
    zeros = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path / "out", state_dict=zeros, variant="zero")
    lm.tokenizer.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out", variant="zero")
    assert again.settings == lm.settings and not any(weight.any() for weight in again.parameters())


def test_a_causal_reading_of_a_diffusion_model_is_saved_as_causal(tmp_path):
    lm = llama_lm("bidirectional")
    lm.as_causal().save(tmp_path / "causal")
    assert json.loads((tmp_path / "causal/config.json").read_text())["model_type"] == "llama"
    lm.save(tmp_path / "own")
    assert load(tmp_path / "own").settings == lm.settings
