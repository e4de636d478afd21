"""`unmask.load` takes the arguments of `from_pretrained`."""

from __future__ import annotations

import inspect
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import unmask
from tests.errors import raises
from tests.tiny import llama_lm
from unmask.errors import ConfigError, ModelError
from unmask.models.diffusion_lm import SAVED_ANYWAY, UNSAVED
from unmask.models.load import REFUSED, WITHOUT_EFFECT, load
from unmask.names import LOADING


@pytest.fixture
def folder(tmp_path):
    llama_lm("causal", logit_shift=True).save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def half(tmp_path):
    llama_lm("causal", logit_shift=True).to(torch.bfloat16).save(tmp_path / "half")
    return tmp_path / "half"


def arguments_of_transformers() -> set[str]:
    source = inspect.getsource(PreTrainedModel.from_pretrained)
    named = set(inspect.signature(PreTrainedModel.from_pretrained).parameters)
    return named - {"pretrained_model_name_or_path", "model_args", "kwargs"} | set(
        re.findall(r"""kwargs\.pop\("(\w+)\"""", source)
    )


def test_every_argument_of_transformers_acts_or_is_refused_by_name():
    names = arguments_of_transformers()
    assert len(names) > 40
    known = set(inspect.signature(load).parameters) | REFUSED.keys() | WITHOUT_EFFECT
    assert names <= known


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(folder, name):
    with pytest.raises(ConfigError) as refused:
        load(folder, **{name: "given"})
    assert refused.value.where == name and refused.value.what == REFUSED[name]


@pytest.mark.parametrize("name", LOADING)
def test_arguments_of_others_get_a_hint(folder, name):
    with pytest.raises(ConfigError) as refused:
        load(folder, **{name: 0})
    assert refused.value.where == "load" and refused.value.remedy == LOADING[name]


@pytest.mark.parametrize("name", ["divice", "quantisation", "block_length", "foo"])
def test_an_unknown_argument_gets_a_hint(folder, name):
    for value in ("cpu", False):
        with raises(ConfigError, where="load"):
            load(folder, **{name: value})


def test_what_asks_for_nothing_is_taken(folder):
    load(folder, use_cache=False, load_in_4bit=False, output_hidden_states=None, resume_download=True)


@pytest.mark.parametrize(
    "dtype", [None, "auto", "bfloat16", torch.bfloat16, "float32", torch.float32, "half", "float", "double"]
)
def test_weights_have_the_type_that_transformers_gives_them(half, dtype):
    given = {"dtype": dtype}
    expected = AutoModelForCausalLM.from_pretrained(half, **given).dtype
    assert load(half).dtype == torch.bfloat16
    assert load(half, **given).dtype == expected


def test_a_config_without_a_type_has_that_of_the_weights(half):
    config = half / "config.json"
    config.write_text(re.sub(r'"dtype": "\w+",', "", config.read_text()))
    assert load(half).dtype == AutoModelForCausalLM.from_pretrained(half).dtype == torch.bfloat16


def test_the_earlier_name_of_dtype_is_deprecated(half):
    with pytest.warns(FutureWarning, match="torch_dtype"):
        assert load(half, torch_dtype=torch.float32).dtype == torch.float32
    with pytest.warns(FutureWarning, match="torch_dtype"):
        assert load(half, torch_dtype=torch.float32, dtype="float64").dtype == torch.float64


@pytest.mark.parametrize("dtype", ["float31", torch.int8, "nn"])
def test_other_types_are_refused(folder, dtype):
    with raises(ModelError, where="dtype"):
        load(folder, dtype=dtype)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, {"": torch.device("cpu")}])
def test_a_device_map_of_one_device(folder, device_map):
    assert load(folder, device_map=device_map, max_memory={"cpu": "1GB"}).device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a GPU")
def test_a_device_by_its_number_is_a_gpu(folder):
    for given in ({"device_map": {"": 0}}, {"device_map": 0}, {"device": 0}):
        with raises(ModelError, where="device"):
            load(folder, **given)


def test_a_device_for_each_part_is_refused(folder):
    with raises(ModelError, where="device_map"):
        load(folder, device_map={"model": "cpu", "lm_head": "cpu"})


def test_a_subfolder(folder):
    expected = load(folder)
    shutil.move(folder, folder.parent / "outer" / "inner")
    found = load(folder.parent / "outer", subfolder="inner")
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(found.logits(ids), expected.logits(ids))


def test_a_variant(folder):
    expected = load(folder)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(load(folder, variant="fp16").logits(ids), expected.logits(ids))


def test_bits_and_bytes_by_their_own_config(folder):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    assert load(folder, quantization_config=config).model.is_quantized


def test_the_model_has_the_methods_of_transformers(folder, tmp_path):
    lm = unmask.DiffusionLM.from_pretrained(folder)
    lm.save_pretrained(tmp_path / "again")
    assert lm.device.type == "cpu" and lm.dtype == torch.float32
    assert lm.to(torch.float64).dtype == torch.float64
    ids = torch.tensor([[4, 5, 6]])
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "again").generate(
        ids, max_new_tokens=5, do_sample=False
    )
    again = unmask.load(tmp_path / "again")
    assert again.generate(ids, max_new_tokens=5).equal(expected)
    assert again.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5).equal(
        expected
    )


def test_every_argument_of_save_pretrained_acts_or_is_refused_by_name(folder, tmp_path):
    lm, out = unmask.load(folder), tmp_path / "out"
    named = set(inspect.signature(PreTrainedModel.save_pretrained).parameters)
    named |= set(inspect.signature(PreTrainedModel.push_to_hub).parameters) - {"tags"}  # of the card
    named -= {"self", "save_directory", "kwargs", *inspect.signature(lm.save_pretrained).parameters}
    named -= set(inspect.signature(lm.push_to_hub).parameters)
    assert named <= UNSAVED.keys() and UNSAVED.keys() - named == {"safe_serialization"}
    for name in UNSAVED:
        with pytest.raises(ConfigError) as refused:
            lm.save_pretrained(out, **{name: name not in SAVED_ANYWAY})
        assert refused.value.where == name and refused.value.what == UNSAVED[name]
    with raises(ConfigError, where="save_pretrained"):
        lm.save_pretrained(out, varient="fp16")
    lm.save_pretrained(out, is_main_process=False)
    assert not out.exists()
    anyway = dict.fromkeys(UNSAVED) | dict.fromkeys(SAVED_ANYWAY, True)
    lm.save_pretrained(out, **anyway, token="given", commit_message="Mine", license="mit")
    assert "license: mit" in (out / "README.md").read_text() and unmask.load(out).settings == lm.settings


def test_the_model_has_the_methods_of_modules(folder):
    lm, stock = unmask.load(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert lm.train() is lm and lm.training and lm.eval() is lm and not lm.training
    assert [*lm.state_dict()] == [*stock.state_dict()] == [name for name, _ in lm.named_parameters()]
    assert len([*lm.parameters()]) == len([*stock.parameters()])
    assert {name for name, _ in lm.named_modules()} == {name for name, _ in stock.named_modules()}
    assert len([*lm.modules()]) == len([*stock.modules()])
    assert [name for name, _ in lm.named_buffers()] == [name for name, _ in stock.named_buffers()]
    assert lm.num_parameters(exclude_embeddings=True) == stock.num_parameters(exclude_embeddings=True)
    assert lm.get_memory_footprint() == stock.get_memory_footprint()
    assert lm.get_input_embeddings().weight.equal(stock.get_input_embeddings().weight)
    assert lm.get_output_embeddings() is lm.model.lm_head
    assert lm.requires_grad_(False) is lm and not lm.num_parameters(only_trainable=True)
    for change, dtype in (("half", "float16"), ("bfloat16", "bfloat16"), ("double", "float64")):
        assert getattr(lm, change)() is lm and lm.dtype == getattr(torch, dtype)
    ids = torch.tensor([[4, 5, 6]])
    assert lm.float().cpu().logits(ids).dtype == torch.float32
    expected = lm.logits(ids)
    lm.load_state_dict(stock.state_dict())
    assert not lm.logits(ids).equal(expected)  # which half precision rounded
    lm.requires_grad_(True).logits(ids)[..., :5].sum().backward()
    assert lm.model.lm_head.weight.grad is not None
    lm.zero_grad()
    assert lm.model.lm_head.weight.grad is None
