"""Log-probabilities by chunks equal those of all logits at once, with their gradients; at most a chunk of
logits exists."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CohereConfig, GraniteConfig

from tests.errors import raises
from tests.models.configurations import CONFIGURATIONS, GROUPED, NAMES, VOCABULARY, random_ids, tiny_lm
from unmask.errors import ModelError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hooks import head

SCALED = {
    "granite": GraniteConfig(**GROUPED, logits_scaling=6.0),
    "cohere": CohereConfig(**GROUPED, logit_scale=0.3),
}
CHUNK = 4  # rows
CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # norms compute in float32


@pytest.fixture(autouse=True)
def scaled(monkeypatch):
    for name, config in SCALED.items():
        monkeypatch.setitem(CONFIGURATIONS, name, config)


@pytest.fixture
def chunks(monkeypatch):
    """Logits are computed in chunks of four rows, unless `monkeypatch` is undone."""
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))


def asked(lm, targets=1, seed=1):
    """Noised rows, and target tokens: one or several per row."""
    clean, generator = random_ids(2, 9), torch.Generator().manual_seed(seed)
    hidden = torch.rand(2, 9, generator=generator) < 0.7
    inputs = lm.noised_inputs(torch.where(hidden, lm.mask_token_id, clean), None, hidden, hidden)
    shape = (len(inputs.index_N),) if targets == 1 else (len(inputs.index_N), targets)
    return inputs, torch.randint(VOCABULARY, shape, generator=generator)


def scored(lm, temperature=1.0, targets=1, seed=1):
    """Log-probabilities, and the gradients of a sum that weights each differently."""
    lm.model.zero_grad()
    log_prob = lm.log_probs(*asked(lm, targets, seed), temperature)
    (log_prob * torch.arange(1, 1 + log_prob.numel()).view_as(log_prob)).sum().backward()
    return log_prob.detach(), {
        name: w.grad.clone() for name, w in lm.model.named_parameters() if w.grad is not None
    }


def both(monkeypatch, lm, **more):
    """Computed at once, and in chunks."""
    whole = scored(lm, **more)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))
    return whole, scored(lm, **more)


def assert_same(whole, chunked, **close):
    torch.testing.assert_close(chunked[0], whole[0], **close)
    assert chunked[1].keys() == whole[1].keys() and any(gradient.any() for gradient in whole[1].values())
    for name, gradient in whole[1].items():
        torch.testing.assert_close(
            chunked[1][name], gradient, **close, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", [*NAMES, *SCALED])
def test_in_chunks_it_is_the_same_with_all_gradients(name, monkeypatch):
    assert_same(*both(monkeypatch, tiny_lm(name, "bidirectional")), **CLOSE)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", *SCALED])
@pytest.mark.parametrize(
    "more", [{"temperature": 0.6}, {"targets": 3}, {"temperature": 2.0, "targets": VOCABULARY}]
)
def test_so_it_is_with_a_temperature_and_several_targets_a_row(name, more, monkeypatch):
    whole, chunked = both(monkeypatch, tiny_lm(name, "bidirectional"), **more)
    assert_same(whole, chunked, **CLOSE)
    assert whole[0].shape[1:] == ((more["targets"],) if "targets" in more else ())


@pytest.mark.parametrize("name", ["llama", "gemma2", *SCALED])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_so_it_is_in_bfloat16(name, weights, monkeypatch):
    lm = tiny_lm(name, "bidirectional", dtype=weights)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights == torch.float32):
        whole, chunked = both(monkeypatch, lm)
    assert whole[0].dtype == chunked[0].dtype == torch.float32
    assert_same(
        whole,
        chunked,
        rtol=0.05,
        atol=0.05 * max(gradient.abs().max().item() for gradient in whole[1].values()),
    )


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_so_it_is_with_activation_checkpointing(name, monkeypatch):
    lm = tiny_lm(name, "bidirectional")
    plain = scored(lm)
    lm.model.train()
    lm.model.activation_checkpointing_enable()
    assert_same(plain, both(monkeypatch, lm)[1], **CLOSE)


# PEFT asks transformers by the old name
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapters", "adapters and a head of their own"])
def test_so_it_is_inside_adapters(saved, monkeypatch):
    lm = tiny_lm("llama", "bidirectional")
    peft_config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved, init_lora_weights=False)
    lm = lm.bind(get_peft_model(lm.model, peft_config))
    if saved:
        with torch.no_grad():
            lm.model.get_output_embeddings().modules_to_save["default"].weight.mul_(1.5)
    whole, chunked = both(monkeypatch, lm)
    assert_same(whole, chunked, **CLOSE)
    assert any("modules_to_save" in name for name in chunked[1]) == bool(saved)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_no_more_logits_than_a_chunk_are_ever_made(name, monkeypatch):
    lm, sizes, backward = tiny_lm(name, "bidirectional"), [], []
    output = lm.model.get_output_embeddings()
    forward = output.forward

    def counted(hidden):
        logits = forward(hidden)
        sizes.append(logits.shape[:-1].numel())
        if logits.requires_grad:
            logits.register_hook(lambda gradient: backward.append(gradient.shape[:-1].numel()))
        return logits

    monkeypatch.setattr(output, "forward", counted)
    log_prob, _ = scored(lm)
    rows = len(log_prob)
    assert rows > 2 * CHUNK and max(sizes) == max(backward) == CHUNK
    # All rows twice, the second time for the gradient; and the first row by the model itself, for the check.
    assert sum(sizes) == 2 * rows + 1 and sum(backward) == rows + 1
    del sizes[:]
    with torch.no_grad():
        lm.log_probs(*asked(lm))
    assert sum(sizes) == rows + 1


@pytest.mark.usefixtures("chunks")
def test_what_a_model_does_after_its_head_must_be_known(monkeypatch):
    lm = tiny_lm("llama", "bidirectional")
    model_forward, calls = lm.model.forward, []

    def scaled(**keywords):
        out = model_forward(**keywords)
        calls.append(1)
        return type(out)(logits=out.logits * 1.1)

    monkeypatch.setattr(lm.model, "forward", scaled)
    for _ in range(2):  # not only the first time
        with raises(ModelError, where="output head"):
            lm.log_probs(*asked(lm))
    assert nothing_left(lm)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 10**9)
    lm.log_probs(*asked(lm))  # computed at once, nothing has to be known
    assert len(calls) == 3


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_mask_token_has_no_probability(name, in_chunks, monkeypatch):
    lm = tiny_lm(name, "bidirectional")
    if in_chunks:
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))
    with torch.no_grad():
        inputs, _ = asked(lm)
        everything = torch.arange(VOCABULARY + 1).expand(len(inputs.index_N), -1)
        log_prob = lm.log_probs(inputs, everything)
    assert (log_prob[:, lm.mask_token_id] == -torch.inf).all()
    torch.testing.assert_close(
        log_prob.exp().sum(1), torch.ones(len(log_prob), dtype=torch.float64), rtol=0, atol=1e-12
    )


def nothing_left(lm: DiffusionLM) -> bool:
    rows = head.RowSelector.of(lm.model)
    left = [
        getattr(rows, name)
        for name in ("captured", "index_N", "reduction", "reduced", "hidden_ND", "first_row_V")
    ]
    return not rows.first_only and all(each is None for each in left)


@pytest.mark.usefixtures("chunks")
def test_a_pass_that_fails_leaves_nothing_behind(monkeypatch):
    lm = tiny_lm("llama", "bidirectional")
    inputs, target = asked(lm)
    expected, logits = lm.log_probs(inputs, target), lm.logits(random_ids(1, 5))
    assert nothing_left(lm)

    def fails(*_):
        raise RuntimeError("no memory")

    for module in (lm.model.model.layers[1], lm.model.get_output_embeddings()):
        hook = module.register_forward_hook(fails)
        with pytest.raises(RuntimeError, match="no memory"), lm.capturing():
            lm.log_probs(inputs, target)
        hook.remove()
        assert nothing_left(lm)
    assert torch.equal(lm.logits(random_ids(1, 5)), logits) and torch.equal(
        lm.log_probs(inputs, target), expected
    )


@pytest.mark.parametrize("in_chunks", [False, True])
def test_what_the_head_read_is_given_out_once_a_pass(in_chunks, monkeypatch):
    lm = tiny_lm("llama", "bidirectional")
    if in_chunks:
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", CHUNK * (VOCABULARY + 1))
    inputs, target = asked(lm)
    with torch.no_grad(), lm.capturing() as seen:
        log_prob = lm.log_probs(inputs, target)
        logits = lm.model.get_output_embeddings()(seen[0])[:, :VOCABULARY]
    assert [tuple(hidden.shape) for hidden in seen] == [(len(target), 16)]
    torch.testing.assert_close(logits.log_softmax(-1).gather(1, target[:, None])[:, 0], log_prob, **CLOSE)


def test_a_deep_copy_scores_with_its_own_weights(chunks):
    lm = tiny_lm("gpt2", "bidirectional")
    other = lm.bind(copy.deepcopy(lm.model))
    before = other.log_probs(*asked(other)).detach()
    with torch.no_grad():
        lm.model.get_output_embeddings().weight.mul_(2)
    assert torch.equal(other.log_probs(*asked(other)), before) and not torch.equal(
        lm.log_probs(*asked(lm)), before
    )
