"""Send a model's weights over NCCL to a vLLM server, from GPU to GPU, with vLLM's own sender."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unmask.errors import GenerationError

Call = Callable[..., Any]  # (method, path, json=...) -> the server's answer


class ControlPlane:
    """The steps of an update, as vLLM's sender calls them."""

    def __init__(self, call: Call):
        self._call = call

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "/update_weights", json={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("POST", "/finish_weight_update")

    def shutdown_weight_transfer_engine(self) -> None:
        self._call("POST", "/shutdown_weight_transfer_engine")


def check_nccl() -> None:
    """Raise GenerationError without a GPU, or if vLLM is not installed here."""
    where, remedy = "update_weights", "Give a folder that the server can read instead (sync disk)"
    if not torch.cuda.is_available():
        raise GenerationError("NCCL needs a GPU on both sides", where=where, remedy=remedy)
    if importlib.util.find_spec("vllm") is None:
        raise GenerationError(
            "NCCL needs vLLM, which is not installed here", where=where, remedy=f"Install vllm, or {remedy}"
        )


def nccl_sender(model: nn.Module, call: Call, address: str) -> Any:
    """A sender whose `send_weights()` sends the model's current weights, whose names are those of the
    server's checkpoint. Errors as in `check_nccl`. `address`: of this machine, as the server's workers reach
    it."""
    check_nccl()
    try:
        from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    except ImportError as error:
        remedy = "Install another vllm, or give a folder that the server can read instead"
        raise GenerationError(
            f"NCCL needs vLLM's sender ({error})", where="update_weights", remedy=remedy
        ) from error
    workers = call("GET", "/get_world_size")["world_size"]
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    facts = NCCLTrainerInitInfo(rank=0, master_address=address, master_port=port, world_size=1 + workers)
    return WeightTransferTrainerFactory.trainer_init(
        facts, client=ControlPlane(call), source=ModuleSource(model)
    )
