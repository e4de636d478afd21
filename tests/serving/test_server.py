"""`unmask serve` as a process: its command line, its end, and what it says."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

import unmask
from tests.errors import raises
from tests.helpers import each_once
from tests.serving.commands import command
from tests.serving.servers import connect, http_get, http_post, posted, served, serving
from tests.serving.workers.local import serving_locally
from tests.tiny import adapted, cached_chat_lm, chat_lm, float64_lm, save_adapters
from unmask.cli import app
from unmask.cli.serve import announce, keys_of, name_of
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.serving.app import PLAYGROUND, AppSettings, make_app
from unmask.serving.middleware import LOOPBACK
from unmask.serving.openai import plans
from unmask.serving.scheduler import Scheduler
from unmask.serving.server import make_server, open_port


def complete(url: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "model", "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields}
    return http_post(f"{url}/v1/completions", json=body)


FRAMES = {"diffusion": {"stream": "frames"}}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("completions", {}),
    "two": ("completions", {"n": 2}),
    "stream": ("completions", {"stream": True}),
    "frames": ("completions", {"stream": True, **FRAMES}),
    "chat": ("chat/completions", {"stream": True, **FRAMES}),
}


def texts_of(answer: httpx.Response) -> list[str]:
    """Of an answer or a stream that is whole."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [choice["text"] for choice in answer.json()["choices"]]
    *events, end, _ = answer.text.split("\n\n")
    assert end == "data: [DONE]"
    choices = [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in events
        if event.startswith("data: ")
    ]
    return [
        "".join(
            choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices
        )
    ]


def ended_clearly(answer: httpx.Response) -> bool:
    """Whether an answer, or the last event of a stream, is an error that says what happened."""
    last = (
        answer.text
        if answer.status_code != 200
        else answer.text.strip().split("\n\n")[-1].removeprefix("data: ")
    )
    error = json.loads(last).get("error", {})
    return (
        answer.status_code in (200, 503)
        and error.get("type") == "server_error"
        and error["message"].startswith("the server end")
    )


def ask_in_every_way(
    url: str, name: str, ways: Sequence[str], answers: dict[int, httpx.Response], **fields: Any
) -> list[threading.Thread]:
    """Clients that ask at once, and add what they are answered."""

    def ask(index: int, way: str) -> None:
        path, own = WAYS[way]
        asked = (
            {"messages": [{"role": "user", "content": "ab"}]}
            if path == "chat/completions"
            else {"prompt": "ab"}
        )
        answers[index] = http_post(f"{url}/v1/{path}", json={"model": name, **asked, **fields, **own})

    clients = [threading.Thread(target=ask, args=(index, way)) for index, way in enumerate(ways)]
    for client in clients:
        client.start()
    return clients


def is_open(url: str) -> bool:
    """Whether a server accepts connections."""
    try:
        connect(url).close()
    except ConnectionRefusedError:
        return False
    return True


def sequences(url: str) -> tuple[float, float]:
    """How many run, and how many wait."""
    told = http_get(f"{url}/metrics").text
    running, waiting = (
        told.split(f"\n{name} ")[1].split()[0] for name in ("unmask_running_sequences", "unmask_queue_length")
    )
    return float(running), float(waiting)


@pytest.mark.slow
@pytest.mark.parametrize("grace", [pytest.param(3600, marks=pytest.mark.nightly), 0])
def test_sigterm_under_load_loses_no_accepted_answer(grace: int, tmp_path: Path) -> None:
    """Those that run and those that wait are answered, whole or in a stream; or, if the time for that is
    over, end with a clear error."""
    lm, size = cached_chat_lm(), 400
    lm.save(tmp_path / "model")
    ways, answers = [*WAYS] * 2, dict[int, httpx.Response]()
    with command(tmp_path / "model", "--dtype", "float64", "--batch-size", 2, "--grace", grace) as (
        process,
        url,
    ):
        clients = ask_in_every_way(url, "model", ways, answers, max_tokens=size, seed=3)
        while sum(sequences(url)) < len(ways) * 6 / 5:  # one in five asks for two
            assert not answers, "the first answer came before the last request"
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stdout is not None and "Traceback" not in process.stdout.read()
    assert len(answers) == len(ways)
    if grace == 0:
        assert all(map(ended_clearly, answers.values()))
        return
    config = SamplerConfig(max_new_tokens=size, seed=3)
    chat = unmask.generate(lm, [[{"role": "user", "content": "ab"}]], config).texts
    completions = unmask.generate(lm, ["ab"] * 2, config).texts
    for index, answer in answers.items():
        assert answer.status_code == 200, answer.text
        assert texts_of(answer) == (
            chat if ways[index] == "chat" else completions[: 2 if ways[index] == "two" else 1]
        )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [["--workers", 2], pytest.param([], marks=pytest.mark.nightly)])
def test_the_command_serves_models_and_adapters_by_name(workers: list[str | int], tmp_path: Path) -> None:
    lm, other = float64_lm(attention="bidirectional"), float64_lm(attention="block_causal", block_size=3)
    expected = {"base": lm, "red": adapted(lm, 0), "blue": adapted(lm, 1), "other": other}
    lm.save(tmp_path / "base")
    other.save(tmp_path / "other")
    words = [
        f"--adapters={name}={save_adapters(expected[name], tmp_path / name)}" for name in ("red", "blue")
    ]
    words += [f"--model=other={tmp_path / 'other'}", "--dtype", "float64"]
    config = SamplerConfig(max_new_tokens=32)
    with command(tmp_path / "base", *words, *workers) as (_, url):
        texts = {name: complete(url, "abc", model=name).json()["choices"][0]["text"] for name in expected}
    assert texts == {
        name: unmask.generate(model, ["abc"], config).texts[0] for name, model in expected.items()
    }


def test_what_is_done_at_the_start_finds_the_port_open() -> None:
    scheduler, found = Scheduler({"tiny": float64_lm(layers=1)}), []
    with open_port("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def look() -> None:
            connect(url).close()
            found.append(url)
            server.should_exit = True

        server = make_server(make_app(scheduler, AppSettings()), scheduler, grace=0, on_start=look)
        server.run(sockets=[listener])
    assert found == [url]


@pytest.mark.parametrize("way", [*WAYS])
def test_after_the_grace_what_is_left_ends_with_a_clear_error(way: str) -> None:
    """Both what runs and what waits."""
    answers: dict[int, httpx.Response] = {}
    with served(chat_lm(), batch_size=1, grace=0) as url:
        clients = ask_in_every_way(url, "tiny", [way] * 3, answers, max_tokens=1500)
        while sum(sequences(url)) < (6 if way == "two" else 3):
            assert not answers, answers
    for client in clients:
        client.join()
    assert len(answers) == 3 and all(map(ended_clearly, answers.values())), [
        answer.text[-200:] for answer in answers.values()
    ]


PREPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "read": ("completions", {"prompt": "ab"}),
    "encoded": ("completions", {"prompt": "ab"}),
    "compiled": ("completions", {"prompt": "ab", "diffusion": {"constraint": {"regex": "[a-f]{8}"}}}),
    "searched": ("infill", {"text": "ab<gap>cd", "max_gap": 4}),
}
"""What is done with a request before its sequences wait."""


@each_once("workers, stage", [False, True], [*PREPARED])
def test_requests_that_are_prepared_when_the_signal_comes_are_answered(
    stage: str, workers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is owed from the first byte of a request on, and not only once it waits for the engine."""
    begun, held = threading.Event(), threading.Event()
    if name := {"encoded": "encode_prompt", "compiled": "make_requests", "searched": "find_lengths"}.get(
        stage
    ):
        function = getattr(plans, name)
        monkeypatch.setattr(plans, name, lambda *args: (begun.set(), held.wait(60), function(*args))[-1])
    path, fields = PREPARED[stage]
    request = posted(
        path, **fields, seed=1, temperature=1.0, **({} if path == "infill" else {"max_tokens": 8})
    )
    with ExitStack() as stack:
        if workers:
            local = stack.enter_context(serving_locally([chat_lm()], grace=30))
            url, server = local.url, local.front
        else:
            url, server = stack.enter_context(serving(chat_lm(), grace=30))
        with connect(url) as client:
            client.sendall(request if stage != "read" else request[:-9])
            if stage != "read":
                assert begun.wait(30)
            server.should_exit = True
            while is_open(url):
                time.sleep(0.01)
            time.sleep(0.1)
            held.set()
            client.sendall(request[-9:] if stage == "read" else b"")
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == 200, answer.read()
            assert json.loads(answer.read())["choices"][0]["finish_reason"]


@pytest.mark.parametrize("new", [False, True])
def test_what_arrives_before_the_signal_is_answered_though_the_server_was_busy(new: bool) -> None:
    """On a connection that it has, or one that it has yet to accept."""
    with serving(chat_lm(), grace=30) as (url, server), connect(url) as kept:
        while not server.server_state.connections:
            time.sleep(0.01)
        [connection] = server.server_state.connections
        connection.loop.call_soon_threadsafe(time.sleep, 0.5)
        time.sleep(0.1)
        with connect(url) if new else kept as client:
            client.sendall(posted("completions", prompt="ab", max_tokens=8))
            server.should_exit = True
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert answer.status == 200


@pytest.mark.slow
def test_logs_have_no_prompts_unless_asked(tmp_path: Path) -> None:
    float64_lm().save(tmp_path / "model")
    logs = []
    for words in ([], ["--log-requests"], ["--log-requests", "--workers", "1"]):
        limits = ["--max-tokens", "40", "--max-answers", "2", "--queue-size", "3"]
        with command(tmp_path / "model", *limits, *words) as (process, url):
            told = http_get(f"{url}/v1/models").json()["data"][0]["limits"]
            assert told == {"sequences": 3, "n": 2, "max_tokens": 40}
            assert complete(url, "abcabcabc", max_tokens=8).status_code == 200
            assert complete(url, "abcabcabc", max_tokens=10**9).status_code == 400
            process.send_signal(signal.SIGINT)
            process.wait(60)
            assert process.stdout is not None
            logs.append(process.stdout.read())
    assert "abcabcabc" not in logs[0]
    for log in logs[1:]:  # each request once
        assert [line.split()[2] for line in log.splitlines()[1:]] == ["GET", "POST", "POST"] and log.count(
            "abcabcabc"
        ) == 2, log


@pytest.mark.parametrize(
    "words, environment, error",
    [
        (
            ["--host", "0.0.0.0"],
            {},
            (
                "--host: other machines can reach this address, and the server has no API key. Set "
                "UNMASK_API_KEY to"
            ),
        ),
        (
            ["--weights-from", "."],
            {},
            "--weights-from: weights may be replaced only with a key of its own. Set UNMASK_ADMIN_KEY to",
        ),
        (["--api-keys", "absent"], {}, "absent: No such file"),
    ],
)
def test_unsafe_settings_are_refused_before_a_model_is_read(
    words: list[str], environment: dict[str, str], error: str
) -> None:
    environment = {"UNMASK_API_KEY": "", "UNMASK_ADMIN_KEY": ""} | environment
    result = CliRunner().invoke(app, ["serve", "no/model", *words], env=environment)
    assert result.exit_code == 2 and error in result.stderr


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNMASK_API_KEY", "own")
    (tmp_path / "keys").write_text("one\n\n two \nown\n")
    assert keys_of(None) == ("own",) and keys_of(tmp_path / "keys") == ("own", "one", "two")
    (tmp_path / "none").write_text("\n")
    with raises(ConfigError, where=str(tmp_path / "none")):
        keys_of(tmp_path / "none")


def test_clients_do_not_learn_where_a_model_lies(tmp_path: Path) -> None:
    assert name_of(str(tmp_path)) == tmp_path.name and name_of("org/model") == "org/model"


@pytest.mark.parametrize(
    "host, loopback",
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
    ],
)
def test_addresses_of_this_machine(host: str, loopback: bool) -> None:
    assert (host in LOOPBACK) is loopback


def test_an_address_in_use_is_refused() -> None:
    with open_port("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        with raises(ConfigError, where=f"127.0.0.1:{port}"):
            open_port("127.0.0.1", port)


def test_what_is_served_is_said_with_the_address_for_clients_and_browsers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open_port("127.0.0.1", 0) as listener:
        announce(listener, 0, "A model is served as m")
    first, second = capsys.readouterr().out.splitlines()
    address = first.removeprefix("A model is served as m at ")
    page = f"; in a browser: {address}" * (PLAYGROUND / "index.html").is_file()
    assert (
        address.startswith("http://127.0.0.1:")
        and second == f"next: for OpenAI's clients base_url={address}/v1{page}"
    )


def test_without_its_libraries_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: unmask serve: needs fastapi, which is not installed. Install it with pip install "
        "'unmask[serve]'.\n"
    )
