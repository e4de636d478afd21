"""Convert old configurations into one of Unmask's, and report the outcome of each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unmask.config.base import OPTIONS
from unmask.config.layers import Layer, Layers, nested_settings
from unmask.config.run import RunConfig
from unmask.config.yaml import dump_yaml
from unmask.errors import ConfigError
from unmask.migration.earlier import verb_of
from unmask.migration.files import read_old
from unmask.migration.formats import FORMATS, Format, format_named, merged, recognize
from unmask.migration.rules import TRANSFORMERS, DroppedError, Rule, Settings, to
from unmask.redaction import masked
from unmask.training.settings.listing import check_training, stock_settings


class Change(NamedTuple):
    """The outcome of an old key."""

    old: str
    """The key; empty for a default of the old trainer."""
    value: Any
    what: str
    """kept, renamed, changed, added or dropped."""
    new: str
    """The settings in its place."""
    why: str


class Migration(NamedTuple):
    """Unmask's config from old ones."""

    titles: str
    """The formats."""
    verb: str | None
    """The verb that the config is for; None: any training."""
    config: dict[str, Any]
    """The nested mappings of the YAML file."""
    changes: list[Change]
    missing: list[str]
    """Options that the user must still set."""

    def to_yaml(self) -> str:
        return dump_yaml(self.config)

    def table(self) -> list[tuple[str, str, str, str]]:
        """Rows of key, outcome, settings and reason; unchanged ones are left out unless they have a
        reason."""
        return [
            (
                f"{change.old} = {masked(change.value, change.old)}" if change.old else "",
                change.what,
                change.new,
                change.why,
            )
            for change in self.changes
            if change.what != "kept" or change.why
        ]


def migrate(paths: Sequence[Path], form: str | None = None) -> Migration:
    """Read the old configurations of one run, and convert them into one of Unmask's.

    Args:
        paths: files; later ones override earlier ones.
        form: the name of their format; None: it is recognized by its keys. A file of accelerate may accompany
            any format.

    Raises:
        ConfigError: a file cannot be read, its format is unknown or ambiguous, or a value is invalid.
    """
    files = [read_old(path) for path in paths]
    launchers = [file for file in files if FORMATS["accelerate"].marks & file.values.keys()]
    others = [file for file in files if file not in launchers]
    program = next((file.program for file in reversed(others) if file.program), None)
    where = " and ".join(map(str, paths))
    parts: list[tuple[Format, Mapping[str, Any]]] = []
    if launchers:
        parts.append((FORMATS["accelerate"], merged(launchers)))
    if others:
        old = merged(others)
        parts.append((format_named(form or recognize(old, program, where)), old))
    verb = parts[-1][0].verb
    settings: Settings = {}
    changes: list[Change] = []
    for each, values in parts:
        for change, found in _read(each, values):
            if any(settings.get(key, value) != value for key, value in found.items()):
                change = change._replace(why=f"{change.why}; overrides an earlier key".lstrip("; "))
            elif found and found.keys() <= settings.keys():
                change = change._replace(new=f"{', '.join(found)}, as above")
            settings |= found
            changes.append(change)
        for key, value in each.defaults(values, program).items():
            if not _is_set(key, settings):
                settings[key] = value
                why = f"the default of {each.title.split(' (')[0]}"
                changes.append(Change("", value, "added", f"{key} = {value}", why))
    for file in files:
        changes += [Change(name, value, "dropped", "", why) for name, value, why in file.notes]
    config = _checked(verb, settings, where)
    missing = [option for key, option in OPTIONS.items() if key not in settings]
    if verb is not None and settings.keys().isdisjoint({"data.train", "data.task"}):
        missing.append("--data FILE or --task NAME")
    elif verb == "grpo" and settings.keys().isdisjoint({"rewards", "data.task"}):
        missing.append("rewards=FILE.py:FUNCTION")
    return Migration(" and ".join(each.title for each, _ in parts), verb, config, changes, missing)


def _read(form: Format, values: Mapping[str, Any]) -> Iterator[tuple[Change, Settings]]:
    """The outcome of every key, and its settings."""
    table = {each.name: to(key) for key, each in stock_settings().items()} | TRANSFORMERS | form.table
    for key, value in values.items():
        rule = table.get(key)
        if rule is None:
            yield Change(key, value, "dropped", "", "is not known here"), {}
            continue
        try:
            found = rule.read(value, values)
        except DroppedError as error:
            yield Change(key, value, "dropped", "", str(error)), {}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            what = f"{masked(value, key)!r} is not valid in {form.title}"
            raise ConfigError(what, where=key, remedy="Correct it there, or remove it") from error
        else:
            yield _change(key, value, found, rule), found


def _change(key: str, value: Any, found: Settings, rule: Rule) -> Change:
    if not found:
        return Change(key, value, "dropped", "", rule.why or "is the default")
    new = ", ".join(name if part == value else f"{name} = {part}" for name, part in found.items())
    if list(found.values()) != [value]:
        return Change(key, value, "changed", new, rule.why)
    return Change(key, value, "kept" if new in (key, f"training.{key}") else "renamed", new, rule.why)


def _is_set(key: str, settings: Settings) -> bool:
    """Whether a setting or one that contradicts it is set, or its section is turned off."""
    if key.partition(".")[0] in settings:
        return True
    if key == "training.num_train_epochs" and "training.max_steps" in settings:
        return True
    return any(f"{name}.".startswith(f"{key}.") for name in settings)


def _checked(verb: str | None, settings: Settings, where: str) -> dict[str, Any]:
    """The nested config, with its keys and types checked."""
    config = nested_settings(settings)
    layers = Layers(
        [Layer(where, {"model": {"path": "MODEL"}, "output_dir": "OUTPUT"}), Layer(where, config)]
    )
    with layers.naming_sources():
        run = RunConfig(**layers.merged())
        check_training(verb or verb_of(run.training), run.training)
    return config
