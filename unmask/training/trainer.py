"""The base of all trainers: transformers.Trainer over a DiffusionLM, with one loss to override.

Shapes: B batch, M masks (views), T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_utils import TrainOutput

from unmask.data.report import Rows, print_report, show_rows
from unmask.data.rows import Collator, check_dataset, separate_documents
from unmask.diffusion.log_probs import view_log_probs, weighted_cross_entropy
from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError, TrainingError
from unmask.models.adapters import has_adapters, with_adapters
from unmask.models.compiled import taken_apart
from unmask.models.diffusion_lm import SETTINGS_KEY, DiffusionLM
from unmask.models.load import as_diffusion_lm
from unmask.models.model_card import history, write_card
from unmask.training.checkpoints import refuse_earlier, steps_done
from unmask.training.config import TrainingConfig, check_rows
from unmask.training.distributed import alone_in, ending_workers, lockstep, rows_before, without_repeats
from unmask.training.durable.checkpoint_files import FULL_DISK, naming_write_errors
from unmask.training.durable.saving import Saver
from unmask.training.half_batches import HalfBatches
from unmask.training.hardware_checks import (
    compile_in_place,
    refuse_other_model,
    refuse_unknown_arguments,
    refuse_unsupported,
)
from unmask.training.memory import memory_metrics
from unmask.training.metrics import STEP_LOSSES, StepNumbers, finite, measuring, naming_missing_metric
from unmask.training.model_history import chosen_settings, remember
from unmask.training.optimizers import keep_on_host, naming_missing_library, updates_in_backward
from unmask.training.per_view_backward import PerViewBackward
from unmask.training.resume.fingerprints import model_inputs, reads_first_weights, rows_fingerprint
from unmask.training.resume.record import RunRecord
from unmask.training.resume.resumption import Resumption
from unmask.training.run_log import Means, ProgressTarget, RunCallback, RunLog, Throughput
from unmask.training.step_timer import Phases
from unmask.training.trackers import TrackedRuns, set_tensorboard_dir

if TYPE_CHECKING:
    import peft

Batch = dict[str, Any]  # tensors by name, and the flag `one_document`


class DiffusionTrainer(Trainer):
    """transformers.Trainer whose loss is the cross-entropy of a view plan over a DiffusionLM.

    Subclasses implement `plan`, which decides what is hidden, or override `micro_loss` for another loss.
    Losses are sums divided by the items (maskable tokens) of the whole accumulated batch over all ranks, so
    that gradient accumulation changes nothing.

    Args:
        model: a DiffusionLM, a path or id to load, or a model of transformers with its tokenizer as
            `processing_class`.
        train_dataset, eval_dataset: rows in the format that the trainer documents.
        peft_config: trains adapters instead of the weights.
        progress: a progress display to update.
        log: of the metrics; None: `training_logs.json` in the output directory.
        phases: measures time and memory by phase of a step; None: a new one.
        data_collator, callbacks, optimizers: as in transformers.Trainer.
    """

    streams = False  # whether the dataset may be a stream, an iterable without a length
    per_view: PerViewBackward | None = None  # makes the steps of a loss that takes several forward passes

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        args: TrainingConfig,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Sequence[Any] | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: peft.PeftConfig | None = None,
        progress: ProgressTarget | None = None,
        log: RunLog | None = None,
        phases: Phases | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **trainer_arguments: Any,
    ):
        refuse_unknown_arguments(args, trainer_arguments)
        args.check_assigned()
        lm = as_diffusion_lm(model, processing_class)
        args.choose_precision(in_float32=lm.weight_dtype == torch.float32)
        train_rows = self._checked_rows(lm, args, train_dataset, "train_dataset")
        eval_rows = self._checked_rows(lm, args, eval_dataset, "eval_dataset")
        check_rows(args, train_rows, eval_rows)
        refuse_unsupported(
            lm,
            args,
            adapters=peft_config is not None or has_adapters(lm),
            trainer_arguments=trainer_arguments,
        )
        set_seed(args.seed)  # new adapters are initialised from it
        self.lm = with_adapters(lm, peft_config) if peft_config is not None else lm
        self.lm.flash_attention = args.flash_attention
        setattr(lm.config, SETTINGS_KEY, lm.settings)
        self.means, self.numbers, self.evaluating = Means(), StepNumbers(self), False
        self._half_batches, self._saver, self.resumption = HalfBatches(self), Saver(self), Resumption(self)
        self.metrics, self.phases = (
            log or RunLog(folder=args.output_folder),
            phases or Phases(args.device, memory=args.log_memory_usage),
        )
        self.earlier_history, self.num_rows = (
            history(lm),
            len(train_dataset) if isinstance(train_dataset, Sized) else None,
        )
        self._run_callback = RunCallback(progress, self.metrics, self.phases)
        super().__init__(
            model=self.lm.model,
            args=args,
            train_dataset=train_rows,
            eval_dataset=eval_rows,
            processing_class=lm.tokenizer,
            data_collator=data_collator or Collator(lm.pad_token_id, marking=not args.dispatched),
            callbacks=[*(callbacks or []), self._run_callback],
            **trainer_arguments,
        )
        if args.torch_compile:
            compile_in_place(self.lm, args, self.accelerator)
        set_tensorboard_dir(self.callback_handler.callbacks, args.logging_dir)
        self._tracked_runs = TrackedRuns(self.callback_handler.callbacks, args.output_folder)
        self.callback_handler.callbacks.insert(0, self._tracked_runs)
        for printed in (PrinterCallback, ProgressCallback) if progress is not None else ():
            self.remove_callback(printed)
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True

    @property
    def model(self) -> Any:
        """The trained model. A compiled one that is assigned, `trainer.model = torch.compile(trainer.model)`,
        is compiled in place."""
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        inner, options = taken_apart(model)
        refuse_other_model(inner, self.lm)
        self._model = inner
        if options is not None:
            self.lm.compile(**options)

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        """Convert the user's rows to the format of the collator. `where` names the dataset in errors."""
        return dataset

    @classmethod
    def _checked_rows(cls, lm: DiffusionLM, args: Any, dataset: Any, where: str) -> Any:
        if dataset is None:
            return None
        check_dataset(dataset, where, streams=cls.streams)
        rows = print_report(
            cls.make_rows(lm, args, dataset, where), args.should_save, tables=not args.disable_tqdm
        )
        if args.show_rows and args.should_save and where == "train_dataset" and rows is not dataset:
            show_rows(lm.tokenizer, rows, args.show_rows)
        return rows

    def plan(self, batch: Batch, draw: Draw) -> Views:
        """The views of this batch: the tokens to hide, the tokens to predict, and the weight of each."""
        raise AssertionError(f"{type(self).__name__} overrides neither plan nor micro_loss")

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch: the weighted cross-entropy of its views."""
        return self.cross_entropy(lm, batch, self.plan(batch, self.training_draw(batch)))

    def training_draw(self, batch: Batch) -> Draw:
        """As `draw`; in training the noise times are also spread evenly over consecutive rows."""
        return replace(self.draw(batch), rows_before_B=batch.get("rows_before"))

    def cross_entropy(self, lm: DiffusionLM, batch: Batch, views: Views) -> Tensor:
        """The weighted cross-entropy of views, summed. Logs the unweighted mean, separately for noised and
        causal views."""
        log_prob_BMT = view_log_probs(
            lm, batch["input_ids"], separate_documents(batch), views, chunk=self.args.score_chunk
        )
        noised = views.count - views.causal
        for name, selected in [("cross_entropy", slice(noised)), ("lm_cross_entropy", slice(noised, None))][
            : 1 + views.causal
        ]:
            count = views.target_BMT[:, selected].sum()
            self.record(name, -log_prob_BMT[:, selected].detach().sum() / count.clamp_min(1), count)
        return weighted_cross_entropy(log_prob_BMT, views)

    def count_items(self, batch: Batch) -> Tensor:
        """The divisor of the loss: the number of maskable tokens."""
        return batch["maskable"].sum()

    def draw(self, batch: Batch) -> Draw:
        """Randomness keyed by seed, sample and epoch: the same masks on any number of devices and after a
        resume."""
        return Draw(self.args.seed, batch["sample_id"], 0 if self.evaluating else int(self.state.epoch or 0))

    @property
    def over(self) -> bool:
        """Whether all steps are done; transformers would make one more when a run is resumed at its end."""
        return self.state.global_step >= self.state.max_steps

    def train(self, resume_from_checkpoint: str | bool | None = None, **rest: Any) -> TrainOutput:
        """As in transformers.Trainer, but True resumes from the last complete checkpoint, or the beginning if
        the run ended before it. A path may also be a run's folder. A resumed run is compared
        (`checkpoint_to_resume`), a new one refuses to overwrite another."""
        self.args.check_assigned(read=True)
        self._throughput = Throughput()
        self._tracked_runs.resumed = bool(resume_from_checkpoint)
        with naming_write_errors(self.args.output_folder, FULL_DISK):
            checkpoint = self.checkpoint_to_resume(resume_from_checkpoint) if resume_from_checkpoint else None
            with alone_in(self.args.output_folder), ending_workers(self):
                if not resume_from_checkpoint:
                    refuse_earlier(self.args.output_folder, started=self.state.global_step > 0)
                elif self.is_world_process_zero():
                    self.rewind(0 if checkpoint is None else steps_done(checkpoint) or 0)
                return super().train(checkpoint and str(checkpoint), **rest)

    @property
    def run_record(self) -> RunRecord:
        """The settings and inputs of the run."""
        return self.resumption.record

    def inputs(self) -> dict[str, Any]:
        """What the run reads, besides settings and held-out rows: fingerprints of JSON types, by name."""
        of_model = model_inputs(self.lm, weights_matter=reads_first_weights(self.args))
        return {"train_dataset": rows_fingerprint(self.train_dataset)} | of_model

    def checkpoint_to_resume(self, named: str | Path | Literal[True]) -> Path | None:
        """See `Resumption.checkpoint`."""
        return self.resumption.checkpoint(named)

    def rewind(self, step: int) -> None:
        """Drop the log lines after this step. They will be written again."""
        self.metrics.rewind(step)

    def _init_training_state(self, max_steps: int, *arguments: Any) -> Any:
        _ = self.run_record  # of a new run; a resumed one has made it before it loaded weights
        started = super()._init_training_state(max_steps, *arguments)
        self.resumption.begin(max_steps)
        return started

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with self.resumption.loading(Path(checkpoint)):
                super()._load_optimizer_and_scheduler(checkpoint)

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
        """Inside, processes may make different numbers of forward passes without gradients. Other collectives
        would deadlock."""
        return lockstep(self.lm, self.args.device) if self.shards_weights else contextlib.nullcontext()

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As in transformers.Trainer, on user rows or the trainer's held-out rows. Raises ConfigError if
        there are none."""
        rows = self.held_out_rows(eval_dataset)
        with measuring(self, metric_key_prefix):
            self.measure(rows)
            return super().evaluate(rows, ignore_keys, metric_key_prefix)

    def measure(self, rows: Any) -> None:
        """Hook for metrics of held-out rows other than the loss. Called before the loss is evaluated."""

    def held_out_rows(self, dataset: Any = None) -> Any:
        """The rows of a dataset in the format of the collator; None: the trainer's `eval_dataset`."""
        rows = self.eval_dataset if dataset is None else dataset
        if rows is None:
            raise ConfigError(
                "there is nothing to evaluate on",
                where="eval_dataset",
                remedy="Give it to evaluate, or to the trainer",
            )
        made = rows is self.eval_dataset or isinstance(rows, Rows)
        return rows if made else self._checked_rows(self.lm, self.args, rows, "eval_dataset")

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refused, because the logits of a row depend on which tokens are hidden."""
        raise TrainingError(
            "whole rows have no predictions", where="predict", remedy="Use evaluate, or generate"
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        with naming_missing_metric(self.args.metric_for_best_model, metrics):
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
        loss = self._half_batches.make(self._micro_step, model, inputs, num_items_in_batch)
        # a step is counted with its last micro-batch
        self.numbers.add_loss(loss, steps=int(self.accelerator.sync_gradients))
        if not self.is_in_train:  # else it is read before the optimizer's step
            self.numbers.read()
        return loss

    def _micro_step(self, model: nn.Module, inputs: Any, items: Tensor | int | None) -> Tensor:
        if self.per_view is not None and (loss := self.per_view.step(model, inputs, items)) is not None:
            return loss
        with self.phases("backward"):  # the forward pass within is a separate phase
            return super().training_step(model, inputs, items)

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
            self.numbers.require_finite("loss", loss)
            self.record("loss", loss, items)  # transformers would average over rows, not items
        return (loss, None) if return_outputs else loss

    def per_item(self, loss: Tensor, items: Tensor | int) -> Tensor:
        """This rank's part of the loss of an optimizer step. `items`: of all ranks. DDP averages gradients
        over ranks."""
        loss = loss / items * self.accelerator.num_processes
        # the numbers of the step are read too late for them
        if self.is_deepspeed_enabled or updates_in_backward(self.args):
            finite(self, "loss", loss)
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
            self.resumption.optimizer_made()
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
        self.numbers.add_mean(name, value, count)

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
        self.numbers.add_tokens(self.count_tokens(inputs))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.numbers.read_step(norm)
        return norm

    def floating_point_ops(self, inputs: Batch) -> int:
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
            remember(self)

    # Checkpoints.

    def _get_output_dir(self, trial: Any) -> str:
        return (
            super()._get_output_dir(trial)
            if self._saver.unfinished is None
            else str(self._saver.unfinished.parent)
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self._saver.whole_checkpoint(Path(self._get_output_dir(trial))):
            super()._save_checkpoint(model, trial)

    def _load_best_model(self) -> None:
        self._saver.check_best()
        super()._load_best_model()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model with adapters merged; a checkpoint (`_internal_call`): trained weights, config
        and metric sums."""
        folder = output_dir or str(self.args.output_dir)
        if not _internal_call and has_adapters(self.lm):
            return self._saver.save_merged(folder)
        with (self._saver.trained_part if _internal_call else self._saver.whole_model)(Path(folder)):
            super().save_model(folder, _internal_call)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Called by transformers when it pushes to the hub."""
        if self.args.should_save:
            write_card(self.lm, str(self.args.output_dir))
