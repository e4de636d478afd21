"""A device that is no CPU, on a CPU: its tensors hold their data there, report another device, and cannot be
mixed with the CPU's.

So a forgotten `.to(device)` fails as on a GPU, and what is computed has the bits of a CPU. As a plugin of
pytest (`-p tests.other_device`) it stands in for the GPU in the tests that are marked `gpu`. It is there for
the rest of the process: torch cannot forget a device.

What GPUs allow is allowed: copies, indices of the CPU, and where single numbers are meant, tensors of the CPU
without dimensions.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import accelerate
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "other"
CPU = torch.device("cpu")
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}
WITH_NUMBERS = {
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::fill_",
    "aten::index_put",
    "aten::index_put_",
    "aten::_fused_adamw_",
}
MAKERS = [
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "randperm",
    "linspace",
    "eye",
    "eye.m",
]
"""What makes tensors of no others, directly or by changing the shape of an empty one."""


class OnDevice(Tensor):
    """A tensor of the device; `held` is its data."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            held.stride(),
            held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held.detach()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        """So that files can tell which tensors share their memory."""
        return self.held.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {NAME}:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In files, the data and the device, so `map_location` of `torch.load` holds."""
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor
        return rebuild, (self.held, self.dtype, str(self.device), self.requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Modules move to subclasses of tensors that have this in place, so that tied weights stay tied."""
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> OnDevice:
        return OnDevice(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        check(function, args, kwargs)
        if name == "aten::_fused_sdp_choice":
            return 0  # the plain products: fused kernels are the device's own
        held_args, held_kwargs = tree_map_only(OnDevice, lambda part: part.held, (args, kwargs))
        asked = kwargs.get("device")
        if asked is not None:
            held_kwargs |= {"device": CPU}
        held_kwargs.pop("pin_memory", None)
        out = function(*held_args, **held_kwargs)
        # resized
        assert all(
            part.shape == part.held.shape
            for part in tree_leaves((args, kwargs))
            if isinstance(part, OnDevice)
        ), name
        if name == "aten::copy_" and not isinstance(args[0], OnDevice):
            return args[0]
        if (asked is not None and asked.type == "cpu") or name == "aten::_local_scalar_dense":
            return out
        return return_and_correct_aliasing(function, args, kwargs, tree_map_only(Tensor, OnDevice, out))


@cache
def written(function: Any) -> tuple[set[int], set[str]]:
    """The places and names of the arguments that a function writes to."""
    writes = [
        (place, part.name)
        for place, part in enumerate(function._schema.arguments)
        if part.alias_info and part.alias_info.is_write
    ]
    return {place for place, _ in writes}, {name for _, name in writes}


def check(function: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse tensors of the CPU beside those of the device, as a GPU does."""
    schema = function._schema
    if schema.name in COPIES:
        return
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{schema.name}: a generator of random numbers of the CPU, on the device")
    places, names = written(function)
    into = tree_leaves(
        (
            [part for place, part in enumerate(args) if place in places],
            {name: kwargs.get(name) for name in names},
        )
    )
    read = [args[0], *args[2:]] if schema.name in INDEXED else args
    number = torch.Tag.pointwise in function.tags or schema.name in WITH_NUMBERS
    for part in tree_leaves((read, kwargs)):
        if (
            isinstance(part, Tensor)
            and not isinstance(part, OnDevice)
            and (part.dim() or not number or any(part is one for one in into))
        ):
            raise RuntimeError(
                f"{schema.name}: tensors of the device and of the CPU, of the shape {list(part.shape)}"
            )


class Module(backend_registration._DummyBackendModule):
    """What `torch.random.fork_rng` and autocast ask a device for."""

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(0)

    def set_rng_state(self, *_: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def made(function: Any) -> Any:
    """A kernel of a function that makes a tensor of the device out of no other."""

    def kernel(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
        return OnDevice(function(*args, device=CPU, **kwargs))

    return kernel


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    into, held = (part.held if isinstance(part, OnDevice) else part for part in (target, source))
    into.copy_(held)
    return target


def install() -> torch.library.Library:
    """Register the device, what torch makes its tensors of, and it as the one that trainers use. Keep the
    result."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    kernels = torch.library.Library("aten", "IMPL")
    for name in MAKERS:
        function, _, overload = name.partition(".")
        kernels.impl(
            name, made(getattr(getattr(torch.ops.aten, function), overload or "default")), "PrivateUse1"
        )
    kernels.impl("copy_", copy_, "PrivateUse1")
    # torch makes them of other operations, with other bits, where a device has none
    for name in ("silu_backward", "mish_backward"):
        kernels.impl(name, getattr(torch.ops.aten, name), "PrivateUse1")
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, place: storage if place.startswith(NAME) else None
    )
    # what trainers use, but for `use_cpu`, which accelerate would then ignore
    os.environ["ACCELERATE_TORCH_DEVICE"] = f"{NAME}:0"
    accelerate.PartialState.set_device = lambda state: setattr(
        state, "device", CPU if state._cpu else torch.device(NAME, 0)
    )
    # the plain products here, and so for the same bits on the CPU
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    return kernels


KERNELS = install()
