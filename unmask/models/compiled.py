"""How torch.compile is applied to a model whose passes are short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def compile_model(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile a model in place with these options of torch.compile, one graph for all lengths and numbers of rows. Without a mode it has
    graphs of its own, which check less; `isolate_recompiles=False` shares graphs with equal models, as stages and references do."""
    torch._dynamo.config.force_nn_module_property_static_shapes = False  # hooks hold the selected rows of a pass
    torch._dynamo.config.specialize_float = True  # those of the layers are constants rather than inputs of every pass
    plain = options.get("mode") is None  # torch takes a mode or options, not both
    options = {"dynamic": True, "isolate_recompiles": plain} | options
    if plain and options["isolate_recompiles"]:  # else a graph of a model with another configuration could pass the checks
        options["options"] = {"guard_filter_fn": guards_to_check} | (options.get("options") or {})
    model.compile(**options)


def guards_to_check(guards: Sequence[Any]) -> list[bool]:
    """What is checked before each pass: all but the model's configuration, which stays as it is. It is a third of the checks, and the
    slowest, as transformers reads settings in Python."""
    return [".config" not in guard.name for guard in guards]
