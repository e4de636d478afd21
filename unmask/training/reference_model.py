"""The reference model of a KL term: the base under the policy's adapters, or a frozen copy, which may follow
the policy slowly.

`GRPOTrainer.make_updates` (with `kl_to: reference`) and the DPO trainer compute its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, TrainerCallback

from unmask.errors import ConfigError
from unmask.models.adapters import starts_at_base
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.diffusion_gemma import canvas_pattern
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm, load, with_pattern
from unmask.models.model_files import read_config
from unmask.models.model_paths import fetched

FILE = "reference.safetensors"
WITHOUT = "a loss that needs no reference (beta 0, or loss_type simpo)"


class Reference:
    """The reference model of DPO and of RL's KL divergence: the untrained policy, or another model.

    Args:
        lm: the policy before training. If it trains only adapters that start at zero, the reference is its
            base with the adapters switched off, and no second model is held.
        device: the device that holds the whole second model, if there is one: the training device.
        copy: whether to copy the policy even where its base without adapters would do: for a reference that
            moves or is placed elsewhere.
        other: another reference with the same vocabulary and settings: a model, or a path to load; None: the
            policy before training.

    Raises:
        ConfigError: the other model has another vocabulary or other settings, or ZeRO 3 has already sharded
            the weights.
    """

    def __init__(self, lm: DiffusionLM, *, device: torch.device, copy: bool = False, other: Any = None):
        self.policy = lm
        self.is_base = (
            hasattr(lm.model, "disable_adapter") and not copy and other is None and starts_at_base(lm)
        )
        source = lm if other is None else beside(lm, other)
        if any(hasattr(weight, "ds_id") for weight in source.model.parameters()):  # DeepSpeed's mark
            what = "no reference can be made from weights that ZeRO 3 has sharded"
            raise ConfigError(what, where="reference", remedy=f"Use zero1, zero2 or FSDP, or {WITHOUT}")
        self.lm = lm if self.is_base else lm.frozen_copy() if other is None else source
        if not self.is_base:
            self.lm.model.eval().requires_grad_(False).to(device)

    @contextmanager
    def model_in_use(self) -> Iterator[DiffusionLM]:
        """Yields the reference; inside, the adapters are switched off if they are part of the policy."""
        with self.policy.model.disable_adapter() if self.is_base else nullcontext():
            yield self.lm

    @torch.no_grad()
    def move(self, fraction: float) -> None:
        """Move the weights towards the policy's by this fraction (TR-DPO, Gorbatovski et al. 2024, eq. 3)."""
        for reference, policy in zip(self.lm.model.parameters(), self.policy.model.parameters(), strict=True):
            if policy.requires_grad:
                reference.lerp_(policy.to(reference.dtype), fraction)

    def save(self, folder: Path) -> None:
        """Write the weights of a moved reference."""
        save_file({name: weight.contiguous() for name, weight in self._moving().items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Read the weights that `save` wrote."""
        stored = load_file(folder / FILE)
        with torch.no_grad():
            for name, weight in self._moving().items():
                weight.copy_(stored[name])

    def _moving(self) -> dict[str, torch.Tensor]:
        trained = {name for name, weight in self.policy.model.named_parameters() if weight.requires_grad}
        return {name: weight for name, weight in self.lm.model.named_parameters() if name in trained}


class ReferenceSync(TrainerCallback):
    """Moves the reference after every `ref_model_sync_steps` steps, as TRL does."""

    def __init__(self, reference: Reference):
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self.reference.move(args.ref_model_mixup_alpha)


def make_reference(
    lm: DiffusionLM, accelerator: Accelerator, *, copy: bool = False, other: Any = None
) -> Reference:
    """The reference of a run. Arguments and errors as in `Reference`; also raises ConfigError if only the
    first process has weights."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.cpu_ram_efficient_loading:
        what = "only the first process has weights to make a reference from"
        raise ConfigError(
            what, where="fsdp_config.cpu_ram_efficient_loading", remedy=f"Leave it out, or use {WITHOUT}"
        )
    return Reference(lm, device=accelerator.device, copy=copy, other=other)


def _has_settings(config: PretrainedConfig) -> bool:
    """Whether a model has an attention pattern of its own."""
    return getattr(config, SETTINGS_KEY, None) is not None or bool(canvas_pattern(config))


def beside(lm: DiffusionLM, given: Any) -> DiffusionLM:
    """Another model: in memory, or a path, which is loaded in the policy's dtype. A model without saved
    settings gets the policy's attention pattern. Raises ConfigError if its tokens or saved settings differ
    from the policy's, ModelError if it cannot be loaded."""
    pattern: dict[str, Any] = {name: lm.pattern[name] for name in ("attention", "block_size", "logit_shift")}
    if isinstance(given, str | Path):
        where, (config, _) = f"ref_model {given}", read_config(fetched(given, weights=False))
        has_settings = _has_settings(config)
        dtype = str(lm.model.dtype).removeprefix("torch.")
        other = load(given, dtype=dtype, **({} if has_settings else pattern))
    else:
        where, other = "ref_model", as_diffusion_lm(given, lm.tokenizer, saved=False)
        has_settings = isinstance(given, DiffusionLM) or _has_settings(given.config)
        other = other if has_settings else with_pattern(other, **pattern)
    tokens, own_tokens = (
        (each.vocab_size, each.mask_token_id, each.tokenizer.get_vocab()) for each in (other, lm)
    )
    if tokens != own_tokens:
        what = f"its vocabulary ({tokens[0]} tokens) is not the policy's ({own_tokens[0]} tokens)"
        raise ConfigError(what, where=where, remedy="Give a model of the same tokenizer")
    if differing := [name for name, value in lm.pattern.items() if other.pattern[name] != value]:
        what = " and ".join(
            f"its {name} is {other.pattern[name]}, the policy's {lm.pattern[name]}" for name in differing
        )
        remedy = (
            "Give a model that was saved with the policy's "
            f"settings{', or a stock one' if has_settings else ''}, or leave it out"
        )
        raise ConfigError(what, where=where, remedy=remedy)
    return other.compile_as(lm)
