"""A causal model on a vLLM server: completions, new weights, and a server that is absent, slow, or dies."""

from __future__ import annotations

import re
import shlex
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import unmask
from tests.errors import raises
from tests.generation.remote.stub_servers import (
    FOR_ADAPTERS,
    FOR_ADAPTERS_IN_ENVIRONMENT,
    FOR_ROLLOUTS,
    FOR_WEIGHTS_IN_ENVIRONMENT,
    MODULE,
    Server,
    echo,
    free_port,
    serving,
    write_model,
)
from tests.helpers import REPOSITORY, partly_slow
from unmask.config.layers import read_recipe, recipe_names
from unmask.config.sampler import SamplerConfig
from unmask.data.characters import character_tokenizer
from unmask.errors import GenerationError
from unmask.generation.remote import http
from unmask.generation.remote.http import RemoteError
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.models.load import with_pattern

TOKENIZER = character_tokenizer("abcdef")


def test_the_command_of_the_docs_starts_a_server_as_the_tests_do():
    text = (REPOSITORY / "docs/generation.md").read_text(encoding="utf-8")
    [block] = [part for part in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if MODULE in part]
    export, start = (shlex.split(line) for line in block.replace("\\\n", " ").strip().splitlines())
    at = start.index("python")
    environment = dict(setting.split("=") for setting in start[:at])
    assert environment == FOR_WEIGHTS_IN_ENVIRONMENT | FOR_ADAPTERS_IN_ENVIRONMENT | {
        "CUDA_VISIBLE_DEVICES": "0,1"
    }
    assert start[at : at + 3] == ["python", "-m", MODULE]
    flags = read_flags(start[at + 3 :])
    assert flags.keys() == read_flags([*FOR_ROLLOUTS, *FOR_ADAPTERS]).keys() | {
        "--model",
        "--port",
        "--tensor-parallel-size",
    }
    assert flags.items() >= read_flags(FOR_ROLLOUTS).items()
    assert flags["--tensor-parallel-size"] == "2" and flags["--model"] == read_flags(export[3:])["--output"]
    recipes = [read_recipe(name) for name in recipe_names()]
    assert int(flags["--max-lora-rank"]) == max(recipe["lora"]["r"] for recipe in recipes if "lora" in recipe)
    assert export[:2] == ["unmask", "export"] and read_flags(export[3:])["--layout"] == "hf"


def read_flags(words: list[str]) -> dict[str, str]:
    """The value of each flag by its name; empty for a flag without a value."""
    return {
        word: "" if following.startswith("--") else following
        for word, following in pairwise([*words, "--"])
        if word.startswith("--")
    }


def test_waiting_for_an_absent_server_ends_with_patience(monkeypatch):
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(http, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    url = f"http://127.0.0.1:{free_port()}"
    with raises(GenerationError, where=url):
        RemoteLM(url, TOKENIZER, patience=0.6)
    assert 0.6 < clock[0] <= 0.6 + 2 * 0.5  # it asks every half second


def test_a_silent_server_is_an_error_after_the_timeout():
    def sleep(path, body):
        time.sleep(1.5)
        return echo(path, body)

    with serving(sleep) as url:
        lm = RemoteLM(url, TOKENIZER, timeout=0.4)
        with raises(RemoteError, where=url):
            lm.generate([[4]])


def test_completions_come_back_in_the_order_of_their_prompts():
    def slow_first(path, body):
        time.sleep(0.3 if body["prompt"] == [4] else 0.0)
        return echo(path, body)

    with serving(slow_first) as url:
        generation = RemoteLM(url, TOKENIZER).generate([[4], [5], [6, 7]])
    assert (
        generation.tokens == [[4], [5], [7]]
        and generation.log_probs == [[-0.5]] * 3
        and generation.prompts == [[4], [5], [6, 7]]
    )


@pytest.mark.parametrize(("ends", "asked"), [(None, [2]), ([2, 5], [2, 5]), ([], [])])
def test_a_server_gets_the_end_tokens(ends, asked):
    bodies = []

    def note(path, body):
        bodies.append(body)
        return echo(path, body)

    with serving(note) as url:
        lm = RemoteLM(url, TOKENIZER, eos_token_ids=ends)
        generation = lm.generate([[4], [5]])
        lm.generate([[4]], SamplerConfig(stop_at_eos=False))
    assert [(body["stop_token_ids"], body["ignore_eos"]) for body in bodies] == [(asked, False)] * 2 + [
        (None, True)
    ]
    assert generation.tokens == [[4], [5]] and generation.texts[1] == (
        "" if 5 in asked else TOKENIZER.decode([5])
    )


def test_a_restarted_server_loses_no_completion():
    failed: set[tuple[int, ...]] = set()

    def stumble(path, body):
        if tuple(body["prompt"]) in failed:
            return echo(path, body)
        failed.add(tuple(body["prompt"]))
        return 503, {}

    with serving(stumble) as url:
        assert RemoteLM(url, TOKENIZER, patience=5).generate([[4], [5]]).tokens == [[4], [5]]


def test_completions_before_a_crash_are_kept():
    def partly(path, body):
        return echo(path, body) if body["prompt"] != [6] else (503, {})

    with serving(partly) as url:
        lm = RemoteLM(url, TOKENIZER, patience=0.6)
        with raises(RemoteError, where=url) as caught:
            lm.generate([[4], [5], [6]])
    assert caught.value.completed == {0: ([4], [-0.5]), 1: ([5], [-0.5])}


def test_refusals_name_the_reason():
    with serving(lambda path, body: (400, {"message": "too long"})) as url:
        lm = RemoteLM(url, TOKENIZER)
        with raises(GenerationError, where=url):
            lm.generate([[4]])
        for meaningless in (
            {"threshold": 0.9},
            {"steps": 4},
            {"cache": "dual"},
            {"num_speculative_tokens": 2},
            {"mode": "self-speculative"},
        ):
            with raises(GenerationError, where=next(iter(meaningless))):
                lm.generate([[4]], SamplerConfig(**meaningless))
        with raises(GenerationError, where="prompts"):
            lm.generate("Once upon a time")
        with raises(GenerationError, where="keys"):
            lm.generate([[4]], keys=[1, 2])


@pytest.mark.parametrize(
    "answer", [[], {}, {"choices": []}, {"choices": [{}]}, {"choices": [{"token_ids": 3}]}, "text"]
)
def test_an_unexpected_answer_is_an_error(answer):
    with serving(lambda path, body: (200, answer)) as url, raises(RemoteError, where=url):
        RemoteLM(url, TOKENIZER).generate([[4]])


def test_an_aborted_completion_is_an_error():
    def abort(path, body):
        return 200, {"choices": [echo(path, body)[1]["choices"][0] | {"finish_reason": "abort"}]}

    with serving(abort) as url, raises(RemoteError, where=url):
        RemoteLM(url, TOKENIZER).generate([[4]])


def test_an_endless_answer_is_an_error_after_the_timeout():
    def drip(client: socket.socket) -> None:
        with client:
            client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(30):
                time.sleep(0.1)
                client.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(lambda: drip(server.accept()[0]))
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with raises(RemoteError, where=url):
            RemoteLM(url, TOKENIZER, timeout=0.5)
        assert not dripping.done()
        assert isinstance(dripping.exception(timeout=10), OSError | None)


@partly_slow("status", [302, 400, 429, 500], 0, 1, 3)
def test_completions_before_a_refusal_are_kept(status):
    with serving(lambda path, body: echo(path, body) if body["prompt"] != [6] else (status, {})) as url:
        lm = RemoteLM(url, TOKENIZER, patience=0.6)
        with raises(RemoteError, where=url) as caught:
            lm.generate([[4], [5], [6]], SamplerConfig(batch_size=1))
    assert set(caught.value.completed) == {0, 1}


def test_a_refused_prompt_stops_the_others():
    seen = []

    def refuse(path, body):
        seen.append(body["prompt"])
        return (400, {"message": "no"}) if body["prompt"] == [4] else echo(path, body)

    # the message counts those that were under way, one or two
    with (
        serving(refuse) as url,
        pytest.raises(GenerationError, match="of 51 completions are done") as refused,
    ):
        RemoteLM(url, TOKENIZER).generate([[4], *[[5]] * 50], SamplerConfig(batch_size=1))
    assert refused.value.where == url and len(seen) < 5


def test_patience_begins_with_the_first_failure():
    """It does not begin with the request, whose answer may have taken long."""
    failed = []

    def die(path, body):
        if not failed:
            time.sleep(1.2)
            failed.append(body)
            return 503, {}
        return echo(path, body)

    with serving(die) as url:
        assert RemoteLM(url, TOKENIZER, patience=0.8).generate([[4]]).tokens == [[4]]


def test_noise_is_seeded_by_prompt_and_seed():
    seen: list[int] = []

    def note(path, body):
        seen.append(body["seed"])
        return echo(path, body)

    with serving(note) as url:
        lm = RemoteLM(url, TOKENIZER)
        config = SamplerConfig(batch_size=1, temperature=1.0)
        for seed in (0, 0, 1):
            lm.generate([[4], [4]], config.model_copy(update={"seed": seed}))
    assert seen[:2] == seen[2:4] and len({*seen}) == 4


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("model")
    write_model(model, seed=0)
    with Server(model, tmp_path_factory.mktemp("vllm") / "log.txt") as server:
        yield server


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_gives_the_tokens_of_the_engine(vllm):
    model = str(vllm.model)
    prompts = ["Once upon a time", "The dog", "Lily and her mom went to the"]
    config = SamplerConfig(max_new_tokens=48)
    with RemoteLM(vllm.url, model) as remote:
        there = remote.generate(prompts, config)
        drawn = SamplerConfig(max_new_tokens=16, temperature=1.0)
        one, two, three = (
            remote.generate(prompts, drawn.model_copy(update={"seed": seed})).tokens for seed in (0, 0, 1)
        )
    assert one == two != three
    here = unmask.generate(unmask.load(model), prompts, config)
    assert there.prompts == here.prompts and there.tokens == here.tokens and there.texts == here.texts
    for got, expected in zip(there.log_probs, here.log_probs, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("candidates", [1, 3])
def test_vllm_verifies_drafts(vllm, candidates):
    model = str(vllm.model)
    lm = with_pattern(unmask.load(model), "block_causal", 4, True, causal_context=True)
    config = SamplerConfig(mode="self-speculative", max_new_tokens=24, num_branches=candidates)
    prompts = ["Once upon a time", "The dog", "Lily and her mom went to the"]
    with RemoteLM(vllm.url, model) as remote:
        found, expected = (
            unmask.generate(lm, prompts, config, verifier=remote),
            remote.generate(prompts, SamplerConfig(max_new_tokens=24)),
        )
        with pytest.raises(GenerationError, match=r"verifier: the server refuses -1 log-probabilities"):
            unmask.generate(lm, prompts, config.model_copy(update={"temperature": 1.0}), verifier=remote)
    assert found.tokens == expected.tokens and 0 < found.accepted_drafts < 1
    for got, other in zip(found.log_probs, expected.log_probs, strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(other), atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_stops_at_each_end_token(vllm):
    lm = unmask.load(vllm.model)
    prompts, config = (
        ["Once upon a time", "The dog", "Lily and her mom went to the"],
        SamplerConfig(max_new_tokens=24),
    )
    lm.eos_token_ids = (
        lm.eos_token_id,
        *(tokens[7] for tokens in unmask.generate(lm, prompts, config).tokens),
    )
    here = unmask.generate(lm, prompts, config)
    with RemoteLM(vllm.url, str(vllm.model), eos_token_ids=lm.eos_token_ids) as remote:
        there = remote.generate(prompts, config)
    assert (
        there.tokens == here.tokens
        and there.texts == here.texts
        and all(tokens[-1] in lm.eos_token_ids for tokens in here.tokens)
    )
    assert [len(row) for row in there.log_probs] == [len(row) for row in here.tokens]


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_refuses_tokens_that_its_model_lacks(vllm):
    tokenizer = unmask.load(vllm.model).tokenizer  # has a mask token, which must not be produced
    with RemoteLM(vllm.url, tokenizer) as remote, pytest.raises(RemoteError, match="vocab") as caught:
        remote.generate(["Once upon a time"])
    assert caught.value.status == 400


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_serves_new_weights(vllm, tmp_path):
    model = str(vllm.model)
    config = SamplerConfig(max_new_tokens=12)
    write_model(tmp_path, seed=1)
    with RemoteLM(vllm.url, model) as remote:
        before = remote.generate(["Once upon a time"], config)
        remote.update_weights(str(tmp_path))
        changed = remote.generate(["Once upon a time"], config)
        remote.update_weights(model)
        again = remote.generate(["Once upon a time"], config)
    expected = unmask.generate(unmask.load(str(tmp_path)), ["Once upon a time"], config)
    assert changed.tokens == expected.tokens and changed.log_probs != before.log_probs
    torch.testing.assert_close(
        torch.tensor(changed.log_probs), torch.tensor(expected.log_probs), atol=1e-3, rtol=1e-3
    )
    assert again.tokens == before.tokens


@pytest.mark.slow
@pytest.mark.vllm
def test_a_vllm_that_restarts_loses_no_completion(vllm):
    model, config = str(vllm.model), SamplerConfig(max_new_tokens=200, stop_at_eos=False, batch_size=4)
    prompts = ["Once upon a time", "The dog", "Lily and her mom went to the", "A"] * 4
    expected = unmask.generate(unmask.load(model), prompts, config)
    with RemoteLM(vllm.url, model, patience=300) as remote, ThreadPoolExecutor(1) as pool:
        running = pool.submit(remote.generate, prompts, config)
        time.sleep(1)
        assert not running.done()
        vllm.kill()
        time.sleep(1)
        assert not running.done()
        vllm.start()
        assert running.result().tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL takes a GPU for the server and one for the model"
)
def test_vllm_gets_weights_over_nccl(vllm, tmp_path):
    write_model(tmp_path, seed=1)
    new = unmask.load(str(tmp_path))
    config = SamplerConfig(max_new_tokens=12)
    with RemoteLM(vllm.url, str(vllm.model)) as remote:
        for _ in range(2):
            remote.update_weights(new.model.to("cuda:1"))
            assert (
                remote.generate(["Once upon a time"], config).tokens
                == unmask.generate(new, ["Once upon a time"], config).tokens
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_weights_over_nccl_need_a_gpu():
    with serving(echo) as url, raises(GenerationError, where="update_weights"):
        RemoteLM(url, TOKENIZER).update_weights(torch.nn.Linear(2, 2))
