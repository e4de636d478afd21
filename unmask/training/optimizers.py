"""What optimizers need: checked before any step is paid for."""

from __future__ import annotations

import logging
import re
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import first_line
from unmask.training.switches import require

OF_TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
STOCHASTIC_ROUNDING = "bf16_stochastic_round"
"""The entry of `optim_args` that rounds updates of bfloat16 weights up or down at random, so that they are right on average."""


def check_optimizer(args: TrainingArguments) -> None:
    """Try an optimizer of bitsandbytes on the device, and see that torchao is there for its own; those of others are left to transformers.

    Raises:
        ConfigError: bitsandbytes is not installed, or cannot work on the device; torchao is not installed.
    """
    name = OptimizerNames(args.optim).value
    if name in OF_TORCHAO:
        require("torchao", "torchao", where="optim")
        for logger in ("torchao", "torch.utils._pytree"):  # of kernels for other machines, and of torchao's own calls of torch
            logging.getLogger(logger).setLevel(logging.ERROR)
    if "torch" in name or not re.search("8bit|bnb|paged|lion|ademamix", name):
        return
    require("bitsandbytes", "cuda", where="optim")
    import bitsandbytes

    probe = nn.Parameter(torch.zeros(4096, device=args.device))  # smaller ones are kept in 32 bits
    probe.grad = torch.zeros_like(probe)
    try:
        bitsandbytes.optim.AdamW8bit([probe]).step()
    except (RuntimeError, NotImplementedError) as error:
        what = f"{name} cannot work on {args.device.type} ({first_line(error)})"
        raise ConfigError(what, where="optim", remedy="Use adamw_torch, or a GPU") from error


def check_rounding(args: Any, lm: DiffusionLM) -> None:
    """Refuse stochastic rounding where nothing would be rounded so.

    Raises:
        ConfigError: weights of another type than bfloat16, or an optimizer that does not know it.
    """
    if STOCHASTIC_ROUNDING not in (args.optim_args or ""):
        return
    where = f"optim_args {STOCHASTIC_ROUNDING}"
    name = OptimizerNames(args.optim).value
    if name not in OF_TORCHAO:
        raise ConfigError(f"{name} does not know it", where=where, remedy=f"Use optim {' or '.join(OF_TORCHAO)}")
    if not any(weight.dtype == torch.bfloat16 for weight in lm.model.parameters() if weight.requires_grad):
        raise ConfigError("no weight that is trained is in bfloat16", where=where, remedy="Set model.dtype to bfloat16, or leave it out")
