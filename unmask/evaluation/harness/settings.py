"""The options of lm-eval's requests, as settings of Unmask. Each is obeyed, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unmask.config.run import OF_NEW_MODELS, ModelConfig, SamplerConfig
from unmask.errors import ConfigError, did_you_mean

LENGTH_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the length of a completion, as in lm-eval."""
OWN = ("until", "do_sample", *LENGTH_NAMES)
MODEL_FIELDS = set(ModelConfig.model_fields) - {
    "path",
    *OF_NEW_MODELS,
    "attention",
    "block_size",
    "logit_shift",
    "device",
}
SAMPLER_FIELDS = set(SamplerConfig.model_fields) - {"seed", "batch_size"}
DEFAULT_LENGTH = 256
"""Of a completion, in tokens, as in lm-eval."""


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of `unmask.load`, and the sampler's settings. Raises ConfigError for any other name."""
    for name in settings:
        if name not in MODEL_FIELDS | SAMPLER_FIELDS:
            known = (
                MODEL_FIELDS
                | SAMPLER_FIELDS
                | {"samples", "estimator", "seed", "batch_size", "max_length", "device"}
            )
            raise ConfigError(
                f"unknown option {name!r}", where="model_args", remedy=did_you_mean(name, known)
            )
    model = {name: value for name, value in settings.items() if name in MODEL_FIELDS}
    return model, {name: value for name, value in settings.items() if name in SAMPLER_FIELDS}


def read_gen_kwargs(
    gen_kwargs: Mapping[str, Any], defaults: SamplerConfig
) -> tuple[SamplerConfig, list[str]]:
    """The sampler and the stop strings of a request.

    `until`, `do_sample` and the length mean what they mean in lm-eval: without `do_sample` a temperature
    decides; `do_sample: false` is greedy at any temperature; `do_sample: true` alone samples at temperature
    1. All other names are those of `SamplerConfig`.

    Raises:
        ConfigError: an unknown name, a wrong value, two lengths, or sampling at temperature 0.
    """
    given = dict(gen_kwargs)
    for name in given:
        if name not in OWN and name not in SamplerConfig.model_fields:
            remedy = did_you_mean(name, {*OWN, *SamplerConfig.model_fields})
            raise ConfigError(f"{name!r} is no option of the sampler", where="gen_kwargs", remedy=remedy)
    lengths = {name: given.pop(name) for name in LENGTH_NAMES if given.get(name) is not None}
    if len(set(lengths.values())) > 1:
        raise ConfigError(
            f"{' and '.join(lengths)} contradict one another", where="gen_kwargs", remedy="Give one length"
        )
    settings = {name: value for name, value in given.items() if name not in OWN}
    if lengths or "max_new_tokens" not in defaults.model_fields_set:
        settings["max_new_tokens"] = int(next(iter(lengths.values()), DEFAULT_LENGTH))
    sample, temperature = given.get("do_sample"), given.get("temperature")
    if sample is False:
        settings["temperature"] = 0.0
    elif sample and temperature == 0:
        remedy = "Leave one out, or raise the temperature"
        raise ConfigError(
            "do_sample with temperature 0 contradict one another", where="gen_kwargs", remedy=remedy
        )
    elif sample and temperature is None:
        settings["temperature"] = defaults.temperature or 1.0
    until = given.get("until") or []
    until = [until] if isinstance(until, str) else list(until)
    if not all(isinstance(stop, str) for stop in until):
        raise ConfigError(
            f"until {until!r:.80} is not a string or a list of strings",
            where="gen_kwargs",
            remedy="Give strings",
        )
    return SamplerConfig(**{**defaults.model_dump(exclude_unset=True), **settings}), [
        stop for stop in until if stop
    ]
