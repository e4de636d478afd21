"""The state of a model: dropout, train and eval mode, which weights are trained, and a hash of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from unmask.models.diffusion_lm import DiffusionLM


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of a model to 0: policy, old policy and reference must be the same function of their
    weights. Unlike in eval mode, gradient checkpointing stays on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            # to mypy every attribute of a module is a tensor
            setattr(module, "attention_dropout", 0.0)  # noqa: B010


def fingerprint(model: nn.Module) -> str:
    """A hash of all weights, by which stored log-probabilities are matched to their model."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@contextmanager
def training_only(lm: DiffusionLM, trained: Collection[nn.Parameter]) -> Iterator[None]:
    """Let only these weights take gradients, for a while."""
    before = {parameter: parameter.requires_grad for parameter in lm.model.parameters()}
    for parameter in before:
        parameter.requires_grad_(parameter in trained)
    try:
        yield
    finally:
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)


@contextmanager
def evaluating(lm: DiffusionLM) -> Iterator[None]:
    """Put the model in eval mode, and restore each module's mode afterwards."""
    training, modules = [], [lm.model]
    while modules:  # `modules()` takes as long as a small model's forward pass
        module = modules.pop()
        training += [module] if module.training else []
        modules += [part for part in module._modules.values() if part is not None]
    if training:
        lm.model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
