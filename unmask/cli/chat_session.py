"""`unmask chat`: an interactive conversation that shows each denoising step."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Literal

from rich.text import Text

from unmask.artifacts import read_file, write_atomic
from unmask.cli.denoising_display import LEGEND, Show, denoise, display, statistics, terminal
from unmask.config.base import Config
from unmask.config.layers import Layer, Layers, nested
from unmask.config.run import refuse_existing
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import dump_yaml, parse_yaml
from unmask.console import for_stdout
from unmask.data.encoding import encode_prompt
from unmask.errors import ConfigError, DataError, GenerationError, ModelError, UnmaskError, did_you_mean
from unmask.generation.output import Generation
from unmask.generation.requests import check_settings, completion_length, make_requests
from unmask.models.chat_template import SIMPLE, render_template, without_start
from unmask.models.diffusion_lm import DiffusionLM
from unmask.redaction import shown

COMMANDS = {
    "system": ("[TEXT]", "set the system message, or remove it"),
    "settings": ("[KEY=VALUE]", "show the sampler's settings, or change one (a value in YAML)"),
    "save": ("FILE", "write the conversation and the settings to a JSON file"),
    "load": ("FILE", "continue a saved conversation in place of this one"),
    "reset": ("", "begin a new conversation; the system message and the settings stay"),
    "help": ("", "show this"),
    "quit": ("", "end, as Ctrl-D does"),
}
"""Each with its argument and what it does."""
KEYS = "Ctrl-C stops an answer. A message that begins with / is written with //."


class ChatMessage(Config):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    """Who says it."""
    content: str
    """What is said."""


class SavedChat(Config):
    """What `/save` writes."""

    model: str
    """The model, as the command named it."""
    raw: bool = False
    """Whether every message is completed by itself."""
    settings: SamplerConfig = SamplerConfig()
    """The settings of the sampler."""
    messages: list[ChatMessage]
    """A system message, if there is one, and pairs of messages of the user and the assistant."""


class Chat:
    """A conversation, and how it is continued.

    Args:
        name: of the model, as the user gave it.
        raw: complete every message by itself, as plain text, without the chat template.
        system: the system message; None: none.

    Raises:
        ModelError: there is no chat template, and `raw` is not set.
        GenerationError: the settings do not fit the model.
    """

    def __init__(
        self,
        lm: DiffusionLM,
        name: str,
        config: SamplerConfig,
        *,
        raw: bool = False,
        system: str | None = None,
    ):
        self.lm, self.name, self.config, self.raw = lm, name, config, raw
        self.messages: list[dict[str, str]] = []  # without the system message
        self.system_message: str | None = None
        self.file: Path | None = None  # in which the conversation was saved
        if not raw and not lm.tokenizer.chat_template:
            remedy = (
                "Complete plain text with --raw, or use a model that was trained on conversations "
                f"({SIMPLE} gives it one)"
            )
            raise ModelError("has no chat template", where=name, remedy=remedy)
        check_settings(lm, config)
        if system:
            self.system(system)

    def answer(self, text: str, show: Show, stopped: Callable[[], bool] = lambda: False) -> Generation | None:
        """The answer to a message. Both become part of the conversation, unless it is stopped, which gives
        None.

        Raises:
            DataError: the chat template refuses the conversation.
            GenerationError: it is too long for the model's context.
        """
        asked = {"role": "user", "content": text}
        prompt = text if self.raw else without_start(self.lm.tokenizer, self._all_messages(asked))
        ids, context = encode_prompt(self.lm.tokenizer, prompt), self.lm.context_length
        new = completion_length(self.lm, self.config.max_new_tokens)
        if context is not None and len(ids) + new > context:
            what = f"{len(ids)} tokens with this message, and {new} new ones, exceed the context of {context}"
            remedy = "Begin a new one with /reset, or shorten answers with /settings max_new_tokens=N"
            raise GenerationError(what, where="message" if self.raw else "conversation", remedy=remedy)
        [request] = make_requests(self.lm, [ids], self.config)
        generation = denoise(self.lm, request, self.config, show, stopped)
        if generation is not None:
            self.messages += [asked, {"role": "assistant", "content": generation.texts[0]}]
        return generation

    def _all_messages(self, *more: dict[str, str]) -> list[dict[str, str]]:
        """The conversation, with its system message first."""
        system = [{"role": "system", "content": self.system_message}] if self.system_message else []
        return [*system, *self.messages, *more]

    def command(self, line: str) -> str:
        """Carry out a command, a line that begins with /, and return what to say. Raises EOFError for
        /quit."""
        name, _, argument = line.removeprefix("/").partition(" ")
        if name not in COMMANDS:
            raise ConfigError("is not a command", where=f"/{name}", remedy=did_you_mean(name, COMMANDS))
        usage, argument = COMMANDS[name][0], argument.strip()
        if (argument and not usage) or (usage.isalpha() and not argument):
            what = "takes no argument" if argument else "needs an argument"
            raise ConfigError(what, where=f"/{name}", remedy=f"Write /{name} {usage}".rstrip())
        action: Callable[[str], str] = getattr(self, name)
        return action(argument)

    def system(self, text: str) -> str:
        if not text:
            self.system_message = None
            return "no system message"
        if self.raw:
            raise ConfigError("plain text has no system message", where="system", remedy="Leave --raw out")
        turns = [{"role": "system", "content": text}, {"role": "user", "content": ""}]
        render_template(self.lm.tokenizer, turns)  # some refuse a system message
        self.system_message = text
        return f"system: {text}"

    def settings(self, pair: str) -> str:
        given = self.config.model_dump(exclude_defaults=True)
        if pair:
            key, equals, value = pair.partition("=")
            if not equals:
                key = "t_max" if self.lm.noise == "uniform" else "temperature"
                raise ConfigError(
                    "is not KEY=VALUE", where=pair, remedy=f"Write for example /settings {key}=0.7"
                )
            new = nested(key.strip().split("."), parse_yaml(value, key))
            config = SamplerConfig(**Layers([Layer("", given), Layer("", new)]).merged())
            check_settings(self.lm, config)
            self.config = config
            return f"{key.strip()}={value.strip()}"
        others = {name: value for name, value in self.config.model_dump().items() if name not in given}
        return f"{dump_yaml(given) if given else ''}by default:\n{dump_yaml(others)}".rstrip()

    def save(self, name: str) -> str:
        path = Path(name).expanduser()
        refuse_existing(path, "Choose another name", overwrite=path.resolve() == self.file)
        saved = {
            "model": self.name,
            "raw": self.raw,
            "settings": self.config.model_dump(mode="json", exclude_defaults=True),
            "messages": self._all_messages(),
        }
        write_atomic(path, json.dumps(saved, indent=2, ensure_ascii=False) + "\n")
        self.file = path.resolve()
        return f"saved {len(self.messages) // 2} answers in {name}"

    def load(self, name: str) -> str:
        path = Path(name).expanduser()
        saved = read_chat(path)
        if saved.raw != self.raw:
            what, remedy = ("with", "Start with --raw") if saved.raw else ("without", "Start without --raw")
            raise ConfigError(f"was saved {what} --raw", where=name, remedy=remedy)
        try:
            check_settings(self.lm, saved.settings)
        except GenerationError as error:
            raise error.moved(f"settings.{error.where} ({path})") from error
        messages = [message.model_dump() for message in saved.messages]
        self.system_message = (
            messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        )
        self.messages, self.config, self.file = messages, saved.settings, path.resolve()
        return f"{len(messages) // 2} answers" + (f", of {saved.model}" if saved.model != self.name else "")

    def reset(self, _: str) -> str:
        self.messages, self.file = [], None
        return "a new conversation"

    def help(self, _: str) -> str:
        lines = [(f"/{name} {usage}", what) for name, (usage, what) in COMMANDS.items()]
        return "\n".join([*(f"{command:<24}{what}" for command, what in lines), KEYS, LEGEND])

    def quit(self, _: str) -> str:
        raise EOFError


def read_chat(path: Path) -> SavedChat:
    """A saved conversation. Raises DataError if the file holds something else, and ConfigError for settings
    out of range."""
    remedy = "Name a file that /save wrote"
    try:
        values = json.loads(read_file(path))
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", where=str(path), remedy=remedy) from error
    if not isinstance(values, dict):
        raise DataError("holds no conversation", where=str(path), remedy=remedy)
    try:
        saved = SavedChat(**values)
    except ConfigError as error:
        raise error.moved(f"{error.where} ({path})") from error
    roles = [message.role for message in saved.messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        remedy = "After a system message, if there is one, write pairs of user and assistant"
        raise DataError("the turns are not in order", where=f"messages ({path})", remedy=remedy)
    return saved


def run_chat(chat: Chat) -> None:
    """Talk on a terminal; else answer each line of stdin, up to the first error. Raises DataError if a line
    is not UTF-8."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        talk(chat)
        return
    try:
        for line in (line.removesuffix("\n") for line in sys.stdin):
            if is_command(line):
                print(shown(chat.command(line)), file=sys.stderr)
            elif line.strip():
                generation = chat.answer(message_of(line), lambda canvas: None)
                assert generation is not None
                print(for_stdout(generation.texts[0]), flush=True)
    except EOFError:
        return
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text: {error}", where="stdin", remedy="Convert it") from error


def is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def message_of(line: str) -> str:
    """The message that a line stands for: of two slashes at its beginning one is left out."""
    return line.removeprefix("/")


def talk(chat: Chat) -> None:
    """Read messages and commands from the terminal until Ctrl-D or /quit. An error is shown, and ends
    nothing."""
    with suppress(ImportError):  # it lets `input` edit lines, and keeps those of this conversation
        import readline  # noqa: F401
    _say(f"{shown(chat.name)}: /help lists the commands, Ctrl-D ends", style="dim")
    while True:
        try:
            line = input("> ")
            if is_command(line):
                _say(shown(chat.command(line)))
            elif line.strip():
                _answer(chat, message_of(line))
        except UnicodeError:
            _say("error: this line is not UTF-8 text", style="red")
        except UnmaskError as error:
            _say("error: " + shown(" ".join(str(error).splitlines())), style="red")
        except OSError as error:
            _say(f"error: {shown(f'{error.filename}: {error.strerror}')}", style="red")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _answer(chat: Chat, text: str) -> None:
    started = time.monotonic()
    with interruptible() as stopped, display(sys.stdout) as show:
        generation = chat.answer(text, show, stopped)
    if generation is None:
        _say("stopped: this message and its answer are not part of the conversation", style="dim")
        return
    _say(shown(generation.texts[0]))
    tokens, passes = len(generation.tokens[0]), generation.forward_passes[0]
    _say(statistics(tokens, passes, time.monotonic() - started), style="dim")


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C makes the function that this gives return True, and only a second one interrupts."""
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str, style: str = "") -> None:
    console = terminal(sys.stdout)
    if console is None:
        print(text)
    else:
        console.print(Text(text, style))
