"""Rules for old keys, from which the tables of the formats are built; simple ones are in tables.yaml."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unmask.config.yaml import parse_yaml
from unmask.names import INSTEAD, NOT_NEEDED
from unmask.training.settings.older_variables import SWITCH, Settings

Old = Mapping[str, Any]
"""An old configuration: values by key."""


class DroppedError(Exception):
    """Raised by a rule for a value that has no counterpart; the message says why."""


class Rule(NamedTuple):
    """How an old key is converted."""

    read: Callable[[Any, Old], Settings]
    """Returns the settings for a value, given all old values. Raises DroppedError if there is no counterpart,
    ValueError or KeyError for an invalid value."""
    why: str = ""
    """The reason for the change, for the report."""


RuleTable = dict[str, Rule]


def to(key: str, convert: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """A key that has another name here, with its value converted."""
    return Rule(lambda value, old: {key: convert(value) if convert else value}, why)


def drop(why: str) -> Rule:
    """A key without counterpart."""

    def read(value: Any, old: Old) -> Settings:
        raise DroppedError(why)

    return Rule(read)


def truth(value: Any) -> bool:
    """The value of a switch: true, false, or an equivalent word or number. Raises KeyError for any other
    value."""
    return SWITCH[str(value).lower()]


def number(text: Any) -> int | float:
    """The value of a variable that holds a number."""
    return float(text) if set(str(text).lower()) & set(".e") else int(text)


@functools.cache
def tables() -> dict[str, Any]:
    """The content of tables.yaml: what of the formats needs no code."""
    path = Path(__file__).with_name("tables.yaml")
    return parse_yaml(path.read_text(encoding="utf-8"), path.name)


def static(name: str) -> RuleTable:
    """The rules of a table in tables.yaml."""
    converters = {"renamed": None, "texts": str, "switches": truth, "numbers": number}
    found = tables()[name]
    table = {key: to(f"training.{key}") for key in found.get("same", ())}
    for kind, convert in converters.items():
        table |= {old: to(new, convert) for old, new in found.get(kind, {}).items()}
    for why, keys in found.get("dropped", {}).items():
        table |= dict.fromkeys(keys, drop(why))
    return table


def words(**known: Any) -> Callable[[Any], Any]:
    """A converter of words by a table; unknown words are dropped."""

    def read(value: Any) -> Any:
        if value not in known:
            raise DroppedError(f"{value!r} has no counterpart; known: {', '.join(known)}")
        return known[value]

    return read


def precision(value: Any, old: Old) -> Settings:
    """Mixed precision: bf16, fp16, or a word for off."""
    word = "no" if str(value).lower() in ("no", "false", "none", "fp32", "float32") else str(value).lower()
    word = {"bfloat16": "bf16", "float16": "fp16"}.get(word, word)
    if word not in ("bf16", "fp16", "no"):
        raise ValueError
    return {f"training.{name}": name == word for name in ("bf16", "fp16")}


def lora_if(switch_key: str | None, names: Mapping[str, str]) -> RuleTable:
    """Adapters: `names` maps r, alpha, dropout and target_modules to their old keys, which apply if the
    switch is on (None: always)."""

    def field(name: str, value: Any, old: Old) -> Settings:
        if switch_key is not None and not truth(old.get(switch_key, False)):
            raise DroppedError(f"{switch_key} is off: the weights themselves are trained")
        return {f"lora.{name}": modules(value) if name == "target_modules" else value}

    def turn(value: Any, old: Old) -> Settings:
        if not truth(value):
            return {"lora": None}
        given = any(old.get(key) is not None for key in names.values())
        return {} if given else {"lora.r": 16, "lora.alpha": 32}

    table = {old_key: Rule(functools.partial(field, name)) for name, old_key in names.items()}
    if switch_key is not None:
        table[switch_key] = Rule(turn, "adapters have a separate section")
    return table


def modules(value: Any) -> Any:
    """Names of layers as a list, from words separated by commas or spaces; a single word such as all-linear
    stays a string."""
    if isinstance(value, str) and ("," in value or " " in value.strip()):
        return [name for name in value.replace(",", " ").split() if name]
    return value


def logs_at(value: Any, old: Old) -> Settings:
    """The folder of TensorBoard; other trackers have no such setting."""
    if "tensorboard" not in str(old.get("report_to")):
        raise DroppedError("only TensorBoard writes there, and report_to does not name it")
    return {"training.logging_dir": str(value)}


TRANSFORMERS: RuleTable = {
    **{name: drop(why) for name, why in (INSTEAD | NOT_NEEDED).items()},
    **static("transformers"),
    "warmup_ratio": to("training.warmup_steps", why="a value below 1 is a fraction of the steps"),
    "group_by_length": to(
        "training.train_sampling_strategy", lambda value: "group_by_length" if truth(value) else "random"
    ),
    "logging_dir": Rule(logs_at),
}
"""Fields of `transformers.TrainingArguments` with another name here, and of other trainers without
counterpart. All others keep their names."""


def remote_code(value: Any, old: Old) -> Settings:
    """Only the command line may let a model run code."""
    if truth(value):
        raise DroppedError("give model.trust_remote_code=true on the command line")
    return {}


def weights_in(value: Any, old: Old) -> Settings:
    """The dtype of the weights; float16 is used for mixed precision only."""
    name = str(value).removeprefix("torch.")
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}.get(name, name)
    if name == "auto":
        raise DroppedError("weights are float32 unless model.dtype says otherwise")
    if name == "float16":
        return {"model.dtype": "float32", "training.fp16": True}
    return {"model.dtype": name}


def attention(value: Any, old: Old) -> Settings:
    """FlashAttention if it is named; other kernels are selected automatically."""
    if not str(value).startswith("flash_attention"):
        raise DroppedError("the fastest exact kernel is used")
    return {"training.flash_attention": True}


def quantized(width: str) -> Rule:
    """A switch for weights of this width."""
    return Rule(
        lambda value, old: {"model.quantization": width} if truth(value) else {},
        "one setting for both widths",
    )


def loading(value: Mapping[str, Any], old: Old) -> Settings:
    """Arguments of `from_pretrained`. Raises DroppedError for one without a counterpart."""
    settings: Settings = {}
    for key, part in value.items():
        rule = SETTINGS_OF_MODEL.get({"revision": "model_revision"}.get(key, key))
        if rule is None:
            raise DroppedError(f"{key} has no counterpart")
        with contextlib.suppress(DroppedError):
            settings |= rule.read(part, {})
    return settings


SETTINGS_OF_MODEL: RuleTable = {
    **static("model"),
    "trust_remote_code": Rule(remote_code),
    "attn_implementation": Rule(
        attention, "FlashAttention 2 is a switch; otherwise the fastest exact kernel is used"
    ),
    "load_in_4bit": quantized("4bit"),
    "load_in_8bit": quantized("8bit"),
    "model_init_kwargs": Rule(loading, "arguments of from_pretrained are settings of model"),
    **dict.fromkeys(("torch_dtype", "dtype"), Rule(weights_in)),
}
"""The settings of the model under their names in other trainers."""
