"""What a compiled model checks before a pass, and what it does not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from tests.helpers import partly_slow
from unmask.models.compiled import compile_model, fingerprint, guards_to_check

pytestmark = pytest.mark.usefixtures("dynamo_as_it_was")


class Scaled(nn.Module):
    """Multiplies by two settings, one of them in its configuration."""

    def __init__(self, scale: Any = 2, *, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.config, self.factor, self.breaks = SimpleNamespace(scale=scale), 3, breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x * self.config.scale * self.factor


class Backend:
    """Counts the graphs."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def compiled(options: dict[str, Any], scale: int = 2, *, breaks: bool = False) -> Scaled:
    model = Scaled(scale, breaks=breaks)
    compile_model(model, options)
    return model


def test_the_configuration_is_read_when_the_model_is_compiled_and_all_else_before_each_pass():
    model, one = compiled({"backend": "eager"}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [6] * 3
    model.factor = 4
    assert model(one).tolist() == [20] * 3  # compiled again


@pytest.mark.parametrize("breaks", [False, True])
@partly_slow("options", [{}, {"mode": "default"}, {"options": {}}, {"dynamic": None}], 0, 1, ids=str)
def test_no_model_runs_a_graph_of_another_configuration(options, breaks):
    one, options = torch.ones(3), {"backend": "eager", **options}
    models = [compiled(options, scale, breaks=breaks) for scale in (2, 5)]
    assert [model(one).tolist() for model in models * 2] == [[6] * 3, [15] * 3] * 2
    models[0].config.scale = 7
    compile_model(models[0], options)
    assert models[0](one).tolist() == [21] * 3
    models[0].config.scale = 5
    compile_model(models[0], options)
    assert models[0](one).tolist() == [15] * 3


def test_a_configuration_that_changes_before_the_first_pass_is_its_own_model_s_alone():
    changed, other = (compiled({"backend": "eager"}) for _ in range(2))
    changed.config.scale = 5
    assert [model(torch.ones(3)).tolist() for model in (changed, other)] == [[15] * 3, [6] * 3]


def test_equal_models_share_their_graphs_and_all_others_have_some():
    backend, one = Backend(), torch.ones(3)
    # more than torch compiles by default
    models = [compiled({"backend": backend}, scale) for scale in range(2, 14)]
    for model in copy.deepcopy(models):
        compile_model(model, {"backend": backend})
        models.append(model)
    assert [model(one)[0].item() for model in models] == [3 * scale for scale in range(2, 14)] * 2
    assert backend.count == 12


def test_the_fingerprint_is_of_all_that_a_pass_reads():
    def of(**settings: Any) -> str:
        model = Scaled()
        model.config, model.first.config = LlamaConfig(vocab_size=9), SimpleNamespace(scale=1)
        for name, value in settings.items():
            setattr(
                model.first if name == "part" else model.config, "config" if name == "part" else name, value
            )
        return fingerprint(model)

    read: list[dict[str, Any]] = [
        {"vocab_size": 8},
        {"rms_norm_eps": 1e-7},
        {"_attn_implementation_internal": "unmask"},
        {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
        *[{"text_config": LlamaConfig(vocab_size=size)} for size in (7, 8)],
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"part": SimpleNamespace(scale=2)},
    ]
    assert len({of(), *(of(**settings) for settings in read)}) == 1 + len(read)
    same: list[dict[str, Any]] = [
        {},
        {"unmask": {"attention": "causal"}},
        {"unmask_history": [1]},
        {"_name_or_path": "here"},
    ]
    assert {of(**settings) for settings in same} == {of()}
    assert of(dtype=torch.float32) == of(dtype="float32") != of(dtype="bfloat16")  # as a save leaves it
    assert of(rope_parameters={"a": 1, "b": 2}) == of(rope_parameters={"b": 2, "a": 1})


def test_options_of_ones_own_come_first():
    seen: list[Any] = []

    def all_of_them(guards: Any) -> list[bool]:
        seen.extend(guards_to_check(model, guards))
        return [True] * len(guards)

    model, one = compiled({"backend": "eager", "options": {"guard_filter_fn": all_of_them}}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [15] * 3 and not all(seen)


def test_a_mode_is_passed_on_without_options():
    """Torch takes one of the two."""
    model, one = compiled({"mode": "default", "backend": "eager"}), torch.ones(3)
    assert model(one).tolist() == [6] * 3
    model.config.scale = 5
    assert model(one).tolist() == [15] * 3
