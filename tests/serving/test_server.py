"""`unmask serve` as a process: its command line, its end, and what it says."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

import unmask
from tests.generation.tiny_models import tiny
from tests.serving.commands import command
from tests.serving.servers import connect, http_get, http_post, served
from unmask.cli import app
from unmask.cli.serve import keys_of, name_of
from unmask.config.run import SamplerConfig
from unmask.errors import ConfigError
from unmask.serving.app import AppSettings, make_app
from unmask.serving.middleware import LOOPBACK
from unmask.serving.scheduler import Scheduler
from unmask.serving.server import make_server, open_port


def complete(url: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "model", "prompt": prompt, "max_tokens": 32, "temperature": 0, **fields}
    return http_post(f"{url}/v1/completions", json=body)


@pytest.mark.slow
def test_sigterm_under_load_loses_no_accepted_answer(tmp_path: Path) -> None:
    lm = tiny(attention="bidirectional")
    lm.save(tmp_path / "model")
    prompts = ["abc", "f", "dd", "fedcba"] * 3
    answers: dict[int, httpx.Response] = {}
    with command(tmp_path / "model", "--dtype", "float64", "--batch-size", 2) as (process, url):
        clients = [threading.Thread(target=lambda i=i, p=p: answers.update({i: complete(url, p)})) for i, p in enumerate(prompts)]
        for client in clients:
            client.start()
        while "\nunmask_running_sequences 2.0" not in http_get(f"{url}/metrics").text:
            time.sleep(0.001)
        accepted = float(http_get(f"{url}/metrics").text.split("\nunmask_queue_length ")[1].split()[0])
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join()
        assert process.wait(60) in (0, -signal.SIGTERM)
        assert process.stdout is not None and "Traceback" not in process.stdout.read()
    config = SamplerConfig(max_new_tokens=32)
    assert len(answers) >= accepted and accepted > 0
    for index, answer in answers.items():
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == unmask.generate(lm, [prompts[index]], config).texts[0]


def test_what_is_done_at_the_start_finds_the_port_open() -> None:
    scheduler, found = Scheduler({"tiny": tiny(layers=1)}), []
    with open_port("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def look() -> None:
            connect(url).close()
            found.append(url)
            server.should_exit = True

        server = make_server(make_app(scheduler, AppSettings()), scheduler, grace=0, on_start=look)
        server.run(sockets=[listener])
    assert found == [url]


def test_after_the_grace_what_is_left_ends_with_a_clear_error() -> None:
    answers: list[httpx.Response] = []
    with served(tiny(attention="bidirectional"), batch_size=1, grace=0) as url:

        def ask() -> None:
            body = {"model": "tiny", "prompt": ["a"] * 256, "max_tokens": 36, "temperature": 0}
            answers.append(http_post(f"{url}/v1/completions", json=body))

        client = threading.Thread(target=ask)
        client.start()
        while "\nunmask_running_sequences 1.0" not in http_get(f"{url}/metrics").text:
            assert client.is_alive(), answers
    client.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["message"] == "the server ended before this request was finished. Send it again."


@pytest.mark.slow
def test_logs_have_no_prompts_unless_asked(tmp_path: Path) -> None:
    tiny().save(tmp_path / "model")
    logs = []
    for words in ([], ["--log-requests"]):
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
    assert "abcabcabc" not in logs[0] and "POST /v1/completions" in logs[1] and "abcabcabc" in logs[1]


@pytest.mark.parametrize(
    "words, environment, error",
    [
        (["--host", "0.0.0.0"], {}, "--host: other machines can reach this address, and the server has no API key. Set UNMASK_API_KEY to"),
        (["--weights-from", "."], {}, "--weights-from: weights may be replaced only with a key of its own. Set UNMASK_ADMIN_KEY to"),
        (["--api-keys", "absent"], {}, "absent: cannot be read"),
    ],
)
def test_unsafe_settings_are_refused_before_a_model_is_read(words: list[str], environment: dict[str, str], error: str) -> None:
    environment = {"UNMASK_API_KEY": "", "UNMASK_ADMIN_KEY": ""} | environment
    result = CliRunner().invoke(app, ["serve", "no/model", *words], env=environment)
    assert result.exit_code == 2 and error in result.stderr


def test_keys_come_from_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNMASK_API_KEY", "own")
    (tmp_path / "keys").write_text("one\n\n two \nown\n")
    assert keys_of(None) == ("own",) and keys_of(tmp_path / "keys") == ("own", "one", "two")
    (tmp_path / "none").write_text("\n")
    with pytest.raises(ConfigError, match="none: has no key"):
        keys_of(tmp_path / "none")


def test_clients_do_not_learn_where_a_model_lies(tmp_path: Path) -> None:
    assert name_of(str(tmp_path)) == tmp_path.name and name_of("org/model") == "org/model"


@pytest.mark.parametrize(
    "host, loopback", [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)]
)
def test_addresses_of_this_machine(host: str, loopback: bool) -> None:
    assert (host in LOOPBACK) is loopback


def test_an_address_in_use_is_refused() -> None:
    with open_port("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(ConfigError, match=r"cannot be bound.*Choose another --host or --port"):
            open_port("127.0.0.1", first.getsockname()[1])


def test_without_its_libraries_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "m"])
    assert result.exit_code == 2
    assert result.stderr == "error: unmask serve: needs fastapi, which is not installed. Install it with pip install 'unmask[serve]'.\n"
