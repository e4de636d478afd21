"""Settings of the completions that are sampled during training, and of the backends that sample them for
reinforcement learning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from unmask.config.base import Config, OnResume
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError

NEUTRAL = OnResume.NEUTRAL
SERVER_FIELDS = {"backend", "url", "folder", "sync_steps", "timeout", "patience", "api_key"}
USED_BY = {
    "local": {"backend"},
    "server": SERVER_FIELDS | {"model"},
    "vllm": SERVER_FIELDS | {"model", "sync"},
}
VLLM_READS = {
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_at_eos",
    "allowed_tokens",
    "forbidden_tokens",
}
VLLM_READS |= {"seed", "batch_size"}
"""The sampler settings that a vLLM server supports."""


ONCE = "Leave it out: a rollout denoises, and reveals each token once"
NOT_IN_ROLLOUTS = dict.fromkeys(("mode", "num_branches", "remask_fraction", "revise"), ONCE) | {
    "trace": "Leave it out: rollouts always have one"
}
"""What to do about settings of the sampler that rollouts do not take."""


def rollout_sampler(
    own: Mapping[str, Any], names: Mapping[str, str], more: Mapping[str, Any] | None
) -> SamplerConfig:
    """The sampler of completions that are trained on, whose trace says which step revealed each token.

    Args:
        own: what the trainer's settings say, by the field of `SamplerConfig`.
        names: the names of these settings, by the field.
        more: further fields (`generation_kwargs`).

    Raises:
        ConfigError: a further field is a setting of its own, or none of rollouts, or has a bad value.
    """
    more = more or {}
    for name in more:
        if name in names or name in NOT_IN_ROLLOUTS:
            what, remedy = "is not a setting of rollouts", NOT_IN_ROLLOUTS.get(name, "")
            if name in names:
                what, remedy = "is a setting of its own", f"Set {names[name]}"
            raise ConfigError(what, where=f"generation_kwargs.{name}", remedy=remedy)
    try:
        return SamplerConfig(**{**own, **more, "trace": True})
    except ConfigError as error:
        if (error.where or "").partition(".")[0] in more:
            raise error.moved(f"generation_kwargs.{error.where}") from error
        raise


def unread_by_vllm(sampler: SamplerConfig) -> str | None:
    """The first changed setting that a vLLM server does not support; None if there is none. A server decodes
    from left to right."""
    default = SamplerConfig()
    for name in sorted(SamplerConfig.model_fields.keys() - VLLM_READS):
        value = getattr(sampler, name)
        if value != getattr(default, name) and (name, value) != ("remasking", "left_to_right"):
            return name
    return None


class RolloutConfig(Config):
    """Which backend samples, and how it gets the trained weights.

    Raises:
        ConfigError: a setting is missing, or has no effect on the backend.
    """

    backend: Literal["local", "server", "vllm"] = "local"
    """local: the trained model itself, in process. server: `unmask serve`, any model. vllm: a vLLM server,
    causal models only."""
    url: Annotated[str | None, NEUTRAL] = None
    """The address of the server, such as http://localhost:8000."""
    model: str | None = None
    """The model's name on the server; unset: the only one of a vLLM server, the first one of `unmask
    serve`."""
    sync: Annotated[Literal["disk", "lora", "nccl"], NEUTRAL] = "disk"
    """How a vLLM server gets weights: all through a folder, only adapters through a folder, or all from GPU
    to GPU."""
    folder: Annotated[str | None, NEUTRAL] = None
    """Where weights for the server are written, a path that is valid on both machines; unset: rollout_weights
    in the output folder."""
    sync_steps: int = Field(default=1, ge=1)
    """vllm: rollouts between two transfers of weights. Above 1, completions come from older weights, which
    `vllm_importance_sampling_cap` corrects for. A resumed run transfers them immediately, and then differs
    from an uninterrupted one."""
    timeout: Annotated[float, NEUTRAL] = Field(default=300.0, gt=0)
    """Seconds to wait for an answer: `batch_size` completions from `unmask serve`, one from vLLM."""
    patience: Annotated[float, NEUTRAL] = Field(default=30.0, ge=0)
    """Seconds to wait for a server that accepts no requests, at the start or after it died."""
    api_key: Annotated[str | None, NEUTRAL] = None
    """The server's API key; unset: the variable UNMASK_API_KEY, which is not recorded with the settings."""

    def without_effect(self) -> Iterator[ConfigError]:
        for name in (name for name in type(self).model_fields if name not in USED_BY[self.backend]):
            yield ConfigError(
                f"has no effect with backend {self.backend!r}",
                where=name,
                remedy="Leave it out, or set another backend",
            )

    def check(self) -> None:
        if self.backend != "local" and not re.match(r"https?://[^/]", self.url or ""):
            what = (
                f"{self.url!r} is not an address"
                if self.url
                else f"backend {self.backend!r} needs the address of its server"
            )
            raise ConfigError(what, where="url", remedy="Give one such as http://localhost:8000")
        if self.backend == "server" and self.sync_steps > 1:
            what = (
                "completions would come from older weights, for which this backend's loss has no correction"
            )
            raise ConfigError(what, where="sync_steps", remedy="Leave it out")
        if self.sync == "nccl" and self.folder is not None:
            raise ConfigError("nothing is written with nccl", where="folder", remedy="Leave it out")
