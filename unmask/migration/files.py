"""Reading old configurations: YAML and JSON files, and the variables and flags of shell scripts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unmask.config.layers import read_text
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError

MAPPINGS = (".yaml", ".yml", ".json")
VARIABLE = re.compile(r"(DIFFU|GRPO|VLLM|LORA)_\w+")
"""Names of variables that are settings; others are only substituted."""
ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<text>.*)", re.DOTALL)
USED = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::?-(?P<default>[^}]*))?\})")
NO_TRAINING = re.compile(
    r"(chat|sample|eval|generate|convert|download|merge|preprocess|test|plot|api_server)\w*\.(py|sh)$"
)
PROGRAM = re.compile(r"(?!-).*\.(py|sh|sbatch)$", re.DOTALL)
CONFIG_FLAGS = ("config", "config_file", "model_config", "training_config", "hardware_config")
"""Flags of a training script that name a configuration."""
END = {"|", "&", "&&", "||", ";"}


class Command(NamedTuple):
    """A command in a script that starts a training."""

    program: str
    """The script that trains: `sft.py`, `trl grpo`."""
    words: list[str]
    """The positional arguments."""
    flags: dict[str, Any]
    launcher: dict[str, Any]
    """Flags of the launcher (accelerate, sbatch)."""


class OldFile(NamedTuple):
    """An old configuration."""

    values: dict[str, Any]
    """Values by key; those of a script are its variables and flags. None: unset."""
    program: str | None = None
    """The training script that a shell script starts."""
    notes: tuple[tuple[str, Any, str], ...] = ()
    """The other flags of a script: name, value, and why it is no setting."""


def read_old(path: Path) -> OldFile:
    """Read an old configuration.

    Raises:
        ConfigError: it cannot be read, is malformed, or starts more than one training.
    """
    if path.suffix == ".py":
        remedy = "Write its settings as YAML, KEY: VALUE. docs/migration.md has the names for Python"
        raise ConfigError("is a program, whose settings only Python knows", where=str(path), remedy=remedy)
    text = read_text(path)
    if path.suffix not in MAPPINGS:
        return _from_script(text, path)
    values = _parse_json(text, path) if path.suffix == ".json" else parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            "has no keys and values", where=str(path), remedy="Give a configuration, or a shell script"
        )
    return OldFile(values)


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"this is not JSON: {error}", where=str(path), remedy="Fix the JSON there"
        ) from error


def _from_script(text: str, path: Path) -> OldFile:
    variables, commands, notes = _read_script(text)
    if len(commands) > 1:
        names = ", ".join(command.program for command in commands)
        raise ConfigError(
            f"starts {len(commands)} trainings ({names})",
            where=str(path),
            remedy="Put each into a separate file",
        )
    values: dict[str, Any] = {name: text for name, text in variables.items() if VARIABLE.fullmatch(name)}
    if not commands:
        return OldFile(values, None, tuple(notes))
    (command,) = commands
    flags = dict(command.flags)
    program = str(flags.pop("script_path", command.program))
    if "accelerate_config" in flags:
        command.launcher["accelerate_config"] = flags.pop("accelerate_config")
    notes += [
        (f"--{name}", value, "belongs to the launcher: see `accelerate launch --help`")
        for name, value in command.launcher.items()
    ]
    for name in CONFIG_FLAGS:
        if name in flags:
            named = flags.pop(name)
            found = next((one for one in (path.parent / str(named), Path(str(named))) if one.is_file()), None)
            if found is None:
                notes.append((f"--{name}", named, "does not exist: pass the file too, before the script"))
            else:
                values |= read_old(found).values
    if re.search(r"run\.sh$", program):
        values |= dict(zip(("DIFFU_DATASET", "mode"), command.words, strict=False))
    for name, value in flags.items():
        if isinstance(value, str) and "$" in value:
            notes.append((f"--{name}", value, "is only known when the script runs"))
        else:
            values[name] = value
    return OldFile(values, program, tuple(notes))


def _read_script(text: str) -> tuple[dict[str, str], list[Command], list[tuple[str, Any, str]]]:
    """The final values of variables, the training commands, and flags that belong to no command."""
    variables: dict[str, str] = {}
    commands: list[Command] = []
    notes: list[tuple[str, Any, str]] = []
    for line in re.sub(r"\\[ \t]*(#[^\n]*)?\n", " ", text).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a command over several lines
            continue
        words = [_expand(word, variables) for word in words]
        if words[:1] == ["export"]:
            words = words[1:]
        while words and (assigned := ASSIGNED.fullmatch(words[0])):
            variables[assigned["name"]] = assigned["text"]
            words = words[1:]
        if words and words[0].startswith("--"):
            notes += [
                (f"--{name}", value, "a line break separates it from its command")
                for name, value in _flags(words)[0].items()
            ]
        elif command := _command(words):
            commands.append(command)
    return variables, commands, notes


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """A word with variables replaced by the script's values, or by their defaults."""

    def value(found: re.Match[str]) -> str:
        default = found[0] if found["default"] is None else found["default"].strip("\"'")
        return variables.get(found["plain"] or found["name"], default)

    return USED.sub(value, word)


def _command(words: Sequence[str]) -> Command | None:
    """The training that a line starts; None if it starts none."""
    words = list(_until_end(words))
    place = next((at for at, word in enumerate(words) if PROGRAM.match(word)), None)
    if words[:1] == ["trl"] and len(words) > 1:
        program, place = f"trl {words[1]}", 1
    elif place is None or NO_TRAINING.search(words[place]):
        return None
    else:
        program = words[place]
    flags, others = _flags(words[place + 1 :])
    if not flags and not re.search(r"run\.sh$", program):
        return None
    launcher, _ = _flags(words[:place])
    for name, value in launcher.items():
        if isinstance(value, list):  # a launcher's flag has one value; the program follows
            launcher[name] = value[0]
    return Command(program, others, flags, launcher)


def _until_end(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word in END or re.match(r"\d?>", word):
            return
        yield word.removesuffix(";")


def _flags(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Flags by name without dashes, each with its value, list of values, or True; and the words before the
    first flag."""
    flags: dict[str, list[Any]] = {}
    others: list[str] = []
    name = None
    for word in words:
        if word == "--":
            continue
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = [_scalar(text)] if equals else []
        elif name is None:
            others.append(word)
        else:
            flags[name].append(_scalar(word))
    values: dict[str, Any] = {}
    for name, found in flags.items():
        # no_cuda is a field itself
        if name.startswith("no_") and name != "no_cuda" and found in ([], [True]):
            values[name.removeprefix("no_")] = False
        else:
            values[name] = found[0] if len(found) == 1 else found or True
    return values, others


def _scalar(text: str) -> Any:
    try:
        value = parse_yaml(text, "")
    except ConfigError:
        return text
    return text if isinstance(value, dict | list) and not text.startswith(("{", "[")) else value
