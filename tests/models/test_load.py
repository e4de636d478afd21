"""Loading and saving: weights and settings are restored, a mask token is added, and every mistake has its
message."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import dispatch_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Llama4TextConfig,
    MambaConfig,
    MiniMaxConfig,
)

from tests.errors import raises
from tests.helpers import partly_slow, shared_path
from tests.models.configurations import (
    ALPHABET,
    CONFIGURATIONS,
    HEADS,
    NAMES,
    SHARED,
    VOCABULARY,
    random_ids,
    tiny_lm,
    tiny_model,
)
from unmask.config.run import ModelConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError, ModelError
from unmask.models.attention import AttentionMask, Layout, make_mask
from unmask.models.device_map import split_layers
from unmask.models.load import MASK_TOKEN, initialize, load, make_diffusion, with_pattern
from unmask.planning.blueprint import ModelSpec, is_tied

SETTINGS = [
    ("causal", None, True),
    ("causal", None, False),
    ("block_causal", 4, True),
    ("block_causal", 2, False),
    ("bidirectional", None, False),
]


def save_stock(path, name="llama", **tokens):
    """Write a folder with transformers; the model that it holds."""
    model, tokenizer = tiny_model(name, dtype=torch.float32), character_tokenizer(ALPHABET)
    tokenizer.add_special_tokens(tokens)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model


@pytest.fixture
def stock(tmp_path):
    save_stock(tmp_path)
    return tmp_path


@partly_slow("name", NAMES, *range(0, len(NAMES), 2))
def test_the_token_that_stands_at_padding_is_trained_where_it_is_text(name, tmp_path):
    save_stock(tmp_path, name)
    for lm in (
        load(tmp_path),
        initialize(tmp_path, seed=0),
        tiny_lm(name),
        with_pattern(tiny_lm(name), "bidirectional"),
    ):
        table = lm.model.get_input_embeddings()
        assert lm.config.pad_token_id == 0
        lm.logits(torch.tensor([[0, 6, 0, 7]])).logsumexp(2).sum().backward()
        weight_VD = table.weight.grad.clone()
        if is_tied(lm.model):  # the gradient through the head is another one
            lm.model.zero_grad()
            lm.logits(torch.tensor([[5, 6, 5, 7]])).logsumexp(2).sum().backward()
            weight_VD -= table.weight.grad
        assert weight_VD[0].abs().max() > 1e-3


def test_a_model_made_from_scratch_has_no_row_of_zeros(stock):
    lm, again = initialize(stock, seed=3), initialize(stock, seed=3)
    rows_V = lm.model.get_input_embeddings().weight.norm(dim=1)
    assert rows_V[0] > rows_V.median() / 3 and lm.config.pad_token_id == 0
    assert all(map(torch.equal, lm.model.parameters(), again.model.parameters()))


def change_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("name", "settings"), list(zip(NAMES, SETTINGS * 3, strict=True)))
def test_saving_and_loading_changes_nothing(tmp_path, name, settings):
    attention, block_size, shift = settings
    lm = tiny_lm(name, attention, block_size, shift=shift, dtype=torch.float32)
    lm.save(tmp_path)
    files = {path.name for path in tmp_path.iterdir()}
    assert "model.safetensors" in files and not any(
        file.endswith((".bin", ".pt", ".pth", ".pkl")) for file in files
    )
    again = load(tmp_path)
    assert not again.model.training
    assert same_weights(lm.model, again.model)
    assert again.settings == lm.settings
    saved = {
        "attention": attention,
        "block_size": block_size,
        "mask_token_id": VOCABULARY,
        "logit_shift": shift,
    }
    assert again.settings.items() >= saved.items()
    assert (
        again.tokenizer.get_vocab() == lm.tokenizer.get_vocab() and again.tokenizer.mask_token == MASK_TOKEN
    )
    ids = random_ids(2, 6)
    assert torch.equal(again.logits(ids), lm.logits(ids))


def test_what_is_loaded_can_be_saved_again(tmp_path):
    tiny_lm("gemma2", "block_causal", 3, dtype=torch.bfloat16).save(tmp_path / "one")
    first = load(tmp_path / "one", dtype="bfloat16")
    first.save(tmp_path / "two")
    second = load(tmp_path / "two", dtype="bfloat16")
    assert same_weights(first.model, second.model) and first.settings == second.settings
    assert (tmp_path / "one/model.safetensors").read_bytes() == (
        tmp_path / "two/model.safetensors"
    ).read_bytes()


def test_a_stock_folder_is_a_causal_model(tmp_path):
    model = save_stock(tmp_path)
    lm = load(tmp_path)
    assert (lm.attention, lm.block_size, lm.mask_token_id, lm.logit_shift) == (
        "causal",
        None,
        VOCABULARY,
        True,
    )
    ids = random_ids(2, 7)
    torch.testing.assert_close(
        lm.logits(ids)[:, 1:, :VOCABULARY], model(ids).logits[:, :-1], rtol=0, atol=1e-5
    )


def test_a_saved_causal_model_is_a_stock_folder(tmp_path):
    lm = tiny_lm("qwen3", dtype=torch.float32)
    lm.save(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path), random_ids(1, 6)
    expected = lm.logits(ids)[:, 1:, :VOCABULARY]
    torch.testing.assert_close(model(ids).logits[:, :-1, :VOCABULARY], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])  # a head of its own, a tied one, one with a bias
def test_a_mask_token_is_added_to_a_full_vocabulary(tmp_path, name):
    before = save_stock(tmp_path, name)
    lm = load(tmp_path)
    assert len(lm.tokenizer) == VOCABULARY + 1 == lm.config.vocab_size
    assert lm.tokenizer(f"ab{MASK_TOKEN}c", add_special_tokens=False)["input_ids"] == [
        4,
        5,
        lm.mask_token_id,
        6,
    ]
    for old, new in (
        (before.get_input_embeddings(), lm.model.get_input_embeddings()),
        (before.get_output_embeddings(), lm.model.get_output_embeddings()),
    ):
        assert torch.equal(new.weight[:VOCABULARY], old.weight) and len(new.weight) == VOCABULARY + 1
        torch.testing.assert_close(new.weight[VOCABULARY], old.weight.mean(0))
    tied = [
        model.get_input_embeddings().weight is model.get_output_embeddings().weight
        for model in (before, lm.model)
    ]
    assert tied == [name == "gpt2"] * 2


def test_a_mask_token_takes_a_free_row_where_there_is_one():
    model = tiny_model("llama", dtype=torch.float32)
    tokenizer = character_tokenizer(ALPHABET[:-3])  # three rows of the embeddings belong to no token
    before = model.get_input_embeddings().weight.clone()
    lm = make_diffusion(model, tokenizer)
    after = model.get_input_embeddings().weight
    assert lm.mask_token_id == VOCABULARY - 3 and after.shape == before.shape
    torch.testing.assert_close(after[VOCABULARY - 3], before[: VOCABULARY - 3].mean(0))
    others = torch.arange(VOCABULARY) != lm.mask_token_id
    assert torch.equal(after[others], before[others])


def test_a_tokenizer_with_a_mask_token_keeps_it(tmp_path):
    before = save_stock(tmp_path, mask_token="e")
    lm = load(tmp_path)
    assert lm.mask_token_id == lm.tokenizer.convert_tokens_to_ids("e") == 8
    assert same_weights(before, lm.model) and MASK_TOKEN not in lm.tokenizer.get_vocab()
    assert (lm.logits(random_ids(1, 3))[..., 8] == -torch.inf).all()


def test_a_mask_token_without_an_embedding_gets_one(tmp_path):
    before = save_stock(tmp_path, mask_token="<hidden>")  # in the tokenizer, and the embeddings end before it
    lm = load(tmp_path)
    assert lm.tokenizer.mask_token == "<hidden>" and lm.mask_token_id == VOCABULARY
    torch.testing.assert_close(
        lm.model.get_input_embeddings().weight[VOCABULARY], before.get_input_embeddings().weight.mean(0)
    )


def test_another_pattern_of_the_same_model_has_the_same_weights():
    lm = tiny_lm("llama")
    other = with_pattern(lm, "block_causal", 4)
    assert other.model is lm.model and other.mask_token_id == lm.mask_token_id
    assert (other.attention, other.block_size, other.logit_shift) == ("block_causal", 4, False)
    assert lm.attention == "causal"


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        ({}, ("block_causal", 4, True)),
        ({"block_size": 8}, ("block_causal", 8, True)),
        ({"logit_shift": False}, ("block_causal", 4, False)),
        ({"attention": "block_causal"}, ("block_causal", 4, True)),
        ({"attention": "bidirectional"}, ("bidirectional", None, False)),
        ({"attention": "bidirectional", "logit_shift": True}, ("bidirectional", None, True)),
        ({"attention": "causal"}, ("causal", None, True)),
    ],
)
def test_what_is_asked_for_goes_before_what_was_saved(tmp_path, asked, loaded):
    tiny_lm("llama", "block_causal", 4, shift=True, dtype=torch.float32).save(tmp_path)
    lm = load(tmp_path, **asked)
    assert (lm.attention, lm.block_size, lm.logit_shift) == loaded


@pytest.mark.parametrize(
    ("asked", "loaded"),
    [
        ({"attention": "bidirectional"}, ("bidirectional", None, False)),
        ({"attention": "block_causal", "block_size": 2}, ("block_causal", 2, False)),
    ],
)
def test_a_stock_model_takes_any_pattern(stock, asked, loaded):
    lm = load(stock, **asked)
    assert (lm.attention, lm.block_size, lm.logit_shift) == loaded


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_weight_has_the_type_asked_for(stock, dtype):
    lm = load(stock, dtype=dtype)
    assert {weight.dtype for weight in lm.model.parameters()} == {getattr(torch, dtype)}


def test_new_weights_depend_on_the_seed_alone(stock):
    one, same, other = initialize(stock, seed=1), initialize(stock, seed=1), initialize(stock, seed=2)
    assert same_weights(one.model, same.model) and not same_weights(one.model, other.model)
    assert one.settings == load(stock).settings
    with raises(ModelError, where=str(stock / "nowhere")):
        initialize(stock / "nowhere", seed=0)


def test_a_path_that_is_no_name_on_the_hub_is_not_looked_up_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("./nope", "runs/nope/model", "elsewhere/run/model"):
        with raises(ModelError, where=path):
            load(path)


def test_a_name_that_is_no_folder_is_said_to_be_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "runs").mkdir()  # of models, as `hf download --local-dir` makes one
    with raises(ModelError, where="runs/sfft"):
        load("runs/sfft")


# What is wrong with a folder, and how the error begins.
BROKEN = {
    "no folder": lambda path: [file.unlink() for file in path.iterdir()],
    "config that is no JSON": lambda path: (path / "config.json").write_text("{"),
    "config of nothing": lambda path: (path / "config.json").write_text("{}"),
    "no causal model": lambda path: change_config(path, model_type="t5"),
    "no tokenizer": lambda path: [file.unlink() for file in path.glob("token*")],
    "tokenizer cut off": lambda path: (path / "tokenizer.json").write_text('{"version"'),
    "weights of another size": lambda path: change_config(path, hidden_size=32),
    "weights cut off": lambda path: (path / "model.safetensors").write_bytes(
        (path / "model.safetensors").read_bytes()[:-10]
    ),
    "no weights": lambda path: (path / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_folder_is_named_with_a_remedy(stock, damage):
    damage(stock)
    with raises(ModelError, where=str(stock)) as error:
        load(stock)
    assert error.value.remedy and "\n" not in str(error.value)


def test_a_padding_token_outside_the_vocabulary_is_refused(stock):
    config = json.loads((stock / "config.json").read_text())
    (stock / "config.json").write_text(json.dumps(config | {"pad_token_id": 99999}))
    with raises(ModelError, where=str(stock)) as refused:
        load(stock)
    assert "Padding_idx must be within num_embeddings" in refused.value.what


def test_weights_that_are_missing_are_not_made_up(stock):
    weights = load_file(stock / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, stock / "model.safetensors", metadata={"format": "pt"})
    with raises(ModelError, where=str(stock)):
        load(stock)


def test_pickled_weights_are_not_read(stock):
    torch.save(load_file(stock / "model.safetensors"), stock / "pytorch_model.bin")
    (stock / "model.safetensors").unlink()
    with raises(ModelError, where=str(stock)):
        load(stock)


@pytest.mark.parametrize(
    ("asked", "error", "where"),
    [
        ({"dtype": "int8"}, ModelError, "dtype"),
        ({"device": "abacus"}, ModelError, "device"),
        ({"attention": "sideways"}, ConfigError, "attention"),
        ({"attention": "block_causal"}, ConfigError, "block_size"),
        ({"block_size": 4}, ConfigError, "block_size"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(stock, asked, error, where):
    with raises(error, where=where):
        load(stock, **asked)


LOCAL = {"num_local_experts": 2, "num_experts_per_tok": 1}


def llama4(chunk):
    types = ["chunked_attention", "full_attention"]
    return Llama4TextConfig(
        **HEADS, **LOCAL, intermediate_size_mlp=24, attention_chunk_size=chunk, layer_types=types
    )


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(hidden_size=16, n_layer=1, n_head=2, **SHARED),
        MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **SHARED),
        MiniMaxConfig(**HEADS, **LOCAL, layer_types=["linear_attention", "full_attention"]),
        llama4(chunk=63),
    ],
    ids=["bloom", "mamba", "minimax", "llama4"],
)
def test_a_model_that_would_ignore_the_mask_is_refused(tmp_path, config):
    model = AutoModelForCausalLM.from_config(config)
    where = type(model).__name__
    model.save_pretrained(tmp_path)
    character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    with raises(ModelError, where=where):
        make_diffusion(model, character_tokenizer(ALPHABET))
    with raises(ModelError, where=where):
        load(tmp_path)
    with raises(ModelError, where=where):
        ModelSpec.read(ModelConfig(path=str(tmp_path))).facts()


def test_attention_in_chunks_as_long_as_the_context_is_full_attention():
    model, ids = (
        AutoModelForCausalLM.from_config(llama4(chunk=64), dtype=torch.float32).eval(),
        random_ids(2, 7),
    )
    expected = model(ids).logits[:, :-1]
    lm = make_diffusion(model, character_tokenizer(ALPHABET))
    torch.testing.assert_close(lm.logits(ids)[:, 1:, :VOCABULARY], expected, rtol=0, atol=1e-5)


def test_a_real_model_tells_its_story():
    lm = load(shared_path("models", "stories260K"))
    ids = lm.tokenizer("Once upon a time")["input_ids"]
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(20):
            last = torch.tensor([[*ids, lm.pad_token_id]])
            ids.append(int(lm.logits(last)[0, -1].argmax()))
    assert lm.tokenizer.decode(ids[prompt:]).startswith(", there was a little girl named Lily")


@pytest.mark.parametrize("name", NAMES)
def test_the_layers_of_a_split_model_are_shared_out_in_order_by_memory(name: str) -> None:
    places = split_layers(CONFIGURATIONS[name], torch.float32, [48, 20])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGURATIONS[name])
    covered = [
        weight
        for weight, _ in model.named_parameters()
        if any(weight.startswith(f"{part}.") for part in places)
    ]
    assert len(covered) == len(list(model.parameters()))
    layers = [place for part, place in places.items() if part.split(".")[-1].isdigit()]
    assert layers == sorted(layers) and set(places.values()) == {"cuda:0", "cuda:1"}
    assert layers.count("cuda:0") >= layers.count("cuda:1")
    if is_tied(model):
        assert places["lm_head"] == "cuda:0"


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_is_not_split_over_fewer_than_two_gpus(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_lm("llama").save(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(total_memory=1))
    with raises(ModelError, where="device_map"):
        load(tmp_path, device_map="balanced")
    with raises(ModelError, where="device_map, quantization"):
        load(tmp_path, device_map="balanced", quantization="4bit")


@pytest.mark.parametrize(
    ("attention", "block_size"), [("bidirectional", None), ("block_causal", 4), ("causal", None)]
)
def test_masks_pass_through_the_hooks_of_a_split_model(
    attention: str, block_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU all parts are on one device, but accelerate's hooks, which would move inputs, are there."""
    lm = tiny_lm("llama", attention, block_size)
    ids_BT = torch.arange(1, 9).expand(2, -1)
    plain = lm.logits(ids_BT)
    moved: list[object] = []
    original = AttentionMask.to
    monkeypatch.setattr(
        AttentionMask,
        "to",
        lambda self, device, **rest: (moved.append(device), original(self, device, **rest))[1],
    )
    dispatch_model(lm.model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(lm.logits(ids_BT), plain) and moved


def test_a_mask_is_moved_once() -> None:
    layout = Layout.full(4, torch.device("cpu"))
    mask = make_mask("causal", None, layout, layout)
    there = mask.to("meta")
    assert (
        there.allowed_B1QK.device.type == "meta"
        and there.positions[0].device.type == "meta"
        and mask.to("meta") is there
    )
    assert mask.to("cpu") is mask
