"""What is read from a model without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BloomConfig, LlamaConfig

from tests.errors import raises
from tests.helpers import partly_slow
from tests.models.configurations import (
    ALPHABET,
    CONFIGURATIONS,
    HYBRIDS,
    LAYERS,
    SIZES,
    VOCABULARY,
    WINDOWS_OF_LAYERS,
    tiny_lm,
)
from tests.models.released import EXPECTED, EXPERT, EXPERTS, HIDDEN, write_published
from unmask.config.run import ModelConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ModelError
from unmask.models.attention import AttentionMask, Layout, make_mask
from unmask.models.load import load
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload


def saved(folder: Path, config: object, alphabet: str = ALPHABET, **options: object) -> ModelSpec:
    config.save_pretrained(folder)
    character_tokenizer(alphabet).save_pretrained(folder)
    return ModelSpec.read(ModelConfig(path=str(folder), **options))


def test_facts_are_those_of_the_loaded_model(tmp_path: Path) -> None:
    lm = tiny_lm("qwen3", "block_causal", 4)
    lm.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    blueprint = ModelSpec.read(ModelConfig(path=str(tmp_path)))
    facts = blueprint.facts()
    assert facts["parameters"] == f"{sum(weight.numel() for weight in lm.model.parameters()):,}"
    assert (facts["attention"], facts["attention block"], facts["logit shift"]) == ("block_causal", "4", "no")
    assert facts["mask token"] == f"<|mask|> ({VOCABULARY})"
    assert blueprint.changes()["mask token"] == "already there"
    assert blueprint.workload(None, 8, 1, None).attention == "block_causal"


def test_a_size_that_no_model_has_is_an_error(tmp_path: Path) -> None:
    blueprint = saved(tmp_path, LlamaConfig(**CONFIGURATIONS["llama"].to_dict() | {"hidden_size": 10**30}))
    with raises(ModelError, where="llama"):
        blueprint.facts()


@pytest.mark.parametrize(
    ("room", "words"),
    [(0, f"full: they grow from {VOCABULARY} to {VOCABULARY + 1} rows"), (3, "no: 19 rows have room")],
)
def test_a_full_vocabulary_is_told(room: int, words: str, tmp_path: Path) -> None:
    sizes = CONFIGURATIONS["llama"].to_dict() | {"vocab_size": VOCABULARY + room}
    blueprint = saved(tmp_path, LlamaConfig(**sizes))
    assert blueprint.changes()["embeddings"] == words
    assert "added" in blueprint.changes()["mask token"]


def test_more_tokens_than_embeddings_is_an_error(tmp_path: Path) -> None:
    with raises(ModelError, where=str(tmp_path)):
        saved(tmp_path, CONFIGURATIONS["llama"], alphabet=ALPHABET + "z")


def test_a_model_without_an_attention_hook_is_an_error(tmp_path: Path) -> None:
    config = BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    with raises(ModelError, where="BloomForCausalLM"):
        saved(tmp_path, config).facts()


@pytest.mark.parametrize("name", WINDOWS_OF_LAYERS)
def test_sliding_windows_that_go_are_counted(name: str, tmp_path: Path) -> None:
    windows = sum(window is not None for window in WINDOWS_OF_LAYERS[name])
    assert (
        saved(tmp_path, CONFIGURATIONS[name]).changes()["sliding windows"] == f"dropped in {windows} layers"
    )


@pytest.mark.parametrize(
    "config", [CONFIGURATIONS["llama"], BertConfig(**SIZES, is_decoder=True)], ids=["llama", "bert"]
)
def test_attention_layers_are_counted_once(config: object, tmp_path: Path) -> None:
    assert (
        saved(tmp_path, config).changes()["attention"] == f"{LAYERS} layers, to bidirectional or block_causal"
    )


@pytest.mark.parametrize("name", ["llada_moe", "llada2"])
def test_a_mixture_of_experts_is_planned_by_what_a_token_meets(name: str, tmp_path: Path) -> None:
    folder = write_published(name, tmp_path)
    blueprint = ModelSpec.read(ModelConfig(path=str(folder)))
    total = sum(weight.numel() for weight in load(folder).model.parameters())
    one = 3 * EXPERT * HIDDEN
    assert blueprint.facts()["parameters"] == f"{total:,}, {total - (EXPERTS - 2) * one:,} active"
    network = blueprint.network(Workload(sequence_length=16, attention=EXPECTED[name][0]))
    assert network.parameters == total and network.expert_weights == EXPERTS * one
    assert network.multiplied_weights == network.linear_weights + 2 * one


@pytest.mark.parametrize("precision", ["float32", "mixed"])
def test_what_experts_keep_is_what_all_of_them_keep_of_real_tokens(precision: str, tmp_path: Path) -> None:
    """The index of the grouped tokens is counted in addition."""
    folder, work = write_published("llada_moe", tmp_path), Workload(sequence_length=16, precision=precision)
    network = ModelSpec.read(ModelConfig(path=str(folder))).network(work)
    lm, kept = load(folder), dict[int, int]()
    lm.model.train()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compute = torch.autocast("cpu", torch.bfloat16, enabled=precision == "mixed")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), compute:
        out = lm.model.base_model(
            input_ids=torch.arange(16)[None],
            position_ids=torch.arange(16)[None],
            use_cache=False,
            unmask_mask=full_mask(16),
        )
    real = sum(kept.values()) - sum(
        kept.get(weight.untyped_storage().data_ptr(), 0) for weight in lm.model.parameters()
    )
    assert out is not None and network.saved_fixed + network.saved_per_row == pytest.approx(real, rel=0.1)


def full_mask(length: int) -> AttentionMask:
    layout = Layout.full(length, torch.device("cpu"))
    return make_mask("bidirectional", None, layout, layout)


def test_what_is_kept_grows_with_rows_and_halves_with_the_type(tmp_path: Path) -> None:
    blueprint = saved(tmp_path, CONFIGURATIONS["llama"])
    kept = {
        p: blueprint.network(Workload(sequence_length=32, precision=p)).saved_per_row
        for p in ("float32", "mixed", "bfloat16")
    }
    assert 0.4 * kept["float32"] < kept["bfloat16"] < kept["mixed"] < kept["float32"]
    longer = blueprint.network(Workload(sequence_length=32, attention="block_causal")).saved_per_row
    assert longer == pytest.approx(2 * kept["float32"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("block_size, length", [(3, 60), pytest.param(4, 30, marks=pytest.mark.slow)])
@partly_slow("name", ["lfm2", "qwen3_5_text", pytest.param("bamba", marks=pytest.mark.nightly)], 0)
def test_few_layers_and_steps_tell_what_all_take(
    name: str, block_size: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"attention": "block_causal", "block_size": block_size, "logit_shift": True}
    found = []
    for few in (2, 1000):
        monkeypatch.setattr("unmask.planning.blueprint.FEW_STEPS", few)
        if few > 2:
            monkeypatch.setattr("unmask.planning.blueprint.layer_kinds", every_layer)
        blueprint = ModelSpec("tiny", HYBRIDS[name], character_tokenizer(ALPHABET), settings)
        work = Workload(sequence_length=length, attention="block_causal")
        costs = blueprint.pass_costs(work)
        traffic = [cost.traffic(2 * length) for cost in (costs.forward, costs.backward)]
        launches = [cost.launches for cost in (costs.forward, costs.backward)]
        found.append([*launches, *traffic, blueprint.network(work).saved_per_row])
    assert found[0] == pytest.approx(found[1], rel=0.1)


def every_layer(model: Any) -> list[list[int]]:
    return [[number] for number in range(model.config.num_hidden_layers)]


def test_what_is_counted_does_not_depend_on_what_was_counted_before(tmp_path: Path) -> None:
    work = Workload(sequence_length=16, lora_rank=4)
    blueprint, other = (saved(tmp_path / name, CONFIGURATIONS["llama"]) for name in ("one", "other"))
    costs = blueprint.pass_costs(work)
    assert blueprint.network(work) == other.network(work)
    assert other.pass_costs(work) == costs


def test_layers_that_no_list_holds_are_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(sequence_length=16)
    blueprint, other = (saved(tmp_path / name, CONFIGURATIONS["llama"]) for name in ("one", "other"))
    expected = blueprint.network(work)
    monkeypatch.setattr("unmask.planning.blueprint.layer_stacks", lambda model: {})
    assert other.network(work) == expected


def test_layers_of_a_kind_have_the_same_modules(tmp_path: Path) -> None:
    config = HYBRIDS["falcon_h1"]  # two lists of its config are as long as it has layers
    assert config.num_hidden_layers == len(config.mlp_multipliers)
    saving = {"attention": "block_causal", "block_size": 4}
    work = Workload(sequence_length=8, attention="block_causal")
    assert saved(tmp_path / "falcon", config, **saving).network(work).layers == 2
    bamba = saved(tmp_path / "bamba", HYBRIDS["bamba"], **saving)
    assert bamba.depths == (3, 6) and bamba.network(work).attention_layers == 1
