"""What FSDP and DeepSpeed need, and what they cannot be combined with.

FSDP needs several GPU processes (`check_sharding`), which all take part in every forward pass
(`distributed.lockstep`, `DiffusionTrainer.shards_weights`). Refused beside FSDP or ZeRO 3: adapters
(`check_sharding`); bitsandbytes optimizers and `optimizer_offload` (`optimizers.py`: `check_optimizer`,
`check_offload`); a model split over devices (`hardware_checks.py`: `check_split`), and with ZeRO 3 recurrent
layers (`refuse_unsupported`); a reference model where
only the first process has weights (`reference_model.py`); a reference that moves, and rollouts from a server
(`rl/config.py`: `GRPOConfig.conflicts`). A conversion gathers the weights between its stages
(`ConvertTrainer._gather`); the evaluation at a run's end loads the saved model again (`cli/run.py`).
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import accelerate.utils.other
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from transformers.integrations import HfTrainerDeepSpeedConfig

from unmask.artifacts import read_file
from unmask.errors import ConfigError, first_line, require

AUTO = {
    name: "auto"
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
}
GATHER = "stage3_gather_16bit_weights_on_model_save"

# accelerate imports DeepSpeed, if it is installed, to see whether a model is wrapped by its engine. None is
# before DeepSpeed is imported.
accelerate.utils.other.is_deepspeed_available = lambda: "deepspeed" in sys.modules


def weight_sharding_setting(args: Any) -> str | None:
    """The setting that shards the weights; None: each process holds all of them."""
    if args.fsdp:
        return "fsdp"
    return "deepspeed" if (args.deepspeed or {}).get("zero_optimization", {}).get("stage") == 3 else None


def check_sharding(args: Any, *, adapters: bool, planned: bool = False) -> None:
    """Raise ConfigError for adapters on sharded weights, which could not be saved merged, and, unless the run
    is only `planned`, for FSDP in one process or on CPUs, which accelerate silently ignores."""
    if adapters and (key := weight_sharding_setting(args)):
        remedy = (
            "Train whole weights (lora=null), use deepspeed zero1 or zero2, or leave fsdp and deepspeed "
            "out (--recipe a40-48gb-x3-ddp)"
        )
        raise ConfigError(
            "adapters cannot be merged into sharded weights", where=f"{key} and lora", remedy=remedy
        )
    if (
        not planned
        and args.fsdp
        and args.distributed_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU)
    ):
        remedy = "Start it on several GPUs with torchrun or accelerate launch, or leave it out"
        raise ConfigError("shards nothing in one process or on CPUs", where="fsdp", remedy=remedy)


def zero_preset(stage: int) -> dict[str, Any]:
    """A DeepSpeed config: ZeRO 1 partitions the optimizer's state, 2 the gradients too, 3 the weights too.
    Other values come from the training arguments ("auto"). The optimizer is torch's, as without DeepSpeed."""
    precision = {name: {"enabled": "auto"} for name in ("bf16", "fp16")}
    zero = {"stage": stage} | ({GATHER: True} if stage == 3 else {})
    return AUTO | precision | {"zero_optimization": zero, "zero_allow_untested_optimizer": True}


def deepspeed_config(setting: str | dict[str, Any]) -> dict[str, Any]:
    """`read_deepspeed`; also raises ConfigError if DeepSpeed is not installed or not launched."""
    require("deepspeed", where="deepspeed")
    if not launched():
        remedy = "Start it with torchrun, accelerate launch or deepspeed, even for one process"
        raise ConfigError("no launcher started this process", where="deepspeed", remedy=remedy)
    return read_deepspeed(setting)


def launched() -> bool:
    """Whether a launcher started this process."""
    return "LOCAL_RANK" in os.environ


def read_deepspeed(setting: str | dict[str, Any]) -> dict[str, Any]:
    """The mapping that `deepspeed` names: zero1, zero2 or zero3, a JSON file, or the mapping itself. Raises
    ConfigError if there is no such preset or file, or models would be saved without weights."""
    if isinstance(setting, dict):
        config = setting
    elif setting in ("zero1", "zero2", "zero3"):
        config = zero_preset(int(setting[-1]))
    else:
        try:
            config = json.loads(read_file(setting))
        except (OSError, json.JSONDecodeError) as error:
            remedy = "Give zero1, zero2, zero3, a JSON file or a mapping"
            raise ConfigError(
                f"cannot read {setting!r} ({first_line(error)})", where="deepspeed", remedy=remedy
            ) from error
    zero = config.get("zero_optimization", {})
    if zero.get("stage") == 3 and not zero.get(GATHER):
        where = f"deepspeed.zero_optimization.{GATHER}"
        raise ConfigError("ZeRO 3 would save models without weights", where=where, remedy="Set it to true")
    return config


def with_fresh_accelerator_state(args: Any) -> Any:
    """A copy of training arguments for one of several runs in a process, for which accelerate would reuse the
    first run's DeepSpeed."""
    fresh = copy.copy(args)
    if args.deepspeed:
        AcceleratorState._reset_state()
        fresh.hf_deepspeed_config = HfTrainerDeepSpeedConfig(args.deepspeed)
        fresh.hf_deepspeed_config.trainer_config_process(fresh)
        fresh.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=fresh.hf_deepspeed_config)
    return fresh
