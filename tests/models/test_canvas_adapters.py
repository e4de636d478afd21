"""Adapters of DiffusionGemma: encoder and decoder have their own, on weights that they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion, PreTrainedModel

from tests.diffusion_gemma import CANVAS, exact, generated, save_published
from tests.errors import raises
from tests.helpers import each_once, partly_slow
from tests.models.test_diffusion_gemma import PROCESSOR, changed, random_ids
from tests.training.tiny_runs import prepared
from unmask.auto_classes import UnmaskForMaskedDiffusion
from unmask.config.rollout import RolloutConfig
from unmask.config.run import LoraSettings
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError, ModelError
from unmask.generation.remote.backends import make_backend
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.adapters import merged, with_adapters
from unmask.models.diffusion_gemma import ADAPTED
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.export import export
from unmask.models.load import as_diffusion_lm, load
from unmask.models.stored_adapters import load_adapters
from unmask.training.reference_model import Reference

START = 5
KINDS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "unnamed": {},
    "names that the vision tower has": {"target_modules": ["q_proj", "o_proj"]},
    "experts": {"target_parameters": ["experts.gate_up_proj"]},
    "routers": {"target_modules": ["router.proj"]},
    "self-conditioning": {"target_modules": "all-linear", "modules_to_save": ["self_conditioning"]},
    "tables": {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]},
    "rows": {"target_modules": "all-linear", "trainable_token_indices": [5, 6]},
    "head": {"target_modules": ["lm_head"]},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
}
PARTS = {"encoder": r".*\.encoder\.language_model\..*\.q_proj", "decoder": r".*\.decoder\..*\.q_proj"}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("base")
    model = save_published(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return folder, model


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, **{"task_type": "CAUSAL_LM"} | settings)


def adapted(folder: Path, **settings: Any) -> DiffusionLM:
    """The model with trained adapters."""
    lm = changed(with_adapters(load(folder), lora(**settings)))
    lm.model.eval()
    return lm


def predicted_BKV(lm: DiffusionLM) -> torch.Tensor:
    """What a denoising step predicted last."""
    return torch.randn(2, CANVAS, lm.vocab_size, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def readings(lm: DiffusionLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of canvases after a text, and those of the encoder for that text."""
    ids_BT = random_ids(lm, 2, START + CANVAS)
    soft_BTD = torch.zeros(*ids_BT.shape, lm.config.text_config.hidden_size)
    soft_BTD[:, START:] = lm.mean_embeddings(predicted_BKV(lm).softmax(-1))
    logits_BTV = lm.logits(ids_BT, hidden_BT=ids_BT < 0, first_B=torch.full((2,), START), soft_BTD=soft_BTD)
    return logits_BTV[:, START:], lm.as_causal().logits(ids_BT[:, :START])[:, 1:]


def equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(map(torch.equal, one, other))


def trained(lm: DiffusionLM) -> set[str]:
    """The modules with trained adapters."""
    names = [name for name, weight in lm.model.named_parameters() if weight.requires_grad]
    return {name.removeprefix("base_model.model.").split(".lora_")[0] for name in names}


def test_attention_and_dense_layers_of_both_stacks_get_adapters(base):
    lm = with_adapters(load(base[0]), LoraSettings().to_peft())
    inner = {f"self_attn.{name}_proj" for name in "qkvo"} | {
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    }
    layers = [
        f"{stack}.layers.{layer}" for stack in ("encoder.language_model", "decoder") for layer in range(3)
    ]
    expected = {f"model.{layer}.{name}" for layer in layers for name in inner}
    shared = {name for name in expected if "layers.2.self_attn.v_proj" in name}  # full attention has none
    assert trained(lm) == expected - shared
    weights = dict(lm.model.named_parameters(remove_duplicate=False))
    name = "base_model.model.model.{}.layers.0.self_attn.q_proj.{}.weight"
    of_encoder, of_decoder = (
        [weights[name.format(stack, part)] for part in ("base_layer", "lora_A.default")]
        for stack in ("encoder.language_model", "decoder")
    )
    assert of_encoder[0] is of_decoder[0] and of_encoder[1] is not of_decoder[1]


@partly_slow("kind", KINDS, *range(0, len(KINDS), 3))
def test_adapters_are_loaded_as_they_were_saved_also_by_peft_alone(kind, base, tmp_path):
    lm = adapted(base[0], **KINDS[kind])
    before = readings(lm)
    assert not any("vision" in name for name in trained(lm))
    lm.save(tmp_path)
    assert equal(readings(load(tmp_path)), before)
    assert not (before[0] - readings(load(base[0]))[0]).abs().max() < 1e-3

    published = DiffusionGemmaForBlockDiffusion.from_pretrained(base[0])
    model = peft.PeftModel.from_pretrained(published, tmp_path).eval()
    ids_BT = random_ids(lm, 2, START + CANVAS)
    with torch.no_grad():
        found = model(
            input_ids=ids_BT[:, :START],
            decoder_input_ids=ids_BT[:, START:],
            self_conditioning_logits=predicted_BKV(lm),
        )
        hidden_BTD = published.model.encoder(input_ids=ids_BT[:, :START]).last_hidden_state
        cap = published.final_logit_softcapping
        causal_BTV = torch.tanh(published.lm_head(hidden_BTD) / cap)[:, :-1] * cap
    torch.testing.assert_close(found.logits, before[0], rtol=0, atol=5e-5)
    torch.testing.assert_close(causal_BTV, before[1], rtol=0, atol=5e-5)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_peft_and_transformers_generate_the_same_tokens(base, tmp_path):
    lm = adapted(base[0], target_modules="all-linear")
    lm.save(tmp_path)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    assert named["parent_library"] == DiffusionGemmaForBlockDiffusion.__module__
    published = DiffusionGemmaForBlockDiffusion.from_pretrained(base[0], dtype=torch.float64)
    published.set_experts_implementation("eager")
    model = peft.PeftModel.from_pretrained(published, tmp_path).double().eval()
    settings = SamplerConfig(max_new_tokens=16, max_denoising_steps=8, stop_at_eos=False, seed=1)
    [request] = make_requests(lm, ["hello, world"], settings)
    again, plain = (load(folder, dtype="float64") for folder in (tmp_path, base[0]))
    again.model.double()  # adapters keep their own type
    with exact():
        expected = generated(model.base_model.model, again, [request], settings)
        assert generate(again, ["hello, world"], settings).tokens == expected
        assert generate(plain, ["hello, world"], settings).tokens != expected


@pytest.mark.parametrize("part", PARTS)
def test_the_causal_reading_has_the_adapters_of_the_encoder_alone(part, base):
    canvas, causal = readings(adapted(base[0], target_modules=PARTS[part]))
    plain = readings(load(base[0]))
    assert torch.equal(causal, plain[1]) == (part == "decoder")
    assert not torch.equal(canvas, plain[0])  # it reads the keys of the encoder


def test_adapters_beside_a_model_in_memory_share_its_weights(base, tmp_path):
    lm = adapted(base[0], target_modules="all-linear")
    lm.save(tmp_path)
    plain = load(base[0])
    before = readings(plain)
    beside = load_adapters(plain, tmp_path)
    assert equal(readings(beside), readings(lm)) and equal(readings(plain), before)
    shared = {id(weight) for weight in plain.model.parameters()}
    assert all(
        id(weight) in shared for name, weight in beside.model.named_parameters() if "lora_" not in name
    )


def test_the_reference_is_the_model_without_its_adapters(base):
    lm = with_adapters(load(base[0]), lora(target_modules="all-linear"))
    reference = Reference(lm, device=torch.device("cpu"))
    changed(lm).model.eval()
    assert reference.is_base and not equal(readings(lm), readings(load(base[0])))
    with reference.model_in_use() as other:
        assert equal(readings(other), readings(load(base[0])))


def test_adapters_of_a_table_are_refused(base):
    with raises(ConfigError, where="lora (peft_config), target_modules or modules_to_save"):
        with_adapters(load(base[0]), lora(target_modules=["embed_tokens"]))


def test_adapters_that_peft_put_on_a_model_of_transformers_are_trained(base):
    torch.manual_seed(0)
    model = peft.get_peft_model(
        DiffusionGemmaForBlockDiffusion.from_pretrained(base[0]), lora(target_modules=ADAPTED, task_type=None)
    )
    lm = as_diffusion_lm(model, load(base[0]).tokenizer)
    torch.manual_seed(0)
    own = with_adapters(load(base[0]), lora())
    assert trained(lm) == trained(own)
    assert equal(readings(changed(lm)), readings(changed(own)))
    with raises(ModelError, where="adapters"):
        merged(lm)


MERGES = {
    "merged": lambda lm, folder: merged(lm),
    "PEFT's merge_and_unload": lambda lm, folder: lm.model.merge_and_unload(),
    "PEFT's merge_adapter": lambda lm, folder: lm.model.merge_adapter(),
    "export": lambda lm, folder: export(lm, folder / "out", "hf"),
    "push_to_hub": lambda lm, folder: lm.push_to_hub("name", merge_adapters=True),
    "a model of transformers": lambda lm, folder: UnmaskForMaskedDiffusion.from_pretrained(folder),
}


@each_once("part, how", [*PARTS, "both"], MERGES)
def test_adapters_are_never_merged(part, how, base, tmp_path):
    lm = adapted(base[0], target_modules=PARTS.get(part, "all-linear"))
    before = readings(lm)
    lm.save(tmp_path)
    with raises(ModelError, where="adapters"):
        MERGES[how](lm, tmp_path)
    assert equal(readings(lm), before) and equal(readings(load(tmp_path)), before)  # the remedy


def test_a_server_of_rollouts_gets_no_merged_weights(base, tmp_path):
    lm = adapted(base[0], target_modules="all-linear")
    config = RolloutConfig(backend="server", url="http://localhost:1")
    with raises(GenerationError, where="backend"):
        make_backend(config, lm, str(tmp_path))
    make_backend(RolloutConfig(), lm, str(tmp_path))  # the remedy


def run(base: Path, folder: Path, **settings: Any) -> Any:
    return prepared("sft", folder, str(base), report_to=[], **settings)


def test_a_run_saves_adapters_that_are_loaded_on_their_base(base, tmp_path):
    trainer = run(base[0], tmp_path / "run", peft_config=lora(target_modules="all-linear"), max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trainer.lm.model.eval()
    expected = readings(trainer.lm)
    assert equal(readings(load(tmp_path / "model")), expected)
    assert not equal(expected, readings(load(base[0])))
    assert (tmp_path / "model/README.md").is_file()
    with raises(ModelError, where="merge_adapters"):
        trainer.push_to_hub(merge_adapters=True)
    with raises(ModelError, where="hub_merge_adapters"):
        run(
            base[0],
            tmp_path / "other",
            peft_config=lora(target_modules="all-linear"),
            hub_merge_adapters=True,
        )


def test_a_resumed_run_ends_with_the_same_adapters(base, tmp_path):
    def trainer() -> Any:
        return run(base[0], tmp_path, peft_config=lora(), max_steps=2, save_strategy="steps", save_steps=1)

    straight, resumed = trainer(), trainer()
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    own = straight.lm.model.state_dict()
    assert all(torch.equal(weight, own[name]) for name, weight in resumed.lm.model.state_dict().items())


def test_a_run_of_all_weights_keeps_the_settings_of_images(base, tmp_path):
    trainer = run(base[0], tmp_path / "run")
    trainer.save_model(str(tmp_path / "model"))
    assert json.loads((tmp_path / "model/processor_config.json").read_text()) == PROCESSOR
