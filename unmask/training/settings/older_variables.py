"""Environment variables of other trainers, read as settings. They override files; `UNMASK_*` variables
override them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from unmask.config.layers import Layer, Layers, nested_settings
from unmask.console import is_first_process
from unmask.errors import ConfigError, did_you_mean
from unmask.tasks import get_task
from unmask.training.settings.listing import settings_of_verb

Settings = dict[str, Any]
"""Values by dotted key."""
SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
VLLM_PORT = 8000
BATCH_VARIABLES = ("DIFFU_BATCH_SIZE", "GRPO_BATCH_SIZE")


class Variable(NamedTuple):
    """How a variable is read."""

    read: Callable[[str], Settings]
    """Raises ValueError or KeyError for an invalid text."""
    wanted: str
    """The expected form of the text."""


def older_layers(environ: Mapping[str, str], verb: str) -> list[Layer]:
    """A layer for each variable that is set and not empty; a line on stderr says how it is read, and another
    for each that is unknown.

    Raises:
        ConfigError: an invalid value.
    """
    variables = OLDER | (OLDER_GRPO_VARIABLES if verb == "grpo" else {})
    texts = {name: text for name in variables if (text := environ.get(name, "").strip())}
    # there is no server, so its address is ignored
    if SWITCH.get(texts.get("GRPO_USE_VLLM", "").lower()) is False:
        texts.pop("VLLM_SERVER_HOST", None)
    layers = []
    prefixes = ("DIFFU_", "GRPO_") if verb == "grpo" else ("DIFFU_",)
    for name in sorted(name for name in environ if name.startswith(prefixes) and name not in variables):
        _say(environ, f"{name} is not read: no variable has this name. {did_you_mean(name, variables)}")
    for name, text in texts.items():
        source = f"environment variable {name}"
        try:
            settings = variables[name].read(text)
        except (KeyError, ValueError):
            raise ConfigError(
                f"{text!r} is not valid", where=source, remedy=f"It should be {variables[name].wanted}"
            ) from None
        layers.append(Layer(source, nested_settings(settings)))
        _say(environ, f"{name} is read as {' and '.join(settings)}")
    return layers


def _say(environ: Mapping[str, str], line: str) -> None:
    if is_first_process(environ):
        print(line, file=sys.stderr)


def with_whole_groups(layers: Layers, environ: Mapping[str, str]) -> Layers:
    """The layers of `unmask grpo`. Where a variable changes the batch so that a step does not hold whole
    groups, gradients are accumulated over as many batches as keep the step's completions, or nearly so,
    unless a user says over how many."""
    batch_key, steps_key = "training.per_device_train_batch_size", "training.gradient_accumulation_steps"
    variables = [f"environment variable {name}" for name in BATCH_VARIABLES]
    source, steps_source = layers.source_of(batch_key), layers.source_of(steps_key)
    if source not in variables or not (steps_source or "recipe ").startswith("recipe "):
        return layers
    earlier = Layers(layer for layer in layers if layer.source not in variables)
    defaults = {setting.key: setting.default for setting in settings_of_verb("grpo")}
    group_key = "training.num_generations"
    batch, before = layers.value_of(batch_key), earlier.value_of(batch_key) or defaults[batch_key]
    accumulated = layers.value_of(steps_key) or defaults[steps_key]
    group = layers.value_of(group_key) or defaults[group_key]
    # which are refused later
    if not all(isinstance(number, int) and number > 0 for number in (before, accumulated, group)):
        return layers
    whole = group // math.gcd(batch * int(environ.get("WORLD_SIZE", 1)), group)
    if accumulated % whole == 0:
        return layers
    steps = whole * max(1, round(before * accumulated / batch / whole))
    reason = f"{accumulated} batches of {batch} completions are no whole groups of {group}"
    _say(environ, f"{steps_key} is {steps}, as {reason}")
    return Layers([*layers, Layer(str(source), nested_settings({steps_key: steps}))])


def _number(key: str) -> Variable:
    def read(text: str) -> Settings:
        if int(text) < 1:
            raise ValueError
        return {key: int(text)}

    return Variable(read, "a whole number of at least 1")


def _switch(key: str, values: tuple[Any, Any] = (False, True)) -> Variable:
    return Variable(
        lambda text: {key: values[SWITCH[text.lower()]]}, "1, true, yes or on, or 0, false, no or off"
    )


def _precision(text: str) -> Settings:
    """A switch that is on means bfloat16, or float16 on a GPU without bfloat16."""
    if text.lower() in SWITCH:
        text = _fast_type() if SWITCH[text.lower()] else "no"
    if text not in ("bf16", "fp16", "no"):
        raise ValueError
    return {f"training.{name}": text == name for name in ("bf16", "fp16")}


def _fast_type() -> str:
    import torch

    return (
        "fp16"
        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
        else "bf16"
    )


def _data(text: str) -> Settings:
    try:
        return {"data.task": get_task(text).name}
    except ConfigError:
        return {"data.train": text}


def _address(text: str) -> Settings:
    bare = "://" not in text
    url = urlsplit(f"http://{text}" if bare else text)
    if not url.hostname or url.scheme not in ("http", "https"):
        raise ValueError
    return {"training.rollout.url": url.geturl() if url.port or not bare else f"{url.geturl()}:{VLLM_PORT}"}


OLDER = {
    "DIFFU_MODEL_PATH": Variable(lambda text: {"model.path": text}, "a folder or a hub name"),
    "DIFFU_DATASET": Variable(_data, "a built-in task, a file or a hub name"),
    "DIFFU_MIXED_PRECISION": Variable(
        _precision, "bf16, fp16, or a switch, of which true is bf16 (on a GPU without it fp16)"
    ),
    "DIFFU_BATCH_SIZE": _number("training.per_device_train_batch_size"),
}
OLDER_GRPO_VARIABLES = {
    "GRPO_USE_VLLM": _switch("training.rollout.backend", ("local", "vllm")),
    "VLLM_SERVER_HOST": Variable(_address, "HOST, HOST:PORT or a URL"),
    "GRPO_USE_TORCH_COMPILE": _switch("training.torch_compile"),
    "GRPO_BATCH_SIZE": _number("training.per_device_train_batch_size"),
    "GRPO_NUM_GENERATIONS": _number("training.num_generations"),
    "GRPO_GRAD_ACCUM_STEPS": _number("training.gradient_accumulation_steps"),
}
