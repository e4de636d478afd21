"""What a GPU refuses and allows of tensors of the CPU: the device that stands in for it
(`tests/other_device.py`) does so too."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from tests.helpers import GPU, STOOD_IN, needs_gpu

pytestmark = needs_gpu

HERE, NUMBER = torch.arange(12.0).view(3, 4), torch.tensor(1.0)
FIRST, BELOW = torch.tensor([[0]]), HERE < 5

REFUSED = {
    "a sum": lambda there: there + HERE,
    "a sum with a number of the device": lambda there: HERE + there[0, 0],
    "a sum that is written to the CPU": lambda there: torch.tensor(1.0).add_(there[0, 0]),
    "a product": lambda there: there @ HERE.T,
    "a comparison": lambda there: torch.equal(there, HERE),
    "rows side by side": lambda there: torch.cat([there, HERE]),
    "numbers side by side": lambda there: torch.stack([there[0, 0], NUMBER]),
    "where": lambda there: torch.where(BELOW, there, 0.0),
    "a mask": lambda there: there.masked_fill(BELOW, 0.0),
    "a mask of the CPU, written to": lambda there: there.clone().masked_fill_(BELOW, 0.0),
    "an index that gathers": lambda there: there.gather(1, FIRST),
    "an index that scatters": lambda there: there.clone().scatter_(1, FIRST, 1.0),
    "an index of rows": lambda there: there.index_select(0, FIRST[0]),
    "an embedding": lambda there: F.embedding(FIRST, there),
    "an index of the device into the CPU": lambda there: HERE[FIRST[0].to(GPU)],
    "a mask of the device into the CPU": lambda there: HERE[there < 5],
    "values of the CPU": lambda there: there.index_put((FIRST[0].to(GPU),), HERE[0]),
    "a generator of the CPU": lambda there: torch.rand(3, device=GPU, generator=torch.Generator()),
    "a layer of the CPU": lambda there: nn.Linear(4, 4)(there),
}
ALLOWED = {
    "a number": lambda there: there + 1.0,
    "a tensor that is a number": lambda there: there * NUMBER,
    "where": lambda there: torch.where(there < 5, there, NUMBER),
    "a value of a mask": lambda there: there.masked_fill(there < 5, NUMBER),
    "an index of the CPU": lambda there: there[FIRST[0]],
    "a mask of the CPU": lambda there: there[BELOW],
    "a list": lambda there: there[[0, 2]],
    "an index that sets": lambda there: there.clone().index_put_((FIRST[0],), NUMBER),
    "a copy into it": lambda there: there.clone().copy_(HERE),
}


@pytest.fixture
def there() -> torch.Tensor:
    return HERE.to(GPU)


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_of_the_cpu_are_refused(what, there):
    with pytest.raises(RuntimeError, match=r"device|CPU|cpu"):
        REFUSED[what](there)


@pytest.mark.parametrize("what", ALLOWED)
def test_numbers_indices_and_copies_are_allowed(what, there):
    found = ALLOWED[what](there)
    assert found.device == there.device and torch.equal(found.cpu(), ALLOWED[what](HERE))


def test_a_copy_to_the_cpu_can_be_read(there):
    assert (there.tolist(), there[1, 1].item(), bool(there[0, 0])) == (HERE.tolist(), 5.0, False)
    assert torch.empty(3, 4).copy_(there).tolist() == there.cpu().numpy().tolist() == HERE.tolist()
    for read in (np.asarray, lambda tensor: tensor.numpy()):
        with pytest.raises(TypeError, match="to numpy"):
            read(there)


def test_what_is_made_there_is_there():
    with torch.device(GPU):
        made = [
            torch.zeros(2),
            torch.tensor([1, 2]),
            torch.full((2,), 1.0),
            torch.rand(2),
            torch.randint(3, (2,)),
            torch.randperm(2),
        ]
        made += [
            torch.arange(2),
            torch.arange(1, 3),
            torch.arange(0, 4, 2),
            torch.linspace(0, 1, 2),
            torch.eye(2),
            torch.tensor([1.0, 2.0]),
        ]
        made += [
            torch.empty(2),
            torch.ones(2, dtype=torch.bool),
            nn.Linear(2, 2).weight,
            F.one_hot(torch.arange(2)),
        ]
    made += [
        made[0].new_zeros(2),
        torch.ones_like(made[0]),
        made[0][None].T,
        torch.zeros(2).to(GPU),
        torch.tensor([1, 1], device=GPU),
    ]
    assert {part.device.type for part in made} == {GPU} and {part.shape[0] for part in made} == {
        len(part.tolist()) for part in made
    } == {2}


def test_files_hold_the_data_and_the_device(there):
    file = io.BytesIO()
    torch.save({"one": there, "two": nn.Linear(4, 4).to(GPU).state_dict()}, file)
    for place, device in {None: GPU, "cpu": "cpu", GPU: GPU}.items():
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)
        assert {loaded["one"].device.type, loaded["two"]["weight"].device.type} == {device} and torch.equal(
            loaded["one"].cpu(), HERE
        )


CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20
    ),
    "gpt2": GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        vocab_size=20,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
}


@pytest.mark.skipif(not STOOD_IN, reason="a GPU rounds otherwise than a CPU")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_gradients_and_updates_have_the_bits_of_a_cpu(family, fused, tmp_path):
    """With tied weights (GPT-2), a norm of gradients, and accumulation."""
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    moved, id_BT = copy.deepcopy(model).to(GPU), torch.arange(20).view(2, 10)
    assert (moved.lm_head.weight is moved.get_input_embeddings().weight) == (family == "gpt2")
    found = []
    for part in (model, moved):
        optimizer = torch.optim.AdamW(part.parameters(), fused=fused)
        for _ in range(2):
            losses = [
                part(ids.to(part.device), labels=ids.to(part.device)).loss for ids in (id_BT, id_BT.flip(1))
            ]
            for loss in losses:
                loss.backward()
            norm = nn.utils.clip_grad_norm_(part.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append([norm.item(), *(loss.item() for loss in losses)])
    assert found[0] == found[1]
    moved.save_pretrained(tmp_path)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(weight, model.get_parameter(name)), name
