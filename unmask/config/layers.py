"""The sources of settings: recipes, YAML files, `UNMASK_*` variables, the command line. Later ones win; each
value has its source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from unmask.artifacts import read_file
from unmask.config.base import valued_section
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError, require_known
from unmask.redaction import masked_argument
from unmask.variables import NOT_SETTINGS

RECIPES = Path(__file__).parent.parent / "recipes"
MODES = RECIPES / "modes"
"""The folder of the files that `--mode` names."""
PREFIX = "UNMASK_"


class Layer(NamedTuple):
    """The settings of one source."""

    source: str
    """Its name in errors: `configs/a.yaml`, `environment variable UNMASK_SEED`, `command line`."""
    values: dict[str, Any]
    """Nested mappings."""


class Layers(tuple[Layer, ...]):
    """Sources in the order in which they apply: later ones win, key by key."""

    def merged(self) -> dict[str, Any]:
        """All settings together."""
        values: dict[str, Any] = {}
        for layer in self:
            values = _merge(values, layer.values)
        return values

    def source_of(self, key: str) -> str | None:
        """The source of a dotted `key`: the last source of a value, all sources of a section; None if no
        source sets it."""
        found = [(layer.source, value) for layer in self for value in _look_up(layer.values, key)]
        if not found:
            return None
        return (
            ", ".join(dict.fromkeys(source for source, _ in found))
            if isinstance(found[-1][1], dict)
            else found[-1][0]
        )

    def value_of(self, key: str) -> Any:
        """The value of a dotted key; None if no source sets it."""
        return next(iter(_look_up(self.merged(), key)), None)

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Let a `ConfigError` raised within also name the source of the refused key."""
        try:
            yield
        except ConfigError as error:
            keys = (error.where or "").split(" and ")  # of two settings that cannot be combined
            sources = [self.source_of(key) if key else None for key in keys]
            if not any(sources):
                raise
            where = " and ".join(
                f"{key} ({source})" if source else key for key, source in zip(keys, sources, strict=True)
            )
            raise error.moved(where) from error


def read_layers(
    *,
    recipes: Sequence[str] = (),
    config_files: Sequence[str | Path] = (),
    older: Sequence[Layer] = (),
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Layers:
    """All sources of settings, in the order in which they apply.

    Args:
        recipes: names of files under `unmask/recipes`, without folder and suffix.
        config_files: YAML files.
        older: settings from variables with other names (`training/settings/older_variables.py`).
        environ: the environment; `UNMASK_TRAINING__LEARNING_RATE=1e-4` sets `training.learning_rate`.
        flags: values by dotted key, already parsed; None for a flag that is not set.
        overrides: `dotted.key=value`, with a value in YAML.
        keys: the dotted keys of overrides that name a setting in another way, by that name.

    Raises:
        ConfigError: an unknown recipe, a file that is missing or malformed, an override without `=`, a value
            for a key that is a section of settings in another source.
    """
    layers = [Layer(f"recipe {name}", read_recipe(name)) for name in recipes]
    layers += [Layer(str(path), read_settings(Path(path))) for path in config_files]
    layers += older
    for name, text in sorted((environ or {}).items()):
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            source = f"environment variable {name}"
            layers.append(
                Layer(source, nested(name.removeprefix(PREFIX).lower().split("__"), parse_yaml(text, source)))
            )
    layers += [
        Layer("command line", nested(key.split("."), value))
        for key, value in (flags or {}).items()
        if value is not None
    ]
    for override in overrides:
        typed, equals, text = override.partition("=")
        key = keys.get(typed, typed)
        if not equals or not all(key.split(".")):
            what = f"{masked_argument(override)!r} is not KEY=VALUE"
            remedy = "Write NAME=VALUE, for example learning_rate=1e-4"
            if Path(override).is_file():  # the shell has written its names in place of a pattern
                remedy = "Quote a pattern of files: --data 'data/*.jsonl'"
            raise ConfigError(what, where="command line", remedy=remedy)
        source = f"command line, {typed}"
        layers.append(
            Layer(
                source if typed in keys else "command line", nested(key.split("."), parse_yaml(text, source))
            )
        )
    sections = {key for layer in layers for key, value in layer.values.items() if isinstance(value, dict)}
    for layer in layers:
        for key in sections & layer.values.keys():
            if not isinstance(value := layer.values[key], dict | None):
                raise valued_section(value, f"{key} ({layer.source})", key)
    return Layers(layers)


def recipe_names() -> list[str]:
    """The names of all recipes of Unmask."""
    return sorted(_recipes())


def _recipes() -> dict[str, Path]:
    return {path.stem: path for path in RECIPES.glob("*/*.yaml") if path.parent != MODES}


def hardware_recipe_names() -> list[str]:
    """The recipes of machines, the CPU first."""
    return sorted(
        (path.stem for path in (RECIPES / "hardware").glob("*.yaml")), key=lambda name: (name != "cpu", name)
    )


def check_hardware(name: str) -> None:
    """Raise ConfigError if there is no recipe of a machine of this name."""
    require_known(name, hardware_recipe_names(), "hardware", where="--hardware")


def recipe_path(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: the name is unknown; the remedy has the most similar one.
    """
    recipes = _recipes()
    require_known(name, recipes, "recipe", where="--recipe")
    return recipes[name]


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe. Raises ConfigError if the name is unknown."""
    return read_settings(recipe_path(name))


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        ConfigError: it is missing or malformed, or lets a model run code. Files are copied unread, so that
            only the command line, or a variable of the user's shell, may do so.
    """
    values = parse_yaml(read_text(path), str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"holds a {type(values).__name__}, not keys and values",
            where=str(path),
            remedy="Write lines such as `seed: 1`",
        )
    model = values.get("model")
    if isinstance(model, dict) and model.get("trust_remote_code", False) is not False:
        remedy = (
            "Remove it there, and give model.trust_remote_code=true on the command line if you trust the "
            "model's code"
        )
        raise ConfigError("may not stand in a file", where=f"model.trust_remote_code ({path})", remedy=remedy)
    return values


def read_text(path: Path) -> str:
    """The text of a file of settings. Raises ConfigError if it is missing or no text."""
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(path), remedy="Give the path of a YAML file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            "is not UTF-8 text", where=str(path), remedy="Give the path of a YAML file"
        ) from error


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """The value nested under these keys, of which the first is the outermost."""
    for key in reversed(keys):
        value = {key: value}
    return value


def nested_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings of values by dotted key; later ones win."""
    return Layers(Layer("", nested(key.split("."), value)) for key, value in settings.items()).merged()


def _look_up(values: Any, key: str) -> list[Any]:
    """A list of the value of a dotted key, or an empty list. A key within a list finds the list."""
    for part in key.split("."):
        if isinstance(values, list):
            break
        if not isinstance(values, dict) or part not in values:
            return []
        values = values[part]
    return [values]
