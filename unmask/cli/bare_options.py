"""Settings that the command line names without their section: `--max-steps 10`, `--no-bf16`,
`learning_rate=1e-4`."""

from __future__ import annotations

import difflib
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from unmask.config.listing import Setting
from unmask.config.run import RunConfig
from unmask.console import is_first_process
from unmask.errors import ConfigError
from unmask.names import NAMES_ELSEWHERE
from unmask.training.settings.listing import near_keys, remedy_elsewhere, settings_of_verb

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


def split_words(
    verb: str, args: Iterable[str], is_flag: Mapping[str, bool]
) -> tuple[list[str], list[str], dict[str, str]]:
    """Separate the options of a verb from its settings.

    Args:
        verb: a training verb.
        args: the command line after it.
        is_flag: whether an option takes no value, by its name.

    Returns:
        The options with their values; the settings as `NAME=VALUE`; the dotted keys of those that were named
        without their section, by the names as they were typed.

    Raises:
        ConfigError: an option is none of the verb and no setting, or a setting has no value.
    """
    options, settings, words = list[str](), list[str](), deque(word for word in args if word != "--")
    names = BareNames(verb, is_flag)
    while words:
        word = words.popleft()
        name, equals, _ = word.partition("=")
        option = name.replace("_", "-")
        if word.startswith("--") and option in is_flag:
            options.append(word)
            if not equals and not is_flag[option]:
                if not words or words[0].startswith("--"):
                    remedy = f"Write {name} VALUE, or {name}=VALUE"
                    raise ConfigError("has no value", where=name, remedy=remedy)
                options.append(words.popleft())
        elif word.startswith("--"):
            settings.append(names.read_option(word, words))
        elif word.startswith("-"):
            options.append(word)
        else:
            if equals and name.partition(".")[0] not in RunConfig.model_fields:
                if f"--{option}" in is_flag:
                    remedy = f"Write --{option}, or the setting with its section"
                    raise ConfigError("is an option, not a setting", where=name, remedy=remedy)
                names.look_up(name, name)
            settings.append(word)
    return options, settings, names.keys


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
        negated = name.startswith(("no-", "no_"))
        setting = self.look_up(name[3:] if negated else name, typed)
        if setting.key in self._lists:
            what = "is given twice, and the second value would replace the first"
            raise ConfigError(what, where=typed, remedy=f"Write both at once: '{name}=[A, B]'")
        if setting.type.startswith("list"):
            self._lists.add(setting.key)
        if negated and (has_value or not setting.is_switch):
            what = "this form is for switches, and takes no value"
            raise ConfigError(what, where=typed, remedy=f"Write --{name[3:]} VALUE")
        if has_value:
            return word
        if negated:
            return f"{typed}=false"
        value_follows = following and not following[0].startswith("--")
        if value_follows and not (setting.is_switch and "=" in following[0]):
            return f"{typed}={following.popleft()}"
        if not setting.is_switch:
            remedy = f"Write {typed} VALUE, of the type {setting.type}"
            raise ConfigError("has no value", where=typed, remedy=remedy)
        return f"{typed}=true"

    def look_up(self, typed_name: str, typed: str) -> Setting:
        """The setting of a name, with or without its section; the name as it was typed is for errors.

        Raises:
            ConfigError: the name is that of no setting or of several ones.
        """
        name = typed_name.replace("-", "_")
        found = self._find(name)
        if not found:
            near = [OPTIONS_ELSEWHERE[name]] if name in OPTIONS_ELSEWHERE else []
            if not near and name not in NAMES_ELSEWHERE:
                near = difflib.get_close_matches(f"--{name.replace('_', '-')}", self.options, cutoff=0.75)
            near = near or near_keys(name.rpartition(".")[2], self.settings.values())
            remedy = f"`unmask config {self.verb}` lists all settings"
            if near:
                remedy = f"Did you mean {' or '.join(near)}?"
            if name not in OPTIONS_ELSEWHERE:
                remedy = remedy_elsewhere(name.removeprefix("training.")) or remedy
            raise ConfigError(f"is no setting or option of {self.verb}", where=typed, remedy=remedy)
        if len(found) > 1:
            what = f"may be {' or '.join(found)}"
            raise ConfigError(what, where=typed, remedy="Write one of them, as KEY=VALUE")
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
                if elsewhere in self.settings and "training" not in sections:
                    return [elsewhere, *found]
                return found
        mapping, dot, entry = name.rpartition(".")
        found = self._find(mapping) if dot else []
        mappings = [
            key for key in found if key in self.settings and self.settings[key].type.startswith("dict")
        ]
        return [f"{key}.{entry}" for key in mappings]
