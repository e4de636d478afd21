"""Recurrent layers under block-causal attention compute what a loop over blocks computes, with the model's own
cache."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from inspect import signature

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import (
    DynamicCache,
    JambaConfig,
    Mamba2Config,
    MiniMaxConfig,
    RecurrentGemmaConfig,
    ZayaConfig,
)
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.helpers import GPU, REPOSITORY, each_once, partly_slow
from tests.models.configurations import (
    ALPHABET,
    HYBRIDS,
    VOCABULARY,
    InFloat64,
    random_ids,
    tiny_lm,
    tiny_model,
)
from unmask.cli import app
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import ModelError
from unmask.generation import sampler
from unmask.models.adapters import merged
from unmask.models.attention import AttentionMask, Layout, make_mask
from unmask.models.load import as_diffusion_lm, make_diffusion, with_pattern
from unmask.models.recurrent import RecurrentLayer, read_in_blocks, recurrent_layers

TOLERANCE = 1e-10
LENGTH = 64
PACKED = torch.tensor([[1] * 7 + [2] * 5 + [0] * 2, [1] * 3 + [2] * 10 + [3]])
every_type = pytest.mark.parametrize("name", HYBRIDS)


def pieces(documents_BT):
    """The row and columns of every document."""
    for row, numbers_T in enumerate(documents_BT):
        for number in numbers_T.unique().tolist():
            if number:
                yield row, torch.nonzero(numbers_T == number)[:, 0]


def assert_near(found, expected):
    """Gradients, some of which are None."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            scale = max(float(other.abs().max()), 1.0)
            torch.testing.assert_close(one, other, rtol=0, atol=10 * TOLERANCE * scale)


@partly_slow("name", HYBRIDS, *range(0, len(HYBRIDS), 2))
def test_blocks_of_one_token_compute_the_causal_model(name):
    ids_BT = random_ids(2, 11)
    model, lm = tiny_model(name), tiny_lm(name, "block_causal", 1, shift=True)
    model.set_experts_implementation("eager")  # torch's grouped products do not support float64
    with torch.no_grad(), InFloat64():
        expected_BTV = model(input_ids=ids_BT).logits
        found_BTV = lm.logits(ids_BT)
        hidden_BMT = torch.zeros(2, 1, 11, dtype=torch.bool)
        inputs = lm.stacked_inputs(ids_BT, hidden_BMT, None, torch.ones_like(hidden_BMT))
        stacked_BTV = lm.forward(inputs).view(2, 11, -1)
    others = slice(0, lm.mask_token_id)
    for one_BTV in (found_BTV, stacked_BTV):
        torch.testing.assert_close(
            one_BTV[:, 1:, others], expected_BTV[:, :-1, others], rtol=TOLERANCE, atol=TOLERANCE
        )


@partly_slow("name", HYBRIDS, *range(1, len(HYBRIDS), 2))
@partly_slow("copies, block_size, shift", [(1, 4, False), (2, 3, True)], 1)
@partly_slow("documents_BT", [torch.ones(2, 9, dtype=torch.long), PACKED], 1, ids=["whole", "packed"])
def test_noised_copies_have_the_loss_and_gradients_of_a_loop(name, copies, block_size, shift, documents_BT):
    lm = tiny_lm(name, "block_causal", block_size, shift=shift)
    count, length = documents_BT.shape
    ids_BT = random_ids(count, length)
    draw = torch.Generator().manual_seed(1)
    hidden_BMT = (torch.rand(count, copies, length, generator=draw) < 0.5) & (documents_BT > 0)[:, None]
    if shift:  # nothing predicts the first token of a document
        for row, columns in pieces(documents_BT):
            hidden_BMT[row, :, columns[0]] = False
    mask_BT = None if documents_BT.max() == 1 else documents_BT
    target_N = ids_BT[:, None].expand_as(hidden_BMT)[hidden_BMT]
    weights = {key: weight for key, weight in lm.model.named_parameters() if weight.requires_grad}
    with InFloat64():
        loss = -lm.log_probs(lm.stacked_inputs(ids_BT, hidden_BMT, mask_BT, hidden_BMT), target_N).sum()
        expected = torch.zeros((), dtype=torch.float64)
        for row, columns in pieces(documents_BT):
            for copy in range(copies):
                for start in range(0, len(columns), block_size):
                    block = columns[start : start + block_size]
                    hidden_T = torch.cat([torch.zeros(start, dtype=torch.bool), hidden_BMT[row, copy, block]])
                    if hidden_T.any():
                        clean_T = ids_BT[row, columns[: start + block_size]]
                        noisy_1T = clean_T.masked_fill(hidden_T, lm.mask_token_id)[None]
                        inputs = lm.noised_inputs(noisy_1T, None, hidden_T[None])
                        expected = expected - lm.log_probs(inputs, clean_T[hidden_T]).sum()
        found, others = (
            torch.autograd.grad(each, weights.values(), allow_unused=True) for each in (loss, expected)
        )
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    assert_near(found, others)


@partly_slow("name", HYBRIDS, *range(0, len(HYBRIDS), 2))
def test_a_noised_block_continues_from_the_models_own_cache(name):
    size, lm = 3, tiny_lm(name, "block_causal", 3)
    ids_1T, hidden_11T = random_ids(1, 9), torch.zeros(1, 1, 9, dtype=torch.bool)
    hidden_11T[..., ::2] = True
    with torch.no_grad(), InFloat64():
        found_NV = lm.forward(lm.stacked_inputs(ids_1T, hidden_11T, None, hidden_11T))
        expected = []
        for start in range(0, 9, size):
            names = signature(lm.model.forward).parameters  # of transformers 5.24, and before
            cached = {"cache" if "cache" in names else "past_key_values": DynamicCache(config=lm.config)}
            if start:
                layout = Layout.full(start, ids_1T.device)
                mask = make_mask("block_causal", size, layout, layout)
                lm.model(ids_1T[:, :start], unmask_mask=mask, use_cache=True, **cached)
            at = slice(start, start + size)
            noisy_1Q = ids_1T[:, at].masked_fill(hidden_11T[0, :, at], lm.mask_token_id)
            visible = AttentionMask(torch.ones(1, 1, size, start + size, dtype=torch.bool), None)
            out = lm.model(
                noisy_1Q,
                position_ids=torch.arange(start, start + size)[None],
                unmask_mask=visible,
                use_cache=True,
                **cached,
            )
            expected.append(out.logits[0][hidden_11T[0, 0, at]])
    others = slice(0, lm.mask_token_id)
    torch.testing.assert_close(found_NV[:, others], torch.cat(expected)[:, others], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("copies", [0, 1])
def test_a_number_of_documents_may_come_again(copies):
    again, apart = (
        Layout.of(torch.tensor([[1] * 3 + [0] * 2 + [number] * 5])).with_noised_copies(copies)
        for number in (1, 2)
    )
    steps = zip(again.recurrence(4, copies).steps, apart.recurrence(4, copies).steps, strict=True)
    assert all((one.index_RQ == other.index_RQ).all() for one, other in steps)


def test_rows_of_padding_alone_are_computed():
    lm = tiny_lm("qwen3_5_text", "block_causal", 4)
    with torch.no_grad():
        assert lm.logits(random_ids(1, 10), torch.zeros(1, 10, dtype=torch.long)).shape[:2] == (1, 10)


@each_once("copies, length, name", [(1, 40), (2, 33)], HYBRIDS)
def test_clean_text_may_be_read_ahead(name, copies, length, monkeypatch):
    lm = tiny_lm(name, "block_causal", 3, shift=True)
    documents_BT = torch.tensor([[1] * 30 + [2] * 10, [1] * 5 + [2] * 34 + [0]])[:, :length]
    ids_BT = random_ids(2, length)
    hidden_BMT = torch.rand(2, copies, length, generator=torch.Generator().manual_seed(1)) < 0.5
    hidden_BMT &= (documents_BT > 0)[:, None]
    hidden_BMT[..., 0] = False
    losses, found = [], []
    in_float64 = partial(checkpoint, context_fn=lambda: (nullcontext(), InFloat64()))
    monkeypatch.setattr("unmask.models.recurrent.checkpoint", in_float64)
    for many in (1000, 2):
        monkeypatch.setattr("unmask.models.recurrent.MANY_STEPS", many)
        inputs = lm.stacked_inputs(ids_BT, hidden_BMT, documents_BT, hidden_BMT)
        weights = [weight for weight in lm.model.parameters() if weight.requires_grad]
        with InFloat64():
            losses.append(lm.log_probs(inputs, ids_BT[:, None].expand_as(hidden_BMT)[hidden_BMT]))
            found.append(torch.autograd.grad(losses[-1].sum(), weights, allow_unused=True))
    torch.testing.assert_close(*losses, rtol=0, atol=TOLERANCE)
    assert_near(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
@every_type
def test_a_gpu_computes_the_same_with_the_kernels_that_are_installed(name):
    """flash-linear-attention and mamba-ssm, where transformers finds them."""
    lm = tiny_lm(name, "block_causal", 4, shift=True, dtype=torch.float32)
    lm.model.set_experts_implementation("eager")  # grouped products are other kernels
    ids_BT, hidden_BMT = random_ids(2, 14), torch.zeros(2, 1, 14, dtype=torch.bool)
    hidden_BMT[..., 1::2] = True
    target_N = ids_BT[:, None][hidden_BMT]
    config = SamplerConfig(max_new_tokens=8, steps=4)

    def computed(lm):
        there = [each.to(lm.device) for each in (ids_BT, hidden_BMT, PACKED, hidden_BMT)]
        log_prob_N = lm.log_probs(lm.stacked_inputs(*there), target_N.to(lm.device))
        log_prob_N.sum().backward()
        gradient_VD = lm.model.get_input_embeddings().weight.grad
        return log_prob_N.cpu(), gradient_VD.cpu(), sampler.generate(lm, [[5, 6, 7], [8] * 9], config).tokens

    expected, other = computed(lm), lm.frozen_copy()
    other.model.requires_grad_(True).to(GPU)
    *found, tokens = computed(other)
    assert tokens == expected[2]
    for one, of_cpu in zip(found, expected, strict=False):
        torch.testing.assert_close(one, of_cpu, rtol=1e-3, atol=1e-3)


def kept_bytes(name, block_size, copies, *, recomputed=False):
    """Bytes that a recurrent layer keeps of two rows for its gradient, beside its weights."""
    model, kept = tiny_model(name, dtype=torch.float32), {}
    read_in_blocks(model)
    layer = recurrent_layers(model)[0]
    layout = Layout.full(LENGTH, torch.device("cpu")).with_noised_copies(copies)
    reading = layout.recurrence(block_size, copies)
    mask = AttentionMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), None, recurrence=reading)
    hidden_BLD = torch.randn(2, LENGTH * (copies + 1), model.config.hidden_size, requires_grad=True)

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if recomputed:
            checkpoint(layer, hidden_BLD, unmask_mask=mask, use_reentrant=False)
        else:
            layer(hidden_BLD, unmask_mask=mask)
    for weight in model.parameters():
        kept.pop(weight.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in kept.values())


@each_once("copies, name", [1, 2], HYBRIDS)
def test_more_blocks_keep_their_first_states_or_nothing(name, copies, monkeypatch):
    model = tiny_model(name, dtype=torch.float32)
    _, states = RecurrentLayer(recurrent_layers(model)[0]).read(
        torch.randn(1, 4, model.config.hidden_size), {}
    )
    state = sum(each.nbytes for each in states.values())
    ahead = kept_bytes(name, 2, copies)
    monkeypatch.setattr("unmask.models.recurrent.MANY_STEPS", 1000)
    text = 2 * LENGTH * model.config.hidden_size * 4
    assert ahead <= 1.1 * kept_bytes(name, 2, copies) + text  # which is read again
    for block_size in (2, 4, 8):
        more = kept_bytes(name, block_size, copies) - kept_bytes(name, 2 * block_size, copies)
        blocks = LENGTH // block_size - LENGTH // (2 * block_size)
        assert more <= 4 * 2 * (1 + copies) * blocks * state
    recomputed = {kept_bytes(name, block_size, copies, recomputed=True) for block_size in (2, 16)}
    assert len(recomputed) == 1
    assert recomputed.pop() < kept_bytes(name, 16, copies) / 2


def test_the_hooks_of_a_model_that_is_split_over_devices_are_called():
    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **named):
            self.calls += 1
            return args, named

    model, hook = tiny_model("qwen3_5_text"), Counting()
    for layer in recurrent_layers(model):
        add_hook_to_module(layer, hook)
    lm = make_diffusion(model, character_tokenizer(ALPHABET), attention="block_causal", block_size=3)
    plain, ids_BT = tiny_lm("qwen3_5_text", "block_causal", 3), random_ids(2, 9)
    hidden_BMT = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    with torch.no_grad():
        found, expected = (
            each.forward(each.stacked_inputs(ids_BT, hidden_BMT, None, hidden_BMT)) for each in (lm, plain)
        )
    assert hook.calls == 2 and torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT
@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h"])
def test_a_layer_whose_convolution_is_trained_beside_adapters_is_recurrent(name):
    kinds = {"target_modules": ["q_proj"], "modules_to_save": ["conv1d"], "init_lora_weights": False}
    adapted = peft.get_peft_model(tiny_model(name), peft.LoraConfig(r=2, **kinds))
    lm = with_pattern(as_diffusion_lm(adapted, character_tokenizer(ALPHABET)), "block_causal", 3)
    ids_BT, hidden_BMT = random_ids(2, 9), torch.ones(2, 1, 9, dtype=torch.bool)
    with torch.no_grad():
        found, expected = (
            each.log_probs(each.stacked_inputs(ids_BT, hidden_BMT, None, hidden_BMT), ids_BT.flatten())
            for each in (lm, merged(lm))
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with raises(ModelError, where=type(adapted.get_base_model()).__name__):
        with_pattern(lm, "bidirectional")


def test_a_mask_is_read_on_the_device_of_the_layer():
    lm, ids_BT = tiny_lm("qwen3_5_text", "block_causal", 3), random_ids(2, 9)
    hidden_BMT = torch.ones(2, 1, 9, dtype=torch.bool)
    inputs = lm.stacked_inputs(ids_BT, hidden_BMT, None, hidden_BMT)
    [layer, _] = recurrent_layers(lm.model)
    hidden_BLD = torch.zeros(2, 18, 16, dtype=torch.float64, device="meta")
    assert layer.to("meta")(hidden_BLD, unmask_mask=inputs.mask).device.type == "meta"


@pytest.fixture(scope="module")
def folder_without_weights(tmp_path_factory):
    """A folder that can be refused only before its weights are read."""
    folder = tmp_path_factory.mktemp("model")
    tiny_lm("qwen3_5_text", dtype=torch.float32).save(folder)
    (folder / "model.safetensors").unlink()
    save_file({}, folder / "model.safetensors")
    return folder


def test_bidirectional_attention_is_refused_before_the_weights_are_read(folder_without_weights, tmp_path):
    folder, kind = folder_without_weights, "Qwen3_5ForCausalLM"
    data = REPOSITORY / "docs/samples/stories.txt"
    with raises(ModelError, where=kind) as refused:
        make_diffusion(tiny_model("qwen3_5_text"), character_tokenizer(ALPHABET), attention="bidirectional")
    assert "block_causal" in refused.value.remedy
    with raises(ModelError, where=kind):
        unmask.load(folder, attention="bidirectional")
    growing = [{"share": 0.5, "attention": "block_causal"}, {"share": 0.5, "attention": "bidirectional"}]
    for settings in ({}, {"attention": "block_causal", "stages": growing}):
        with raises(ModelError, where=kind):
            args = unmask.ConvertConfig(output_dir=str(tmp_path), max_steps=2, **settings)
            unmask.ConvertTrainer(folder, args, train_dataset=[{"text": "abc"}])
    with raises(ModelError, where=kind):
        args = unmask.SFTConfig(
            output_dir=str(tmp_path), model_init_kwargs={"attention": "bidirectional"}, max_steps=2
        )
        unmask.SFTTrainer(folder, args, train_dataset=[{"prompt": "a", "completion": "b"}])
    run = ["--data", str(data), "--output", str(tmp_path / "run"), "--max-steps", "2"]
    for words in (
        ["convert", "--model", str(folder), *run],
        ["convert", "--model", str(folder), *run, "--dry-run"],
        ["convert", "--model", str(folder), *run, "--recipe", "growing"],
        ["sft", "--model", str(folder), *run, "model.attention=bidirectional"],
        ["inspect", str(folder), "--attention", "bidirectional"],
    ):
        found = CliRunner().invoke(app, words)
        assert found.exit_code == 2 and "layer 0 (Qwen3_5GatedDeltaNet) reads from left" in found.stderr
        assert "--recipe block" in found.stderr


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
UNSUPPORTED = {
    "JambaMambaMixer": JambaConfig(**COMMON, attn_layer_period=2, attn_layer_offset=1, num_experts=2),
    "layer 0, of type 'linear_attention'": RecurrentGemmaConfig(
        **COMMON | {"num_key_value_heads": 1, "num_hidden_layers": 3}, lru_width=32
    ),
    "ZayaCCAProjection": ZayaConfig(**COMMON, head_dim=8),
    "layer 1, of type 'linear_attention'": MiniMaxConfig(**COMMON),
    "none of its layers is attention": Mamba2Config(
        **{name: COMMON[name] for name in COMMON if "attention" not in name and "key" not in name},
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
    ),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_other_types_are_refused_by_name_before_the_weights_are_read(reason, tmp_path):
    UNSUPPORTED[reason].save_pretrained(tmp_path)
    character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    name = type(UNSUPPORTED[reason]).__name__.replace("Config", "ForCausalLM")
    with raises(ModelError, where=name) as refused:
        unmask.load(tmp_path)
    assert reason in refused.value.what and "docs/models.md" in refused.value.remedy


@every_type
def test_every_type_has_recurrent_layers(name):
    assert recurrent_layers(tiny_model(name))
