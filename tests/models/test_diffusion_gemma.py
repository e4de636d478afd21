"""DiffusionGemma is read as transformers reads it, and written so that transformers reads it."""

from __future__ import annotations

import json
import shutil
from inspect import signature

import pytest
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

from tests.diffusion_gemma import CANVAS, exact, generated, loaded, save_published
from tests.errors import raises
from tests.helpers import partly_slow
from tests.training.tiny_runs import prepared
from unmask.cli.run import check_together, training_arguments
from unmask.config.run import RunConfig, StartConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError, ModelError
from unmask.generation.requests import make_requests
from unmask.generation.sampler import generate
from unmask.models.diffusion_gemma import DiffusionGemmaForBlockDiffusion as DiffusionGemma
from unmask.models.export import export
from unmask.models.load import as_diffusion_lm, check_patterns, load, with_pattern

PROCESSOR = {"image_processor_type": "Gemma4ImageProcessor"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    model = save_published(folder)
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return folder, model


def random_ids(lm, *shape):
    return torch.randint(lm.vocab_size, shape, generator=torch.Generator().manual_seed(0))


@partly_slow("start", [1, 5, 8, 13], 1, 3)
@pytest.mark.parametrize("conditioned", [False, True])
@torch.no_grad()
def test_logits_of_a_canvas_are_those_of_transformers(start, conditioned, base):
    """Also with padding, where windows cut the text off, and for prompts of different lengths."""
    lm, model = load(base[0]), base[1]
    ids_BT = random_ids(lm, 3, start + CANVAS)
    earlier_BKV = torch.randn(3, CANVAS, lm.vocab_size) if conditioned else None
    found = model(
        input_ids=ids_BT[:, :start],
        decoder_input_ids=ids_BT[:, start:],
        self_conditioning_logits=earlier_BKV,
    )
    padded_BT = torch.cat([torch.zeros(3, 2, dtype=torch.long), ids_BT], 1)
    real_BT = torch.ones_like(padded_BT)
    real_BT[:, :2] = 0
    for row_BT, mask_BT, first in ((ids_BT, None, start), (padded_BT, real_BT, start + 2)):
        soft_BTD = None
        if earlier_BKV is not None:
            soft_BTD = torch.zeros(*row_BT.shape, lm.config.text_config.hidden_size)
            soft_BTD[:, first:] = lm.mean_embeddings(earlier_BKV.softmax(-1))
        logits_BTV = lm.logits(
            row_BT, mask_BT, hidden_BT=row_BT < 0, first_B=torch.full((3,), first), soft_BTD=soft_BTD
        )
        torch.testing.assert_close(logits_BTV[:, first:], found.logits, rtol=0, atol=5e-5)


@torch.no_grad()
def test_the_causal_reading_is_the_encoder(base):
    lm, model = load(base[0]), base[1]
    ids_BT, cap = random_ids(lm, 2, 19), lm.config.text_config.final_logit_softcapping
    hidden_BTD = model.model.encoder(input_ids=ids_BT).last_hidden_state
    expected_BTV = torch.tanh(model.lm_head(hidden_BTD) / cap) * cap
    found_BTV = lm.as_causal().logits(ids_BT)[:, 1:]
    torch.testing.assert_close(found_BTV, expected_BTV[:, :-1], rtol=0, atol=5e-5)


def changed(lm):
    """The model with other weights, where it can be trained."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.05)
    return lm


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("write", ["save", "save_pretrained", "export"])
def test_transformers_reads_what_was_trained(write, base, tmp_path):
    lm = changed(load(base[0]))
    if write == "export":
        export(lm, tmp_path / "out", "hf")
    else:
        getattr(lm, write)(tmp_path / "out")
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    own = lm.model.state_dict()
    assert all(torch.equal(weight, own[name]) for name, weight in model.state_dict().items())
    towers = {name: weight for name, weight in base[1].state_dict().items() if "vision" in name}
    assert towers and all(torch.equal(weight, model.state_dict()[name]) for name, weight in towers.items())
    assert json.loads((tmp_path / "out/processor_config.json").read_text()) == PROCESSOR
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["DiffusionGemmaForBlockDiffusion"]
    assert config["model_type"] == "diffusion_gemma"

    settings = SamplerConfig(max_new_tokens=16, max_denoising_steps=8, stop_at_eos=False, seed=1)
    again = load(tmp_path / "out", dtype="float64")
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "out", dtype=torch.float64)
    model.set_experts_implementation("eager")
    [request] = make_requests(again, ["hello, world"], settings)
    with exact():
        expected = generated(model, again, [request], settings)
        assert generate(again, ["hello, world"], settings).tokens == expected


@pytest.mark.parametrize(
    "arguments", [{"attention": "bidirectional"}, {"block_size": 4}, {"logit_shift": True}], ids=str
)
def test_its_pattern_is_its_own(arguments, base):
    with raises(ConfigError, where=next(iter(arguments))):
        load(base[0], **arguments)


def test_a_run_with_its_own_pattern_is_checked_without_its_weights(base):
    check_patterns(base[0], None, {})
    check_patterns(base[0], None, {"attention": "block_causal", "block_size": CANVAS})
    with raises(ConfigError, where="block_size"):
        check_patterns(base[0], None, {"block_size": 2 * CANVAS})


@pytest.mark.parametrize("attention", ["bidirectional", "block_causal", "causal"])
def test_it_is_not_converted(attention, base):
    with raises(ModelError, where=str(base[0])):
        check_patterns(base[0], [attention], {})
    with raises(ModelError, where="DiffusionGemmaForBlockDiffusion"):
        with_pattern(load(base[0]), attention)


@pytest.mark.parametrize(
    "verb, settings, from_scratch",
    [
        ("convert", {}, False),
        ("convert", {"attention": "block_causal", "block_size": CANVAS}, False),
        ("pretrain", {}, False),
        ("pretrain", {}, True),
        ("pretrain", {"attention": "bidirectional"}, True),
    ],
)
def test_a_run_that_would_convert_it_is_refused_before_its_weights_are_read(
    verb, settings, from_scratch, base, tmp_path
):
    """Also where only its architecture is taken."""
    model = StartConfig(path=str(base[0]), from_scratch=from_scratch)
    config = RunConfig(model=model, output_dir=str(tmp_path), training={"use_cpu": True} | settings)
    with raises(ModelError, where=str(base[0])):
        check_together(config, training_arguments(verb, config))


def test_pre_training_does_not_take_it_in_memory(base, tmp_path):
    with raises(ModelError, where="model"):
        prepared("pretrain", tmp_path, load(base[0]))


def test_it_has_no_masks(base):
    lm = load(base[0])
    assert lm.canvas and lm.noise == "uniform" and lm.never_predicted == ()
    assert len(lm.model.get_input_embeddings().weight) == lm.vocab_size == lm.mask_token_id
    with raises(ConfigError, where="noise"):
        lm.with_noise("masked")
    with raises(ModelError, where="layout") as error:
        export(lm, base[0] / "out", "llada")
    assert error.value.remedy == "Use layout hf"


def test_images_are_not_trained(base):
    names = {name for name, weight in load(base[0]).model.named_parameters() if not weight.requires_grad}
    assert names and all("vision" in name for name in names)


@torch.no_grad()
def test_a_model_of_transformers_in_memory_is_read_alike(base):
    lm = load(base[0])
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(base[0])
    ids_BT = random_ids(lm, 2, CANVAS)
    expected = model(input_ids=ids_BT, decoder_input_ids=ids_BT).logits
    made = as_diffusion_lm(model, lm.tokenizer)
    assert torch.equal(made.logits(ids_BT, hidden_BT=ids_BT < 0), lm.logits(ids_BT, hidden_BT=ids_BT < 0))
    model.set_attn_implementation("eager")
    found = model(input_ids=ids_BT, decoder_input_ids=ids_BT).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("how", [{"quantization": "4bit"}, {"quantization": "8bit"}], ids=str)
def test_quantization_would_leave_out_almost_all_of_it(how, base):
    with raises(ModelError, where="quantization"):
        load(base[0], **how)


def test_checkpoints_of_both_stacks_save_memory_and_change_no_gradient(base):
    found = []
    for checkpointing in (False, True):
        lm, saved = load(base[0]), [0]
        lm.model.train()
        if checkpointing:
            lm.model.activation_checkpointing_enable()

        def keep(tensor, saved=saved):
            saved[0] += tensor.untyped_storage().nbytes()
            return tensor

        ids_BT = random_ids(lm, 2, 20)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits_BTV = lm.logits(ids_BT, hidden_BT=ids_BT < 0)
        logits_BTV.square().mean().backward()
        gradients = [weight.grad for weight in lm.model.parameters() if weight.grad is not None]
        found.append((saved[0], gradients))
    assert found[1][0] < found[0][0] / 10
    assert len(found[0][1]) > 50 and all(map(torch.equal, found[0][1], found[1][1]))


def test_checkpoints_that_would_lose_gradients_are_refused(base, tmp_path):
    how = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    with raises(ConfigError, where="activation_checkpointing_kwargs"):
        prepared("sft", tmp_path, str(base[0]), **how)


def test_loaded_from_a_name_in_memory(tmp_path):
    lm = loaded(tmp_path / "model")
    assert repr(lm).startswith("DiffusionLM(DiffusionGemmaForBlockDiffusion")


@torch.no_grad()
def test_without_a_mask_the_class_computes_what_that_of_transformers_does(base):
    model = DiffusionGemma.from_pretrained(base[0])
    ids_BT = torch.randint(4, 30, (1, 7))
    canvas_BK = torch.randint(4, 30, (1, CANVAS))
    # transformers before 5.24 names it past_key_values
    name = "cache" if "cache" in signature(base[1].forward).parameters else "past_key_values"
    logits = [
        each(
            ids_BT[:, 3:],
            decoder_input_ids=canvas_BK,
            **{name: each.model.encoder(input_ids=ids_BT[:, :3]).past_key_values},
        ).logits
        for each in (model, base[1])
    ]
    assert torch.equal(*logits)


def test_generate_takes_the_sampler_of_transformers(base):
    lm, ids_BT = load(base[0]), torch.tensor([[4, 5, 6]])
    sampler = EntropyBoundSamplerConfig(entropy_bound=3.0)
    more = {"max_new_tokens": 8, "seed": 1, "max_denoising_steps": 4}
    by_config = lm.generate(ids_BT, sampler_config=sampler, **more).sequences
    assert torch.equal(by_config, lm.generate(ids_BT, entropy_bound=3.0, **more).sequences)
    with raises(ConfigError, where="do_sample"):
        lm.generate(ids_BT, do_sample=False, max_new_tokens=8)


def test_a_whole_canvas_must_fit_the_context(base):
    lm = load(base[0])
    with raises(GenerationError, where="prompt 0"):
        generate(lm, ["a" * 255], SamplerConfig(max_new_tokens=1))


def test_settings_of_the_models_generation_config_count(base, tmp_path):
    shutil.copytree(base[0], tmp_path / "model")
    file = tmp_path / "model/generation_config.json"
    saved = {"max_denoising_steps": 2, "t_min": 0.1, "t_max": 0.2, "confidence_threshold": 1e-9}
    bound = {"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 2.0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | saved | bound))
    config = SamplerConfig(max_new_tokens=16, stop_at_eos=False)
    named = config.model_copy(update=saved | {"entropy_bound": 2.0})
    found = generate(load(tmp_path / "model"), ["hello"], config)
    assert found.tokens == generate(load(base[0]), ["hello"], named).tokens
    assert found.forward_passes == [4]
    given = config.model_copy(update={"max_denoising_steps": 3})
    assert generate(load(tmp_path / "model"), ["hello"], given).forward_passes == [6]
