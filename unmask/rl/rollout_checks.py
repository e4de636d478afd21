"""Settings of rollouts that their backend ignores, or that cannot be combined."""

from __future__ import annotations

from typing import Any

from unmask.config.rollout import unread_by_vllm
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError
from unmask.rl.methods.base import METHODS, Method
from unmask.training.config_fields import naming_setting_too

CAUSAL_RECIPE_HINT = "the recipe grpo-code-ocaml-causal is for causal models"


def check_rollouts(args: Any, sampler: SamplerConfig) -> None:
    """Refuse settings that the backend of the rollouts ignores.

    Args:
        args: the GRPOConfig.
        sampler: its sampler settings.

    Raises:
        ConfigError: such a setting is set.
    """
    # for causal models: nothing is denoised, and the likelihood is exact
    if args.rollout_config.backend == "vllm":
        if (name := unread_by_vllm(sampler)) is not None:
            what = f"vllm decodes a causal model token by token, and ignores {name}"
            remedy = (
                f"Leave {name} out ({CAUSAL_RECIPE_HINT}), or sample a diffusion model with "
                "rollout.backend local or server"
            )
            raise ConfigError(what, where=f"rollout.backend and {name}", remedy=remedy)
        with naming_setting_too("rollout.backend"):
            args.refuse_for_causal_models()
        if args.rollout_config.sync == "nccl" and args.use_cpu:
            what = "NCCL needs a GPU on both sides"
            raise ConfigError(
                what, where="rollout.sync and use_cpu", remedy="Use disk or lora, or leave use_cpu out"
            )
        if args.corrects_for_server and args.log_prob_temperature != args.temperature:
            what = (
                f"the server's log-probabilities are of temperature {args.temperature:g}, not of "
                f"{args.log_prob_temperature:g}"
            )
            raise ConfigError(
                what,
                where="rollout.backend and score_temperature",
                remedy="Leave it out, or set importance_cap to null",
            )
    elif "importance_cap" in args.given:
        what = (
            f"{args.rollout_config.backend} samples from the trained model itself, so there is nothing to "
            "correct"
        )
        remedy = "Leave importance_cap out, or set rollout.backend to vllm"
        raise ConfigError(what, where="rollout.backend and importance_cap", remedy=remedy)


def check_ahead(args: Any, method: type[Method]) -> None:
    """Refuse rollouts ahead of training (`max_staleness`) where nothing can sample them, or nothing corrects
    for their age.

    Raises:
        ConfigError: they are refused.
    """
    if not args.max_staleness:
        return
    if args.rollout_config.backend == "local":
        what = "only a server can sample while the model trains"
        remedy = "Set rollout.backend to server or vllm, or leave max_staleness out"
        raise ConfigError(what, where="rollout.backend and max_staleness", remedy=remedy)
    if not method.has_ratio:
        what = (
            f"the loss of {args.method} has no ratio to the policy that sampled, which corrects for older "
            "weights"
        )
        remedy = (
            "Leave it out, or use one of "
            f"{', '.join(name for name, other in METHODS.items() if other.has_ratio)}"
        )
        raise ConfigError(what, where="method and max_staleness", remedy=remedy)
    if args.rollout_config.sync == "nccl":
        what = "a restarted server would get the weights as they are being trained"
        raise ConfigError(what, where="rollout.sync and max_staleness", remedy="Use disk or lora")
    if args.rollout_config.sync_steps > 1:
        what = "the server would sample from older weights than max_staleness allows"
        raise ConfigError(what, where="rollout.sync_steps and max_staleness", remedy="Leave one of them out")
