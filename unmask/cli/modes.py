"""`--mode`: groups of settings for this hardware, from `unmask/recipes/modes`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from unmask.cli.verbs import VERBS
from unmask.config.layers import MODES, Layer, Layers, read_settings


def adapt_recipes(layers: Layers, verb: str, mode: str | None, *, recipes: int) -> Layers:
    """Adapt the first `recipes` layers: a recipe for another RL method loses its method-specific settings.
    The mode's layer goes after the recipes."""
    config_class, chosen = VERBS[verb].config_class, layers.merged().get("training", {})
    adapted = [
        Layer(name, values | {"training": config_class.of_recipe(values.get("training", {}), chosen)})
        for name, values in layers[:recipes]
    ]
    layers = Layers([*adapted, *layers[recipes:]])
    return with_mode(layers, mode, verb, after=recipes) if mode else layers


def with_mode(layers: Layers, mode: str, verb: str, *, after: int) -> Layers:
    """Insert a mode's settings after the first `after` layers, the recipes: files, variables and the command
    line override them."""
    active = {verb} | hardware_here(use_cpu=layers.value_of("training.use_cpu") is True)
    if layers.value_of("training.fsdp"):
        active.add("fsdp")
    return Layers([*layers[:after], Layer(f"--mode {mode}", mode_settings(mode, active)), *layers[after:]])


def mode_settings(mode: str, active: Collection[str]) -> dict[str, Any]:
    """The settings in a mode's section `everywhere` and in its active sections (hardware, fsdp, verb)."""
    sections = read_settings(MODES / f"{mode}.yaml")
    return Layers(
        Layer(name, values) for name, values in sections.items() if name in {"everywhere", *active}
    ).merged()


def hardware_here(*, use_cpu: bool = False) -> set[str]:
    """The sections of this machine: cpu; or gpu, and ampere if the GPU computes in bfloat16 and TF32."""
    import torch

    if use_cpu or not torch.cuda.is_available():
        return {"cpu"}
    return {"gpu", "ampere"} if torch.cuda.get_device_capability() >= (8, 0) else {"gpu"}
