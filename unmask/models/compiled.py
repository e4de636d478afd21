"""How torch.compile is applied to a model whose passes are short."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

FINGERPRINT = "unmask_fingerprint"
"""The attribute of a compiled model's first part that tells the model's configuration from others."""

NEVER_READ = ("unmask", "_name_or_path", "_commit_hash", "transformers_version", "architectures")
"""How names in a configuration start that no pass reads: where it comes from, and Unmask's own settings."""

GRAPHS = 64
"""Graphs of models whose forward passes share a wrapper of transformers, of all configurations together;
beyond them torch runs a model as it is."""

MODULE_PATH = r"self(\._modules\['[^']*'\])*\."
CONFIG_PATH = re.compile(rf"\b{MODULE_PATH}config\b")
FINGERPRINT_PATH = re.compile(rf"{MODULE_PATH}{FINGERPRINT}")
"""In names of checks, which start at the module whose forward pass is compiled."""


def compile_model(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile a model in place with these options of torch.compile, one graph for all lengths and numbers of
    rows. Models whose configurations are equal now share their graphs, as stages and references do; later
    changes of the configuration are not seen."""
    # hooks hold the selected rows of a pass
    torch._dynamo.config.force_nn_module_property_static_shapes = False
    # those of the layers are constants rather than inputs of every pass
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    tell_apart(model)
    options = {"dynamic": True} | options
    if options.get("mode") is None:  # torch takes a mode or options, not both
        options["options"] = {"guard_filter_fn": partial(guards_to_check, model)} | (
            options.get("options") or {}
        )
    model.compile(**options)


def taken_apart(module: Any) -> tuple[nn.Module, dict[str, Any] | None]:
    """The module within what torch.compile returned, and options of torch.compile for the same; of any other,
    itself and None."""
    if not hasattr(module, "_orig_mod"):
        return module, None
    # which knows mode and options
    backend = torch._dynamo.eval_frame.innermost_backend(module.dynamo_ctx.callback)
    return module._orig_mod, {"backend": backend}


def tell_apart(model: nn.Module) -> None:
    """Make a model's first part read the fingerprint of its configuration in each pass, so that torch checks
    it. Hooks of the model itself are not part of what is compiled."""
    if (part := next(model.children(), None)) is not None:
        setattr(part, FINGERPRINT, fingerprint(model))
        if read_fingerprint not in part._forward_pre_hooks.values():
            part.register_forward_pre_hook(read_fingerprint)


def read_fingerprint(part: nn.Module, args: tuple[Any, ...]) -> None:
    """The hook. Torch checks what is read of a string."""
    getattr(part, FINGERPRINT).isascii()


def guards_to_check(model: nn.Module, guards: Sequence[Any]) -> list[bool]:
    """What is checked before each pass: all but the model's configuration, for which its fingerprint stands.
    Its checks are the slowest, as transformers reads settings in Python. Code that reads no fingerprint
    (after a graph break), or one that is no longer true (the configuration changed before the first pass),
    checks everything."""
    told_apart = any(
        FINGERPRINT_PATH.fullmatch(guard.name) and guard.value == fingerprint(model) for guard in guards
    )
    return [not (told_apart and CONFIG_PATH.search(guard.name)) for guard in guards]


def fingerprint(model: nn.Module) -> str:
    """A hash of all settings that a pass can read in the configurations of a model and its modules."""
    configs = {
        name: vars(module)["config"] for name, module in model.named_modules() if "config" in vars(module)
    }
    described = {id(config): description(config) for config in configs.values()}
    return hashlib.sha256(
        repr([(name, described[id(config)]) for name, config in configs.items()]).encode()
    ).hexdigest()


def description(value: Any) -> str:
    """A configuration or a value in it, as text: the same for equal ones. Objects that do not say what they
    hold differ from all others."""
    if isinstance(value, PretrainedConfig):
        settings = {name: setting for name, setting in vars(value).items() if not name.startswith(NEVER_READ)}
        return f"{type(value)} {description(settings)}"
    if isinstance(value, torch.dtype):
        return repr(str(value).removeprefix("torch."))  # as a configuration is saved
    if isinstance(value, Mapping):
        return repr(sorted((repr(key), description(entry)) for key, entry in value.items()))
    if isinstance(value, list | tuple):
        return f"{type(value)} {[description(entry) for entry in value]}"
    return repr(value)
