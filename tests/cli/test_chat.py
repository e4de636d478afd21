"""`unmask chat`: conversations, their commands, and the terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import unmask
from tests.diffusion_gemma import CANVAS, loaded
from tests.errors import raises
from tests.helpers import REPOSITORY
from tests.test_console import Terminal
from tests.tiny import PLAIN_TEMPLATE, build_lm
from unmask.cli import app
from unmask.cli import chat_session as module
from unmask.cli.chat_session import Chat, interruptible, talk
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, DataError, GenerationError, ModelError, UnmaskError
from unmask.models.chat_template import TEMPLATES
from unmask.models.diffusion_lm import DiffusionLM

SETTINGS = {"max_new_tokens": 12, "tokens_per_step": 3, "temperature": 1.0}
CONTEXT = 200


def test_a_chat_on_whole_canvases(tmp_path: Path) -> None:
    """Their context has to hold a canvas, and answers have the tokens that are asked for."""
    lm = loaded(tmp_path)
    lm.tokenizer.chat_template = PLAIN_TEMPLATE
    config = SamplerConfig(max_new_tokens=CANVAS + 1, max_denoising_steps=3)
    chat, steps = Chat(lm, "the model", config), list[int]()
    generation = chat.answer("hello", lambda canvas: steps.append(canvas.step))
    assert generation is not None and len(generation.tokens[0]) <= CANVAS + 1
    prompt = [{"role": "user", "content": "hello"}]
    assert generation.texts == unmask.generate(lm, [prompt], config).texts
    assert steps == [*range(generation.forward_passes[0] + 1)]
    known = len(generation.prompts[0]) + len(generation.texts[0])
    room = int(lm.context_length or 0) - (CANVAS + 1) - known  # for the tokens, but not for the canvas
    chat.settings("t_max=0.9")
    with raises(GenerationError, where="temperature"):
        chat.settings("temperature=0.7")
    with raises(ConfigError, where="t_max"):
        chat.settings("t_max")
    with raises(GenerationError, where="conversation"):
        chat.answer("a" * room, lambda canvas: None)


def lm_with(template: str | None) -> DiffusionLM:
    """A bidirectional Phi of lower-case letters with this chat template."""
    sizes = {"layers": 1, "context": CONTEXT, "intermediate_size": 24, "initializer_range": 0.2}
    return build_lm("phi", "abcdefghijklmnopqrstuvwxyz :\n/.\x1b", template=template, **sizes)


@pytest.fixture(scope="module")
def lm() -> DiffusionLM:
    return lm_with(TEMPLATES["simple"])


@pytest.fixture(scope="module")
def folder(lm: DiffusionLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chat"
    lm.save(path)
    return path


@pytest.fixture
def chat(lm: DiffusionLM) -> Chat:
    return Chat(lm, "the model", SamplerConfig(**SETTINGS))


def ask(chat: Chat, text: str) -> str:
    generation = chat.answer(text, lambda canvas: None)
    assert generation is not None
    return generation.texts[0]


def expected(lm: DiffusionLM, *messages: tuple[str, str], **settings: Any) -> str:
    prompt = [{"role": role, "content": content} for role, content in messages]
    return unmask.generate(lm, [prompt], SamplerConfig(**SETTINGS | settings)).texts[0]


def test_every_answer_is_that_of_generate_for_the_conversation(lm, chat):
    first = ask(chat, "hello")
    assert first == expected(lm, ("user", "hello"))
    second = ask(chat, "and then")
    assert second == expected(lm, ("user", "hello"), ("assistant", first), ("user", "and then"))
    assert chat.command("/system be brief") == "system: be brief"
    third = ask(chat, "so")
    turns = [
        ("user", "hello"),
        ("assistant", first),
        ("user", "and then"),
        ("assistant", second),
        ("user", "so"),
    ]
    assert third == expected(lm, ("system", "be brief"), *turns)
    chat.command("/reset")
    assert ask(chat, "hello") == expected(lm, ("system", "be brief"), ("user", "hello"))
    assert chat.command("/system") == "no system message"
    chat.command("/reset")
    assert ask(chat, "hello") == first


def test_a_stopped_answer_leaves_no_trace(lm, chat):
    assert chat.answer("hello", lambda canvas: None, lambda: True) is None
    assert chat.messages == [] and ask(chat, "hello") == expected(lm, ("user", "hello"))


def test_raw_text_is_completed_without_a_template_and_one_by_one():
    lm = lm_with(None)
    with raises(ModelError, where="the model"):
        Chat(lm, "the model", SamplerConfig(**SETTINGS))
    chat = Chat(lm, "the model", SamplerConfig(**SETTINGS), raw=True)
    for text in (" once upon", "a time", " once upon"):
        assert ask(chat, text) == unmask.generate(lm, [text], SamplerConfig(**SETTINGS)).texts[0]
    with raises(ConfigError, where="system"):
        chat.command("/system be brief")


def test_settings_are_changed_one_by_one_and_checked(lm, chat):
    assert chat.command("/settings max_new_tokens=7") == "max_new_tokens=7"
    assert len(ask(chat, "hello")) <= 7
    assert chat.command("/settings allowed_tokens=[5, 6]") == "allowed_tokens=[5, 6]"
    assert set(ask(chat, "hello")) <= {lm.tokenizer.decode([5]), lm.tokenizer.decode([6])}
    for wrong, where in {
        "temperature=-1": "temperature",
        "temprature=1": "temprature",
        "temperature": "temperature",
        "temperature=[": "temperature, line 1",
        "steps=3": "tokens_per_step",
        "num_speculative_tokens=2": "num_speculative_tokens",
        "constraint.regx=a": "constraint.regx",
    }.items():
        before = chat.config
        with raises(UnmaskError, where=where):
            chat.command(f"/settings {wrong}")
        assert chat.config is before
    chat.command("/settings tokens_per_step=null")
    chat.command("/settings steps = 3")
    assert chat.config.steps == 3
    listed = chat.command("/settings")
    assert (
        listed.startswith("max_new_tokens: 7\n")
        and "by default:\nmode: denoise\n" in listed
        and "remasking: low_confidence" in listed
    )


def test_nested_settings(chat):
    pytest.importorskip("outlines_core")
    chat.command("/settings constraint.choice=[yes, no]")
    assert ask(chat, "hello") in ("yes", "no")
    with raises(ConfigError, where="constraint.regex"):
        chat.command("/settings constraint.regex=a+")
    chat.command("/settings constraint=null")
    chat.command("/settings constraint.regex='[a-c]+'")
    assert re.fullmatch("[a-c]+", ask(chat, "hello"))
    chat.command("/settings constraint=null")
    assert chat.config.constraint is None


def test_a_conversation_is_saved_and_continued(lm, chat, tmp_path):
    path = tmp_path / "folder" / "chat.json"
    chat.command("/system be brief")
    answer = ask(chat, "hello")
    assert chat.command(f"/save {path}") == f"saved 1 answers in {path}"
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer},
    ]
    assert json.loads(path.read_text()) == {
        "model": "the model",
        "raw": False,
        "settings": SETTINGS,
        "messages": turns,
    }
    next_answer = ask(chat, "and then")
    chat.command(f"/save {path}")  # its own file may be replaced
    other = Chat(lm, "another", SamplerConfig())
    with raises(ConfigError, where=str(path)):
        other.command(f"/save {path}")
    assert other.command(f"/load {path}") == "2 answers, of the model"
    assert (
        other.config == chat.config and other.messages == chat.messages and other.system_message == "be brief"
    )
    assert ask(other, "so") == ask(chat, "so")
    assert other.messages[3]["content"] == next_answer
    other.command("/reset")
    with raises(ConfigError, where=str(path)):  # of a conversation that was given up
        other.command(f"/save {path}")


@pytest.mark.parametrize(
    "text, where",
    [
        ("", "FILE"),
        ("[]", "FILE"),
        ('{"messages": []}', "model (FILE)"),
        ('{"model": "m", "messages": [{"role": "tool", "content": "a"}]}', "messages.0.role (FILE)"),
        ('{"model": "m", "messages": [{"role": "user", "content": "a"}]}', "messages (FILE)"),
        ('{"model": "m", "messages": [], "settings": {"top_p": 2}}', "settings.top_p (FILE)"),
        (
            '{"model": "m", "messages": [], "settings": {"num_speculative_tokens": 2}}',
            "settings.num_speculative_tokens (FILE)",
        ),
        ('{"model": "m", "messages": [], "raw": true}', "FILE"),
        ("\udcff", "FILE"),
    ],
)
def test_a_file_that_is_no_conversation_changes_nothing(chat, tmp_path, text, where):
    path = tmp_path / "chat.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    ask(chat, "hello")
    before = list(chat.messages)
    with raises(UnmaskError, where=where.replace("FILE", str(path))):
        chat.command(f"/load {path}")
    assert chat.messages == before and chat.file is None


def test_files_that_cannot_be(chat, tmp_path):
    for folder in (f"{tmp_path}/absent", tmp_path):  # shown on a terminal, and the end of a pipe
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            chat.command(f"/load {folder}")
    with pytest.raises(ConfigError):
        chat.command(f"/save {tmp_path}")


@pytest.mark.parametrize(
    "line, where",
    [
        ("/sav x", "/sav"),
        ("/", "/"),
        ("/answer", "/answer"),
        ("/save", "/save"),
        ("/load  ", "/load"),
        ("/reset all", "/reset"),
    ],
)
def test_commands_that_are_wrong(chat, line, where):
    with raises(ConfigError, where=where):
        chat.command(line)


def test_help_names_every_command(chat):
    text = chat.command("/help")
    assert all(f"/{name}" in text for name in module.COMMANDS) and max(map(len, text.splitlines())) <= 100
    with pytest.raises(EOFError):
        chat.command("/quit")


def test_a_conversation_that_is_too_long_says_what_to_do(chat):
    ask(chat, "hello")
    with raises(GenerationError, where="conversation"):
        ask(chat, "a" * CONTEXT)
    assert len(chat.messages) == 2


def test_a_template_may_refuse_a_system_message(lm):
    lm = lm_with("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}a")
    with raises(DataError, where=None) as refused:
        Chat(lm, "the model", SamplerConfig(**SETTINGS), system="be brief")
    assert "no system" in refused.value.what


# Off a terminal


def test_each_line_of_a_pipe_gets_an_answer(lm, folder, tmp_path):
    path = tmp_path / "chat.json"
    lines = f"/system be brief\nhello\n\n//slash\n/save {path}\n/quit\nnot read\n"
    options = ["--max-new-tokens", "12", "--tokens-per-step", "3", "--temperature", "1"]
    result = CliRunner().invoke(app, ["chat", str(folder), *options], input=lines)
    assert result.exit_code == 0, result.output
    first = expected(lm, ("system", "be brief"), ("user", "hello"))
    second = expected(lm, ("system", "be brief"), ("user", "hello"), ("assistant", first), ("user", "/slash"))
    assert result.stdout == f"{first}\n{second}\n"
    assert result.stderr.splitlines()[-2:] == ["system: be brief", f"saved 2 answers in {path}"]
    given = CliRunner().invoke(app, ["chat", str(folder), *options, "--system", "be brief"], input="hello\n")
    assert given.stdout == f"{first}\n"


def test_the_first_error_ends_a_pipe(folder):
    result = CliRunner().invoke(app, ["chat", str(folder)], input="/sav x\nhello\n")
    assert result.exit_code == 2 and result.stdout == "" and "Did you mean 'save'?" in result.stderr
    result = CliRunner().invoke(
        app, ["chat", str(folder), "--raw", "--max-new-tokens", "3"], input=b"a\n\xff\n"
    )
    assert result.exit_code == 2 and "UTF-8" in result.stderr
    assert CliRunner().invoke(app, ["chat", str(folder), "--drafts", "2"]).exit_code == 2


# On a terminal


def conversation(monkeypatch: pytest.MonkeyPatch, chat: Chat, *lines: Any) -> str:
    """The output of a session in which these lines are typed; an exception is raised in place of a line."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stdout, typed = Terminal(), iter([*lines, EOFError()])

    def type_next(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", type_next)
    monkeypatch.setattr(sys, "stdout", stdout)
    talk(chat)
    return stdout.getvalue()


def test_errors_and_control_c_end_nothing(monkeypatch, lm, chat, tmp_path):
    unreadable = OSError(5, "Input/output error", "there")
    monkeypatch.setattr(module, "write_atomic", lambda *_: (_ for _ in ()).throw(unreadable))
    decode = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    output = conversation(
        monkeypatch,
        chat,
        KeyboardInterrupt(),
        "/sav",
        decode,
        "",
        f"/save {tmp_path}/a",
        "a" * CONTEXT,
        "hello",
    )
    for message in (
        "error: /sav: is not a command",
        "is not UTF-8 text",
        "error: there: Input/output error",
        "error: conversation:",
    ):
        assert message in output
    answer = expected(lm, ("user", "hello"))
    assert module.shown(answer) in output and "12 tokens · 4 passes · 3.00 tokens per pass" in output
    assert chat.messages[-1]["content"] == answer


def test_the_second_control_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Session:
    """The real command on a pseudo-terminal."""

    def __init__(self, *args: str, **environment: str):
        self.master, slave = pty.openpty()
        env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(REPOSITORY),
            "TERM": "xterm-256color",
            "COLUMNS": "90",
            **environment,
        }
        command = [sys.executable, "-m", "unmask", *args]
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        controlling = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731 (so that Ctrl-C is a signal)
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, env=env, start_new_session=True, preexec_fn=controlling, **streams
        )
        os.close(slave)
        self.output = ""

    def wait(self, text: str, seconds: float = 120, press: str = "") -> str:
        """What was written up to this text, since the last wait; each second without output, press these
        keys."""
        until = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < until, f"no {text!r} in {self.output!r}"
            if select.select([self.master], [], [], 1)[0]:
                try:
                    self.output += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError as error:  # the program has ended
                    raise AssertionError(self.output) from error
            elif press:
                self.type(press)
        found, _, self.output = self.output.partition(text)
        return found

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())


@pytest.fixture
def session(folder: Path) -> Iterator[Any]:
    opened: list[Session] = []

    def start(*args: str, **environment: str) -> Session:
        opened.append(Session("chat", str(folder), *args, **environment))
        return opened[-1]

    yield start
    for each in opened:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


@pytest.mark.slow
def test_a_conversation_on_a_terminal(lm, session, tmp_path):
    live = session("--max-new-tokens", "12", "--tokens-per-step", "3", "--temperature", "1")
    live.wait("> ")
    live.type("hello\r")
    drawn = live.wait("tokens per pass")
    answer = expected(lm, ("user", "hello"))
    region, _, said = drawn.rpartition("\x1b[2K")  # the region is removed; the text stays
    assert "░" in region and "\x1b[2m" in region
    assert "12 tokens · 4 passes · 3.00" in said and module.shown(answer) in said.replace("\r\n", "\n")
    live.wait("> ")
    live.type("\x1b[A\r")  # the line before, from the history
    live.wait("tokens per pass")
    live.wait("> ")
    live.type("/settings max_new_tokens=80\r/settings tokens_per_step=1\r")
    live.wait("tokens_per_step=1\r\n")
    live.wait("> ")
    live.type("stop this\r")
    live.wait("░")
    live.type("\x03")
    live.wait("stopped: ")
    live.wait("> ")
    live.type("half a line\x03")
    live.wait("> ", press="\x03")  # Python's readline loses a Ctrl-C that comes while it handles another key
    live.type(f"/save {tmp_path}/chat.json\r")
    live.wait("saved 2 answers")
    live.wait("> ")
    live.type("\x04")
    assert live.process.wait(60) == 0
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    second = expected(lm, ("user", "hello"), ("assistant", answer), ("user", "hello"))
    assert [message["content"] for message in messages] == ["hello", answer, "hello", second]


@pytest.mark.slow
def test_no_color(session):
    live = session("--max-new-tokens", "12", "--temperature", "1", NO_COLOR="1")
    live.wait("> ")
    live.type("hello\r")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", live.wait("tokens per pass"))
    live.wait("> ")
    live.type("\x04")
    assert live.process.wait(60) == 0
