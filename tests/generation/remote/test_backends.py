"""Rollouts from the model in process and from servers, which get new weights, die, and restart."""

from __future__ import annotations

import copy
import functools
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig

import unmask
from tests.errors import raises
from tests.generation.cases import PATTERNS
from tests.generation.remote.stub_servers import (
    FOR_ADAPTERS,
    FOR_ADAPTERS_IN_ENVIRONMENT,
    FOR_ROLLOUTS,
    FakeVLLM,
    Server,
    free_port,
    serving,
    write_model,
)
from tests.helpers import REPOSITORY, each_once
from tests.serving.servers import copied, served, serving_rollouts
from tests.tiny import adapted, float64_lm
from unmask.config.rollout import RolloutConfig
from unmask.config.run import NoiseName
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.output import Generation
from unmask.generation.remote.backends import (
    LocalBackend,
    ServerBackend,
    VLLMBackend,
    in_chunks,
    make_backend,
)
from unmask.generation.remote.http import RemoteError
from unmask.generation.remote.protocol import model_facts
from unmask.generation.requests import make_requests
from unmask.generation.rollout import make_rollout
from unmask.models.adapters import merged, with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.export import export
from unmask.sandbox.launch import usage_of
from unmask.serving.app import AppSettings

PROMPTS = [[4, 5, 6], [7], [4, 5, 6], [9, 8, 7, 6, 5, 4]]
KEYS = [3, -(2**63), 2**63 - 1, 0]
CONFIG = SamplerConfig(max_new_tokens=8, temperature=1.0, seed=5, trace=True)
CANVAS = SamplerConfig(max_new_tokens=8, max_denoising_steps=4, seed=5, trace=True)


def changed(lm: DiffusionLM, seed: int = 7) -> DiffusionLM:
    """The same model with other weights, as after further training."""
    trained, generator = lm.frozen_copy(), torch.Generator().manual_seed(seed)
    for weight in trained.model.parameters():
        weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return trained


def unreused(generation: Generation) -> Generation:
    """Without what a server does not tell, of prompts that were read once: it has others than ours."""
    return replace(generation, prompt_reuse=None)


def to_server(url: str, **values: Any) -> RolloutConfig:
    return RolloutConfig(backend="server", url=url, **values)


def to_vllm(url: str, **values: Any) -> RolloutConfig:
    return RolloutConfig(backend="vllm", url=url, patience=2.0, **values)


@each_once("attention, block_size, noise", PATTERNS, ["masked", "uniform"])
def test_every_pattern_is_sampled_by_a_server_as_in_process(
    attention: str, block_size: int | None, noise: NoiseName, tmp_path: Path
) -> None:
    if noise == "uniform" and attention == "causal":
        pytest.skip("it has no noise")
    lm = float64_lm(attention=attention, block_size=block_size).with_noise(noise)
    config = CANVAS if noise == "uniform" else CONFIG
    trained, local = changed(lm), make_backend(RolloutConfig(), lm, tmp_path)
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path) as url:
        server = make_backend(to_server(url), lm, tmp_path)
        assert isinstance(local, LocalBackend) and isinstance(server, ServerBackend)
        expected = unreused(local.generate(PROMPTS, config, KEYS))
        assert server.generate(PROMPTS, config, KEYS) == expected
        server.sync(trained, step=1)
        generation = server.generate(PROMPTS, config, KEYS)
        server.close()
    assert generation == unreused(LocalBackend(trained).generate(PROMPTS, config, KEYS)) != expected
    assert make_rollout(lm, generation, slice(0, 4)).step_BT.max() > 0


def test_canvases_of_random_tokens_are_sampled_by_a_server_as_in_process(tmp_path: Path) -> None:
    lm = float64_lm(attention="bidirectional").with_noise("uniform")
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path) as url:
        server = make_backend(to_server(url), lm, tmp_path)
        for settings in ({}, {"t_min": 1.0, "t_max": 2.0}):
            config = SamplerConfig(max_new_tokens=8, seed=5, trace=True, max_denoising_steps=5, **settings)
            expected = unreused(LocalBackend(lm).generate(PROMPTS, config, KEYS))
            assert server.generate(PROMPTS, config, KEYS) == expected
        server.close()


def test_one_of_several_models_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, other = float64_lm(), float64_lm(attention="bidirectional")
    settings = AppSettings(admin_key="admin", weights_from=(tmp_path,))
    monkeypatch.setenv("UNMASK_ADMIN_KEY", "admin")
    with served(
        copied(other, tmp_path / "other"), settings, more={"remasking": copied(lm, tmp_path / "model")}
    ) as url:
        server, first = (
            make_backend(to_server(url, model="remasking"), lm, tmp_path),
            make_backend(to_server(url), other, tmp_path),
        )
        server.sync(changed(lm), step=1)
        found, untouched = server.generate(PROMPTS, CONFIG, KEYS), first.generate(PROMPTS, CONFIG, KEYS)
        with raises(GenerationError, where=url):
            make_backend(to_server(url, model="absent"), lm, tmp_path)
        server.close()
        first.close()
    assert found == unreused(LocalBackend(changed(lm)).generate(PROMPTS, CONFIG, KEYS))
    assert untouched == unreused(LocalBackend(other).generate(PROMPTS, CONFIG, KEYS))


def test_adapters_are_sent_merged(tmp_path: Path) -> None:
    lm = float64_lm(attention="bidirectional")
    trained = adapted(lm)
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path) as url:
        server = make_backend(to_server(url), lm, tmp_path)
        with raises(GenerationError, where="sync"):
            server.sync(trained, step=0)
        server.sync(merged(trained), step=0)
        generation = server.generate(PROMPTS, CONFIG, KEYS)
        server.close()
    assert generation == unreused(LocalBackend(merged(trained)).generate(PROMPTS, CONFIG, KEYS))


def test_a_table_that_is_no_longer_the_head_is_not_sent_to_a_model_in_which_it_is(fake, tmp_path):
    lm = float64_lm("gpt2")
    trained = with_adapters(lm.frozen_copy(), LoraConfig(target_modules=["wte"], init_lora_weights=False))
    _, url = fake(lm)
    backend = make_backend(to_vllm(url), lm, tmp_path)
    with raises(GenerationError, where="sync"):
        backend.sync(merged(trained), 0)
    backend.sync(
        merged(with_adapters(lm.frozen_copy(), LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True))), 0
    )
    backend.close()


def test_a_server_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    with served(float64_lm(attention="block_causal", block_size=4)) as url:
        for lm in [
            float64_lm(attention="block_causal", block_size=3),
            float64_lm(attention="bidirectional"),
            float64_lm("gpt2", attention="block_causal", block_size=4),
        ]:
            with raises(GenerationError, where=url):
                make_backend(to_server(url), lm, tmp_path)
    with serving(lambda path, body: (200, {"status": "ok"})) as url, raises(RemoteError, where=url):
        make_backend(to_server(url), float64_lm(), tmp_path)


def test_weights_are_sent_every_sync_steps_and_only_the_last_are_kept(fake, tmp_path):
    lm = float64_lm()
    vllm, url = fake(lm)
    backend = make_backend(
        to_vllm(url, sync_steps=3, folder=str(tmp_path / "weights")), lm, tmp_path / "elsewhere"
    )
    (tmp_path / "weights" / "step-0-unfinished").mkdir(parents=True)  # of a run that was killed
    held = {}
    for step in range(4, 10):  # a resumed run: the server may hold anything
        if backend.due(step):
            backend.sync(changed(lm, step), step)
        held[step] = Path(vllm.version).name
    backend.close()
    assert held == {4: "step-4", 5: "step-4", 6: "step-6", 7: "step-6", 8: "step-6", 9: "step-9"}
    assert backend.due(None)  # an evaluation uses the current weights
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["step-9"]
    last, expected = (
        own.model.state_dict() for own in (unmask.load(vllm.version, dtype="float64"), changed(lm, 9))
    )
    assert last.keys() == expected.keys() and all(torch.equal(last[name], expected[name]) for name in last)


def test_of_several_processes_the_first_sends_and_all_name_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = float64_lm()
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path) as url:
        first, second = (make_backend(to_server(url), lm, tmp_path) for _ in range(2))
        monkeypatch.setenv("RANK", "1")
        second.sync(changed(lm), 0)
        assert not (tmp_path / "rollout_weights").exists()
        monkeypatch.setenv("RANK", "0")
        first.sync(changed(lm), 0)
        generations = [backend.generate(PROMPTS, CONFIG, KEYS) for backend in (first, second)]
        for backend in (first, second):
            backend.close()
    assert (
        generations[0]
        == generations[1]
        == unreused(LocalBackend(changed(lm)).generate(PROMPTS, CONFIG, KEYS))
    )


def test_a_server_that_has_too_many_requests_is_waited_for_longer_than_an_absent_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, answers = float64_lm(), iter([429, 429, 200])
    card = {"id": "tiny", "version": None, "facts": model_facts(lm), "limits": {"sequences": 256}}
    monkeypatch.setattr(ServerBackend, "served", lambda _: card)

    def full_at_first(path: str, body: Any) -> tuple[int, Any]:
        traces = unmask.generate(lm, body["prompt"], CONFIG, body["diffusion"]["keys"]).trace or []
        return next(answers), {"choices": [{"diffusion": {"trace": asdict(trace)}} for trace in traces]}

    with serving(full_at_first) as url:
        server = make_backend(to_server(url, patience=0.0), lm, tmp_path)
        assert server.generate(PROMPTS, CONFIG, KEYS) == unreused(
            LocalBackend(lm).generate(PROMPTS, CONFIG, KEYS)
        )
        server.close()


def test_what_a_server_cannot_do_is_refused_before_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UNMASK_ADMIN_KEY", raising=False)
    lm = float64_lm()
    with served(lm) as url:
        server = make_backend(to_server(url), lm, tmp_path)
        with raises(GenerationError, where="deterministic"):
            server.generate(PROMPTS, CONFIG.model_copy(update={"deterministic": True}), KEYS)
        with raises(GenerationError, where=url):
            server.sync(changed(lm), 0)
        server.close()


def test_long_rollouts_are_several_requests() -> None:
    requests = make_requests(float64_lm(), [[4, 5, 6]] * 7, CONFIG)
    assert [len(chunk) for chunk in in_chunks(requests, 3)] == [3, 3, 1]
    long = [replace(request, prompt=[4] * 30_000) for request in requests]
    assert [len(chunk) for chunk in in_chunks([*requests[:2], *long[:2], *requests[:1]], 64)] == [3, 2]
    assert in_chunks([], 3) == []


def test_a_restarted_server_gets_the_weights_again(tmp_path: Path) -> None:
    lm = float64_lm()
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path) as url:
        server = make_backend(to_server(url), lm, tmp_path)
        server.sync(changed(lm), 0)
        expected = server.generate(PROMPTS, CONFIG, KEYS)
    with serving_rollouts(copied(lm, tmp_path / "model"), tmp_path, port=int(url.rpartition(":")[2])):
        assert server.generate(PROMPTS, CONFIG, KEYS) == expected
        server.close()
    assert expected != unreused(LocalBackend(lm).generate(PROMPTS, CONFIG, KEYS))


@pytest.fixture
def fake() -> Iterator[Callable[..., tuple[FakeVLLM, str]]]:
    """A fake vLLM and its address."""
    servers: list[Any] = []

    def start(lm: DiffusionLM, *, processed: bool = True) -> tuple[FakeVLLM, str]:
        vllm = FakeVLLM(lm, processed=processed)
        servers.append(serving(vllm))
        return vllm, servers[-1].__enter__()

    yield start
    for server in servers:
        server.__exit__(None, None, None)


@pytest.mark.parametrize(
    "settings, processed, log_probs, sampled",
    [
        ({"temperature": 1.0}, True, "given", "given"),
        ({"temperature": 1.0}, False, "given", "given"),
        ({"temperature": 0.7}, True, "unknown", "given"),
        ({"temperature": 0.7}, False, "given", "none"),
        ({"temperature": 1.0, "top_p": 0.9}, True, "unknown", "given"),
        ({"temperature": 1.0, "top_k": 5}, False, "given", "none"),
        ({"temperature": 1.0, "forbidden_tokens": [5]}, True, "unknown", "given"),
        ({"temperature": 0.0}, True, "given", "certain"),
        ({"temperature": 0.0, "top_k": 5}, False, "given", "certain"),
    ],
)
def test_traces_of_vllm_have_only_known_log_probs(fake, tmp_path, settings, processed, log_probs, sampled):
    lm = float64_lm()
    _, url = fake(lm, processed=processed)
    backend = make_backend(to_vllm(url), lm, tmp_path)
    generation = backend.generate(
        [[4, 5], [6]], SamplerConfig(max_new_tokens=5, trace=True, **settings), [1, 2]
    )
    backend.close()
    eos, mask, given = lm.eos_token_id, lm.mask_token_id, [-0.5, -0.25, -1.0]
    expected = {"given": given, "unknown": [math.nan] * 3, "certain": [0.0] * 3}
    assert generation.tokens == [[5, 5, eos], [6, 6, eos]] and generation.steps == [[0, 1, 2]] * 2
    for first, trace in zip((5, 6), generation.trace, strict=True):
        assert (
            trace.canvas == [first, first, eos, mask, mask]
            and trace.steps == [0, 1, 2, -1, -1]
            and trace.forward_passes == 3
        )
        assert trace.log_probs == pytest.approx([*expected[log_probs], 0.0, 0.0], nan_ok=True)
        assert trace.sampled_log_probs == ([] if sampled == "none" else [*expected[sampled], 0.0, 0.0])
    rollout = make_rollout(lm, generation, slice(0, 2))
    assert rollout.completion_BT.sum(1).tolist() == [3, 3] and rollout.step_BT[0].tolist() == [
        -1,
        -1,
        0,
        1,
        2,
        -1,
        -1,
    ]


def test_vllm_gets_the_end_tokens_of_the_model(fake, tmp_path):
    lm = copy.copy(float64_lm())
    lm.eos_token_ids = (2, 7)
    vllm, url = fake(lm, processed=True)
    backend = make_backend(to_vllm(url), lm, tmp_path)
    backend.generate([[4, 5]], SamplerConfig(max_new_tokens=5))
    backend.close()
    assert vllm.asked[-1][1]["stop_token_ids"] == [2, 7]


def test_vllm_is_for_causal_models(tmp_path):
    for lm in (
        float64_lm(attention="bidirectional"),
        float64_lm(attention="block_causal", block_size=3),
        float64_lm(logit_shift=False),
    ):
        with raises(GenerationError, where="backend"):
            make_backend(to_vllm("http://127.0.0.1:9"), lm, tmp_path)


def test_a_vllm_without_the_mask_token_is_refused_at_the_start(tmp_path):
    with (
        serving(lambda path, body: (400, {"message": "out of vocab"})) as url,
        raises(GenerationError, where=url),
    ):
        make_backend(to_vllm(url), float64_lm(), tmp_path)


ADAPTERS_ELSEWHERE = [
    pytest.param(LoraConfig(target_modules=["q_proj"], **{name: value}), id=name)
    for name, value in {
        "use_dora": True,
        "modules_to_save": ["embed_tokens"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 2},
        "trainable_token_indices": [4],
        "bias": "lora_only",
    }.items()
] + [pytest.param(IA3Config(target_modules=["q_proj"], feedforward_modules=[]), id="IA3")]


@pytest.mark.parametrize("peft_config", ADAPTERS_ELSEWHERE)
def test_adapters_that_vllm_does_not_compute_are_refused_before_any_request(peft_config, tmp_path):
    with raises(GenerationError, where="sync"):
        make_backend(
            to_vllm("http://127.0.0.1:9", sync="lora"),
            with_adapters(float64_lm().frozen_copy(), peft_config),
            tmp_path,
        )


@pytest.mark.parametrize(
    ("sync", "where"),
    [
        ("lora", "sync"),
        ("nccl", "update_weights"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL finds a GPU here")
def test_weights_that_cannot_be_sent_are_refused_before_any_request(sync, where, tmp_path):
    with raises(GenerationError, where=where):
        make_backend(to_vllm("http://127.0.0.1:9", sync=sync), float64_lm(), tmp_path)


def test_vllm_reads_whole_weights_from_a_folder(fake, tmp_path):
    lm = float64_lm()
    vllm, url = fake(lm)
    backend = make_backend(to_vllm(url), lm, tmp_path)
    backend.sync(changed(lm), 3)
    backend.close()
    [body] = [body for path, body in vllm.asked if path == "/collective_rpc"]
    path = tmp_path / "rollout_weights" / "step-3"
    assert body == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(path)},
    } and vllm.version == str(path)
    new = unmask.load(path, dtype="float64")
    assert new.model.state_dict().keys() == lm.model.state_dict().keys()
    assert vllm.paths()[-2:] == ["/reset_prefix_cache", "/update_weight_version"]


def test_vllm_serves_adapters_under_their_own_name(fake, tmp_path):
    lm = float64_lm()
    vllm, url = fake(lm)
    backend = make_backend(to_vllm(url, sync="lora"), adapted(lm), tmp_path)
    vllm.version = "/run/rollout_weights/step-9"
    with raises(GenerationError, where=url):
        backend.sync(adapted(lm), 0)
    vllm.version = "default"
    backend.sync(adapted(lm), 0)
    backend.generate(PROMPTS, CONFIG, KEYS)
    backend.close()
    [body] = [body for path, body in vllm.asked if path == "/v1/load_lora_adapter"]
    path = tmp_path / "rollout_weights" / "step-0"
    assert body == {"lora_name": vllm.adapter, "lora_path": str(path), "load_inplace": True}
    assert {file.name for file in path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert [body["model"] for path, body in vllm.asked[-4:]] == [vllm.adapter] * 4


def test_every_process_asks_vllm_for_the_adapters_that_the_first_one_sent(fake, tmp_path, monkeypatch):
    lm = float64_lm()
    vllm, url = fake(lm)
    first, second = (make_backend(to_vllm(url, sync="lora"), adapted(lm), tmp_path) for _ in range(2))
    first.sync(adapted(lm), 0)
    monkeypatch.setenv("RANK", "1")
    second.sync(adapted(lm), 0)
    second.generate([[4]], CONFIG)
    assert vllm.asked[-1][1]["model"] == vllm.adapter and vllm.paths().count("/v1/load_lora_adapter") == 1
    for backend in (first, second):
        backend.close()


@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_a_vllm_that_lost_the_weights_gets_them_and_samples_again(fake, tmp_path, sync):
    lm = float64_lm()
    vllm, url = fake(lm)
    backend = make_backend(to_vllm(url, sync=sync), lm if sync == "disk" else adapted(lm), tmp_path)
    backend.sync(changed(lm) if sync == "disk" else adapted(lm), 0)
    done = len(vllm.asked)
    vllm.restarts = 1
    assert backend.generate(PROMPTS, CONFIG.model_copy(update={"batch_size": 1}), KEYS).tokens[0][:2] == [
        6,
        6,
    ]
    paths = vllm.paths()[done:]
    again = paths.index("/reset_prefix_cache")
    assert paths[again + 1 :].count("/v1/completions") == 4
    vllm.restarts = 1000
    with raises(RemoteError, where=url):
        backend.generate(PROMPTS, CONFIG.model_copy(update={"batch_size": 1}), KEYS)
    backend.close()


class Serve:
    """A process of `unmask serve`."""

    def __init__(self, model: Path, port: int):
        options = ["--port", str(port), "--batch-size", "1", "--weights-from", str(model.parent)]
        command = [sys.executable, "-m", "unmask", "serve", str(model), *options]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "UNMASK_ADMIN_KEY": "admin"}
        # background jobs of a shell ignore it
        heeds_interrupts = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heeds_interrupts,
        )

    def end(self, how: signal.Signals) -> str:
        self.process.send_signal(how)
        return self.process.communicate(timeout=30)[0]


@pytest.mark.slow
def test_unmask_serve_dies_in_the_middle_and_comes_back(tmp_path, monkeypatch):
    """The second time it does not come back."""
    monkeypatch.setenv("UNMASK_ADMIN_KEY", "admin")
    lm = float64_lm(attention="bidirectional", layers=3)
    lm.save(tmp_path / "model")
    lm = unmask.load(tmp_path / "model")  # float32, as the server reads it
    config = SamplerConfig(max_new_tokens=32, temperature=1.0, seed=1, batch_size=1, stop_at_eos=False)
    prompts, keys = PROMPTS * 6, list(range(24))
    port = free_port()
    serve = Serve(tmp_path / "model", port)
    try:
        backend = make_backend(to_server(f"http://127.0.0.1:{port}", patience=120.0), lm, tmp_path)
        backend.sync(changed(lm), 0)
        expected = LocalBackend(changed(lm)).generate(prompts, config, keys)
        with ThreadPoolExecutor(1) as pool:
            idle = usage_of(serve.process.pid).computed
            running = pool.submit(backend.generate, prompts, config, keys)
            while usage_of(serve.process.pid).computed < idle + 0.1:
                assert not running.done()
            serve.end(signal.SIGKILL)
            serve = Serve(tmp_path / "model", port)
            assert running.result() == expected
        told = (
            "DiffusionLM(PhiForCausalLM, bidirectional, logit_shift=False) is served as model at "
            f"http://127.0.0.1:{port}"
        )
        assert told in serve.end(signal.SIGINT)
        assert serve.process.returncode == 130
        backend.http.patience = 0.6
        with raises(RemoteError, where=f"http://127.0.0.1:{port}"):
            backend.generate(prompts, config, keys)
        backend.close()
    finally:
        serve.process.kill()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the mask token, adapters, and the log-probabilities of the sampled distribution."""
    stock, model = tmp_path_factory.mktemp("stock"), tmp_path_factory.mktemp("model")
    write_model(stock, seed=0)
    export(unmask.load(stock), model, "hf")
    log = tmp_path_factory.mktemp("vllm") / "log.txt"
    with Server(model, log, [*FOR_ROLLOUTS, *FOR_ADAPTERS], **FOR_ADAPTERS_IN_ENVIRONMENT) as server:
        yield server


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("sync", ["disk", "lora"])
def test_vllm_samples_from_the_trained_weights(vllm, tmp_path, sync):
    lm = unmask.load(vllm.model)
    prompts = [
        lm.tokenizer(text).input_ids
        for text in ("Once upon a time", "The dog", "Lily and her mom went to the")
    ]
    greedy = SamplerConfig(max_new_tokens=24, trace=True)
    drawn = greedy.model_copy(update={"temperature": 0.7})
    backend = make_backend(to_vllm(vllm.url, sync=sync), lm if sync == "disk" else adapted(lm), tmp_path)
    assert isinstance(backend, VLLMBackend) and backend.processed
    for step in range(2):
        trained = changed(lm, step) if sync == "disk" else adapted(lm, step)
        backend.sync(trained, step)
        there, here = backend.generate(prompts, greedy), LocalBackend(trained).generate(prompts, greedy)
        assert there.tokens == here.tokens and there.steps == here.steps
        for one, other in zip(there.trace, here.trace, strict=True):
            assert (one.canvas, one.steps, one.sampled_log_probs) == (
                other.canvas,
                other.steps,
                other.sampled_log_probs,
            )
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-3)
        generation = backend.generate(prompts, drawn, [1, 2, 3])
        for prompt, trace in zip(prompts, generation.trace, strict=True):
            ids = torch.tensor([prompt + trace.canvas])
            scored_TV = (trained.logits(ids)[0, len(prompt) :].detach() / 0.7).log_softmax(-1)
            for position, step_taken in enumerate(trace.steps):
                if step_taken >= 0:
                    expected = float(scored_TV[position, trace.canvas[position]])
                    assert trace.sampled_log_probs[position] == pytest.approx(expected, abs=1e-3)
    if sync == "disk":  # as it was
        backend.remote.update_weights(vllm.model)
        backend.remote.weight_version = "default"
    backend.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_restarted_vllm_samples_from_the_trained_weights(vllm, tmp_path):
    lm, config = unmask.load(vllm.model), SamplerConfig(max_new_tokens=24)
    trained = changed(lm)
    backend = make_backend(to_vllm(vllm.url), lm, tmp_path)
    backend.sync(trained, 0)
    vllm.kill()
    vllm.start()
    backend.remote.http.patience = 300.0
    assert (
        backend.generate(["Once upon a time"], config).tokens
        == LocalBackend(trained).generate(["Once upon a time"], config).tokens
    )
    backend.close()
