"""One process of a run that test_sharding.py starts: torchrun ... sharded.py VERB MODE FOLDER.

It trains, saves, resumes, and records what only this process can see.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from tests.models.configurations import tiny_lm
from tests.tiny import PLAIN_TEMPLATE, llama_lm
from tests.training.tiny_runs import PAIRS, PREFERENCES, ROLLOUT, TEXTS, moved, settings, share_of_a
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.generation.remote.backends import LocalBackend
from unmask.generation.remote.http import RemoteError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer
from unmask.supervised.sft import SFTConfig, SFTTrainer
from unmask.training.trainer import DiffusionTrainer

RUN = {"max_steps": 4, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 2}
FASTER = {"learning_rate": 5e-3, "weight_decay": 0.1}
"""Settings that act from where a run is resumed with them."""


BLOCKS = [
    {"prompt": one, "chosen": two, "rejected": three}
    for one, two, three in ("abc", "bcd", "cde", "def", "efg", "fgh")
]
BLOCKS += [
    {"prompt": "g", "chosen": "abcab", "rejected": "bcdbcd"},
    {"prompt": "h", "chosen": "ghghgh", "rejected": "hghghg"},
]
"""Most end within their prompt's block, of which fewer views are scored than of whole ones: processes make
different numbers of passes."""


def pass_for_gpus() -> None:
    """Let these processes pass for GPUs, and their memory for pinned, as accelerate shards across GPUs
    only."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def hybrid() -> DiffusionLM:
    """A model with recurrent layers, and with experts, whose weights are stored one by one."""
    lm = tiny_lm("granitemoehybrid", "block_causal", 4, shift=True, dtype=torch.float32)
    lm.set_chat_template(PLAIN_TEMPLATE, ends=False)
    return moved(lm)


def trainer(verb: str, folder: Path, **more: Any) -> DiffusionTrainer:
    """The same run in all modes, except for the sharding."""
    given = settings(folder, **RUN | more)
    if verb in ("sft", "sft-hybrid"):
        args: Any = SFTConfig(**given)
    elif verb == "grpo":
        args = GRPOConfig(**given | ROLLOUT)
    else:
        # which blocks, whose likelihood is exact, do not have
        few = {} if verb == "kto-blocks" else {"samples": 2}
        args = DPOConfig(**given, **few, loss_type="sigmoid" if verb == "dpo" else "kto")
    if args.fsdp:
        pass_for_gpus()
    if isinstance(args, SFTConfig):
        lm = hybrid() if verb == "sft-hybrid" else llama_lm()
        return SFTTrainer(lm, args, train_dataset=PAIRS, eval_dataset=PAIRS[:5])
    if verb == "kto-blocks":
        return DPOTrainer(
            llama_lm("block_causal", 4), args=args, train_dataset=BLOCKS, eval_dataset=BLOCKS[:5]
        )
    if isinstance(args, DPOConfig):
        return DPOTrainer(llama_lm(), args=args, train_dataset=PREFERENCES, eval_dataset=PREFERENCES[:5])
    return GRPOTrainer(llama_lm(), share_of_a, args, PAIRS)


def switches(mode: str, layers: Sequence[str] = ("LlamaDecoderLayer",)) -> dict[str, Any]:
    if mode == "ddp":
        return {}
    if mode.startswith("fsdp"):
        return {
            "fsdp": True,
            "fsdp_config": {
                "transformer_layer_cls_to_wrap": [*layers],
                "cpu_offload": mode != "fsdp",
            },
        }
    zero: dict[str, Any] = {"stage": int(mode[4])}
    if zero["stage"] == 3:  # else weights as small as these are never sharded
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    if mode.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    batches = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    untested = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return {
        "deepspeed": mode if mode in ("zero1", "zero2") else batches | untested | {"zero_optimization": zero}
    }


def seen(run: DiffusionTrainer, mode: str) -> dict[str, Any]:
    """The number of weights and of Adam's first moments that this process holds, and the device of its
    optimizer."""
    parameters = list(run.model.parameters())
    if mode.startswith("fsdp"):
        held = [parameter.to_local() for parameter in parameters]  # only a DTensor has it
        moments = [state["exp_avg"].to_local() for state in run.optimizer.state.values()]
        offload = (
            run.model.model.layers[0]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0].offload_to_cpu
        )
    else:
        engine = run.model_wrapped
        assert engine.zero_optimization_stage() == int(mode[4])
        assert engine.zero_optimization_partition_gradients() == (mode[4] in "23")
        held = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]
        moments = [state["exp_avg"] for state in run.optimizer.state.values()]
        offload = getattr(engine.optimizer, "cpu_offload", False)
    return {
        "weights": sum(one.numel() for one in held),
        "moments": sum(one.numel() for one in moments),
        "offload": bool(offload),
        "losses": [line["loss"] for line in run.state.log_history if "loss" in line],
        "samples per token": samples_per_token(run.state.log_history),
    }


def samples_per_token(lines: list[dict[str, float]]) -> list[float]:
    """The quotient of the two rates of each line, which does not depend on time."""
    return [line["samples_per_second"] / line["tokens_per_second"] for line in lines if "loss" in line]


RAGGED = {
    "seed": 0,
    "method": "cj-grpo",
    "max_completion_length": 8,
    "block_size": 2,
    "gradient_accumulation_steps": 2,
    "num_iterations": 2,
    "beta": 0.1,
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 0.1,
    "max_grad_norm": 1e6,
}
"""A run on a trajectory: a completion has as many views as it has steps, and stops where it ends."""
RATIOS = {"tokens": "token", "sequences": "sequence"}
"""Of tokens the loss is the sum of those of its passes; of sequences every pass has to know the scores of the
others."""
QUESTIONS = [{"prompt": prompt} for prompt in ("ab", "ha", "ccg")]


def ragged(folder: Path, mode: str, **more: Any) -> GRPOTrainer:
    """The same ragged run in all modes, in float64, or in float32 if it is compared with ZeRO 3, which does
    not support more."""
    args = GRPOConfig(**settings(folder, **ROLLOUT | RAGGED | more))
    if args.fsdp:
        pass_for_gpus()
    lm = llama_lm(dtype=torch.float32 if mode == "zero3" else torch.float64)
    with torch.no_grad():  # completions end here and there
        lm.model.lm_head.weight[lm.eos_token_id] *= 10
    return GRPOTrainer(lm, share_of_a, args, PAIRS, QUESTIONS)


def run_ragged(mode: str, folder: Path, **more: Any) -> None:
    """Make the run, and record how many views and steps the completions of this process took, and the metrics
    of an evaluation."""
    run = ragged(folder, mode, per_device_train_batch_size=2, **switches(mode) | more)
    run.train()
    views = [[update.views.count for update in updates] for updates in run.buffer]
    run.save_model(str(folder / "model"))
    write(folder, {"views": views, "evaluation": run.evaluate()})


class LosingServer(LocalBackend):
    """A backend that sends no weights. The third time it fails in the first process."""

    def __init__(self, lm: DiffusionLM):
        super().__init__(lm)
        self.syncs = 0

    def due(self, step: int | None) -> bool:
        return True

    def sync(self, lm: DiffusionLM, step: int) -> None:
        self.syncs += 1
        if self.syncs == 3 and PartialState().process_index == 0:
            raise RemoteError("the server is gone", where="here", remedy="Start it")


CONVERSION = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_length": 32,
    "packing": False,
    "time_embedding": True,
}
STAGES = [
    {"rate": 0.5, "train": ["attention", "time_embedding", "mask_token"]},
    {"rate": 1.0},
    {"rate": 0.3, "lm_loss": 0.1},
]
"""Two steps each."""
CONVERSIONS: dict[str, dict[str, Any]] = {
    "convert": {"attention": "bidirectional"},
    "convert-blocks": {"attention": "block_causal", "block_size": 4},
}


def conversion(folder: Path, **more: Any) -> ConvertTrainer:
    """The same conversion in all modes, except for the sharding, with tied weights and bidirectional
    attention."""
    args = ConvertConfig(**settings(folder, **RUN | CONVERSION | {"stages": STAGES} | more))
    if args.fsdp:
        pass_for_gpus()
    return ConvertTrainer(
        llama_lm("causal", tie_word_embeddings=more.get("block_size") is None),
        args,
        train_dataset=TEXTS,
        eval_dataset=TEXTS[:5],
    )


def stopped_amid(stage: int, whole: Path, folder: Path) -> None:
    """Leave the folder in the state of a conversion that was stopped after the first step of a stage."""
    if PartialState().is_main_process:
        for number in range(1, stage + 1):
            shutil.copytree(whole / f"stage-{number}", folder / f"stage-{number}")
        shutil.rmtree(folder / f"stage-{stage}" / "checkpoint-2")
        shutil.copy(whole / "training_logs.json", folder)
    torch.distributed.barrier()


def run_conversion(mode: str, folder: Path, **more: Any) -> None:
    """Convert without interruption, with only the first stage, and resumed in the middle of every stage."""
    more |= {"per_device_train_batch_size": 2} | switches(mode)
    whole = conversion(folder / "run", **more)
    whole.train()
    whole.save_model(str(folder / "model"))
    assert whole.trainer is not None
    report = {} if mode == "ddp" else seen(whole.trainer, mode)
    report |= {"losses": [line["loss"] for line in whole.state.log_history if "loss" in line]}
    report["evaluations"] = [line["eval_loss"] for line in whole.state.log_history if "eval_loss" in line]
    first = conversion(folder / "first", **more | {"stages": STAGES[:1], "max_steps": 2})
    first.train()
    first.save_model(str(folder / "first-model"))
    for stage in range(1, len(STAGES) + 1):
        stopped_amid(stage, folder / "run", folder / f"amid-{stage}")
        resumed = conversion(folder / f"amid-{stage}", **more)
        resumed.train(resume_from_checkpoint=True)
        resumed.save_model(str(folder / f"resumed-{stage}"))
    write(folder, report)


def lose_server(mode: str, folder: Path) -> None:
    """Lose the server amid the run, and resume from the checkpoint that this leaves."""
    shares = {"per_device_train_batch_size": 2, "save_strategy": "no"} | switches(mode)
    first = trainer("grpo", folder, **shares)
    first.source.backend = LosingServer(first.lm)
    report: dict[str, Any] = {}
    try:
        first.train()
    except RemoteError as error:
        report["error"] = str(error)
    resumed = trainer("grpo", folder, **shares)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.save_model(str(folder / "resumed"))
    write(folder, report)


def write(folder: Path, report: dict[str, Any]) -> None:
    """Write what the processes have recorded."""
    (folder / f"rank-{PartialState().process_index}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(verb: str, mode: str, folder: Path) -> None:
    if verb == "lose-server":
        return lose_server(mode, folder)
    if verb in RATIOS:
        return run_ragged(mode, folder, importance_sampling_level=RATIOS[verb])
    if verb in CONVERSIONS:
        return run_conversion(mode, folder, **CONVERSIONS[verb])
    layers = ("GraniteMoeHybridDecoderLayer" if verb == "sft-hybrid" else "LlamaDecoderLayer",)
    shares = {"per_device_train_batch_size": 2} | switches(mode, layers)
    first = trainer(verb, folder, **shares)
    first.train()
    report = seen(first, mode)
    if verb != "grpo":
        report["evaluation"] = {
            name: value
            for name, value in first.evaluate().items()
            if "second" not in name and "time" not in name
        }
    first.save_model(str(folder / "model"))
    resumed = trainer(verb, folder, **shares)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    resumed.save_model(str(folder / "resumed"))
    if verb == "sft":
        faster = trainer(verb, folder, **shares, **FASTER)
        faster.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        faster.save_model(str(folder / "faster"))
    write(folder, report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
