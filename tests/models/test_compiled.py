"""What a compiled model checks before a pass, and what it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unmask.models.compiled import compile_model, guards_to_check

pytestmark = pytest.mark.usefixtures("dynamo_as_it_was")


class Scaled(nn.Module):
    """Multiplies by two settings, one of them in its configuration."""

    def __init__(self, scale: int = 2) -> None:
        super().__init__()
        self.config, self.factor = SimpleNamespace(scale=scale), 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale * self.factor


def compiled(options: dict[str, Any], scale: int = 2) -> Scaled:
    model = Scaled(scale)
    compile_model(model, options)
    return model


def test_the_configuration_is_read_when_the_model_is_compiled_and_all_else_before_each_pass():
    model, one = compiled({"backend": "eager"}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [6] * 3
    model.factor = 4
    assert model(one).tolist() == [20] * 3  # compiled again


@pytest.mark.parametrize("options", [{}, {"isolate_recompiles": False}, {"mode": "default"}], ids=str)
def test_no_model_runs_a_graph_of_another_configuration(options):
    one, options = torch.ones(3), {"backend": "eager", **options}
    models = [compiled(options, scale) for scale in (2, 5)]
    assert [model(one).tolist() for model in models * 2] == [[6] * 3, [15] * 3] * 2
    models[0].config.scale = 7
    compile_model(models[0], options)
    assert models[0](one).tolist() == [21] * 3


def test_equal_models_may_share_their_graphs():
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    models = [compiled({"backend": backend, "isolate_recompiles": False}) for _ in range(2)]
    assert [model(torch.ones(3)).tolist() for model in models] == [[6] * 3] * 2 and len(graphs) == 1


def test_options_of_ones_own_come_first():
    seen: list[Any] = []

    def all_of_them(guards: Any) -> list[bool]:
        seen.extend(guards_to_check(guards))
        return [True] * len(guards)

    model, one = compiled({"backend": "eager", "options": {"guard_filter_fn": all_of_them}}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [15] * 3 and not all(seen)


@pytest.mark.parametrize("alone", [False, True])
def test_a_mode_is_passed_on_without_options(alone):
    """Torch takes one of the two."""
    model, one = compiled({"mode": "default", "backend": "eager", "isolate_recompiles": alone}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [15] * 3
