"""The shared trainer: transformers.Trainer over a DiffusionLM, with one loss to override.

Shapes: B batch, V views, T tokens.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput

from unmask.data.rows import Collator, documents_apart
from unmask.diffusion.score import noise_groups, score
from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError, TrainingError
from unmask.models.card import HISTORY_KEY, history, write_card
from unmask.models.diffusion_lm import SETTINGS_KEY, DiffusionLM
from unmask.models.ends import accept_generation_config
from unmask.models.load import as_diffusion_lm, first_line
from unmask.monitor import write_atomic
from unmask.objectives.supervised import weighted_cross_entropy
from unmask.training.adapters import has_adapters, merged, quantised, with_adapters
from unmask.training.checkpoints import check_adapters, check_whole, checkpoints, last_checkpoint, named_checkpoint, steps_done
from unmask.training.evaluation import Batch, EvaluatingTrainer
from unmask.training.history import chosen_settings, stage_entry
from unmask.training.log import Progress, RunCallback, RunLog
from unmask.training.means import Means
from unmask.training.memory import memory_metrics
from unmask.training.optimizers import check_rounding, keep_on_host
from unmask.training.phases import Phases
from unmask.training.stage_config import StageConfig, steps_per_epoch
from unmask.training.switches import Subject, check_switches, compile_in_place, is_split
from unmask.training.trackers import direct

if TYPE_CHECKING:
    import peft

RECORDED_NAME = "recorded.json"
STEP_LOSSES = ("loss", "train_loss")
"""Means over steps: since the last log line, and of the whole run."""
NOT_FINITE = "Lower the learning rate or max_grad_norm, or use float32; earlier checkpoints are intact"


class DiffusionTrainer(EvaluatingTrainer):
    """transformers.Trainer whose loss is a plan of views over a DiffusionLM.

    Subclasses say what to hide (`plan`); a trainer with another loss overrides `micro_loss`. Losses are sums divided by the
    items (maskable tokens) of the whole accumulated batch over all ranks, so that gradient accumulation changes nothing.

    Args:
        model: a DiffusionLM, a path or id to load, or a model of transformers with its tokenizer as `processing_class`.
        args: the stage's config.
        train_dataset: rows as the stage describes them.
        eval_dataset: the same, held out.
        peft_config: train adapters instead of the weights.
        progress: a stage of a progress display to keep up to date.
        log: where the metrics go; None: `training_logs.json` in the output directory.
        phases: what takes the time and memory of the parts of a step; None: one of its own.
        data_collator, callbacks, optimizers: as in transformers.Trainer.

    Raises:
        TrainingError: the loss is not finite.
    """

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        args: StageConfig,
        train_dataset: Iterable[Any] | None = None,
        eval_dataset: Sequence[Any] | None = None,
        *,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: peft.PeftConfig | None = None,
        progress: Progress | None = None,
        log: RunLog | None = None,
        phases: Phases | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        **trainer_arguments: Any,
    ):
        lm = as_diffusion_lm(model, processing_class)
        args.choose_precision(in_float32=lm.weight_dtype == torch.float32)
        train_rows, eval_rows = (
            self._checked_rows(lm, args, rows, where) for rows, where in ((train_dataset, "train_dataset"), (eval_dataset, "eval_dataset"))
        )
        if eval_rows is None and args.eval_strategy != "no":
            remedy = "Give held-out rows (data.eval, eval_dataset), or leave it out"
            raise ConfigError("there is nothing to evaluate on", where="eval_strategy", remedy=remedy)
        if isinstance(train_rows, Sized):
            steps_per_epoch(args, train_rows)  # refuses a run without any
        for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            if trainer_arguments.get(name) is not None:
                what = "is never called: a row has no logits of its own, they hang on what is hidden"
                raise ConfigError(what, where=name, remedy="Leave it out; a subclass may override measure and micro_loss")
        if args.n_gpu > 1 and not is_split(lm):
            raise ConfigError(f"{args.n_gpu} GPUs in one process", where="device", remedy="Start it with accelerate launch or torchrun")
        adapters = peft_config is not None or has_adapters(lm)
        subject = Subject(lm.attention, lm.weight_dtype, adapters, quantised(lm), is_split(lm))
        check_switches(args, subject)
        check_rounding(args, subject)
        set_seed(args.seed)  # new adapters follow from it
        self.lm = with_adapters(lm, peft_config) if peft_config is not None else lm
        self.lm.flash_attention = args.flash_attention
        setattr(lm.config, SETTINGS_KEY, lm.settings)
        self.means = Means()
        self.metrics = log or RunLog(folder=Path(str(args.output_dir)))
        self.phases = phases or Phases(args.device, memory=args.log_memory_usage)
        self._earlier, self._rows = history(lm), len(train_dataset) if isinstance(train_dataset, Sized) else None
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
        direct(self.callback_handler.callbacks, args.logging_dir)
        for other in (PrinterCallback, ProgressCallback) if progress is not None else ():
            self.remove_callback(other)
        self.loss_is_scaled_for_ga = True
        self.model_accepts_loss_kwargs = True

    def plan(self, batch: Batch, draw: Draw) -> Views:
        """What to hide, score and weigh in this batch."""
        raise AssertionError(f"{type(self).__name__} overrides neither plan nor micro_loss")

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        """The summed loss of a micro-batch: the weighted cross-entropy of its views."""
        return self.cross_entropy(lm, batch, self.plan(batch, self.visit(batch)))

    def visit(self, batch: Batch) -> Draw:
        """As `draw`, with times spread evenly over the rows that training visits one after another."""
        return replace(self.draw(batch), order_B=batch.get("order"))

    def cross_entropy(self, lm: DiffusionLM, batch: Batch, views: Views) -> Tensor:
        """The weighted cross-entropy of views, summed; its plain mean is logged, that of a causal view by itself."""
        log_prob_BVT = self.scores(lm, batch, views)
        noised = views.count - views.causal
        for name, at in (("cross_entropy", slice(noised)), ("lm_cross_entropy", slice(noised, None))):
            count = views.scored_BVT[:, at].sum()
            self.record(name, -log_prob_BVT[:, at].detach().sum() / count.clamp_min(1), float(count))
        return weighted_cross_entropy(log_prob_BVT, views)

    def scores(self, lm: DiffusionLM, batch: Batch, views: Views) -> Tensor:
        """Log-probabilities of the tokens that the views score [B, V, T]."""
        return score(lm, batch["input_ids"], documents_apart(batch), views, chunk=self.args.score_chunk)

    def count_items(self, batch: Batch) -> Tensor:
        """What the loss is divided by: the maskable tokens."""
        return batch["maskable"].sum()

    def count_tokens(self, batch: Batch) -> Tensor:
        """All tokens that are no padding: what the model card counts."""
        return (batch["documents"] > 0).sum()

    def count_samples(self, batch: Batch) -> int:
        """The rows of this process's micro-batch: what `samples_per_second` counts."""
        return len(batch["sample_id"])

    def draw(self, batch: Batch) -> Draw:
        """Randomness keyed by sample and epoch: the same masks on any number of devices, and after a resume."""
        epoch = 0 if self._measured else int(self.state.epoch or 0)
        return Draw(self.args.seed, batch["sample_id"], epoch)

    @property
    def over(self) -> bool:
        """Whether all steps are done. Of a run resumed at its very end transformers would make one more."""
        return self.state.global_step >= self.state.max_steps

    def groups(self, batch: Batch) -> Tensor:
        """The tokens that are noised together [B, T]."""
        return noise_groups(self.lm, batch["maskable"], batch["documents"])

    def train(self, resume_from_checkpoint: str | bool | None = None, **rest: Any) -> TrainOutput:
        """As in transformers.Trainer, but that True means the last whole checkpoint and is no error where there is none yet, that a path
        may be the folder of a run, that the checkpoints of an earlier run are not overwritten, and that what is logged again replaces
        what was."""
        self._counted: tuple[float, int | None] = time.perf_counter(), None
        self._samples = 0
        folder = Path(str(self.args.output_dir))
        if not resume_from_checkpoint:
            if self.state.global_step == 0 and (earlier := checkpoints(folder)):
                remedy = "Resume with train(resume_from_checkpoint=True), remove it, or choose another output_dir"
                raise TrainingError("holds a checkpoint of an earlier run", where=str(earlier[0]), remedy=remedy)
            return super().train(None, **rest)
        checkpoint = last_checkpoint(folder) if resume_from_checkpoint is True else named_checkpoint(Path(resume_from_checkpoint))
        if checkpoint is not None and not self.sharded:
            check_whole(checkpoint)
            check_adapters(checkpoint, adapters=has_adapters(self.lm))
        if self.is_world_process_zero():
            self.rewind(0 if checkpoint is None else steps_done(checkpoint) or 0)
        return super().train(checkpoint and str(checkpoint), **rest)

    def rewind(self, step: int) -> None:
        """Drop what was logged after this step, which will be logged again."""
        self.metrics.rewind(step)

    def told_settings(self) -> dict[str, Any]:
        """What the model's history says of the settings."""
        return chosen_settings(self.args)

    def _remember(self) -> None:
        """Put what this stage did into the model's history, after the earlier stages."""
        state: Any = self.state
        if state.global_step == 0:  # the evaluation of a model that is not trained yet
            return
        done = {"rows": self._rows, "steps": state.global_step, "tokens": state.num_input_tokens_seen}
        entry = stage_entry(self.args, self.told_settings(), state.log_history, **done)
        setattr(self.lm.config, HISTORY_KEY, [*self._earlier, entry])

    def get_performance_stats(self) -> dict[str, Any]:
        """Time, peak memory (with `log_memory_usage`) and tokens per second by phase: see `Phases.performance_stats`."""
        return self.phases.performance_stats()

    # What transformers.Trainer calls.

    def training_step(self, *arguments: Any, **rest: Any) -> Tensor:
        with self.phases("backward"):  # the forward pass within is a phase of its own
            return self.record_loss(super().training_step(*arguments, **rest))

    def record_loss(self, loss: Tensor) -> Tensor:
        """Add a micro-batch's part of the loss of a step to what is logged: transformers' own sums forget what came before a resume."""
        for name in STEP_LOSSES:
            self.means.add(name, float(loss), self.accelerator.sync_gradients)  # a step is counted with its last micro-batch
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor | tuple[Tensor, None]:
        # DDP takes what the last pass of a step leaves out for unused, though an earlier one has used it.
        several = self.accelerator.num_processes > 1
        with self.phases("forward"), self.lm.calling_all_modules() if several else contextlib.nullcontext():
            loss = self.micro_loss(self.lm.bind(model), inputs)
        if num_items_in_batch is not None:
            loss = self.per_item(loss, num_items_in_batch)
        else:  # evaluation: every batch by itself
            items = self.count_items(inputs)
            loss = self.finite(loss / items.clamp_min(1))
            self.record("loss", loss.detach(), float(items))  # transformers takes the mean over rows, whatever they count
        return (loss, None) if return_outputs else loss

    def per_item(self, loss: Tensor, items: Tensor | int) -> Tensor:
        """A rank's part of the loss of an optimizer step, given the items of all ranks: DDP takes the mean over these."""
        return self.finite(loss / items * self.accelerator.num_processes)

    def finite(self, loss: Tensor) -> Tensor:
        """The loss; TrainingError where it is not finite."""
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss is {loss.item()}", where=f"step {self.state.global_step}", remedy=NOT_FINITE)
        return loss

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Tensor | None]:
        if not self.over:
            self.phases.begin_step()
        batches, _ = super().get_batch_samples(epoch_iterator, 0 if self.over else num_batches, device)
        batches = self.prepared([batch | {"order": self._order(batch, index)} for index, batch in enumerate(batches)])
        return batches, self._get_num_items_in_batch(batches, device)

    def create_optimizer(self, *arguments: Any) -> Any:
        first = self.optimizer is None
        try:
            super().create_optimizer(*arguments)
        except ImportError as error:
            raise ConfigError(first_line(error), where="optim", remedy="Install it, or use adamw_torch") from error
        if first and self.args.optimizer_offload:
            keep_on_host(self.optimizer)
        return self.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            recorded = Path(checkpoint) / RECORDED_NAME
            is_mine = self.is_world_process_zero() and recorded.exists()  # it is of all processes
            self.means.load(json.loads(recorded.read_text()) if is_mine else {})

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of an optimizer step, before their items are counted."""
        return batches

    def _order(self, batch: Batch, index: int) -> Tensor:
        """How many rows training has visited before each of a micro-batch, the same however a step is cut into micro-batches."""
        size, ranks = self.args.train_batch_size, self.accelerator.num_processes
        micro_batches = self.state.global_step * self.args.gradient_accumulation_steps + index
        first = (micro_batches * ranks + self.accelerator.process_index) * size
        return first + torch.arange(len(batch["sample_id"]), device=batch["sample_id"].device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        if not batch_samples:
            return None
        items = torch.stack([self.count_items(batch) for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(items).sum().clamp_min(1)

    def _track_num_input_tokens(self, inputs: Batch) -> None:
        self._samples += self.count_samples(inputs)
        self.state.num_input_tokens_seen += int(self.accelerator.gather(self.count_tokens(inputs).to(self.args.device)).sum())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.accelerator.scaler is None and norm is not None and not math.isfinite(norm):  # a float16 scaler skips such steps itself
            raise TrainingError(f"the gradient norm is {float(norm)}", where=f"step {self.state.global_step}", remedy=NOT_FINITE)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        logs |= self.means.take(lambda name: name not in STEP_LOSSES or name in logs)
        if "loss" in logs:  # of the steps since the last such line
            logs |= self._throughput()
        memory = memory_metrics(self.args.device)
        self._run_callback.memory_gb = memory["memory_gb"]
        if self.args.log_memory_usage:
            logs |= memory
        super().log(logs, start_time)
        if "train_loss" in logs or not self.is_in_train:  # the summary of a run, or a later evaluation
            self._remember()

    def _throughput(self) -> dict[str, float]:
        """Tokens and samples a second, of all processes since it was last asked, pauses for evaluation and checkpoints included. All
        processes must ask at the same time."""
        (since, counted), now, seen = self._counted, time.perf_counter(), self.state.num_input_tokens_seen
        tokens = seen - (self._initial_num_input_tokens_seen if counted is None else counted)
        samples = sum(gather_object([self._samples]))
        self._counted, self._samples = (now, seen), 0
        return {"tokens_per_second": tokens / (now - since), "samples_per_second": samples / (now - since)}

    def floating_point_ops(self, inputs: Batch) -> int:
        return 0

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Checkpoints hold what is trained, and what was recorded since the last log line; a save of one's own holds the whole model, with
        adapters merged in."""
        accept_generation_config(self.lm.model.generation_config)
        if _internal_call:
            recorded = self.means.state_everywhere()
            if self.args.should_save:
                write_atomic(Path(str(output_dir)) / RECORDED_NAME, json.dumps(recorded))
                self.lm.config.save_pretrained(str(output_dir))  # it holds the history, and adapters are saved without it
            # PEFT writes whole embedding tables beside adapters where the vocabulary is not that of the base; nothing else is new there.
            for adapters in getattr(self.lm.model, "peft_config", {}).values():
                adapters.base_model_name_or_path = None  # is filled in again when they are written
        if _internal_call or not has_adapters(self.lm):
            super().save_model(output_dir, _internal_call)
            if not _internal_call and self.args.should_save:
                write_card(self.lm, output_dir or str(self.args.output_dir))
        elif self.args.should_save:
            merged(self.lm).save(output_dir or self.args.output_dir)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """What transformers does when it pushes to the hub."""
        if self.args.should_save:
            write_card(self.lm, str(self.args.output_dir))
