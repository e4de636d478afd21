"""Several models and adapters behind one server: each answers as if it were alone."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.generation.cases import PATTERNS, PROMPTS
from tests.helpers import partly_slow
from tests.serving.scheduling import CONFIG, LONG, alone, collect, outline, scheduling, traces, until, works
from tests.serving.servers import ADMIN, http_get, http_post, message, other_weights, served
from tests.tiny import adapted, float64_lm, save_adapters
from unmask.cli import app
from unmask.cli.serve import names_and_paths
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.generation.engine.engine import Engine
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import fingerprint
from unmask.models.stored_adapters import load_adapters
from unmask.serving.app import AppSettings
from unmask.serving.scheduler import MOST_FAILURES
from unmask.serving.served_models import ServedModels, description
from unmask.serving.submission import OverloadedError, ServiceError

STEADY = CONFIG.model_copy(update={"stop_at_eos": False})


def with_adapters(lm: DiffusionLM, folder: Path) -> dict[str, DiffusionLM]:
    """Two models that are adapters on this one."""
    return {
        name: load_adapters(lm, save_adapters(adapted(lm, seed), folder / name))
        for seed, name in enumerate(("red", "blue"))
    }


def pair() -> tuple[DiffusionLM, DiffusionLM]:
    """Two models of this test's own."""
    return float64_lm().frozen_copy(), float64_lm("gpt2", attention="bidirectional").frozen_copy()


@partly_slow("attention, block_size", [PATTERNS[0], PATTERNS[2], PATTERNS[-1]], 1)
def test_answers_are_those_of_each_model_alone(
    attention: Any, block_size: int | None, tmp_path: Path
) -> None:
    """Of the same prompts at the same time: what one has cached of a prompt is not that of another."""
    lm, other = float64_lm(attention=attention, block_size=block_size).frozen_copy(), pair()[1]
    adapters = with_adapters(lm, tmp_path)
    # of no common memory
    apart = {"tiny": lm, "other": other, **{name: adapted(lm, seed) for seed, name in enumerate(adapters)}}
    expected = {
        name: outline(unmask.generate(each, PROMPTS, CONFIG, range(len(PROMPTS))).trace or [])
        for name, each in apart.items()
    }

    async def run() -> list[Any]:
        async with scheduling(lm, {"other": other}, adapters=adapters, batch_size=7) as scheduler:
            asked = [
                traces(scheduler.submit(name, works(apart[name], PROMPTS), owner=name))
                for name in apart
                for _ in range(2)
            ]
            return [outline(found) for found in await asyncio.gather(*asked)]

    assert asyncio.run(run()) == [expected[name] for name in apart for _ in range(2)]
    assert len({str(found) for found in expected.values()}) == len(apart)


def test_engines_take_turns(stalled: threading.Semaphore, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, other = pair()
    step, stepped = Engine.step, []

    def noted(self: Engine) -> Any:
        stepped.append(self.lm)
        return step(self)

    monkeypatch.setattr(Engine, "step", noted)

    async def run() -> None:
        async with scheduling(lm, {"other": other}) as scheduler:
            asked = [
                scheduler.submit(name, works(model, ["abc"], LONG), owner=name)
                for name, model in (("tiny", lm), ("other", other))
            ]
            stalled.release(1000)
            await asyncio.gather(*map(collect, asked))

    asyncio.run(run())
    together = stepped[2:70]
    assert all(a is not b for a, b in pairwise(together)) and Counter(map(id, together)) == {
        id(lm): 34,
        id(other): 34,
    }


def test_owners_take_turns_over_all_models(stalled: threading.Semaphore) -> None:
    lm, other = pair()

    async def run() -> list[str]:
        order: list[str] = []
        async with scheduling(lm, {"other": other}, batch_size=1) as scheduler:

            async def ask(owner: str, name: str, model: DiffusionLM) -> None:
                await collect(scheduler.submit(name, works(model, ["abc"]), owner=owner))
                order.append(owner)

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(ask("greedy", "tiny", lm))
                await until(
                    lambda: scheduler.metrics.registry.get_sample_value("unmask_running_sequences") == 1
                )
                group.create_task(ask("modest", "other", other))
                group.create_task(ask("third", "tiny", lm))
                await asyncio.sleep(0)
                stalled.release(1000)
        return order

    assert asyncio.run(run()) == ["greedy", "greedy", "modest", "third", "greedy", "greedy"]


def test_the_queue_and_the_places_are_those_of_all_models(stalled: threading.Semaphore) -> None:
    lm, other = pair()

    async def run() -> None:
        async with scheduling(lm, {"other": other}, batch_size=2, queue_size=2) as scheduler:
            value = scheduler.metrics.registry.get_sample_value
            asked = [scheduler.submit("tiny", works(lm, ["abc"], STEADY), owner="a")]
            asked += [scheduler.submit("other", works(other, ["f"], STEADY), owner="a")]
            stalled.release()  # the first may have entered before the second came
            await until(lambda: value("unmask_running_sequences") == 2)
            asked += [
                scheduler.submit(name, works(model, ["dd"]), owner="a")
                for name, model in (("tiny", lm), ("other", other))
            ]
            with pytest.raises(OverloadedError):
                scheduler.submit("other", works(other, ["dd"]), owner="a")
            await asyncio.sleep(0)
            assert (value("unmask_running_sequences"), value("unmask_queue_length")) == (2, 2)
            stalled.release(1000)
            await asyncio.gather(*map(collect, asked))
            assert [
                value("unmask_sequences_total", {"model": name, "outcome": "finished"})
                for name in ("tiny", "other")
            ] == [2, 2]

    asyncio.run(run())


def test_weights_of_a_model_wait_for_its_own_answers_alone(stalled: threading.Semaphore) -> None:
    """And meanwhile new requests to the other model enter."""
    lm, other = pair()

    async def run() -> None:
        async with scheduling(lm, {"other": other}, batch_size=4) as scheduler:
            value = scheduler.metrics.registry.get_sample_value
            begun = scheduler.submit("tiny", works(lm, ["abc"], STEADY), owner="a")
            beside = scheduler.submit("other", works(other, ["abc"], LONG), owner="a")
            stalled.release()  # the first may have entered before the second came
            await until(lambda: value("unmask_running_sequences") == 2)
            loaded = asyncio.create_task(scheduler.replace_weights("tiny", lambda: None, "new"))
            await asyncio.sleep(0)
            waiting = scheduler.submit("tiny", works(lm, ["f"], STEADY), owner="a")
            entering = scheduler.submit("other", works(other, ["f"], STEADY), owner="a")
            stalled.release(2)
            await until(lambda: value("unmask_running_sequences") == 3)
            assert not loaded.done()
            stalled.release(13)  # 6 steps of the first model, and as many of the other, whose answer needs 36
            await loaded
            assert value("unmask_sequences_total", {"model": "tiny", "outcome": "finished"}) == 1
            assert value("unmask_sequences_total", {"model": "other", "outcome": "finished"}) is None
            stalled.release(1000)
            found = [
                {event.version for event in await collect(events)}
                for events in (begun, waiting, beside, entering)
            ]
            assert found == [{None}, {"new"}, {None}, {None}]
            assert [model.version for model in scheduler.models.values()] == ["new", None]

    asyncio.run(run())


def test_a_model_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, other = pair()
    step = Engine.step

    def failing(self: Engine) -> Any:
        if self.lm is lm:
            raise RuntimeError("out of memory")
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)

    async def run() -> None:
        async with scheduling(lm, {"other": other}, batch_size=4) as scheduler:
            good = scheduler.submit("other", works(other, ["abc", "f"]), owner="a")
            bad = [scheduler.submit("tiny", works(lm, ["abc"]), owner="b") for _ in range(MOST_FAILURES)]
            failed = await asyncio.gather(*map(collect, bad), return_exceptions=True)
            assert [type(error) for error in failed] == [ServiceError] * MOST_FAILURES
            found = outline(await traces(good))
            assert found == [
                one
                for key, prompt in enumerate(["abc", "f"])
                for one in await alone(scheduler, prompt, key=key, model="other")
            ]
            await collect(scheduler.submit("other", works(other, ["dd"]), owner="a"))
            assert scheduler.failing == ["tiny"] and scheduler.healthy  # since the other one goes on

    asyncio.run(run())


@pytest.fixture
def lm() -> DiffusionLM:
    """A model of this test's own."""
    return float64_lm(attention="bidirectional").frozen_copy()


@pytest.fixture
def other() -> DiffusionLM:
    """Another one."""
    return float64_lm(attention="block_causal", block_size=3).frozen_copy()


@pytest.fixture
def url(lm: DiffusionLM, other: DiffusionLM, tmp_path: Path) -> Iterator[str]:
    """A server with a model, two adapters on it and another model, which takes weights from a folder."""
    settings = AppSettings(admin_key="admin", weights_from=(tmp_path,))
    with served(
        lm, settings, name="base", more={"other": other}, adapters=with_adapters(lm, tmp_path)
    ) as address:
        yield address


def replace(url: str, model: str, path: str) -> httpx.Response:
    return http_post(f"{url}/v1/weights", json={"model": model, "path": path, "version": path}, headers=ADMIN)


def test_the_official_client_chooses_a_model(url: str) -> None:
    base, other = float64_lm(attention="bidirectional"), float64_lm(attention="block_causal", block_size=3)
    expected = {"base": base, "other": other, "red": adapted(base, 0), "blue": adapted(base, 1)}
    config = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=3)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        listed = {model.id: model.parent for model in client.models.list().data}  # type: ignore[attr-defined]
        assert listed == {"base": None, "other": None, "red": "base", "blue": "base"}
        assert client.models.retrieve("blue").parent == "base"  # type: ignore[attr-defined]
        for name, model in expected.items():
            answer = client.completions.create(
                model=name, prompt="abc", max_tokens=8, temperature=1.0, seed=3
            )
            assert (answer.model, answer.choices[0].text) == (
                name,
                unmask.generate(model, ["abc"], config).texts[0],
            )
        with pytest.raises(
            openai.NotFoundError,
            match=r"'green' does not exist\. This server has 'base', 'other', 'red', 'blue'",
        ) as refused:
            client.completions.create(model="green", prompt="abc")
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    assert 'unmask_sequences_total{model="red",outcome="finished"} 1.0' in http_get(f"{url}/metrics").text


def test_new_adapters_touch_no_other_model(url: str, lm: DiffusionLM, tmp_path: Path) -> None:
    def ask() -> list[tuple[str, str | None]]:
        bodies = [
            {"model": name, "prompt": "abc", "max_tokens": 8, "temperature": 1, "seed": 3}
            for name in ("base", "other", "red", "blue")
        ]
        answers = [http_post(f"{url}/v1/completions", json=body).json() for body in bodies]
        return [(answer["choices"][0]["text"], answer["diffusion"]["version"]) for answer in answers]

    before, digest = ask(), fingerprint(lm.model)
    save_adapters(adapted(lm, 5), tmp_path / "new")
    assert replace(url, "red", "new").json() == {"version": "new"}
    config = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=3)
    expected = unmask.generate(adapted(lm, 5), ["abc"], config).texts[0]
    assert ask() == [*before[:2], (expected, "new"), before[3]] and expected != before[2][0]
    assert fingerprint(lm.model) == digest


def test_new_weights_of_a_model_touch_no_other(
    url: str, lm: DiffusionLM, other: DiffusionLM, tmp_path: Path
) -> None:
    changed, digest = other_weights(other), fingerprint(lm.model)
    changed.save(tmp_path / "changed")
    assert replace(url, "other", "changed").json() == {"version": "changed"}
    body = {"model": "other", "prompt": "abc", "max_tokens": 8, "temperature": 0}
    text = http_post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == unmask.generate(changed, ["abc"], SamplerConfig(max_new_tokens=8)).texts[0]
    assert fingerprint(lm.model) == digest
    versions = {card["id"]: card["version"] for card in http_get(f"{url}/v1/models").json()["data"]}
    assert versions == {"base": None, "other": "changed", "red": None, "blue": None}


def test_weights_that_others_share_or_that_do_not_fit_are_refused(
    url: str, lm: DiffusionLM, tmp_path: Path
) -> None:
    other_weights(lm).save(tmp_path / "whole")
    save_adapters(adapted(lm, 5, target_modules=["fc1"]), tmp_path / "elsewhere")
    digest = fingerprint(lm.model)
    refused = {
        ("base", "whole"): (
            400,
            "model",
            "model: the adapters red, blue are on the weights of 'base'. Replace adapters",
        ),
        ("red", "whole"): (400, "path", "holds no adapters"),
        ("red", "elsewhere"): (400, "path", "the adapters are of another model: base_model"),
        ("other", "red"): (400, "path", "holds adapters, not a whole model"),
        ("green", "red"): (404, "model", "the model 'green' does not exist"),
    }
    for (model, path), (status, param, words) in refused.items():
        answer = replace(url, model, path)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param) and words in message(
            answer
        ), answer.text
        assert str(tmp_path) not in answer.text
    assert fingerprint(lm.model) == digest


def test_the_command_loads_each_model_once(lm: DiffusionLM, tmp_path: Path) -> None:
    lm.save(tmp_path / "model")
    pair()[1].save(tmp_path / "second")
    folders = {
        name: str(save_adapters(adapted(lm, seed), tmp_path / name))
        for seed, name in enumerate(("red", "blue"))
    }
    [adapters, more] = names_and_paths(
        "model", [f"{name}={path}" for name, path in folders.items()], [f"second={tmp_path / 'second'}"]
    )
    served = ServedModels(str(tmp_path / "model"), {"dtype": "float64"}, "model", adapters, more)
    scheduler = ServedModels.from_json(served.to_json()).make_scheduler()  # as a worker gets it
    base = {weight.data_ptr() for weight in scheduler.models["model"].lm.model.parameters()}
    for name in folders:
        named = scheduler.models[name].lm.model.named_parameters()
        assert {weight.data_ptr() for name, weight in named if "lora_" not in name} == base
    said = description(scheduler)
    assert said.startswith(
        "DiffusionLM(PhiForCausalLM, bidirectional, logit_shift=False) is served as model, "
    )
    assert all(f" as {name}" in said for name in ("second", "red", "blue"))


@pytest.mark.parametrize(
    "words, where",
    [
        (["--adapters", "red"], "--adapters"),
        (["--model", "=red"], "--model"),
        (["--adapters", "red=a", "--adapters", "red=b"], "--adapters"),
        (["--adapters", "red=a", "--model", "red=b"], "--model"),
        (["--model", "m=b"], "--model"),
    ],
)
def test_options_that_name_no_model_are_refused(words: list[str], where: str) -> None:
    options = {
        option: [words[i + 1] for i in range(0, len(words), 2) if words[i] == option]
        for option in ("--adapters", "--model")
    }
    with raises(ConfigError, where=where):
        names_and_paths("m", options["--adapters"], options["--model"])


def test_a_folder_without_adapters_ends_the_start_in_one_line(lm: DiffusionLM, tmp_path: Path) -> None:
    lm.save(tmp_path / "model")
    path = tmp_path / "model"
    result = CliRunner().invoke(app, ["serve", str(path), "--port", "0", "--adapters", f"style={path}"])
    error = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert error.startswith(
        f"error: {path}: holds no adapters: there is no adapter_config.json. Give a folder with LoRA adapters"
    )
