"""The settings that all verbs share, and the sizes that follow from them."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments, get_scheduler

from unmask.artifacts import read_file
from unmask.config.base import OnResume
from unmask.config.run import AttentionName, DataConfig, NoiseName, RunConfig
from unmask.config.trackers import check_trackers
from unmask.data.rows import require_rows
from unmask.errors import ConfigError, UnmaskWarning, did_you_mean, first_line
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_paths import ADAPTER_CONFIG, base_of_adapters, fetched
from unmask.names import ASKS_WHEN_OFF
from unmask.planning.blueprint import ModelSpec
from unmask.planning.cost_model import Workload
from unmask.redaction import masked
from unmask.training.config_fields import (
    check_not_read,
    check_settings,
    check_stock,
    check_types,
    described,
    limits_of,
    setting,
    unmet,
)
from unmask.training.distributed import check_processes, started_processes
from unmask.training.hardware_checks import amp_faster, amp_supported, check_kernels, set_backends
from unmask.training.optimizers import check_offload, check_optimizer
from unmask.training.run.resume import stock_kind
from unmask.training.settings.listing import remedy_elsewhere
from unmask.training.sharding import deepspeed_config


class Part(NamedTuple):
    """A part of a run with separate settings: a stage of a conversion, or the whole of any other run."""

    fraction: float = 1.0  # of the optimizer steps
    rate: float = 1.0  # factor of the learning rate
    described: Mapping[str, str] = MappingProxyType({})  # its settings, by column of a table


ACTS, NEUTRAL = OnResume.ACTS, OnResume.NEUTRAL
UNRECORDED = {
    "output_dir",
    "resume_from_checkpoint",
    "local_rank",
    "hub_token",
    "disable_tqdm",
    "log_level",
    "log_level_replica",
}
"""Settings of a launch, and secrets."""
CHECKED_LATER = {"bf16", "fp16", "deepspeed", "resume_from_checkpoint"}
"""Settings that the trainer or the launch checks."""
SCHEDULE_NEEDS = {
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), '{"min_lr_rate": 0.1}'),
    "warmup_stable_decay": '{"num_decay_steps": 100}',
}
"""The schedules that need arguments, with an example."""
METRIC_SCHEDULERS = ("reduce_lr_on_plateau", "greedy")  # they read the metric of the best model


@described
@dataclass
class TrainingConfig(TrainingArguments):
    """The settings of all verbs, in addition to those of `transformers.TrainingArguments`, which are all
    accepted."""

    output_dir: str | None = field(
        default=None, metadata={"help": "The folder of checkpoints and the trained model."}
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "The peak learning rate of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between log lines."})
    report_to: list[str] | str | None = field(
        default="none", metadata={"help": "tensorboard, wandb, trackio, ... or none."}
    )
    logging_dir: str | None = setting(
        None,
        "The folder of TensorBoard's event files; unset: a new one under `runs` in output_dir",
        on_resume=NEUTRAL,
    )
    fsdp: Literal[True, False] | str | None = field(
        default=None, metadata={"help": "Shard the model over all devices; fsdp_config says how."}
    )
    cudnn_benchmark: bool = setting(
        False, "Let cuDNN choose the fastest convolutions by trying; needs a GPU", on_resume=NEUTRAL
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": (
                "Mixed precision: products in bfloat16, weights in float32. Unset: on for float32 weights "
                "on Ampere or later."
            )
        },
    )
    flash_attention: bool = setting(
        False, "FlashAttention 2 for rows without blocks; needs a GPU and 16 bits", on_resume=NEUTRAL
    )
    optimizer_offload: bool = setting(
        False, "Keep the state of a torch optimizer, and float32 copies of the weights, in host memory"
    )
    model_init_kwargs: dict[str, Any] | None = setting(  # noqa: RUF009 (the call makes a field)
        None, "Arguments of `unmask.load` for a model that a trainer is given as a path", on_resume=NEUTRAL
    )
    max_length: int = setting(512, "Maximum tokens in a training row", low=2)
    dataset_num_proc: int | None = setting(
        None,
        "Processes that tokenize the rows; unset: as many as there are cores, if the rows are many",
        low=1,
        on_resume=NEUTRAL,
    )
    max_unknown: float = setting(
        0.01,
        "The fraction of the data's tokens that may be unknown to the tokenizer (<unk>); 1: any",
        low=0,
        high=1,
        on_resume=NEUTRAL,  # the rows are compared
    )
    logprob_batch_size: int | None = setting(
        None,
        (
            "Noised rows per forward pass. Unset: all views of a micro-batch (grpo: as many as it has "
            "rows; dpo: that, or of 1024 tokens)"
        ),
        low=1,
        on_resume=NEUTRAL,
    )
    data_source: str | None = setting(
        None, "The name of the training data in the model card", on_resume=NEUTRAL
    )
    hub_merge_adapters: bool = setting(
        False,
        "Upload the whole model with adapters merged, and not the adapters (push_to_hub)",
        on_resume=NEUTRAL,
    )
    show_rows: int = setting(
        0,
        "Training rows to print as text, with the trained tokens marked; also in data_report.json",
        low=0,
        on_resume=NEUTRAL,
    )
    log_memory_usage: bool = setting(
        False, "Log the peak memory so far in GB (on a GPU of reserved memory)", on_resume=NEUTRAL
    )
    run_settings: ClassVar[Mapping[str, tuple[Any, OnResume]] | None] = None
    """The settings of the run besides these, by dotted name, with their kinds; the command line sets them."""

    reads_rewards: ClassVar[bool] = False
    from_scratch: ClassVar[bool] = False  # whether a model may start from new weights

    given: ClassVar[frozenset[str]]
    """The names of the settings that were given a value (None: unset). If all were, as `dataclasses.replace`
    and `to_dict` do, none of them counts as given. Of each config; a class has none."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuses unknown settings, all at once, with the names that they have here. Without names they are
        in the order of `TrainingArguments`."""
        cls._refuse_unknown(given)
        config = super().__new__(cls)
        given |= zip((each.name for each in fields(cls) if each.init), args, strict=False)
        unset = {each.name for each in fields(cls) if each.init} - given.keys()
        is_copy = unset <= CHECKED_LATER | {"hub_token"}
        config.given = frozenset(name for name, value in given.items() if value is not None and not is_copy)
        config._passed = frozenset(given)
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses unknown settings that are assigned later, too."""
        if "assigned" in vars(self) and not name.startswith("_"):  # transformers adds some before that
            if not hasattr(self, name):
                self._refuse_unknown([name])
            self.assigned.add(name)
        super().__setattr__(name, value)

    def check_assigned(self, *, read: bool = False) -> None:
        """Convert the settings that were assigned, as a new config would.

        Args:
            read: whether a trainer was made, which has read the settings that are not of transformers.

        Raises:
            ConfigError: a new config would refuse a value, or a trainer would not read it any more.
        """
        settings = {each.name for each in fields(self) if each.init}
        late = sorted((self.assigned & settings) - {each.name for each in fields(TrainingArguments)})
        if read and late:
            raise ConfigError(
                "was assigned after the trainer had read it",
                where=late[0],
                remedy="Set it before the trainer is made",
            )
        if assigned := (self.assigned & settings) - CHECKED_LATER:
            names = (self._passed | assigned) - CHECKED_LATER
            accelerator = dict(AcceleratorState._shared_state)  # which a new config resets
            checked = type(self)(**{name: getattr(self, name) for name in names})
            AcceleratorState._shared_state.update(accelerator)
            for name in assigned:
                setattr(self, name, getattr(checked, name))
        self.assigned.clear()

    @classmethod
    def _refuse_unknown(cls, names: Iterable[str]) -> None:
        known = {each.name for each in fields(cls) if each.init}
        if unknown := [name for name in names if name not in known]:
            hints = [(name, remedy_elsewhere(name) or did_you_mean(name, known, "")) for name in unknown]
            if isinstance(names, Mapping):  # what is off is not to be switched on
                off = {name for name in names.keys() - ASKS_WHEN_OFF if names[name] is False}
                hints = [(name, "Leave it out" if name in off else hint) for name, hint in hints]
            remedies = [f"{name}: {hint}{'' if hint[-1] in '?.' else '.'}" for name, hint in hints if hint]
            remedy = " ".join([*remedies, "docs/migration.md has the names of other trainers"])
            raise ConfigError(
                "no known setting", where=f"{cls.__name__}: {', '.join(unknown)}", remedy=remedy
            )

    def __post_init__(self) -> None:
        if not isinstance(folder := self.output_dir, str | os.PathLike | None):
            remedy = "Give the folder of the run"
            raise ConfigError(f"{folder!r} is no path", where="output_dir", remedy=remedy)
        self.report_to = "none" if self.report_to is None else self.report_to
        check_types(self)
        check_not_read(self.given, partial(getattr, self))
        check_trackers(self.report_to, self.logging_dir)
        args: Any = self  # mypy does not read the fields of TrainingArguments
        elsewhere = args.fp16 or args.deepspeed or os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no"
        self._chooses_bf16 = args.bf16 is None and not elsewhere and not args.use_cpu and amp_faster()
        args.bf16 = bool(args.bf16)
        self._precision = args.bf16, args.fp16
        self.choose_precision(in_float32=True)
        args.remove_unused_columns = False
        args.dataloader_pin_memory &= torch.cuda.is_available() and not args.use_cpu  # otherwise it warns
        if args.accelerator_config is None:
            # Pinned batches are copied while the GPU computes. Batches differ in width, so each rank reads
            # the stream itself.
            args.accelerator_config = {"non_blocking": args.dataloader_pin_memory, "dispatch_batches": False}
        args.logging_nan_inf_filter = False  # a NaN is an error, not a gap in a curve
        args.label_names = []
        self._drop_unsupported_precision()
        if args.deepspeed:
            args.deepspeed = deepspeed_config(args.deepspeed)
        # transformers ignores launchers or warns unless it is set
        alone = not torch.accelerator.is_available()
        args.use_cpu |= alone and (args.bf16 or started_processes() > 1)
        limited = {each.name: limits for each in fields(self) if (limits := limits_of(each)) is not None}
        off = {each.name for each in fields(self) if getattr(self, each.name) is each.default is False}
        check_settings(limited, self.given - off, partial(getattr, self))
        check_stock(partial(getattr, self))
        super().__post_init__()
        check_processes(args.world_size)
        # transformers leaves them at "min", whichever metric it is
        if args.lr_scheduler_type in METRIC_SCHEDULERS:
            args.lr_scheduler_kwargs = {"mode": "max" if args.greater_is_better else "min"} | (
                args.lr_scheduler_kwargs or {}
            )
        else:
            _try_schedule(args)
        set_backends(args)
        check_kernels(args)
        check_optimizer(args)
        check_offload(args)
        self.assigned: set[str] = set()  # the settings that are changed from here on

    def unread(self) -> set[str]:
        """The settings that have no effect beside the others. Giving one is an error, so that the record of a
        run leaves them out."""
        return {each.name for each in fields(self) if unmet(limits_of(each) or {}, partial(getattr, self))}

    def to_dict(self) -> dict[str, Any]:
        """The settings without secrets, for trackers and the model card."""
        values: dict[str, Any] = masked(super().to_dict())
        return values

    # What the command line needs to know of a verb.

    @classmethod
    def data_defaults(cls, data: DataConfig, task: str | None) -> dict[str, Any]:
        """Settings that follow from those of the data."""
        return {}

    @classmethod
    def of_recipe(cls, settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The `training` section of a recipe, adapted to the settings chosen by all sources."""
        return dict(settings)

    def overwriting(self, given: Collection[str]) -> None:
        """Apply `--overwrite` to the settings that are not `given`."""

    def shortened(self, steps: int) -> dict[str, Any]:
        """The settings of a short run with `steps` steps of every part, which saves nothing."""
        quiet: dict[str, Any] = {
            "save_strategy": "no",
            "eval_strategy": "no",
            "eval_steps": None,
            "report_to": "none",
            "logging_dir": None,
        }
        quiet["logging_steps"] = 1
        return {"max_steps": steps * len(self.parts()), "warmup_steps": 0, **quiet}

    def shortened_arguments(self, steps: int) -> dict[str, Any]:
        """Further arguments of the trainer of a short run."""
        return {}

    # What a resumed run compares.

    @classmethod
    def kinds_on_resume(cls) -> dict[str, OnResume]:
        """What changing each setting does to a run that is resumed."""
        return {each.name: each.metadata.get("on_resume") or stock_kind(each.name) for each in fields(cls)}

    def values_on_resume(self) -> dict[str, Any]:
        """The settings that a resumed run compares, with their defaults filled in."""
        values = {name: value for name, value in self.to_dict().items() if name not in UNRECORDED}
        values["accelerator_config"] = {
            name: value for name, value in values["accelerator_config"].items() if name != "non_blocking"
        }
        return values

    def parts(self) -> list[Part]:
        """The parts of a run, one after another."""
        return [Part()]

    def patterns(self) -> list[AttentionName] | None:
        """The attention patterns that the parts train; None: the model's own."""
        return None

    def check_trained_noise(self, noise: NoiseName) -> None:
        """Raise ConfigError if a model of this noise cannot be trained with these settings."""
        if noise != "masked":
            what = f"its noise is {noise}, and this training hides tokens behind masks"
            raise ConfigError(what, where="model", remedy="Use SFT, or a model of masked noise")

    @property
    def excludes_adapters(self) -> str | None:
        """The setting with which the verb cannot train adapters; None: it can."""
        return None

    def check_run(self, run: RunConfig, *, has_adapters: bool) -> None:
        """Raise ConfigError for settings of the verb and the run that exclude each other; `where` joins their
        keys by " and ". `has_adapters`: the run trains adapters."""
        model, one = run.model, "Leave one of the two out"
        if model.from_scratch and not self.from_scratch:
            what = "only pretrain takes a model without training"
            raise ConfigError(what, where="model.from_scratch", remedy="Pre-train it first")
        if model.tokenizer and not model.from_scratch:
            what = "a model with weights keeps the tokenizer that it was trained with"
            remedy = "Add model.from_scratch=true (pretrain only), or leave it out"
            raise ConfigError(what, where="model.tokenizer", remedy=remedy)
        if model.from_scratch and model.quantization:
            where = "model.from_scratch and model.quantization"
            raise ConfigError("new weights are not quantized", where=where, remedy=one)
        if model.from_scratch and model.device_map:
            where = "model.from_scratch and model.device_map"
            raise ConfigError("new weights are made on one device", where=where, remedy=one)
        if run.rewards and not self.reads_rewards:
            raise ConfigError("only grpo reads rewards", where="rewards", remedy="Leave it out")
        if model.quantization and model.device_map:
            where = "model.quantization and model.device_map"
            raise ConfigError("quantized weights are not spread over devices", where=where, remedy=one)

    def check_model(self, read_attention: Callable[[], Mapping[str, Any]], run: RunConfig) -> None:
        """Raise ConfigError for settings that the model's attention ignores
        (`unmask.models.load.pattern_settings` reads it)."""

    def workload(self, blueprint: ModelSpec, run: RunConfig) -> Workload | None:
        """A training step for the cost model, of rows of `max_length`; None: there is no formula."""
        length = min(self.max_length, blueprint.context or self.max_length)
        pattern, quantization = self.trained_pattern(run), run.model.quantization
        work = blueprint.workload(
            *(pattern, length, self.noised_copies, lora_rank(run)),
            quantization=quantization,
            canvases=self.noised_canvases,
        )
        return replace(work, batch=self.per_device_train_batch_size)

    def trained_pattern(self, run: RunConfig) -> AttentionName | None:
        """The attention pattern of the trained model; None: as it was saved."""
        return run.model.attention

    @property
    def generates(self) -> bool:
        """Whether a step samples completions, too."""
        return False

    @property
    def updates_per_batch(self) -> int:
        """The optimizer steps on what one batch gives: more than one where a rollout serves several."""
        return 1

    @property
    def output_folder(self) -> Path:
        """`output_dir` as a path."""
        return Path(str(self.output_dir))

    @property
    def noised_copies(self) -> int:
        """Views of each row in a step."""
        return 1

    @property
    def noised_canvases(self) -> int:
        """Canvases of each row in a step of DiffusionGemma; 0: it has views in their place."""
        return 0

    def choose_precision(self, *, in_float32: bool) -> None:
        """Resolve an unset `bf16`: on if it is faster here and the weights are in float32, else off.
        Assignments after construction, `args.bf16 = True`, are respected. Raises ConfigError if both `bf16`
        and `fp16` are on."""
        args: Any = self
        if (args.bf16, args.fp16) != self._precision:
            if args.bf16 and args.fp16 and not self._chooses_bf16:
                raise ConfigError("both are on", where="bf16, fp16", remedy="Set one of them to False")
            args.bf16 &= not args.fp16
            self._chooses_bf16 = False
            self._drop_unsupported_precision()
            args.mixed_precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
        elif self._chooses_bf16:
            args.bf16 = in_float32
            args.mixed_precision = "bf16" if args.bf16 else "no"
        self._precision = args.bf16, args.fp16

    def _drop_unsupported_precision(self) -> None:
        """Turn off, with a warning, mixed precision that this machine cannot train in."""
        args: Any = self
        if (args.bf16 or args.fp16) and not amp_supported(args.bf16):
            message = (
                f"{'bf16' if args.bf16 else 'fp16'} is set, but this machine cannot train in it: training "
                "in float32"
            )
            warnings.warn(message, UnmaskWarning, stacklevel=4)
            args.bf16 = args.fp16 = False
        self._precision = args.bf16, args.fp16

    @property
    def dispatched(self) -> bool:
        """Whether the first process reads all batches and sends them to the others."""
        args: Any = self
        return bool(args.accelerator_config.dispatch_batches)


def row_length(lm: DiffusionLM, args: TrainingConfig) -> int:
    """The maximum tokens in a row: `max_length`, or the model's context if that is shorter."""
    return min(args.max_length, lm.context_length or args.max_length)


def canvas_length(lm: DiffusionLM, args: Any) -> int | None:
    """The setting `canvas_length`; None for a causal model, which has no canvas to fill."""
    return None if lm.autoregressive else args.canvas_length


def check_rows(args: TrainingConfig, train_rows: Any, eval_rows: Any) -> None:
    """Raise ConfigError if the rows make no step, or there are none for the evaluations that are set."""
    if eval_rows is None and args.eval_strategy != "no":
        remedy = "Give held-out rows (data.eval, eval_dataset), or leave it out"
        raise ConfigError("there is nothing to evaluate on", where="eval_strategy", remedy=remedy)
    if isinstance(train_rows, Sized):
        steps_per_epoch(args, train_rows)


def lora_rank(run: RunConfig) -> int | None:
    """The rank of the adapters that a run trains, of new ones or those that it starts from (1 for kinds
    without ranks); None: it trains none."""
    model, code = run.model, run.model.trust_remote_code
    if run.lora is not None:
        return run.lora.r
    folder = fetched(model.path, weights=False, revision=model.revision, trust_remote_code=code)
    if base_of_adapters(folder) is None:
        return None
    rank: int = json.loads(read_file(Path(folder, ADAPTER_CONFIG))).get("r") or 1
    return rank


def steps_per_epoch(args: TrainingArguments, rows: Sized) -> int:
    """Optimizer steps of one epoch. With `dataloader_drop_last` only full micro-batches count. Raises
    ConfigError if there is none."""
    if not args.dataloader_drop_last:
        return math.ceil(len(rows) / rows_per_step(args))
    if len(rows) < (size := args.train_batch_size * args.world_size):
        remedy = "Leave it out, or use smaller batches"
        raise ConfigError(
            f"{len(rows):,} rows do not fill a batch of {size:,}", where="dataloader_drop_last", remedy=remedy
        )
    return math.ceil(len(rows) // size / args.gradient_accumulation_steps)


def _try_schedule(args: TrainingArguments) -> None:
    """Raise ConfigError for `lr_scheduler_kwargs` that the schedule lacks or does not take, before the data
    are read."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    given = dict(args.lr_scheduler_kwargs or {})
    try:
        get_scheduler(args.lr_scheduler_type, optimizer, 0, 2, scheduler_specific_kwargs=given)
    except (TypeError, ValueError) as error:
        name = args.lr_scheduler_type.value
        what = f"{name} does not take {given}" if given else f"{name} needs arguments"
        remedy = (
            f"For example {SCHEDULE_NEEDS[name]}"
            if name in SCHEDULE_NEEDS
            else "See transformers' documentation of this schedule"
        )
        raise ConfigError(
            f"{what}: {first_line(error).rstrip('.')}", where="lr_scheduler_kwargs", remedy=remedy
        ) from error


def total_steps(args: TrainingArguments, rows: Any) -> int:
    """Optimizer steps of a run; a stream of rows needs `max_steps`."""
    return (
        args.max_steps
        if args.max_steps > 0
        else math.ceil(steps_per_epoch(args, rows) * args.num_train_epochs)
    )


def rows_per_step(args: TrainingArguments) -> int:
    """Rows in an optimizer step, over all ranks."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def first_of_stream(args: TrainingArguments, stream: Iterable[Any], rows: int) -> list[Any]:
    """The first rows of a stream, those that a run visits. Raises ConfigError if `max_steps` is not set, and
    DataError for what holds no rows."""
    require_rows(stream, "train_dataset")
    if args.max_steps <= 0:
        raise ConfigError(
            "a stream has no end",
            where="max_steps",
            remedy="Set it, or give a list of rows or a datasets.Dataset",
        )
    return [*islice(stream, rows)]
