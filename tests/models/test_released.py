"""Released models in their published formats: every tensor is mapped correctly, and exported byte for
byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from typer.testing import CliRunner

from tests.errors import raises
from tests.models.released import (
    CONFIGS,
    END,
    EXPECTED,
    FROZEN,
    HIDDEN,
    MASK,
    MIXTURES,
    NOT_KEPT,
    VOCABULARY,
    by_hand,
    published_weights,
    write_published,
)
from tests.tiny import build_lm, llama_causal
from tests.training.tiny_runs import TEXTS, settings
from unmask.cli import app
from unmask.config.sampler import SamplerConfig
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.errors import ConfigError, ModelError
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.export import export
from unmask.models.load import initialize, load, make_diffusion
from unmask.models.released_families import FAMILIES

# these vocabularies are small
pytestmark = pytest.mark.filterwarnings("ignore:the mask token is:RuntimeWarning")


@pytest.fixture(params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def published(name: str, tmp_path: Path) -> Path:
    return write_published(name, tmp_path / "published")


def some_ids(length: int = 11) -> Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(1))


def test_every_tensor_and_setting_lands_where_it_belongs(name, published):
    lm = load(published)
    assert (lm.attention, lm.block_size, lm.logit_shift) == EXPECTED[name]
    assert lm.mask_token_id == MASK == lm.tokenizer.mask_token_id and lm.eos_token_id == END
    assert lm.tokenizer("abc").input_ids == [256, lm.tokenizer.convert_tokens_to_ids("c")]
    assert lm.tokenizer(f"ab{lm.tokenizer.mask_token}").input_ids == [256, MASK]
    attention, block_size, shift = EXPECTED[name]
    tokenizer = load(published).tokenizer
    expected = make_diffusion(
        by_hand(name), tokenizer, attention=attention, block_size=block_size, logit_shift=shift
    )
    assert torch.equal(lm.logits(some_ids()), expected.logits(some_ids()))
    assert (
        generate(lm, ["ab"], SamplerConfig(max_new_tokens=8)).tokens
        == generate(expected, ["ab"], SamplerConfig(max_new_tokens=8)).tokens
    )


def test_the_embedding_at_padding_is_trained_where_the_released_model_trains_it(name, published, tmp_path):
    """The padding token is the EOS. LLaDA's modeling code trains every row, and so does SDAR's, as its
    configs name no padding token."""
    lm = load(published)
    lm.save(tmp_path)
    for model in (lm, load(tmp_path)):
        model.logits(torch.tensor([[5, 6, END, 7]])).logsumexp(2).sum().backward()
        assert (model.model.get_input_embeddings().weight.grad[END] == 0).all() == (name in FROZEN)
        assert model.padding_idx == (END if name in FROZEN else None)


def test_nobody_is_asked_whether_to_run_code(published, capfd):
    load(published)
    load(published, trust_remote_code=True)  # there is no remote code to run, and none is needed
    assert "run the custom code" not in "".join(capfd.readouterr())


def test_the_round_trip_is_byte_for_byte(name, published, tmp_path):
    export(load(published), tmp_path / "back", name)
    before, after = load_file(published / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "back/config.json").read_text())
    kept = {key: value for key, value in CONFIGS[name].items() if key not in NOT_KEPT}
    assert {key: config[key] for key in kept} == kept
    again = load(tmp_path / "back")
    assert (
        again.settings == load(published).settings
        and again.tokenizer.get_vocab() == load(published).tokenizer.get_vocab()
    )
    assert torch.equal(again.logits(some_ids()), load(published).logits(some_ids()))


def test_what_unmask_saves_has_the_weights_of_a_stock_model(published, tmp_path):
    lm = load(published)
    lm.save(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.settings == lm.settings and torch.equal(again.logits(some_ids()), lm.logits(some_ids()))
    stock = type(lm.model)
    _, info = stock.from_pretrained(tmp_path / "saved", config=lm.config, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_shards_types_and_tied_embeddings(name, tmp_path):
    weights = {
        key: value if "expert_bias" in key else value.bfloat16()
        for key, value in published_weights(name).items()
    }
    del weights["model.transformer.ff_out.weight" if name == "llada" else "lm_head.weight"]
    tied = {"weight_tying" if name == "llada" else "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    folder = write_published(name, tmp_path / "one", weights, **tied)
    halves = list(weights)[::2], list(weights)[1::2]
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {}}
    for number, half in enumerate(halves, start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({key: weights[key] for key in half}, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(half, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    export(load(folder, dtype="bfloat16"), tmp_path / "back", name)
    back = load_file(tmp_path / "back/model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[key], weights[key]) for key in back)
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_what_a_config_leaves_out_is_as_released(tmp_path):
    folder = write_published("sdar", tmp_path / "sdar", block_size=..., mask_token_id=...)
    with raises(ModelError, where=str(folder)):  # of the released tokenizer
        load(folder)
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in CONFIGS["sdar"].items() if key != "block_size"})
    )
    assert load(folder).block_size == 4 and load(folder, block_size=8).block_size == 8
    assert load(write_published("sdar", folder, block_size=16)).block_size == 16
    assert (
        load(
            write_published("llada", tmp_path / "llada", embedding_size=None, n_kv_heads=None)
        ).config.vocab_size
        == VOCABULARY
    )


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_config_that_names_no_shared_experts_has_none(tmp_path):
    weights = published_weights("llada2")
    for name, weight in weights.items():
        if "shared_experts" in name:
            weights[name] = weight[:, :0].clone() if "down_proj" in name else weight[:0].clone()
    for count in (0, ...):  # its config class makes 0 of what is left out
        lm = load(write_published("llada2", tmp_path / "published", weights, num_shared_experts=count))
        assert lm.config.n_shared_experts == 0 and lm.logits(some_ids()).isfinite().any()


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compute_in_float64(tmp_path, family):
    """torch's grouped products do not support float64."""
    folder = write_published(family, tmp_path / "published")
    single, double = load(folder), load(folder, dtype="float64")
    assert double.logits(some_ids()).dtype == torch.float64
    torch.testing.assert_close(
        double.logits(some_ids()).float(), single.logits(some_ids()), rtol=1e-4, atol=1e-4
    )
    initialize(folder, seed=0, dtype="float64").logits(some_ids())


def test_new_weights_for_a_released_architecture(published):
    assert initialize(published, seed=0).mask_token_id == MASK


REFUSED_CONFIGS = {
    "another architecture": ("dream", {"architectures": ["DreamForCausalLM"]}),
    "shared experts": ("llada_moe", {"shared_expert_intermediate_size": 8}),
    "one expert": ("llada2", {"num_experts_per_tok": 1}),
    "biases": ("llada", {"include_qkv_bias": True}),
    "another block": ("llada", {"block_type": "sequential"}),
    "layers by a number": ("llada_moe", {"moe_layer_freq": 1}),
    "layers that are too few": ("llada_moe", {"moe_layer_freq": [0]}),
    "windows": ("sdar", {"use_sliding_window": True}),
    "no sizes": ("llada", {"d_model": ..., "n_heads": ...}),
}


@pytest.mark.parametrize(("family", "changes"), REFUSED_CONFIGS.values(), ids=REFUSED_CONFIGS.keys())
def test_a_config_that_the_stock_class_does_not_compute_is_refused(tmp_path, family, changes):
    folder = write_published(family, tmp_path / "x", **changes)
    with raises(ModelError, where=str(folder)) as error:
        load(folder)
    assert error.value.remedy


def test_weights_that_do_not_fit_are_refused(tmp_path):
    weights = published_weights("llada")
    extra = {"model.transformer.blocks.0.q_proj.bias": torch.zeros(HIDDEN)}
    with raises(ModelError, where=str(tmp_path / "x")):
        load(write_published("llada", tmp_path / "x", weights | extra))
    del weights["model.transformer.blocks.1.up_proj.weight"]
    with raises(ModelError, where=str(tmp_path / "x")):
        load(write_published("llada", tmp_path / "x", weights))


def qwen3(**changes: Any) -> DiffusionLM:
    pattern = {"attention": "block_causal", "block_size": 4, "logit_shift": False}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "ids": ["eos_token_id"]}
    return build_lm("qwen3", "abcdefgh", layers=1, intermediate_size=24, **heads, **pattern | changes)


def mixture(**changes: Any) -> DiffusionLM:
    sizes = {"layers": 1, "heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24}
    experts = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
    return build_lm("qwen3_moe", "abcdefgh", ids=(), context=None, **sizes, **experts, **changes)


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # as published
def test_a_converted_block_model_in_the_sdar_layout(tmp_path):
    lm = qwen3(
        attention="causal",
        block_size=None,
        logit_shift=True,
        rope_theta=1e6,
        use_sliding_window=True,
        sliding_window=8,
    )
    args = ConvertConfig(**settings(tmp_path / "run", max_steps=10), attention="block_causal", block_size=4)
    trainer = ConvertTrainer(lm, args, train_dataset=TEXTS)
    trainer.train()
    export(trainer.lm, tmp_path / "sdar", "sdar")
    again = load(tmp_path / "sdar")
    assert again.settings == trainer.lm.settings
    ids = torch.randint(4, 12, (2, 10))
    assert torch.equal(again.logits(ids), trainer.lm.logits(ids))
    config = AutoConfig.from_pretrained(tmp_path / "sdar", trust_remote_code=True)  # as engines read it
    assert (config.model_type, config.block_size, config.mask_token_id, config.rope_theta) == (
        "sdar",
        4,
        lm.mask_token_id,
        1e6,
    )
    assert again.tokenizer("abc").input_ids == lm.tokenizer("abc").input_ids
    assert (
        json.loads((tmp_path / "sdar/tokenizer_config.json").read_text())["tokenizer_class"]
        == "PreTrainedTokenizerFast"
    )
    assert "convert" in (tmp_path / "sdar/README.md").read_text()


@pytest.mark.parametrize(
    ("layout", "lm"),
    [
        ("sdar", lambda: make_diffusion(*llama_causal(), attention="block_causal", block_size=4)),
        ("llada", lambda: qwen3(attention="bidirectional", block_size=None)),
        ("sdar", lambda: qwen3(attention="bidirectional", block_size=None)),
        ("sdar", lambda: qwen3(logit_shift=True)),
        ("llada", lambda: make_diffusion(*llama_causal(attention_bias=True), attention="bidirectional")),
        ("llada", lambda: make_diffusion(*llama_causal(hidden_act="gelu"), attention="bidirectional")),
        ("llada", lambda: make_diffusion(*llama_causal(head_dim=8), attention="bidirectional")),
        (
            "llada",
            lambda: make_diffusion(
                *llama_causal(rope_scaling={"rope_type": "linear", "factor": 2.0}), attention="bidirectional"
            ),
        ),
        ("llada_moe", lambda: mixture(norm_topk_prob=True)),
        ("mdlm", lambda: qwen3()),
    ],
)
def test_a_model_that_a_layout_cannot_express_is_refused(tmp_path, layout, lm):
    with raises((ModelError, ConfigError), where="layout") as error:
        export(lm(), tmp_path / "out", layout)
    assert error.value.remedy and not (tmp_path / "out").exists()


def test_foreign_weights_are_refused(tmp_path):
    lm = qwen3()
    lm.model.time_embedding = torch.nn.Linear(2, 2)
    with raises(ModelError, where="layout"):
        export(lm, tmp_path / "out", "sdar")


# PEFT 0.21 asks for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_merged(tmp_path):
    lm = qwen3()
    wrapped = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    adapted = lm.bind(peft.get_peft_model(lm.model, wrapped))
    export(adapted, tmp_path, "sdar")
    ids_BT = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = adapted.logits(ids_BT)
        torch.testing.assert_close(load(tmp_path).logits(ids_BT), expected, rtol=0, atol=1e-5)


def test_a_mask_token_that_engines_do_not_expect_is_told(tmp_path):
    with pytest.warns(
        RuntimeWarning, match="the mask token is 12, but engines may assume 151669 for sdar models"
    ):
        export(qwen3(), tmp_path, "sdar")


def test_the_command_line(tmp_path):
    qwen3().save(tmp_path / "model")
    run = ["export", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--layout"]
    assert CliRunner().invoke(app, [*run, "dream"]).exit_code == 2
    assert CliRunner().invoke(app, [*run, "sdar"]).exit_code == 0
    assert load(tmp_path / "out").attention == "block_causal"
    assert CliRunner().invoke(app, [*run, "sdar"]).exit_code == 2  # not empty
    assert CliRunner().invoke(app, [*run, "sdar", "--overwrite"]).exit_code == 0


def test_names_are_mapped_one_to_one():
    for family in FAMILIES.values():
        names = [
            name
            for names in family.weights.values()
            for name in ([names] if isinstance(names, str) else names)
        ]
        assert len(set(names)) == len(names)
        # in rope_parameters, or only where it is set
        elsewhere = {"rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"}
        assert all(
            hasattr(family.config_class(), name)
            for name in {*family.fields.values(), *family.defaults} - elsewhere
        )
