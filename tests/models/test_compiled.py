"""What a compiled model checks before a pass, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from unmask.models.compiled import compile_model, guards_to_check


class Scaled(nn.Module):
    """Multiplies by two settings, one of them in its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.factor = SimpleNamespace(scale=2), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale * self.factor


def compiled(options: dict[str, Any]) -> Scaled:
    torch.compiler.reset()
    model = Scaled()
    compile_model(model, options)
    return model


def test_the_configuration_is_read_when_the_model_is_compiled_and_all_else_before_each_pass():
    model, one = compiled({"backend": "eager"}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [6] * 3
    model.factor = 4
    assert model(one).tolist() == [20] * 3  # compiled again


def test_options_of_ones_own_come_first():
    seen: list[Any] = []

    def all_of_them(guards: Any) -> list[bool]:
        seen.extend(guards_to_check(guards))
        return [True] * len(guards)

    model, one = compiled({"backend": "eager", "options": {"guard_filter_fn": all_of_them}}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [15] * 3 and not all(seen)


def test_a_mode_is_passed_on_alone():
    model = compiled({"mode": "default", "backend": "eager"})
    assert model(torch.ones(3)).tolist() == [6] * 3
