"""Settings that the command line names without their section: `--max-steps 10`, `--no-bf16`,
`learning_rate=1e-4`."""

from __future__ import annotations

import difflib
import sys
from collections import deque
from collections.abc import Collection

from unmask.commands.settings.listing import near_keys, settings_of_verb
from unmask.config.listing import Setting
from unmask.console import is_first_process
from unmask.errors import NAMES_ELSEWHERE, ConfigError

SECTIONS = (("training",), ("data",), ("model", "sampler", "lora"))
"""Where a setting without its section is looked up: a name of the first sections is not looked up in the
later ones."""

OPTIONS_ELSEWHERE = {
    "model_name_or_path": "--model",
    "model_name": "--model",
    "dataset": "--data",
    "dataset_name": "--data",
    "train_file": "--data",
    "reward_funcs": "--rewards",
}
"""Unmask's options, by their names in TRL and in transformers' examples."""


class BareNames:
    """The settings of a verb by the names that a command line gives them.

    Args:
        verb: a training verb.
        options: its options besides the settings, with their dashes.

    Attributes:
        keys: the dotted keys of the settings that were read, by the names as they were typed.
    """

    def __init__(self, verb: str, options: Collection[str]):
        self.verb, self.options = verb, options
        self.settings = {setting.key: setting for setting in settings_of_verb(verb)}
        self.keys: dict[str, str] = {}
        self._lists = set[str]()  # that options have given

    def read_word(self, word: str) -> None:
        """Look up the name in a word `NAME=VALUE`.

        Raises:
            ConfigError: the name is that of an option, of no setting or of several ones.
        """
        typed = word.partition("=")[0]
        option = f"--{typed.replace('_', '-')}"
        if option in self.options:
            raise ConfigError(
                "is an option, not a setting",
                where=typed,
                remedy=f"Write {option}, or the setting with its section",
            )
        self._look_up(typed, typed)

    def read_option(self, word: str, following: deque[str]) -> str:
        """Look up an option `--NAME`, `--NAME=VALUE` or `--no-NAME`, and return it with its value, as one
        word.

        Args:
            following: the words after it. The value is removed, if it is one of them.

        Raises:
            ConfigError: the name is that of no setting or of several ones; the value is missing, or not
                wanted.
        """
        typed, has_value, _ = word.partition("=")
        name = typed.removeprefix("--")
        negated = name.startswith("no-") or name.startswith("no_")
        setting = self._look_up(name[3:] if negated else name, typed)
        if setting.key in self._lists:
            what = "is given twice, and the second value would replace the first"
            raise ConfigError(what, where=typed, remedy=f"Write both at once: '{name}=[A, B]'")
        self._lists |= {setting.key} if setting.type.startswith("list") else set()
        if negated and (has_value or not setting.is_switch):
            raise ConfigError(
                "this form is for switches, and takes no value",
                where=typed,
                remedy=f"Write --{name[3:]} VALUE",
            )
        if has_value:
            return word
        if negated:
            return f"{typed}=false"
        if (
            following
            and not following[0].startswith("--")
            and not (setting.is_switch and "=" in following[0])
        ):
            return f"{typed}={following.popleft()}"
        if not setting.is_switch:
            raise ConfigError(
                "has no value", where=typed, remedy=f"Write {typed} VALUE, of the type {setting.type}"
            )
        return f"{typed}=true"

    def _look_up(self, typed_name: str, typed: str) -> Setting:
        """The setting of a name, with or without its section; the name as it was typed is for errors."""
        name = typed_name.replace("-", "_")
        found = self._find(name)
        if not found:
            options = (
                []
                if name in NAMES_ELSEWHERE
                else difflib.get_close_matches(f"--{name.replace('_', '-')}", self.options, cutoff=0.75)
            )
            options = [OPTIONS_ELSEWHERE[name]] if name in OPTIONS_ELSEWHERE else options
            near = options or near_keys(name.rpartition(".")[2], self.settings.values())
            remedy = (
                f"Did you mean {' or '.join(near)}?"
                if near
                else f"`unmask config {self.verb}` lists all settings"
            )
            raise ConfigError(f"is no setting or option of {self.verb}", where=typed, remedy=remedy)
        if len(found) > 1:
            raise ConfigError(
                f"may be {' or '.join(found)}", where=typed, remedy="Write one of them, as KEY=VALUE"
            )
        self.keys[typed] = found[0]
        if not found[0].startswith("training.") and found[0] != name and is_first_process():
            print(f"{typed} is read as {found[0]}", file=sys.stderr)
        return self.settings.get(found[0]) or Setting(found[0], "Any", None, "")  # an entry has any type

    def _find(self, name: str) -> list[str]:
        """The keys of the settings, or of entries of mappings (`method_settings.NAME`), that a name may
        mean."""
        if name in self.settings:
            return [name]
        for sections in SECTIONS:
            if found := [key for section in sections if (key := f"{section}.{name}") in self.settings]:
                elsewhere = f"training.{NAMES_ELSEWHERE.get(name)}"
                return (
                    [elsewhere, *found]
                    if elsewhere in self.settings and "training" not in sections
                    else found
                )
        mapping, dot, entry = name.rpartition(".")
        found = self._find(mapping) if dot else []
        return [
            f"{key}.{entry}"
            for key in found
            if key in self.settings and self.settings[key].type.startswith("dict")
        ]
