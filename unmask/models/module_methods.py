"""Methods of modules and of transformers' models for a DiffusionLM, which is no module but has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.nn import Module
from transformers import PreTrainedModel

P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def of_model(method: Callable[Concatenate[Any, P], Result]) -> Callable[Concatenate[Any, P], Result]:
    """The method of this name of `lm.model`."""

    @wraps(method)
    def call(lm: Any, *arguments: P.args, **named: P.kwargs) -> Result:
        result: Result = getattr(lm.model, method.__name__)(*arguments, **named)
        return result

    return call


def changing_model(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Owner, P], Owner]:
    """The method of this name of `lm.model`, which returns `lm`, as the module's returns the module."""
    change = of_model(method)

    @wraps(method)
    def call(lm: Owner, *arguments: P.args, **named: P.kwargs) -> Owner:
        change(lm, *arguments, **named)
        return lm

    return call


class ModuleMethods:
    """Methods that a DiffusionLM has of its model."""

    model: Any

    eval = changing_model(Module.eval)
    train = changing_model(Module.train)
    requires_grad_ = changing_model(Module.requires_grad_)
    half = changing_model(Module.half)
    bfloat16 = changing_model(Module.bfloat16)
    float = changing_model(Module.float)
    double = changing_model(Module.double)
    cpu = changing_model(Module.cpu)
    cuda = changing_model(Module.cuda)
    zero_grad = of_model(Module.zero_grad)
    parameters = of_model(Module.parameters)
    named_parameters = of_model(Module.named_parameters)
    buffers = of_model(Module.buffers)
    named_buffers = of_model(Module.named_buffers)
    modules = of_model(Module.modules)
    named_modules = of_model(Module.named_modules)
    state_dict = of_model(Module.state_dict)
    load_state_dict = of_model(Module.load_state_dict)
    num_parameters = of_model(PreTrainedModel.num_parameters)
    get_memory_footprint = of_model(PreTrainedModel.get_memory_footprint)
    get_input_embeddings = of_model(PreTrainedModel.get_input_embeddings)
    get_output_embeddings = of_model(PreTrainedModel.get_output_embeddings)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode, with dropout; `unmask.load` gives it in evaluation mode."""
        return bool(self.model.training)
