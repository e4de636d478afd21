"""LoRA adapters from folders: they compute as PEFT's own, share the weights of their model, and change
nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.errors import raises
from tests.generation.cases import every_pattern
from tests.helpers import partly_slow
from tests.tiny import adapted, float64_lm, llama_lm, save_adapters
from tests.training.tiny_runs import moved
from unmask.errors import ModelError
from unmask.models.adapters import with_adapters, with_trained_mask_row
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.model_state import fingerprint
from unmask.models.stored_adapters import load_adapters, put_adapters, read_adapters

IDS_BT = torch.tensor([[3, 4, 5, 6, 7, 8]])
KINDS = {
    "plain": {},
    "all layers": {"target_modules": "all-linear", "lora_alpha": 3},
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 5}},
    "DoRA": {"use_dora": True},
    "a whole module": {"modules_to_save": ["fc1"]},
    "table and head": {"target_modules": ["embed_tokens", "lm_head"]},
}
WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture
def lm() -> DiffusionLM:
    """A model of this test's own."""
    return float64_lm(attention="bidirectional").frozen_copy()


def logits(lm: DiffusionLM) -> Tensor:
    with torch.no_grad():
        return lm.logits(IDS_BT)


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_adapters_compute_as_those_that_were_saved(settings: dict, lm: DiffusionLM, tmp_path: Path) -> None:
    trained = adapted(lm, **settings)
    loaded = load_adapters(lm, save_adapters(trained, tmp_path))
    assert torch.equal(logits(loaded), logits(trained)) and not torch.allclose(logits(loaded), logits(lm))


@pytest.mark.filterwarnings("ignore:.*(eva|is_gradient_checkpointing)")  # of PEFT
@partly_slow("start", [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "olora"], 0, 2, 4, 6)
def test_adapters_are_loaded_however_they_started(start, tmp_path: Path) -> None:
    llama_lm().save(tmp_path / "base")
    lm = load(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=start, lora_dropout=0)
    trained = moved(with_adapters(lm, config), among="lora_")
    trained.save(tmp_path / "adapters")
    again = load(tmp_path / "adapters")
    assert torch.allclose(logits(again), logits(trained), atol=1e-6)
    if start not in ("pissa", "olora"):  # which change the weights that others share
        shared = load_adapters(load(tmp_path / "base"), tmp_path / "adapters")
        assert torch.allclose(logits(shared), logits(trained), atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("start", ["pissa_niter_4", "corda", "loftq", "lora_ga"])
def test_adapters_on_weights_that_their_start_changed_are_refused(start, tmp_path: Path) -> None:
    llama_lm().save(tmp_path / "base")
    with_adapters(load(tmp_path / "base"), LoraConfig(r=2, target_modules=["q_proj"])).save(tmp_path / "run")
    config = json.loads((tmp_path / "run" / SETTINGS).read_text()) | {"init_lora_weights": start}
    if start in ("corda", "loftq", "lora_ga"):
        config |= {f"{start}_config": {"loftq_bits": 4} if start == "loftq" else {}}
    (tmp_path / "run" / SETTINGS).write_text(json.dumps(config))
    with raises(ModelError, where=str(tmp_path / "run")):
        load(tmp_path / "run")


@every_pattern
def test_a_trained_row_of_the_mask_token_is_loaded(
    attention: str, block_size: int | None, tmp_path: Path
) -> None:
    lm = float64_lm(attention=attention, block_size=block_size).frozen_copy()
    trained = with_adapters(lm.frozen_copy(), with_trained_mask_row(adapted(lm).model.active_peft_config, lm))
    rows = next(
        weight for name, weight in trained.model.named_parameters() if "trainable_tokens_delta" in name
    )
    rows.data[:, ::2] += 0.5
    loaded = load_adapters(lm, save_adapters(trained, tmp_path))
    hidden_BT = torch.full_like(IDS_BT, lm.mask_token_id)
    with torch.no_grad():
        found, expected, base = (
            each.logits(hidden_BT, hidden_BT=hidden_BT > 0) for each in (loaded, trained, lm)
        )
    assert torch.equal(found, expected) and not torch.allclose(found[:, 1:], base[:, 1:])


def test_weights_exist_once_and_the_model_computes_as_before(lm: DiffusionLM, tmp_path: Path) -> None:
    before, digest = logits(lm), fingerprint(lm.model)
    folders = [save_adapters(adapted(lm, seed), tmp_path / str(seed)) for seed in range(3)]
    models = [load_adapters(lm, folder) for folder in folders]
    own = {weight.data_ptr() for weight in lm.model.parameters()}
    for model in models:
        there = {weight.data_ptr() for name, weight in model.model.named_parameters() if "lora_" not in name}
        assert there == own
    assert torch.equal(logits(lm), before) and fingerprint(lm.model) == digest
    assert len({str(logits(model)) for model in (lm, *models)}) == 4
    assert [
        torch.equal(logits(model), logits(load_adapters(lm, folder)))
        for model, folder in zip(models, folders, strict=True)
    ] == [True] * 3


def rewrite(folder: Path, **settings: object) -> None:
    """Change settings of stored adapters."""
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def spoil(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the stored weights."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


def of_another_pattern(folder: Path) -> None:
    float64_lm(attention="causal").save(folder / "model")
    (folder / "model" / "config.json").rename(folder / "config.json")


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


TABLE = "base_model.model.model.embed_tokens.weight"
SPOILED = {
    "no adapters": lambda folder: (folder / SETTINGS).unlink(),
    "pickled": pickled,
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "torn": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9]),
    "no JSON": lambda folder: (folder / SETTINGS).write_text("{"),
    "other layers": lambda folder: rewrite(folder, target_modules=["c_attn"]),
    "on the head": lambda folder: rewrite(folder, target_modules=["lm_head"]),
    "another rank": lambda folder: rewrite(folder, r=8),
    "a part": lambda folder: spoil(folder, lambda weights: weights.popitem()),
    "a table": lambda folder: spoil(folder, lambda weights: weights.update({TABLE: torch.zeros(10, 16)})),
    "another kind": lambda folder: IA3Config(
        target_modules=["q_proj"], feedforward_modules=[]
    ).save_pretrained(folder),
    "changed base": lambda folder: rewrite(folder, init_lora_weights="pissa"),
    "biases": lambda folder: rewrite(folder, bias="all"),
    "code": lambda folder: rewrite(folder, megatron_config={}, megatron_core="os"),
    "pattern": of_another_pattern,
}


@pytest.mark.parametrize("kind", SPOILED)
def test_other_folders_are_refused_and_change_nothing(kind: str, lm: DiffusionLM, tmp_path: Path) -> None:
    change = SPOILED[kind]
    good = load_adapters(lm, save_adapters(adapted(lm), tmp_path / "good"))
    bad, before, digest = save_adapters(adapted(lm, 1), tmp_path / "bad"), logits(good), fingerprint(lm.model)
    change(bad)
    with raises(ModelError, where=str(bad)) as refused:
        load_adapters(lm, bad)
    assert refused.value.remedy
    if kind not in ("other layers", "on the head"):  # whose weights are those of the layers that there are
        with raises(ModelError, where=str(bad)):
            read_adapters(good, bad)
    assert torch.equal(logits(good), before) and fingerprint(lm.model) == digest


def test_absent_folders_and_whole_models_are_refused(lm: DiffusionLM, tmp_path: Path) -> None:
    lm.save(tmp_path / "model")
    with raises(ModelError, where=str(tmp_path / "absent")):
        load_adapters(lm, tmp_path / "absent")
    with raises(ModelError, where=str(tmp_path / "model")):
        load_adapters(load(tmp_path / "model", dtype="float64"), tmp_path / "model")


@pytest.mark.parametrize("layers", [["q_proj", "v_proj"], "all-linear"], ids=str)
def test_weights_in_4_bits_are_shared_too(layers: list[str] | str, tmp_path: Path) -> None:
    float64_lm(attention="bidirectional").save(tmp_path / "model")
    lm = load(tmp_path / "model", quantization="4bit")
    before = logits(lm)
    folders = [
        save_adapters(adapted(lm, seed, target_modules=layers), tmp_path / str(seed)) for seed in range(2)
    ]
    first, second = (load_adapters(lm, folder) for folder in folders)
    alone = load_adapters(load(tmp_path / "model", quantization="4bit"), folders[0])
    assert torch.equal(logits(first), logits(alone)) and torch.equal(logits(lm), before)
    assert not torch.allclose(logits(first), logits(second))
    own = {weight.data_ptr() for weight in lm.model.parameters()}
    assert own == {
        weight.data_ptr() for name, weight in second.model.named_parameters() if "lora_" not in name
    }


def test_weights_in_8_bits_are_not_shared(lm: DiffusionLM, tmp_path: Path) -> None:
    lm.model.is_loaded_in_8bit = True
    with raises(ModelError, where="quantization"):
        load_adapters(lm, save_adapters(adapted(lm), tmp_path))


def test_adapters_get_other_weights_in_the_same_memory(lm: DiffusionLM, tmp_path: Path) -> None:
    first, second = (
        load_adapters(lm, save_adapters(adapted(lm, seed), tmp_path / str(seed))) for seed in (0, 1)
    )
    other, before, digest = (
        save_adapters(adapted(lm, 2), tmp_path / "2"),
        logits(second),
        fingerprint(lm.model),
    )
    addresses = [weight.data_ptr() for weight in first.model.parameters()]
    put_adapters(first, read_adapters(first, other))
    assert torch.equal(logits(first), logits(load_adapters(lm, other)))
    assert [weight.data_ptr() for weight in first.model.parameters()] == addresses
    assert torch.equal(logits(second), before) and fingerprint(lm.model) == digest


@pytest.mark.parametrize(
    "settings", [{"lora_alpha": 3}, {"use_rslora": True}, {"alpha_pattern": {"v_proj": 5}}], ids=str
)
def test_adapters_of_another_scale_do_not_replace_others(
    settings: dict, lm: DiffusionLM, tmp_path: Path
) -> None:
    loaded, other = (
        load_adapters(lm, save_adapters(adapted(lm), tmp_path / "a")),
        save_adapters(adapted(lm, 1, **settings), tmp_path / "b"),
    )
    before = logits(loaded)
    with raises(ModelError, where=str(other)):
        read_adapters(loaded, other)
    assert torch.equal(logits(loaded), before)
