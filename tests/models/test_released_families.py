"""Released families compared with logits and completions recorded from their authors' code, on small models
with the same weights."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.helpers import each_once
from tests.models.released import MIXTURES, write_published, write_tokenizer
from tests.training.tiny_runs import equal, make, ranks, weights
from unmask.config.run import LoraSettings
from unmask.config.sampler import SamplerConfig
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.export import export
from unmask.models.load import load

RECORDED = {path.stem: path for path in sorted((Path(__file__).parent / "data").glob("*.json"))}


def seeded_weight(name: str, shape: list[int]) -> Tensor:
    """The weights that the recording was made with."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    weight = torch.randn(*shape, generator=generator) * (1.0 if name == "lm_head.weight" else 0.3)
    return weight + 1.0 if len(shape) == 1 and not name.endswith("bias") else weight


@pytest.fixture(params=list(RECORDED))
def recorded(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(RECORDED[request.param].read_text())


@pytest.fixture
def dtype() -> str:
    return "float32"


@pytest.fixture
def lm(recorded: dict[str, Any], dtype: str, tmp_path: Path) -> DiffusionLM:
    (tmp_path / "config.json").write_text(json.dumps(recorded["config"]))
    weights = {name: seeded_weight(name, shape) for name, shape in recorded["weights"].items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if zlib.crc32(b"".join(weight.numpy().tobytes() for weight in weights.values())) != recorded["crc32"]:
        pytest.skip(
            "torch draws other normal numbers with these instructions than on the machine of the recording"
        )
    write_tokenizer("sdar", tmp_path)
    return load(tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float64"])  # whose rounding no machine's instructions change visibly
def test_logits_are_those_of_the_published_code(recorded, lm):
    published_TV = torch.tensor(recorded["logits"]["rows"], dtype=torch.float64)
    logits_TV = lm.logits(torch.tensor([recorded["ids"]]))[0, :, recorded["logits"]["columns"]]
    shift = int(lm.logit_shift)
    torch.testing.assert_close(
        logits_TV[shift:], published_TV[: len(published_TV) - shift], rtol=0, atol=3e-5
    )


def test_completions_are_those_of_the_published_sampler(recorded, lm):
    """The published samplers fill whole attention blocks; LLaDA2's cuts the last one, Fast-dLLM v2's adds the
    first token of the next."""
    settings, block = recorded["sampler"], lm.block_size
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(recorded["prompts"]):
        length = len(prompt) + 16
        canvas = length if block is None else -(-length // block) * block
        by_length.setdefault(canvas - len(prompt), []).append(index)
    compared = 0
    for length, indices in by_length.items():
        made = generate(
            lm,
            [recorded["prompts"][index] for index in indices],
            SamplerConfig(**{"max_new_tokens": length} | settings),
        )
        for index, tokens in zip(indices, made.tokens, strict=True):
            published = recorded["completions"][index][:length]
            assert tokens[: len(published)] == published
            compared += len(published)
    assert compared > 800


@pytest.mark.filterwarnings("ignore:the mask token is:RuntimeWarning")  # these vocabularies are small
@each_once("name, verb", list(RECORDED), ["sft", "grpo"])
def test_what_is_trained_goes_back_to_its_layout(name, verb, tmp_path):
    """Every weight is trained, experts and routers among them; the bias that evens the choice of experts is
    not, as published."""
    lm = load(write_published(name, tmp_path / "published"))
    before = weights(lm)
    trainer = make(verb, tmp_path / "run", lm, **({"reward": ranks} if verb == "grpo" else {}))
    trainer.train()
    after = weights(trainer.lm)
    assert {part for part in before if torch.equal(before[part], after[part])} <= {
        "model.layers.1.mlp.gate.e_score_correction_bias"
    }
    export(trainer.lm, tmp_path / "back", name)
    assert equal(weights(load(tmp_path / "back")), after)


@pytest.mark.parametrize("name", MIXTURES)
def test_adapters_stand_at_attention_experts_and_routers(name, tmp_path):
    lm = load(write_published(name, tmp_path / "published"))
    trainer = make("sft", tmp_path / "run", lm, peft_config=LoraSettings(r=2).to_peft())
    trainer.train()
    trained = {part for part, weight in trainer.lm.model.named_parameters() if weight.requires_grad}
    for place in ("self_attn.q_proj", "mlp.experts", "mlp.gate"):
        assert any(f"layers.1.{place}" in part for part in trained), place
    trainer.save_model(str(tmp_path / "merged"))
    ids = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        load(tmp_path / "merged").logits(ids), trainer.lm.logits(ids), rtol=1e-4, atol=1e-4
    )
