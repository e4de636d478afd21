"""The base of all trainers: transformers.Trainer over a DiffusionLM, with one loss to override.

Shapes: B batch, M masks (views), T tokens.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import transformers.trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy, TrainOutput
from transformers.utils.hub import PushInProgress, hf_api

from unmask.artifacts import share, write_atomic
from unmask.config.base import OnResume
from unmask.data.report import print_report, show_rows
from unmask.data.rows import Collator, check_dataset, separate_documents
from unmask.data.streamed_rows import StreamedRows
from unmask.diffusion.log_probs import view_log_probs, weighted_cross_entropy
from unmask.diffusion.views import MaskRNG, Views
from unmask.errors import ConfigError, TrainingError, UnmaskWarning
from unmask.models.adapters import (
    check_mergeable,
    has_adapters,
    merged,
    refuse_frozen,
    with_adapters,
    without_tables,
)
from unmask.models.auto_config import SETTINGS_KEY
from unmask.models.chat_template import accept_generation_config
from unmask.models.compiled import taken_apart
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.hub import upload_model
from unmask.models.load import as_diffusion_lm
from unmask.models.model_card import FILE as CARD
from unmask.models.model_card import HISTORY_KEY, CardFields, card_fields, history, write_card
from unmask.training.arguments import (
    OWN_LOSS,
    WITHOUT_PREDICTIONS,
    TrainerArguments,
    by_place,
    map_held_out,
    refuse_foreign_collator,
    refuse_given,
)
from unmask.training.config import TrainingConfig, check_rows, rows_per_step
from unmask.training.distributed import from_first, lockstep, rows_before, without_repeats
from unmask.training.hardware_checks import compile_in_place, refuse_other_model, refuse_unsupported
from unmask.training.memory import memory_metrics
from unmask.training.metrics import (
    SPEEDS,
    STEP_LOSSES,
    Means,
    ProgressTarget,
    RunCallback,
    Throughput,
    Unread,
    check_finite,
    measuring,
    require_best_metric,
)
from unmask.training.model_history import chosen_settings, history_entry, result_fields
from unmask.training.optimizers import (
    METRIC_SETTINGS,
    apply_settings,
    hyperparameters,
    keep_on_host,
    naming_missing_library,
    updates_in_backward,
)
from unmask.training.per_view_backward import PerViewBackward, accumulating
from unmask.training.run.around import running_in
from unmask.training.run.checkpoint import (
    LAST_ON_HUB,
    SUMS_NAME,
    checked_checkpoint,
    fault,
    load_renamed,
    refuse_earlier,
    remove_old,
    steps_done,
    written_checkpoint,
)
from unmask.training.run.fingerprints import model_inputs, reads_first_weights, rows_fingerprint
from unmask.training.run.folder import refuse_nothing
from unmask.training.run.log import RunLog
from unmask.training.run.record import SECTION, RunRecord, expect_visited
from unmask.training.step_timer import Phases
from unmask.training.trackers import TrackedRuns, set_tensorboard_dir

if TYPE_CHECKING:
    import peft
    from transformers import BitsAndBytesConfig

OF_A_MODEL = ("*config.json", "adapter_model.safetensors", "model*.safetensors", "*.index.json")
"""The files of a model or adapters in a checkpoint, besides the tokenizer's."""
Batch = dict[str, Any]  # tensors by name, and the flag `one_document`
Model: TypeAlias = DiffusionLM | PreTrainedModel | str | Path
HeldOut: TypeAlias = Iterable[Any] | Mapping[str, Iterable[Any]]
"""Rows, or several datasets of rows by name."""
Tokenizer: TypeAlias = PreTrainedTokenizerBase | str | Path
Optimizers: TypeAlias = tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]
OptimizerClass: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]


class DiffusionTrainer(Trainer, TrainerArguments):
    """transformers.Trainer whose loss is the cross-entropy of a view plan over a DiffusionLM.

    Subclasses implement `plan`, which decides what is hidden, or override `micro_loss` for another loss.
    Losses are sums divided by the items (maskable tokens) of the whole accumulated batch over all ranks, so
    that gradient accumulation changes nothing.

    Args:
        model: a DiffusionLM, a path or id to load, or a model of transformers with its tokenizer.
        args: the trainer's config; None: its defaults.
        data_collator: makes batches as `unmask.data.rows.Collator` does.
        train_dataset: rows in the format that the trainer documents.
        eval_dataset: held-out rows, or several such datasets by name, whose metrics are `eval_NAME_loss`.
        processing_class: the tokenizer of a model of transformers, or in place of the model's own; or its
            path.
        model_init: makes the model of each `train`, in place of `model`: see `hyperparameter_search`.
        callbacks, optimizers, optimizer_cls_and_kwargs: as in transformers.Trainer.
        compute_loss_func, compute_metrics, preprocess_logits_for_metrics: refused.
        quantization_config: how to quantize a model that is loaded here.
        peft_config: trains adapters instead of the weights.
        progress: a progress display to update.
        phases: measures time and memory by phase of a step; None: a new one.
        log: of the metrics; None: `training_logs.json` in the output directory.
    """

    streams = False  # whether the training rows may be a stream, an iterable without a length
    push_in_progress: Any = None
    per_view: PerViewBackward | None = None  # makes the steps of a loss that takes several forward passes
    args: Any
    lm: DiffusionLM  # that is trained

    def __init__(
        self,
        model: Model | None = None,
        args: TrainingConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: HeldOut | None = None,
        processing_class: Tokenizer | None = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: peft.PeftConfig | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
        log: RunLog | None = None,
    ):
        functions = {
            "compute_metrics": compute_metrics,
            "compute_loss_func": compute_loss_func,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
        }
        refuse_given(functions, WITHOUT_PREDICTIONS, OWN_LOSS)
        refuse_foreign_collator(data_collator)
        args = self.checked_args(args, model)
        if model_init is not None:
            model = self._first_model(model, model_init, optimizers, args)
        if model is None:
            raise ConfigError("is not given", where="model", remedy="Give it, or model_init")
        lm = as_diffusion_lm(model, processing_class, quantization_config, args.model_init_kwargs)
        lm = self.prepared_model(lm, args)
        args.check_trained_noise(lm.noise)
        adapters = peft_config is not None or has_adapters(lm)
        if adapters and (setting := args.excludes_adapters):
            what = "is not trained with lora, which leaves its weights as they are"
            raise ConfigError(what, where=setting, remedy="Train without adapters")
        args.choose_precision(in_float32=lm.dtype == torch.float32)
        train_rows = self._checked_rows(lm, args, train_dataset, "train_dataset")
        eval_rows = map_held_out(eval_dataset, partial(self._checked_rows, lm, args))
        check_rows(args, train_rows, eval_rows)
        refuse_unsupported(lm, args, adapters=adapters)
        if adapters and args.hub_merge_adapters:
            check_mergeable(lm, "hub_merge_adapters")
        set_seed(args.seed)  # new adapters are initialized from it
        self.peft_config = peft_config
        self.lm = self._trained(lm, args)
        if train_rows is not None:
            refuse_frozen(self.lm)
        self.means, self.numbers, self.evaluating = Means(), Unread(), False
        self._step_tokens: list[Tensor] = []  # of the micro-batches of this step
        self._step_batches: list[Any] = []  # the micro-batches of this step so far
        self._step_begins, self._numbers_before, self._halves = True, 0, False
        # the earlier values of the settings that were changed when the run was resumed, by dotted name
        self.changed: Mapping[str, Any] = {}
        self._first_groups: list[dict[str, Any]] | None = None  # of the optimizer as it was made
        self._found: dict[Any, Path | None] = {}  # the checkpoint to resume, which is hashed once
        self._unfinished: Path | None = None  # where a checkpoint is being written
        self.metrics = log or RunLog(folder=args.output_folder)
        self.phases = phases or Phases(args.device, memory=args.log_memory_usage)
        self.earlier_history = history(lm)
        self.num_rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
        self._run_callback = RunCallback(progress, self.metrics, self.phases)
        super().__init__(
            model=self.lm.model,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=lm.tokenizer,
            data_collator=data_collator or Collator(lm.pad_token_id, marking=not args.dispatched),
            callbacks=[*(callbacks or []), self._run_callback],
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.model_init = model_init
        if args.torch_compile:
            compile_in_place(self.lm, args, self.accelerator)
        set_tensorboard_dir(self.callback_handler.callbacks, args.logging_dir)
        self._tracked_runs = TrackedRuns(self.callback_handler.callbacks, args.output_folder)
        self.callback_handler.callbacks.insert(0, self._tracked_runs)
        for printed in (PrinterCallback, ProgressCallback) if progress is not None else ():
            self.remove_callback(printed)
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True

    # The model, which `model_init` makes anew for each run.

    def _first_model(self, model: Any, model_init: Callable[..., Any], optimizers: Any, args: Any) -> Any:
        if model is not None or any(optimizers):
            where = "model_init and " + ("optimizers" if model is None else "model")
            raise ConfigError("both are given", where=where, remedy="Leave one of them out")
        set_seed(args.seed)
        self.model_init = model_init
        return super().call_model_init()

    def prepared_model(self, lm: DiffusionLM, args: Any) -> DiffusionLM:
        """Hook to add to a model what is trained beside its weights."""
        return lm

    def _trained(self, lm: DiffusionLM, args: Any) -> DiffusionLM:
        """A prepared model with its adapters, which is trained."""
        trained = lm if self.peft_config is None else with_adapters(lm, self.peft_config)
        trained.flash_attention = args.flash_attention
        setattr(lm.config, SETTINGS_KEY, lm.settings)
        trained.publish_when_saved()
        return trained

    def call_model_init(self, trial: Any = None) -> Any:
        """The model of a new run. Raises ConfigError if the rows were not made for it."""
        made = as_diffusion_lm(super().call_model_init(trial), self.processing_class)
        made = self.prepared_model(made, self.args)
        if made.settings != self.lm.settings or made.tokenizer.get_vocab() != self.lm.tokenizer.get_vocab():
            what = f"made {made}, but the rows were made for {self.lm}"
            raise ConfigError(what, where="model_init", remedy="Make a trainer for each such model")
        self.lm = self._trained(made, self.args)
        if self.args.torch_compile:
            compile_in_place(self.lm, self.args, self.accelerator)
        return self.lm.model

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **of_backend: Any,
    ) -> Any:
        """Like transformers.Trainer, with a `model_init`, for settings of transformers; the objective is
        `eval_loss` unless another is given. Each trial is a run in a folder of its own, `run-N`."""
        if self.model_init is None:
            what, remedy = "each trial trains a model of its own", "Give it (PretrainTrainer, SFTTrainer)"
            raise ConfigError(what, where="model_init", remedy=remedy)
        objective = compute_objective or itemgetter("eval_loss")
        return super().hyperparameter_search(
            hp_space, objective, n_trials, direction, backend, hp_name, **of_backend
        )

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.args.check_assigned(read=True)

    @contextlib.contextmanager
    def _run_of(self, trial: Any) -> Iterator[None]:
        """A context in which a trial of `hyperparameter_search` is a run in a folder of its own."""
        settings, output_dir, log = vars(self.args), self.args.output_dir, self.metrics
        settings["output_dir"] = super()._get_output_dir(trial)
        self.metrics = self._run_callback.log = RunLog(folder=self.args.output_folder)
        self.state.global_step = 0
        self.__dict__.pop("run_record", None)
        try:
            yield
        finally:
            settings["output_dir"], self.metrics = output_dir, log
            self._run_callback.log = log

    @property
    def model(self) -> Any:
        """The trained model. A compiled one that is assigned, `trainer.model = torch.compile(trainer.model)`,
        is compiled in place."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        inner, options = taken_apart(model)
        if model is not None:  # the end of a trial releases it
            refuse_other_model(inner, self.lm)
        self._model = inner
        if options is not None:
            self.lm.compile(**options)

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        """Convert the user's rows to the format of the collator. `where` names the dataset in errors."""
        return dataset

    def _checked_rows(self, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        if dataset is None:
            return None
        check_dataset(dataset, where, streams=self.streams)
        rows = print_report(
            self.make_rows(lm, args, dataset, where), args.should_save, tables=not args.disable_tqdm
        )
        if args.show_rows and args.should_save and where == "train_dataset" and rows is not dataset:
            show_rows(lm.tokenizer, rows, args.show_rows)
        return rows

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        """The views of this batch: the tokens to hide, the tokens to predict, and the weight of each."""
        raise AssertionError(f"{type(self).__name__} overrides neither plan nor micro_loss")

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch: the weighted cross-entropy of its views."""
        return self.cross_entropy(lm, batch, self.plan(batch, self.training_draw(batch)))

    def training_draw(self, batch: Batch) -> MaskRNG:
        """Like `draw`; in training the noise times are also spread evenly over consecutive rows."""
        return replace(self.draw(batch), rows_before_B=batch.get("rows_before"))

    def cross_entropy(self, lm: DiffusionLM, batch: Batch, views: Views) -> Tensor:
        """The weighted cross-entropy of views, summed. Logs the unweighted mean, separately for noised and
        causal views, but none of divergences, which mean nothing without their weights."""
        log_prob_BMT = view_log_probs(
            lm, batch["input_ids"], separate_documents(batch), views, chunk=self.args.logprob_batch_size
        )
        noised = views.count - views.causal
        parts = [("cross_entropy", slice(noised)), ("lm_cross_entropy", slice(noised, None))]
        for name, selected in parts[views.divergence : 1 + views.causal]:
            count = views.target_BMT[:, selected].sum()
            self.record(name, -log_prob_BMT[:, selected].detach().sum() / count.clamp_min(1), count)
        return weighted_cross_entropy(log_prob_BMT, views)

    def count_items(self, batch: Batch) -> Tensor:
        """The divisor of the loss: the number of maskable tokens."""
        return batch["maskable"].sum()

    def draw(self, batch: Batch) -> MaskRNG:
        """Randomness keyed by seed, sample and epoch: the same masks on any number of devices and after a
        resume."""
        return MaskRNG(
            self.args.seed, batch["sample_id"], 0 if self.evaluating else int(self.state.epoch or 0)
        )

    @property
    def over(self) -> bool:
        """Whether all steps are done; transformers would make one more when a run is resumed at its end."""
        return self.state.global_step >= self.state.max_steps

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Like transformers.Trainer, but True resumes from the last complete checkpoint, or the beginning if
        the run ended before it. A path may also be a run's folder. A resumed run is compared
        (`checkpoint_to_resume`), a new one refuses to overwrite another."""
        with contextlib.nullcontext() if trial is None else self._run_of(trial):
            return self._train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _train(self, resume_from_checkpoint: str | bool | None, trial: Any, ignored: Any) -> TrainOutput:
        self.args.check_assigned(read=True)
        own = type(self).__module__.partition(".")[0] == "unmask"  # a user's subclass may record others
        if own and self.eval_dataset is not None and self.args.eval_strategy != "no":
            sets = self.eval_dataset if isinstance(self.eval_dataset, Mapping) else ()
            starts = [f"eval_{name}_" for name in sets] or ["eval_"]
            known = [start + name for start in starts for name in self.held_out_metrics()]
            require_best_metric(self.args.metric_for_best_model, known)
        self._throughput = Throughput()
        self._tracked_runs.resumed = bool(resume_from_checkpoint)
        checkpoint = self.checkpoint_to_resume(resume_from_checkpoint) if resume_from_checkpoint else None
        with running_in(self.args.output_folder):
            if not resume_from_checkpoint:
                refuse_earlier(self.args.output_folder, started=self.state.global_step > 0)
            elif self.is_world_process_zero():
                self.rewind(0 if checkpoint is None else steps_done(checkpoint) or 0)
            output = super().train(checkpoint and str(checkpoint), trial, ignored)
            # ends workers that load rows: persistent ones live as long as their loader
            self.callback_handler.train_dataloader = None
            self.accelerator._dataloaders.clear()
            return output

    def planned_steps(self, args: TrainingConfig) -> int:
        """The number of optimizer steps that a run with these arguments makes on this trainer's rows."""
        return self.set_initial_training_values(args, self.get_train_dataloader())[-1]

    def setup_seconds(self, args: TrainingConfig) -> float:
        """The estimated seconds that such a run needs before its first step."""
        return 0.0

    def reported_settings(self) -> dict[str, Any]:
        """The settings that are stored in the model's history."""
        return chosen_settings(self.args)

    @property
    def uses_fsdp_or_deepspeed(self) -> bool:
        """Whether FSDP or DeepSpeed writes the checkpoints, in files of their own formats."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds only a part of the weights (FSDP, ZeRO 3). Every forward pass then needs
        all processes."""
        return self.is_fsdp_enabled or (
            self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3
        )

    def lockstep(self) -> contextlib.AbstractContextManager[None]:
        """A context in which processes may make different numbers of forward passes without gradients. Other
        collectives would deadlock."""
        return lockstep(self.lm, self.args.device) if self.shards_weights else contextlib.nullcontext()

    # Resuming.

    @cached_property
    def run_record(self) -> RunRecord:
        """The settings and inputs of the run. It must be made before training changes the weights."""
        held_out = {place: rows_fingerprint(rows) for place, rows in by_place(self.eval_dataset).items()}
        return RunRecord(self.args, self.inputs(), held_out)

    def inputs(self) -> dict[str, Any]:
        """What the run reads, besides settings and held-out rows: fingerprints of JSON types, by name."""
        of_model = model_inputs(self.lm, weights_matter=reads_first_weights(self.args))
        return {"train_dataset": rows_fingerprint(self.train_dataset)} | of_model

    def checkpoint_to_resume(self, named: str | Path | Literal[True]) -> Path | None:
        """The checkpoint that `train(resume_from_checkpoint=named)` continues; None: the run ended before its
        first one. Writes nothing.

        Raises:
            TrainingError: there is no run, or the checkpoint is incomplete.
            ConfigError: a setting or an input was changed that makes another run.
        """
        folder, in_shards = self.args.output_folder, self.uses_fsdp_or_deepspeed
        if named is True or Path(named).resolve() == folder.resolve():
            named = True
            refuse_nothing(folder)
        if named not in self._found:
            self._found = {named: from_first(lambda: checked_checkpoint(folder, named, in_shards=in_shards))}
        if (checkpoint := self._found[named]) is not None:
            self.compare_run(checkpoint, steps_done(checkpoint) or 0)
        return checkpoint

    def compare_run(self, checkpoint: Path, step: int) -> None:
        """Compare with the run of a checkpoint after `step` steps. Raises ConfigError for another run."""
        if 0 < (steps := self.args.max_steps) < step:
            what = f"is {steps}, but {checkpoint} is after {step} steps"
            where = self.run_record.named(f"{SECTION}max_steps")
            raise ConfigError(what, where=where, remedy="Give more, or resume an earlier checkpoint")
        self.changed = self.run_record.resume(checkpoint, step)
        expect_visited(self.train_dataset, checkpoint)

    def rewind(self, step: int) -> None:
        """Drop the log lines after this step. They will be written again."""
        self.metrics.rewind(step)

    def show_changes(self, max_steps: int) -> None:
        """Print where the run continues, and what was changed. `max_steps`: of the whole run."""
        if self.args.should_save:
            self.run_record.show(self.changed, self.state.global_step, max_steps)

    def changes_in_card(self) -> list[dict[str, Any]]:
        """The changes of settings that affect the result: step, setting and earlier value."""
        names = {SECTION + each.name for each in result_fields(self.args)}
        return [
            {"step": each["step"], "setting": each["setting"].removeprefix(SECTION), "old": each["old"]}
            for each in self.run_record.changes
            if each["setting"] in names and self.run_record.kinds[each["setting"]] is OnResume.ACTS
        ]

    def _init_training_state(self, max_steps: int, *arguments: Any) -> Any:
        _ = self.run_record  # of a new run; a resumed one has made it before it loaded weights
        started = super()._init_training_state(max_steps, *arguments)
        self._found.clear()
        self.state.compute_steps(self.args, max_steps)  # a restored state has the checkpoint's intervals
        if METRIC_SETTINGS & self.changed.keys():
            self.state.best_metric = self.state.best_global_step = self.state.best_model_checkpoint = None
        if self.state.global_step:
            self.show_changes(max_steps)
        return started

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):  # these have the model's names
            load_renamed(self.model if model is None else model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        schedule = self.lr_scheduler
        first_schedule = copy.deepcopy(schedule.state_dict()) if schedule is not None else {}
        super()._load_optimizer_and_scheduler(checkpoint)
        # the saved sums cover all processes
        sums = json.loads((Path(checkpoint) / SUMS_NAME).read_text())
        self.means.load(sums if self.is_world_process_zero() else {})
        if self._first_groups is not None:
            own_schedule = self.lr_scheduler if self._created_lr_scheduler else None
            step = self.state.global_step
            apply_settings(
                self.optimizer, own_schedule, self._first_groups, first_schedule, step, self.changed
            )

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Like transformers.Trainer, on user rows or the trainer's held-out rows: of one dataset, or of
        several by name. Raises ConfigError if there are none."""
        rows = self.held_out_rows(eval_dataset)
        sets = {f"_{name}": each for name, each in rows.items()} if isinstance(rows, Mapping) else {"": rows}
        metrics: dict[str, float] = {}
        for suffix, each in sets.items():
            prefix = metric_key_prefix + suffix
            with measuring(self, prefix):
                metrics |= self.evaluate_rows(each, ignore_keys, prefix)
        return metrics

    def evaluate_rows(self, rows: Any, ignore_keys: Any, metric_key_prefix: str) -> dict[str, float]:
        """The metrics of one dataset of held-out rows."""
        self.measure(rows)
        return super().evaluate(rows, ignore_keys, metric_key_prefix)

    def held_out_metrics(self) -> Sequence[str]:
        """The names of the metrics of an evaluation, without its prefix."""
        return "loss", *SPEEDS, "cross_entropy"

    def measure(self, rows: Any) -> None:
        """Hook for metrics of held-out rows other than the loss. Called before the loss is evaluated."""

    def held_out_rows(self, dataset: Any = None) -> Any:
        """The rows of a dataset, of several, or of one of the trainer's by its name, in the format of the
        collator; None: the trainer's `eval_dataset`."""
        rows = self.eval_dataset if dataset is None else dataset
        if rows is None:
            raise ConfigError(
                "there is nothing to evaluate on",
                where="eval_dataset",
                remedy="Give it to evaluate, or to the trainer",
            )
        if isinstance(rows, str) and isinstance(self.eval_dataset, Mapping):
            return self.eval_dataset[rows]
        own = [self.eval_dataset, *by_place(self.eval_dataset).values()]
        made = hasattr(rows, "content") or any(rows is each for each in own)  # stored rows, or prompts
        return rows if made else map_held_out(rows, partial(self._checked_rows, self.lm, self.args))

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refused, because the logits of a row depend on which tokens are hidden."""
        raise TrainingError(
            "whole rows have no predictions", where="predict", remedy="Use evaluate, or generate"
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        require_best_metric(self.args.metric_for_best_model, metrics)
        return super()._determine_best_metric(metrics, trial)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, *rest: Any, **named: Any
    ) -> tuple[Tensor, None, None]:
        rows, loss = (
            without_repeats(inputs, self.accelerator),
            torch.zeros((), dtype=self.lm.log_prob_dtype, device=self.args.device),
        )
        with torch.no_grad(), self.compute_loss_context_manager(), self.lockstep():
            if len(rows["sample_id"]) > 0:
                loss, _ = self.compute_loss(model, self._prepare_inputs(rows), return_outputs=True)
        self.numbers.read()
        return loss.detach(), None, None

    # Training steps: overridden methods of transformers.Trainer.

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self._step_begins:
            self._step_batches, self._numbers_before = [], len(self.numbers)
        try:
            loss = self._micro_steps(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            # several processes would have to agree on it amid a backward pass
            if self._halves or self.accelerator.num_processes > 1 or self.count_samples(inputs) < 2:
                raise
            error.__traceback__ = None  # its frames hold the activations
            loss = None
        if loss is None:
            self._start_over(model, inputs, num_items_in_batch)
            loss = self._micro_steps(model, inputs, num_items_in_batch)
        self._step_batches.append(inputs)
        self._step_begins = self.accelerator.sync_gradients
        # a step is counted with its last micro-batch
        self._add_loss(loss, steps=int(self.accelerator.sync_gradients))
        if not self.is_in_train:  # else it is read before the optimizer's step
            self.numbers.read()
        return loss

    def _micro_steps(self, model: nn.Module, batch: Any, items: Any) -> Tensor:
        """The loss of a micro-batch, whose gradients are added: in halves once the memory was full."""
        rows = self.count_samples(batch)
        if not self._halves or rows < 2:
            return self.micro_step(model, batch, items)
        middle = rows - rows // 2
        halves = [select_rows(batch, slice(0, middle)), select_rows(batch, slice(middle, rows))]
        return torch.stack([self.micro_step(model, half, items) for half in halves]).sum()

    def _start_over(self, model: nn.Module, batch: Any, items: Any) -> None:
        """After the device's memory was full: repeat the earlier micro-batches of this step in halves, with
        the same result. The backward pass that failed may have added some gradients."""
        size, accumulated = self.count_samples(batch), self.args.gradient_accumulation_steps
        settings = (
            f"training.per_device_train_batch_size={size // 2} "
            f"training.gradient_accumulation_steps={2 * accumulated}"
        )
        message = (
            f"step {self.state.global_step}: the device's memory is full: micro-batches of {size} rows are "
            f"halved from here on, with the same result. To start so: {settings}"
        )
        warnings.warn(message, UnmaskWarning, stacklevel=2)
        self._halves = True
        if self.per_view is not None:
            self.per_view.tokens_together = 0
        model.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        self.numbers.drop(kept=self._numbers_before)
        for earlier in self._step_batches:
            self._add_loss(self._micro_steps(model, earlier, items), steps=0)

    def micro_step(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor:
        """The loss of a micro-batch or a half of one, whose gradients are added."""
        if (per_view := self.per_view) is not None:
            model.train()
        with self.phases("backward"):  # the forward pass within is a separate phase
            if per_view is not None and self._maximum_over_ranks(len(per_view.chunks(self.lm, inputs))) > 1:
                return self._pass_by_pass(per_view, model, inputs, items)
            return super().training_step(model, inputs, items)

    def _maximum_over_ranks(self, count: int) -> int:
        """The maximum over ranks if all must make the same number of passes (FSDP, DeepSpeed); otherwise this
        rank's count."""
        if not self.uses_fsdp_or_deepspeed:
            return count
        return int(self.accelerator.gather(torch.tensor([count], device=self.args.device)).max())

    def _pass_by_pass(
        self, per_view: PerViewBackward, model: nn.Module, inputs: Any, items: Tensor | int | None
    ) -> Tensor:
        """Backpropagate a micro-batch pass by pass and return its loss."""
        chunks = per_view.chunks_with_targets(self.lm, inputs)
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        inputs = self._prepare_inputs(inputs)
        view_passes = per_view.passes(self.lm.bind(model), inputs)
        assert items is not None
        num_chunks = len(chunks)
        # with zero loss: other ranks have more passes
        chunks += [chunks[-1]] * (self._maximum_over_ranks(num_chunks) - num_chunks)
        total = torch.zeros((), device=self.accelerator.device)
        if not per_view.separable:
            with (
                torch.no_grad(),
                self.compute_loss_context_manager(),
                self.phases("forward"),
                self.lockstep(),
            ):
                log_prob_BMT = view_passes.all_log_probs(per_view.rows_per_pass(inputs)).requires_grad_()
            with torch.enable_grad():
                total = self.per_item(per_view.loss_on(inputs, log_prob_BMT), items)
            [grad_BMT] = torch.autograd.grad(total, log_prob_BMT)
            total = total.detach()
        for index, chunk in enumerate(chunks):
            with accumulating(self.accelerator, model, last=index == len(chunks) - 1):
                with self.compute_loss_context_manager():
                    with self.phases("forward"):
                        log_prob_BMT = view_passes.log_probs(*chunk)
                    if not per_view.separable:
                        loss = (grad_BMT[chunk] * log_prob_BMT).sum()
                    else:
                        loss = self.per_item(per_view.loss_on(inputs, log_prob_BMT, chunk), items)
                        if index < num_chunks:
                            total = total + loss.detach()
                if index >= num_chunks:
                    loss = loss * 0
                scaling = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
                self.accelerator.backward(loss, **scaling)
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, None]:
        # DDP treats modules that a step's last pass does not call as unused in all
        distributed = self.accelerator.num_processes > 1
        with (
            self.phases("forward"),
            self.lm.calling_all_modules() if distributed else contextlib.nullcontext(),
        ):
            loss = self.micro_loss(self.lm.bind(model), inputs)
        if num_items_in_batch is not None:
            loss = self.per_item(loss, num_items_in_batch)
        else:  # evaluation: each batch is divided by its own items
            items = self.count_items(inputs)
            loss = loss / items.clamp_min(1)
            self.numbers.add(partial(self._check_finite, "loss"), loss)
            self.record("loss", loss, items)  # transformers would average over rows, not items
        return (loss, None) if return_outputs else loss

    def per_item(self, loss: Tensor, items: Tensor | int) -> Tensor:
        """This rank's part of the loss of an optimizer step. `items`: of all ranks. DDP averages gradients
        over ranks."""
        loss = loss / items * self.accelerator.num_processes
        # the numbers of the step are read too late for them
        if self.is_deepspeed_enabled or updates_in_backward(self.args):
            self._check_finite("loss", loss)
        return loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        if not self.over:
            self.phases.begin_step()
        batches = list(islice(epoch_iterator, 0 if self.over else num_batches))
        first = self.state.global_step * self.args.gradient_accumulation_steps
        batches = self.prepared(
            [
                batch | {"rows_before": rows_before(batch, first + n, self.args)}
                for n, batch in enumerate(batches)
            ]
        )
        return batches, self._get_num_items_in_batch(batches, device)

    def create_optimizer(self, *arguments: Any) -> Any:
        if new := self.optimizer is None:
            with naming_missing_library():
                super().create_optimizer(*arguments)
            self._first_groups = hyperparameters(self.optimizer)
        if new and self.args.optimizer_offload:
            keep_on_host(self.optimizer)
        return self.optimizer

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        """Hook to change the micro-batches of an optimizer step before their items are counted."""
        return batches

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        if not batch_samples:
            return None
        return (
            self.accelerator.gather(torch.stack([*map(self.count_items, batch_samples)]).sum().to(device))
            .sum()
            .clamp_min(1)
        )

    # Metrics.

    def record(self, name: str, value: Tensor | float, count: Tensor | float = 1.0) -> None:
        """Add a mean over `count` values to the metric's mean in the next log line. A scalar on the device is
        read later, with others."""
        means = self.means
        self.numbers.add(lambda mean, count: means.add(name, mean * count, count), value, count)

    def _add_loss(self, loss: Tensor, steps: int) -> None:
        """Add a micro-batch's part of a step's loss, and this number of steps, to the means of losses
        (transformers loses its own on resume)."""
        means = self.means

        def use(number: float) -> None:
            self._check_finite("loss", number)
            for name in STEP_LOSSES:
                means.add(name, number, steps)

        self.numbers.add(use, loss)

    def _check_finite(self, name: str, value: Tensor | float) -> None:
        check_finite(name, value, self.lm.model, self.state.global_step)

    def count_tokens(self, batch: Batch) -> Tensor:
        """The number of tokens without padding, which the model card reports."""
        return (batch["documents"] > 0).sum()

    def count_samples(self, batch: Batch) -> int:
        """The rows of this process's micro-batch, which `samples_per_second` counts."""
        return len(batch["sample_id"])

    def get_performance_stats(self) -> dict[str, Any]:
        """Time, peak memory (with `log_memory_usage`) and tokens per second by phase: see
        `Phases.performance_stats`."""
        return self.phases.performance_stats()

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        self._throughput.samples += self.count_samples(inputs)
        self._step_tokens.append(self.count_tokens(inputs))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Also reads the numbers of the step, which is not made if one of them is not finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        count, self._step_tokens = torch.stack(self._step_tokens).sum().to(self.args.device), []
        self.numbers.add(self._see_tokens, self.accelerator.gather(count).sum())
        # a float16 scaler skips steps whose gradients are not finite
        if norm is not None and self.accelerator.scaler is None:
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
            self.numbers.add(partial(self._check_finite, "gradient norm"), whole)
        self.numbers.read()
        return norm

    def _see_tokens(self, count: float) -> None:
        self.state.num_input_tokens_seen += int(count)
        self.state.total_flos += 6 * int(count) * self._weights_of_a_token

    @cached_property
    def _weights_of_a_token(self) -> int:
        """The weights that a token is multiplied with, all but the embedding table."""
        table = {id(weight) for weight in self.lm.model.get_input_embeddings().parameters()}
        return sum(
            getattr(weight, "ds_numel", weight.numel())  # of a weight that DeepSpeed has partitioned
            for weight in self.lm.model.parameters()
            if id(weight) not in table
        )

    def floating_point_ops(self, inputs: Batch) -> int:
        """None here: they are counted with the tokens (`_see_tokens`), by the estimate of transformers, 6 for
        each weight and token of the data."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.numbers.read()
        logs |= self.means.take(lambda name: name not in STEP_LOSSES or name in logs)
        if "loss" in logs:  # a line of training, not of evaluation
            logs |= self._throughput.take(
                self.state.num_input_tokens_seen, self._initial_num_input_tokens_seen
            )
        memory = memory_metrics(self.args.device)
        self._run_callback.memory_gb = memory["memory_gb"]
        logs |= memory if self.args.log_memory_usage else {}
        super().log(logs, start_time)
        if "train_loss" in logs or not self.is_in_train:  # the summary of a run, or a later evaluation
            self.remember()

    def remember(self) -> None:
        """Append the run to the history in its model's config."""
        if self.state.global_step > 0:  # nothing to record when an untrained model is evaluated
            changes, settings = self.changes_in_card(), self.reported_settings()
            entry = history_entry(self.args, settings, self.state, rows=self.num_rows, changes=changes)
            setattr(self.lm.config, HISTORY_KEY, [*self.earlier_history, entry])

    # Checkpoints.

    def _get_output_dir(self, trial: Any) -> str:
        """That of the run, which is a trial's own (`_run_of`)."""
        return str(self.args.output_dir if self._unfinished is None else self._unfinished.parent)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        args, name = self.args, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = Path(self._get_output_dir(trial)) / name
        uploads, args.push_to_hub = args.push_to_hub, False  # not before it is in its place
        try:
            with written_checkpoint(checkpoint, self._checkpoint_bytes, writes=args.should_save) as folder:
                self._unfinished = folder
                super()._save_checkpoint(model, trial)
                self._name_best(folder, checkpoint)
        finally:
            self._unfinished, args.push_to_hub = None, uploads
        if uploads:
            self._push_from_checkpoint(str(checkpoint))
        if args.should_save:
            remove_old(checkpoint, args.save_total_limit, self.state.best_model_checkpoint)

    def _checkpoint_bytes(self) -> int:
        """The size of a first checkpoint: what is trained, and the optimizer's state."""
        adapters = has_adapters(self.lm)
        tensors = [weight for weight in self.lm.model.parameters() if weight.requires_grad or not adapters]
        if not self.args.save_only_model and self.optimizer is not None:
            states = [state for state in self.optimizer.state.values() if isinstance(state, dict)]
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def _name_best(self, unfinished: Path, checkpoint: Path) -> None:
        """Record the best checkpoint under the name that it will have."""
        state, saves = self.state, self.args.save_strategy != "no"
        best = checkpoint.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if saves and state.best_global_step and (best == checkpoint or best.exists()):
            state.best_model_checkpoint = str(best)
            if self.args.should_save:
                state.save_to_json(str(unfinished / TRAINER_STATE_NAME))

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (found := fault(best)) is not None:
            remedy = "Use the last checkpoint (load_best_model_at_end=false)"
            raise TrainingError(found, where=str(best), remedy=remedy)
        super()._load_best_model()
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            load_renamed(self.model, best)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model with adapters merged, and push to the hub with `push_to_hub`; a checkpoint
        (`_internal_call`): trained weights, config, metric sums, and the record of the run."""
        folder = Path(output_dir or str(self.args.output_dir))
        if _internal_call:
            self._save_run(folder)
            self._save_trained(folder)
            return
        self.save_whole(folder)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save")

    def save_whole(self, folder: Path, card: CardFields | None = None) -> None:
        """Save the whole model with adapters merged, or those that stay apart (DiffusionGemma's) alone."""
        if not has_adapters(self.lm) or self.lm.canvas:
            self._save_trained(folder)
            if self.args.should_save:
                share(folder)
                write_card(self.lm, folder, card)
        elif self.args.should_save:
            merged(self.lm).save(folder, card=card)

    def _save_trained(self, folder: Path) -> None:
        """Save what is trained, the weights or the adapters, with config and tokenizer."""
        accept_generation_config(self.lm.model.generation_config)
        if self.args.should_save:  # adapters and shards are saved without it
            self.lm.config.save_pretrained(str(folder))
        without_tables(self.lm)
        with without_pickled_settings():
            super().save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            self.lm.publish_config(folder)
            self.lm.write_processor(folder)

    def _save_run(self, folder: Path) -> None:
        """Add to a checkpoint what the weights do not hold."""
        self.numbers.read()
        sums, rows = self.means.state_everywhere(), self.train_dataset
        if self.args.should_save:
            steps = self.state.global_step
            read = rows.visited(steps * rows_per_step(self.args)) if isinstance(rows, StreamedRows) else None
            write_atomic(folder / SUMS_NAME, json.dumps(sums))
            self.run_record.write(folder, self.reported_settings(), read, self.metrics.stage)

    # The hub.

    def create_model_card(self, **fields: Any) -> None:
        """Write the card of the model into the output directory. `fields`: those of `CardFields`, as in
        transformers.Trainer and TRL."""
        if self.args.should_save:
            write_card(self.lm, str(self.args.output_dir), card_fields(self._repository, fields))

    @property
    def _repository(self) -> str:
        """The name of the repository of this run."""
        return self.hub_model_id or self.args.hub_model_id or self.args.output_folder.absolute().name

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        *,
        merge_adapters: bool | None = None,
        **card: Any,
    ) -> Any:
        """Upload the model with its tokenizer and card; of a model with adapters these, or with
        `merge_adapters` the whole model (None: `hub_merge_adapters`). The other arguments as in
        transformers.Trainer; `card`: as for `create_model_card`."""
        merging = self.args.hub_merge_adapters if merge_adapters is None else merge_adapters
        if merging and has_adapters(self.lm):
            check_mergeable(self.lm, "merge_adapters")
        token = token or self.args.hub_token
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        fields = card_fields(self._repository, card)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            if (card_here := self.args.output_folder / CARD).is_file():  # it may have been edited
                shutil.copy(card_here, folder)
            if merging:
                self.save_whole(folder, fields)
            else:
                self._save_trained(folder)
                if self.args.should_save:
                    write_card(self.lm, folder, fields)
            if not self.is_world_process_zero():
                return None
            self._finish_current_push()
            return self._upload(folder, stack, commit_message, blocking, token=token, revision=revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the model of a checkpoint in the background and, by `hub_strategy`, the checkpoint."""
        args, checkpoint = self.args, Path(checkpoint_folder)
        pending = self.push_in_progress
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if pending is not None and not pending.is_done() and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        steps = args.save_strategy == SaveStrategy.STEPS
        at = f"step {self.state.global_step}" if steps else f"epoch {int(self.state.epoch or 0)}"
        message = f"Training in progress, {at}"
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            before, fields = history(self.lm), card_fields(self._repository, {})
            self.remember()
            if args.hub_merge_adapters and has_adapters(self.lm):
                merged(self.lm).save(folder, card=fields)
            else:
                for path in chain.from_iterable(map(checkpoint.glob, OF_A_MODEL)):
                    shutil.copy(path, folder)
                self.lm.tokenizer.save_pretrained(folder)
                write_card(self.lm, folder, fields)
            setattr(self.lm.config, HISTORY_KEY, before)
            jobs = [self._upload(folder, stack, message, blocking=False)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            last = args.hub_strategy == HubStrategy.CHECKPOINT
            jobs.append(
                hf_api().upload_folder(
                    repo_id=str(self.hub_model_id),
                    folder_path=checkpoint,
                    path_in_repo=LAST_ON_HUB if last else str(checkpoint.relative_to(self.metrics.folder)),
                    commit_message=f"{message}, checkpoint",
                    token=args.hub_token,
                    run_as_future=True,
                    revision=args.hub_revision,
                )
            )
        self.push_in_progress = PushInProgress([*(pending.jobs if pending is not None else []), *jobs])

    def _upload(
        self,
        folder: Path,
        stack: contextlib.ExitStack,
        message: str | None,
        blocking: bool,
        *,
        token: str | None = None,
        revision: str | None = None,
    ) -> Any:
        """Upload a folder as the model of the run's repository, and then leave the context of the folder."""
        done: Any = upload_model(
            folder,
            str(self.hub_model_id),
            revision=revision or self.args.hub_revision,
            token=token or self.args.hub_token,
            commit_message=message,
            run_as_future=not blocking,
        )
        if not blocking:
            kept = stack.pop_all()
            done.add_done_callback(lambda _: kept.close())
        return done


def select_rows(batch: Any, rows: slice) -> Any:
    """These rows of a batch: of its tensors, of the batches in it, or by its own `select_rows`."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: select_rows(value, rows) for name, value in batch.items()}
    return batch.select_rows(rows) if hasattr(batch, "select_rows") else batch


@contextlib.contextmanager
def without_pickled_settings() -> Iterator[None]:
    """Let transformers write its pickle of all settings, tokens included, to nowhere: it would also be
    uploaded, and nothing reads it."""
    name = transformers.trainer.TRAINING_ARGS_NAME
    transformers.trainer.TRAINING_ARGS_NAME = os.devnull
    try:
        yield
    finally:
        transformers.trainer.TRAINING_ARGS_NAME = name
