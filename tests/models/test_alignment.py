"""Unaligned weights change the last bits of results: loading aligns them, without a second copy of the model
in memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny import build_causal, llama_lm
from unmask.models.alignment import ALIGNMENT, align_weights
from unmask.models.load import as_diffusion_lm, load


def shift(model: torch.nn.Module, offset: int) -> None:
    """Move every weight this many bytes off alignment."""
    for weight in model.parameters():
        room = torch.empty(weight.nbytes + 2 * ALIGNMENT, dtype=torch.uint8)
        start = -room.data_ptr() % ALIGNMENT + offset
        moved = room[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = moved.copy_(weight.data)


def off_alignment(model: torch.nn.Module) -> int:
    return sum(weight.data_ptr() % ALIGNMENT != 0 for weight in model.parameters())


@pytest.mark.parametrize("offset", [8, 16, 48])
def test_weights_off_alignment_are_moved_with_their_values(offset):
    straight, lm = (llama_lm("causal", dtype=torch.float64) for _ in range(2))
    shift(lm.model, offset)
    assert off_alignment(lm.model) == len(list(lm.model.parameters()))
    given = as_diffusion_lm(lm.model, lm.tokenizer)
    assert off_alignment(given.model) == 0
    ids = torch.arange(1, 13).view(2, 6)
    assert torch.equal(given.logits(ids), straight.logits(ids))


def test_tied_weights_stay_one_tensor():
    lm = llama_lm(tie_word_embeddings=True)
    shift(lm.model, 8)
    align_weights(lm.model)
    assert lm.model.lm_head.weight is lm.model.model.embed_tokens.weight


def test_a_loaded_model_is_aligned(tmp_path):
    llama_lm().save(tmp_path)
    assert off_alignment(load(tmp_path).model) == 0


def tensors(holder: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds in its attributes, and in those of its quantization state."""
    for name, value in vars(holder).items():
        if isinstance(value, torch.Tensor):
            yield value
        elif name in ("quant_state", "state2") and value is not None:
            yield from tensors(value)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantized_weights_are_aligned_with_all_that_belongs_to_them(tmp_path, bits):
    llama_lm().save(tmp_path / "whole")
    load(tmp_path / "whole", quantization=bits).save(tmp_path / "quantized")
    lm = load(tmp_path / "quantized")
    kept = [tensor for weight in lm.model.parameters() for tensor in tensors(weight)]
    assert kept and off_alignment(lm.model) == 0
    assert not any(tensor.data_ptr() % ALIGNMENT for tensor in kept)
    lm.logits(torch.arange(1, 9)[None])
    assert off_alignment(lm.model) == 0


PEAK = """
import re, sys
import torch
import unmask
unmask.load
import unmask.models.load
torch.set_num_threads(1)
# Of this process alone: ru_maxrss would begin with the peak of the process that started it.
peak = lambda: int(re.search("VmHWM:\\s*([0-9]+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
unmask.load(sys.argv[1])
print(peak() - before)
"""


@pytest.mark.slow
def test_loading_a_gigabyte_takes_a_gigabyte(tmp_path):
    sizes = {"width": 1024, "layers": 20, "heads": 16, "intermediate_size": 2816}
    model, tokenizer = build_causal("llama", "abcdefgh", **sizes)
    model.save_pretrained(tmp_path, max_shard_size="50GB")
    tokenizer.save_pretrained(tmp_path)
    size = sum(weight.nbytes for weight in model.parameters())
    assert size > 1e9
    del model
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[-1]) < 1.15 * size
