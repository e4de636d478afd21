"""The server of rollouts: the tokens of the model in process, and new weights without a restart."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch
from typer.testing import CliRunner

import unmask
from tests.generation.remote.servers import copied, served
from tests.generation.tiny_models import every_pattern, tiny
from unmask.cli import app
from unmask.config.run import SamplerConfig
from unmask.errors import ConfigError
from unmask.generation.remote.protocol import GenerateRequest, model_facts, read_generation
from unmask.generation.remote.server import open_port
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint

PROMPTS = [[4, 5, 6], [7], [4, 5, 6], [9, 8, 7, 6, 5, 4]]
KEYS = [3, -(2**63), 2**63 - 1, 0]
CONFIG = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=5, trace=True, batch_size=3)


def other_weights(lm: DiffusionLM) -> DiffusionLM:
    """The same model with other weights, as after further training."""
    trained = lm.frozen_copy()
    generator = torch.Generator().manual_seed(7)
    for weight in trained.model.parameters():
        weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return trained


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def ask(url: str, **changes: Any) -> httpx.Response:
    return post(url, "/generate", GenerateRequest(prompts=PROMPTS, config=CONFIG, keys=KEYS).model_dump() | changes)


@every_pattern
def test_the_server_gives_the_tokens_of_the_model_in_process(attention: str, block_size: int | None, tmp_path: Path) -> None:
    lm = tiny(attention=attention, block_size=block_size, eos_bias=0.3)
    with served(copied(lm, tmp_path)) as url, ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda _: ask(url), range(4)))  # at once: they must not disturb one another
        health = httpx.get(f"{url}/health").json()
    expected = unmask.generate(lm, PROMPTS, CONFIG, KEYS)
    assert expected.trace is not None and len({*map(len, expected.tokens)}) > 1  # some stop before others
    for answer in answers:
        assert read_generation(answer.json()) == expected
    assert health == {"version": None, "model": model_facts(lm)}


def test_new_weights_replace_the_old_ones(tmp_path: Path) -> None:
    lm = copied(tiny(attention="bidirectional", time_embedding=True), tmp_path / "old")
    new = other_weights(lm)
    new.save(tmp_path / "new")
    weights = [weight.data_ptr() for weight in lm.model.parameters()]
    with served(lm) as url:
        assert post(url, "/update_weights", {"path": str(tmp_path / "new"), "version": "1"}).json() == {"version": "1"}
        generation = read_generation(ask(url, version="1").json())
        stale = ask(url, version="0")
        anyhow = ask(url)
    assert generation == unmask.generate(new, PROMPTS, CONFIG, KEYS) == read_generation(anyhow.json())
    assert stale.status_code == 409 and "the weights are '1', not '0'" in stale.json()["error"]
    assert weights == [weight.data_ptr() for weight in lm.model.parameters()]


def test_weights_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    lm = copied(tiny(attention="block_causal", block_size=3), tmp_path / "own")
    before = fingerprint(lm.model)
    tiny(attention="block_causal", block_size=4).save(tmp_path / "pattern")
    tiny(attention="block_causal", block_size=3, layers=1).save(tmp_path / "layers")
    tiny("gpt2", attention="block_causal", block_size=3).save(tmp_path / "family")
    lm.save(tmp_path / "torn")
    [weights] = (tmp_path / "torn").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "empty").mkdir()
    refused = {
        "pattern": "block_size is 4 and not 3",
        "layers": "another architecture",
        "family": "model_type is 'gpt2' and not 'phi'",
        "torn": "cannot load the weights",
        "empty": "cannot load a model config",
        "absent": "no such folder on the server",
    }
    with served(lm) as url:
        for name, error in refused.items():
            answer = post(url, "/update_weights", {"path": str(tmp_path / name), "version": name})
            assert answer.status_code == 422 and error in answer.json()["error"], answer.text
        assert httpx.get(f"{url}/health").json()["version"] is None
    assert fingerprint(lm.model) == before


@pytest.mark.parametrize(
    "changes, error",
    [
        ({"keys": [1]}, "1 keys for 4 prompts"),
        ({"prompts": "abc"}, "prompts"),
        ({"prompts": [[99]], "keys": [1]}, "token id 99 is outside the vocabulary"),
        ({"config": {"stepz": 3}}, "config.stepz: is not a known key. Did you mean 'steps'"),
        ({"config": {"max_new_tokens": 1000}}, "exceed the context of 40"),
        ({"surprise": 1}, "surprise: is not a known key"),
    ],
)
def test_refusals_name_the_reason(served_tiny: str, changes: dict[str, Any], error: str) -> None:
    answer = ask(served_tiny, **changes)
    assert answer.status_code == 422 and error in answer.json()["error"]


@pytest.fixture(scope="module")
def served_tiny() -> Any:
    with served(tiny()) as url:
        yield url


def test_a_server_with_a_key_requires_it() -> None:
    with served(tiny(), api_key="k") as url:
        statuses = [httpx.get(f"{url}/health", headers=headers).status_code for headers in ({}, {"Authorization": "Bearer other"})]
        assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer k"}).status_code == 200
    assert statuses == [401, 401]


def test_an_address_in_use_is_refused_before_a_model_is_read() -> None:
    with open_port("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ConfigError, match=r"cannot be bound.*Choose another --host or --port"):
            open_port("127.0.0.1", first.getsockname()[1])


def test_without_its_libraries_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delitem(sys.modules, "unmask.generation.remote.server")
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 2
    assert result.stderr == "error: unmask serve: fastapi is not installed. Install it with pip install 'unmask[serve]'.\n"
