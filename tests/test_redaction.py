"""Secrets are masked wherever settings and errors are shown or recorded; control characters are escaped on
terminals."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from typer.testing import CliRunner

from tests.errors import raises
from unmask.artifacts import run_manifest, started_by
from unmask.cli.entry import app
from unmask.cli.run import resolved, training_arguments
from unmask.cli.verbs import VERBS
from unmask.config.base import type_args
from unmask.config.layers import read_layers
from unmask.config.run import RunConfig, resolve, to_yaml
from unmask.console import Progress, show_table
from unmask.errors import ConfigError, DataError
from unmask.redaction import (
    CONTROL,
    MASK,
    find_mask,
    masked,
    masked_argument,
    masked_text,
    masked_words,
    shown,
)
from unmask.training.model_history import chosen_settings
from unmask.training.run.lost_process import resume_command

SECRET = "s3cr3t-p4ss"
TOKEN = "hf_" + "a1B2" * 8
URLS = {
    f"http://me:{SECRET}@host:8000/path": f"http://me:{MASK}@host:8000/path",
    f"https://:{SECRET}@host": f"https://:{MASK}@host",
    f"http://me:{SECRET}@@host/": f"http://me:{MASK}@host/",
    f"https://host/judge?api_key={SECRET}&x=1": f"https://host/judge?api_key={MASK}&x=1",
    f"see http://a:{SECRET}@b and http://c:{SECRET}@d.": f"see http://a:{MASK}@b and http://c:{MASK}@d.",
    f"http:/me:{SECRET}@host/a": f"http:/me:{MASK}@host/a",  # as pathlib writes it
    f"http://{SECRET}@host/a and https://{SECRET}@h": f"http://{MASK}@host/a and https://{MASK}@h",
    f"https://me:a/{SECRET}@host/a@b": f"https://me:{MASK}@host/a@b",
    f"s3://AKIAIOSFODNN7EXAMPLE:a/{SECRET}@bucket": f"s3://AKIA{MASK}:{MASK}@bucket",
    f"at me:{SECRET}@host:8000": f"at me:{MASK}@host:8000",
    f"http://h/?auth={SECRET}&X-Amz-Credential={SECRET}#token={SECRET}": f"http://h/?auth={MASK}&X-Amz-Credential={MASK}#token={MASK}",
    f"token {TOKEN} there": f"token hf_{MASK} there",
    "AKIAIOSFODNN7EXAMPLE": f"AKIA{MASK}",
    "a eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN": f"a eyJ{MASK}",
    **{
        f"{service}{'a1B2' * 9}": f"{service}{MASK}"
        for service in (
            "github_pat_",
            "glpat-",
            "xoxb-",
            "nvapi-",
            "gsk_",
            "r8_",
            "pypi-AgE",
            "AIza",
            "sk-",
            "ghp_",
        )
    },
    f"npm_{TOKEN[3:]} and bearer {TOKEN[3:]}": f"npm_{MASK} and bearer {MASK}",
    f"https://hooks.slack.com/services/T0/B0/{SECRET[:6]}": f"https://hooks.slack.com/services/{MASK}",
    "Authorization: Basic bWU6czNjcjN0LXA0c3M=": f"Authorization: Basic {MASK}",
    f"http://h/?pwd={SECRET}": f"http://h/?pwd={MASK}",
    f"http://h/?otp={SECRET}&a=1&user_pin={SECRET}": f"http://h/?otp={MASK}&a=1&user_pin={MASK}",
    f"https://discord.com/api/webhooks/123/{SECRET}": f"https://discord.com/api/webhooks/{MASK}",
    f"https://a.webhook.office.com/webhookb2/{SECRET}@b/c": f"https://a.webhook.office.com/webhookb2/{MASK}",
    f"https://api.telegram.org/bot123:{SECRET}/send": f"https://api.telegram.org/bot{MASK}/send",
    f"Endpoint=x;AccountName=me;AccountKey={SECRET};A=b": f"Endpoint=x;AccountName=me;AccountKey={MASK}",
    f"Server=x;User Id=me;Password={SECRET}": f"Server=x;User Id=me;Password={MASK}",
    f"host=x user=me password={SECRET} dbname=a": f"host=x user=me password={MASK} dbname=a",
    "http://h/?max_tokens=5&spin=3&pin_memory=1&author=me": "http://h/?max_tokens=5&spin=3&pin_memory=1&author=me",
    "a basic straightforward-approach": "a basic straightforward-approach",
    "r8_alpha16_dropout_05_long_name": "r8_alpha16_dropout_05_long_name",
    "git@host.com:2/a b:c@d ratio 3:4@5": "git@host.com:2/a b:c@d ratio 3:4@5",
    "pypi-publish-workflow-name": "pypi-publish-workflow-name",
    "http://host:8000/a:b@c": "http://host:8000/a:b@c",
    "a: b@c, http://host/?page=2": "a: b@c, http://host/?page=2",
}
SECRETS = [
    f"training.hub_token={SECRET}",
    f"training.rollout={{backend: server, url: 'http://me:{SECRET}@host:1', api_key: {SECRET}}}",
    f"rewards=['http://me:{SECRET}@judge/score', 'http://judge/score?token={SECRET}']",
]


@pytest.mark.parametrize("text", URLS)
def test_passwords_of_urls_and_tokens_are_masked(text: str) -> None:
    assert masked_text(text) == URLS[text] == masked_text(masked_text(text))
    assert SECRET not in str(DataError(text, where=text, remedy=text))


def run_config() -> RunConfig:
    return resolve(read_layers(overrides=["model.path=m", "output_dir=o", *SECRETS]))


def test_no_record_of_a_run_holds_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config()
    args = training_arguments("grpo", config)
    monkeypatch.setattr(sys, "orig_argv", ["unmask", "grpo", *SECRETS])
    records = {
        "config.yaml": to_yaml(resolved(config, args)),
        "manifest.json": json.dumps(run_manifest(config.model_dump(), verb="grpo")),
        "trackers": args.to_json_string() + str(args.to_sanitized_dict()),
        "model card": str(chosen_settings(args)),
    }
    assert not [name for name, text in records.items() if SECRET in text]
    assert all(MASK in text for text in (records["config.yaml"], records["manifest.json"]))
    assert args.hub_token == SECRET and SECRET in str(args.rollout)  # the run itself has them


def test_print_config_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["grpo", "--model", "m", "--output", "o", "--print-config", *SECRETS])
    assert result.exit_code == 0 and SECRET not in result.output and f"me:{MASK}@judge" in result.output


def test_a_record_is_read_without_its_secrets(tmp_path: Path) -> None:
    """A setting that is a secret is not recorded, so that UNMASK_API_KEY or the login holds; an address must
    be given again."""
    config = run_config()
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    with raises(ConfigError, where=f"training.rollout.url ({path})"):
        resolve(read_layers(config_files=[path]))
    again = resolve(
        read_layers(config_files=[path], overrides=["training.rollout.url=http://x", "rewards=[sudoku]"])
    )
    assert "hub_token" not in again.training and again.training["rollout"] == {
        "backend": "server",
        "url": "http://x",
    }
    assert resolve(read_layers(config_files=[path], overrides=SECRETS)).training == config.training


def test_a_refused_secret_is_not_quoted() -> None:
    with raises(ConfigError, where="training.hub_token") as caught:
        training_arguments(
            "sft",
            RunConfig(**{"model": {"path": "m"}, "output_dir": "o", "training": {"hub_token": [SECRET]}}),
        )
    assert SECRET not in str(caught.value)
    assert (
        masked_argument("--data=x") == "--data=x"
        and masked_argument(f"a.api_key={SECRET}") == f"a.api_key={MASK}"
    )


KEYS = """
AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID x-api-key private_key access_key token a.token passphrase cookie credentials
auth basic_auth training.report.auth SENTRY_DSN dsn webhook slackWebhook webhook_url connection_string AZURE_STORAGE_CONNECTION_STRING
connectionString conn_str otp user_otp totp pin user.pin sim-pin pin_2 jwt hub_tokens auth_tokens access-tokens api_keys openaiApiKey
apiKeys_1 API_KEY_2 passwords db_password secrets client_secrets private_keys github_token SLACK_BOT_TOKEN account_key shared_access_key
accessKeys master_key dbPassword UNMASK_ADMIN_KEY
"""
PLAIN = """
max_new_tokens tokens_per_step tokens eos_tokens special_tokens num_input_tokens_seen token_cache mask_token pad_token image_token author
authors authority authentic pin_memory dataloader_pin_memory pinned pinning spin spins hairpin topping dsnap webhooks_enabled otpions
optimizer keys sort_key primary_key text_key column_keys grid_token hybrid_tokens map_key key_length password_length secretary
auth_method otp_length
"""


@pytest.mark.parametrize("key", KEYS.split())
def test_secrets_by_their_keys(key: str) -> None:
    for value in (SECRET, [SECRET], {"a": SECRET}):
        assert masked(value, key) == MASK and masked({key: value, "b": 1}) == {"b": 1}
    for text in (
        f"{key}: {SECRET}",
        f"a={{{key}: {{b: {SECRET}}}}}",
        f"{key}: 'a {SECRET}'",
        f"{key}: [a, {SECRET}]",
    ):
        assert SECRET not in masked_argument(text) and key in masked_argument(text)


@pytest.mark.parametrize("key", PLAIN.split())
def test_settings_whose_names_hold_the_names_of_secrets_are_shown(key: str) -> None:
    values = {key: "a", "b": {key: [1, 2]}}
    assert masked(values) == values and masked("a", f"training.{key}") == "a"
    for text in (f"training.{key}=a", f"{key}: a", f"b={{{key}: {{c: a}}}}", f"--{key}=a"):
        assert masked_argument(text) == text


def test_a_switch_is_no_secret() -> None:
    values = {"use_auth": True, "auth": False, "pin": None, "otp": True}
    assert masked(values) == values and masked(True, "training.use_auth") is True


def settings_of(cls: Any) -> Iterator[str]:
    """The names of its fields and of those of the configs in them."""
    types = typing.get_type_hints(cls)
    names = (
        cls.model_fields if issubclass(cls, BaseModel) else [field.name for field in dataclasses.fields(cls)]
    )
    for name in names:
        yield name
        for inner in type_args(types[name]):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from settings_of(inner)


def test_of_all_settings_only_secrets_are_masked() -> None:
    names = {
        name
        for cls in (RunConfig, *(verb.config_class for verb in VERBS.values()))
        for name in settings_of(cls)
    }
    assert len(names) > 200
    assert {name for name in names if masked("a", name) == MASK} == {
        "api_key",
        "hub_token",
        "push_to_hub_token",
    } & names
    assert not {name for name in names if masked_argument(f"training.{name}: a") != f"training.{name}: a"} - {
        "api_key",
        "hub_token",
        "push_to_hub_token",
    }


RUN = ["sft", "--model", "m", "--data", "d.jsonl", "--output", "o", "--print-config"]


@pytest.mark.parametrize(
    "words", ["--hub_token {}", "--hub-token={}", "hub_token={}", "--training.hub_token {}"]
)
def test_a_token_without_its_section_is_not_shown(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = shlex.split(words.format(SECRET))
    result = CliRunner().invoke(app, [*RUN, *given])
    assert result.exit_code == 0 and SECRET not in result.output, result.output
    monkeypatch.setattr(sys, "orig_argv", ["unmask", *RUN, *given])
    for recorded in (
        run_manifest({})["command"],
        resume_command(started_by()),
        resume_command(shlex.split(run_manifest({})["command"])),
    ):
        assert SECRET not in recorded and MASK in recorded and "token" in recorded


@pytest.mark.parametrize(
    "words",
    [
        *(
            "'training.hub_token: {}'",
            "'training.hub_token={{a: {}}}'",
            "--hub_token '{{a: {}}}'",
            "--hub-token='[{}'",
            "--hub_tokens {}",
        ),
        *("--hub-toke={}", "hub_tokenn={}", "--no-hub-token={}"),
    ],
)
def test_a_token_in_a_wrong_place_is_not_shown(words: str) -> None:
    result = CliRunner().invoke(app, [*RUN, *shlex.split(words.format(SECRET))])
    assert result.exit_code == 2 and SECRET not in result.output and "hub" in result.output


def test_the_word_after_the_name_of_a_secret_is_masked_and_no_other() -> None:
    words = [
        "unmask",
        "--hub-token",
        "a",
        "--api_key",
        "--token",
        "b",
        "--hub_token=c",
        "d",
        "--max-new-tokens",
        "5",
        "e",
    ]
    shown_instead = [
        "unmask",
        "--hub-token",
        MASK,
        "--api_key",
        "--token",
        MASK,
        f"--hub_token={MASK}",
        "d",
        "--max-new-tokens",
        "5",
        "e",
    ]
    assert masked_words(words) == shown_instead == masked_words(shown_instead)


def test_tokens_of_text_are_no_secrets() -> None:
    values = {
        "eos_token": "</s>",
        "eos_token_ids": [1],
        "token_cache": "a",
        "max_tokens": 3,
        "text_column": "key",
    }
    assert masked(values) == values and find_mask(values) is None


PIECES = [
    ":",
    "/",
    "@",
    ";",
    "a",
    "me",
    ":80",
    "?",
    "#",
    "&",
    "=",
    "token=",
    "pwd=",
    "password",
    "http://",
    "https:/",
    "s3://",
    "eyJ",
    "-eyJhbGci",
    "-",
    "_",
]
PIECES += [
    ".",
    " ",
    "\n",
    "hf_",
    "sk-",
    "b" * 20,
    "12/",
    "bearer ",
    "AKIA",
    "authorization: basic ",
    "'",
    ",",
    "[",
    "{",
    "é",
    "://a:",
    "discord.com/api/webhooks/",
]
LONG = [
    *PIECES,
    ";a:",
    *(one + other for number, one in enumerate(PIECES) for other in PIECES[number % 7 :: 7]),
]


@pytest.mark.slow
def test_texts_are_masked_in_a_time_that_their_length_bounds() -> None:
    """Whatever is repeated in them: each takes some 10 ms, and 1 to 20 seconds where the time grows with the
    square."""
    slow = {}
    for piece in LONG:
        begin = time.process_time()
        shown(piece * (40_000 // len(piece)))
        if (seconds := time.process_time() - begin) > 0.5:
            slow[piece] = seconds
    assert not slow


@pytest.mark.parametrize(
    "function", [masked_argument, lambda text: str(DataError(text, where=text, remedy=text))]
)
def test_arguments_and_errors_are_masked_in_such_a_time_too(function: Any) -> None:
    begin = time.process_time()
    for piece in (";a:", "http://a:", "-eyJ", "token ", "secret={"):
        function(piece * (20_000 // len(piece)))
    assert time.process_time() - begin < 5


HOSTILE = "a\x1b[31m\x00\x9b1m\u202eb\r\x07\ufeff\U000e0041"


def test_control_characters_are_escaped_in_tables_progress_and_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    show_table([(HOSTILE,)], HOSTILE, [HOSTILE])
    progress = Progress([(HOSTILE, 1.0)], stream=(stream := io.StringIO()))
    with progress, progress.phase(HOSTILE):
        pass
    data = f"{HOSTILE.replace(chr(0), '')}.txt"
    result = CliRunner().invoke(app, ["sft", "--model", "m", "--data", data, "--output", str(tmp_path / "o")])
    for text in (capsys.readouterr().out, stream.getvalue(), result.output):
        assert "\\u001b" in text and "\\u202e" in text and not CONTROL.search(text)


@given(st.text())
def test_what_is_shown_has_no_control_characters_and_other_text_is_unchanged(text: str) -> None:
    assert not CONTROL.search(shown(text))
    assert shown(text) == masked_text(text) or CONTROL.search(text)
