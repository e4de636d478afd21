"""A device that is no CPU, on a CPU: its tensors hold their data there, report another device, and cannot be mixed with the CPU's.

So a forgotten `.to(device)` fails as on a GPU. `install()` registers the device with torch for the rest of the process, and `active()` lets
tensors be made on it. What GPUs allow is allowed: numbers, tensors of one element without dimensions, and indices of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("privateuseone", 0)
COPIES = {"aten::_to_copy", "aten::copy_"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}


class OnDevice(Tensor):
    """A tensor of the device; `held` is its data."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE, requires_grad=held.requires_grad
        )
        made.held = held.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a tensor of the device has no numpy array: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


def dispatch(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name
    tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
    ours = [part for part in tensors if isinstance(part, OnDevice)]
    asked = kwargs.get("device")
    there = elsewhere(asked) if asked is not None else bool(ours)
    if ours and name not in COPIES:
        read = [args[0], *args[2:]] if name in INDEXED else args
        for part in tree_leaves((read, kwargs)):
            if isinstance(part, Tensor) and not isinstance(part, OnDevice) and part.dim():
                raise RuntimeError(f"{name}: tensors of the device and of the CPU, of the shape {list(part.shape)}")
    if name == "aten::_fused_sdp_choice":
        return 0  # the plain products: fused kernels are the device's own
    held_args, held_kwargs = tree_map_only(OnDevice, lambda part: part.held, (args, kwargs))
    if asked is not None:
        held_kwargs = {**held_kwargs, "device": torch.device("cpu")}
    held_kwargs.pop("pin_memory", None)
    out = function(*held_args, **held_kwargs)
    if name == "aten::copy_" and not isinstance(args[0], OnDevice):
        return args[0]
    if not there or name == "aten::_local_scalar_dense":
        return out
    out = tree_map_only(Tensor, lambda part: part if isinstance(part, OnDevice) else OnDevice(part), out)
    return return_and_correct_aliasing(function, args, kwargs, out) if ours else out


class Dispatched(TorchDispatchMode):
    """Inside, tensors can be made on the device and moved to it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(function, args, kwargs or {})


class Made(TorchFunctionMode):
    """Inside, `torch.tensor` makes tensors of the device: it does not dispatch."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and elsewhere(kwargs.get("device")) and not isinstance(args[0], OnDevice):
            return function(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return function(*args, **kwargs)


def elsewhere(device: Any) -> bool:
    return device is not None and torch.device(device).type != "cpu"


class Module(backend_registration._DummyBackendModule):
    """What `torch.random.fork_rng` and autocast ask a device for."""

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(0)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install() -> torch.library.Library:
    """Register the device. What torch makes without dispatching, such as the index tensor of a list, is made here; keep the result."""
    backend_registration._setup_privateuseone_for_python_backend("other", backend_module=Module())
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Tensor:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        held, into = (part.held if isinstance(part, OnDevice) else part for part in (source, target))
        into.copy_(held)
        return target

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library


@contextmanager
def active() -> Iterator[None]:
    with Dispatched(), Made():
        yield


def moved(module: nn.Module) -> nn.Module:
    """The module, with its weights and buffers on the device."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                part._parameters[name] = nn.Parameter(OnDevice(weight.data), requires_grad=weight.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module
