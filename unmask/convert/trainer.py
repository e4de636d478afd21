"""Conversion of a causal model to a diffusion model, stage by stage. A stage is one Trainer run."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from unmask.artifacts import read_file
from unmask.convert.config import ConvertConfig
from unmask.convert.distillation import compare, distillation_loss
from unmask.convert.on_policy import complete, conversion_prompts, prompts_of, state_batch, state_views
from unmask.convert.stages import PEFT_ROW_PARAMETER, ConversionStage, freezing, only_mask_row, stage_ends
from unmask.data.pairs import RowLimits, pair_rows
from unmask.data.report import DataReport, show_rows
from unmask.data.row_store import TOKENS, stored_rows
from unmask.data.rows import TokenRow, check_dataset, separate_documents
from unmask.data.special_tokens import parses_special_tokens
from unmask.data.streamed_rows import StreamedRows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.rng import RngStream, sequence_key
from unmask.diffusion.views import MaskRNG, Views
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.generation.requests import check_settings
from unmask.generation.rollout import make_rollout
from unmask.generation.sampler import generate
from unmask.models.adapters import has_adapters, refuse_frozen, with_adapters, with_trained_mask_row
from unmask.models.attention import DEFAULT_BLOCK
from unmask.models.compiled import taken_apart
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm, check_patterns, load, with_pattern
from unmask.models.model_card import HISTORY_KEY
from unmask.training.arguments import TrainerArguments, by_place, map_held_out, refuse_foreign_collator
from unmask.training.config import row_length, total_steps
from unmask.training.distributed import failing_together, from_first
from unmask.training.hardware_checks import is_split, refuse_other_model
from unmask.training.metrics import ProgressPart, ProgressTarget
from unmask.training.noising import noised_views
from unmask.training.run.around import StopOnSignal, running_in
from unmask.training.run.checkpoint import fault, last_of_run, named_checkpoint, stage_of, steps_done
from unmask.training.run.fingerprints import model_inputs, rows_fingerprint
from unmask.training.run.folder import checkpoints, refuse_nothing
from unmask.training.run.log import RunLog
from unmask.training.run.record import RunRecord, expect_visited, read_record
from unmask.training.sharding import with_fresh_accelerator_state
from unmask.training.step_timer import Phases
from unmask.training.text_config import corpus_rows, rows_from_step
from unmask.training.trackers import RunTrackers
from unmask.training.trainer import (
    Batch,
    DiffusionTrainer,
    HeldOut,
    Model,
    OptimizerClass,
    Tokenizer,
)

if TYPE_CHECKING:
    import peft
    from transformers import BitsAndBytesConfig


class StageTrainer(DiffusionTrainer):
    """The trainer of one stage, on `conversion_rows`: the diffusion loss and the auxiliary losses of the
    stage.

    `teacher`: the frozen causal model, for distillation and alignment. `steps_before`, `total_steps`: of the
    earlier stages, and of all.
    """

    streams = True
    restored: dict[str, Any] | None = None
    """The reported settings of a finished stage of an earlier run."""

    config_class = ConvertConfig

    def __init__(
        self,
        model: DiffusionLM,
        args: ConvertConfig,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        stage: ConversionStage,
        teacher: DiffusionLM | None,
        steps_before: int,
        total_steps: int,
        run_record: RunRecord | None = None,  # of the whole conversion
        callbacks: list[TrainerCallback] | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
        log: RunLog | None = None,
    ):
        self.stage, self.teacher = stage, teacher
        self.steps_before, self.total_steps = steps_before, total_steps
        super().__init__(
            model,
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            callbacks=callbacks,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            progress=progress,
            phases=phases,
            log=log,
        )
        if run_record is not None:
            self.run_record = run_record
        if teacher is not None:
            teacher.compile_as(self.lm)
            if not is_split(self.lm):
                teacher.model.to(self.args.device)

    def reported_settings(self) -> dict[str, Any]:
        """The config's settings, with those of this stage in place of `stages`."""
        if self.restored is not None:
            return self.restored
        settings = {name: value for name, value in super().reported_settings().items() if name != "stages"}
        return settings | self.stage.model_dump(exclude_defaults=True)

    def restore(self) -> bool:
        """Load the weights and history of an earlier run that finished this stage. Returns whether there was
        one."""
        if self.uses_fsdp_or_deepspeed or self.args.load_best_model_at_end:
            return False  # only `train`, which then makes no step, can load their checkpoints
        checkpoint = self.args.output_folder / f"{PREFIX_CHECKPOINT_DIR}-{self.args.max_steps}"
        logged = self.metrics.read()
        if steps_done(checkpoint) is None or not any("train_loss" in line for line in logged):
            return False
        if from_first(lambda: fault(checkpoint)) is not None:  # `train` finds an earlier one
            return False
        self.restored = read_record(checkpoint)["reported"]
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.state.log_history = logged
        self.remember()
        return True

    def checkpoint_to_resume(self, named: str | Path | Literal[True]) -> Path | None:
        """The checkpoint to resume; None also for a stage that did not begin."""
        begun = named is not True or checkpoints(self.args.output_folder)
        return super().checkpoint_to_resume(named) if begun else None

    def compare_run(self, checkpoint: Path, step: int) -> None:
        """Find what to change in this stage. `ConvertTrainer` has compared the whole runs."""
        self.changed = self.run_record.changed_since(read_record(checkpoint))

    def show_changes(self, max_steps: int) -> None:
        """`ConvertTrainer` prints them."""

    def changes_in_card(self) -> list[dict[str, Any]]:
        """The changes within this stage, with its learning rates."""
        first, rate = self.steps_before, self.stage.rate
        return [
            each | {"old": each["old"] * rate} if each["setting"] == "learning_rate" else each
            for each in super().changes_in_card()
            if first < each["step"] < first + self.args.max_steps
        ]

    def plan(self, batch: Batch, draw: MaskRNG) -> Views:
        if "hidden" in batch:
            return state_views(batch["hidden"], batch["maskable"])
        group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
        pair = self.args.complementary
        views = noised_views(
            self.args, self.lm, batch["input_ids"], group_BT, batch["documents"], draw, complementary=pair
        )
        return views.with_causal(batch["maskable"], self.stage.lm_loss) if self.stage.lm_loss else views

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        lm = self._annealed(lm)
        if self.of_sampler and self.evaluating:
            [batch] = self._rollouts([batch])
        views = self.plan(batch, self.training_draw(batch))
        if self.teacher is None:
            return self.cross_entropy(lm, batch, views)
        if not views.causal:
            return self._distillation_loss(lm, self.teacher, batch, views)
        noised, causal = views.split_causal()
        return self._distillation_loss(lm, self.teacher, batch, noised) + self.cross_entropy(
            lm, batch, causal
        )

    def _annealed(self, lm: DiffusionLM) -> DiffusionLM:
        step = self.steps_before + self.state.global_step
        end = self.args.attention_annealing * self.total_steps
        if self.evaluating or step >= end or lm.attention != "bidirectional":
            return lm
        return lm.annealed((step + 1) / (end + 1), self.args.seed + step)

    def _distillation_loss(self, lm: DiffusionLM, teacher: DiffusionLM, batch: Batch, views: Views) -> Tensor:
        found = compare(
            *(lm, teacher, batch["input_ids"], separate_documents(batch), views),
            top_k=self.args.teacher_top_k,
            divergence=self.args.divergence,
            everywhere=self.of_sampler,
        )
        count = float(views.target_BMT.sum())
        for name, values in (
            ("cross_entropy", -found.log_prob_N),
            ("kl", found.divergence_N),
            ("distance", found.distance_N),
        ):
            self.record(name, values.detach().sum() / max(count, 1), count)
        return distillation_loss(
            found, views, distillation=self.args.distillation, alignment=self.args.alignment
        )

    def held_out_metrics(self) -> Sequence[str]:
        causal = ["lm_cross_entropy"] if self.stage.lm_loss else []
        return *super().held_out_metrics(), *causal, *([] if self.teacher is None else ["kl", "distance"])

    @property
    def of_sampler(self) -> bool:
        """Whether rows are prompts, and the states that are learned those that the model's sampler visits."""
        return bool(self.args.states == "sampler")

    def count_items(self, batch: Batch) -> Tensor:
        """The divisor of the loss: the number of maskable tokens, or of rows, in each of which the mean over
        tokens is taken."""
        return torch.tensor(len(batch["sample_id"])) if self.of_sampler else super().count_items(batch)

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of a step, with what the model writes of them."""
        if not self.args.lmbda:
            return batches
        with failing_together("rollout"), self.phases("generation"), self.lockstep():
            if self.of_sampler:
                return self._rollouts(batches)
            return [self._continued(batch) for batch in batches]

    @property
    def rollout_step(self) -> int | None:
        """The number of the step in the run, by which rollouts differ; None: an evaluation, whose rollouts
        are the same at all steps."""
        return None if self.evaluating else self.steps_before + self.state.global_step

    def rollout_draw(self, batch: Batch) -> MaskRNG:
        """The random numbers of the rollouts of these rows, with the keys of their completions."""
        step = [] if self.rollout_step is None else [self.rollout_step]
        keys = [sequence_key([number, *step]) for number in batch["sample_id"].tolist()]
        return MaskRNG(self.args.seed, torch.tensor(keys, device=batch["sample_id"].device))

    def _rollouts(self, batches: list[Batch]) -> list[Batch]:
        """The completions of these prompts, and what is hidden of them. Only the hidden tokens of completions
        are trained on."""
        args, draws, teacher = self.args, [self.rollout_draw(batch) for batch in batches], self.teacher
        assert teacher is not None
        from_student = [draw.per_sequence(1, RngStream.ROLLOUT).squeeze(1) < args.lmbda for draw in draws]
        step = self.rollout_step
        generation = complete(
            [(self.lm, args.rollout_sampler(step)), (teacher, args.teacher_sampler(step))],
            [prompt for batch in batches for prompt in prompts_of(batch)],
            [key for draw in draws for key in draw.key_B.tolist()],
            [int(not own) for own_B in from_student for own in own_B.tolist()],
        )
        lengths = [len(tokens) for tokens in generation.tokens]
        self.phases.count(generated=sum(lengths))
        self.record("completion_length", sum(lengths) / max(len(lengths), 1), len(lengths))
        excluded, made, start = self.lm.eos_token_ids if args.exclude_im_end else (), list[Batch](), 0
        for batch, draw, own_B in zip(batches, draws, from_student, strict=True):
            rollout = make_rollout(self.lm, generation, slice(start, start + len(own_B)))
            made.append(batch | state_batch(rollout, own_B, draw, excluded))
            start += len(own_B)
        return made

    def _continued(self, batch: Batch) -> Batch:
        """A copy of the batch in which the model continues randomly chosen rows from a random cut. Only the
        continuation is trained on."""
        draw, new_tokens = self.rollout_draw(batch), self.args.max_new_tokens
        chosen_B, cut_B = draw.per_sequence(2, RngStream.ROLLOUT).unbind(1)
        length_B = (batch["documents"] == 1).sum(1) - new_tokens
        rows = ((chosen_B < self.args.lmbda) & (length_B > 0)).nonzero().flatten().tolist()
        if not rows:
            return batch
        prompts = [batch["input_ids"][row, : 1 + int(cut_B[row] * length_B[row])].tolist() for row in rows]
        sampler = self.args.rollout_sampler(self.rollout_step)
        continuations = generate(self.lm, prompts, sampler, keys=draw.key_B[rows].tolist()).tokens
        batch = copy.deepcopy(batch)
        batch["one_document"] = False  # the rest of a continued row becomes padding
        position_T = torch.arange(batch["input_ids"].shape[1], device=draw.key_B.device)
        for row, prompt, tokens in zip(rows, prompts, continuations, strict=True):
            stop = len(prompt) + len(tokens)
            batch["input_ids"][row, len(prompt) : stop] = torch.tensor(tokens, device=draw.key_B.device)
            batch["documents"][row] = (position_T < stop).long()
            batch["maskable"][row] = (position_T >= len(prompt)) & (position_T < stop)
        return batch

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """The parameters with weight decay, without embeddings of which the stage trains only the mask
        token's row."""
        names = [name for name in super().get_decay_parameter_names(model) if PEFT_ROW_PARAMETER not in name]
        if not only_mask_row(self.lm, self.stage):
            return names
        table = model.get_input_embeddings().weight
        named = dict(model.named_parameters(remove_duplicate=False))
        return [name for name in names if named[name] is not table]


class ConvertTrainer(TrainerArguments):
    """Converts a causal model on text, or on prompts and completions, in the stages of its config.

    Each stage writes its checkpoints to `output_dir/stage-N`. `train(resume_from_checkpoint=True)` resumes in
    the middle of any stage.

    Args:
        model: as in DiffusionTrainer. Its weights are changed in place.
        args: pattern, steps, rates and stages. `max_steps` (or the epochs) are divided among the stages.
        train_dataset: rows with `text` (or a stream of them, see `corpus_rows`), or with `prompt` and
            `completion`, of which only the completion is noised.
        eval_dataset: held-out rows in the same format; each stage ends with an evaluation.
        peft_config: trains adapters and the mask token's embedding row; a stage then trains the adapters of
            the weights that it names. Adapters are merged when the model is saved.
        rest: as in DiffusionTrainer, and in the same order.

    Raises:
        ConfigError: a causal pattern, adapters with a time embedding, FSDP or DeepSpeed, a frozen model, or a
            stage that trains nothing or has no steps.
        DataError: a row lacks a column, or there is no text.
    """

    config_class = ConvertConfig

    def __init__(
        self,
        model: Model,
        args: ConvertConfig | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Iterable[Any] = (),
        eval_dataset: HeldOut | None = None,
        processing_class: Tokenizer | None = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizer_cls_and_kwargs: OptimizerClass | None = None,
        *,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: peft.PeftConfig | None = None,
        progress: ProgressTarget | None = None,
        phases: Phases | None = None,
    ):
        refuse_foreign_collator(data_collator)
        args = self.checked_args(args, model)
        if isinstance(model, str | Path):
            check_patterns(model, args.patterns(), args.model_init_kwargs or {})
        lm = as_diffusion_lm(model, processing_class, quantization_config, args.model_init_kwargs)
        self.args, self.progress, self.callbacks = args, progress, callbacks or []
        self.rest: dict[str, Any] = {
            "phases": phases,
            "data_collator": data_collator,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
        }
        self.dtype = str(lm.dtype).removeprefix("torch.")
        self.teacher = lm.as_causal().frozen_copy() if args.distillation or args.alignment else None
        self.lms = [self._with_pattern(lm, stage) for stage in args.stages]
        if peft_config is not None or has_adapters(lm):
            args.refuse_adapters(timed=any(each.has_time_embedding for each in self.lms))
        if peft_config is not None:
            self._add_adapters(peft_config)
        for each in self.lms if args.lmbda else ():
            check_settings(each, args.rollout_sampler(None))
        refuse_frozen(self.lms[-1])
        for number, (stage, stage_lm) in enumerate(zip(args.stages, self.lms, strict=True), start=1):
            where = f"stages, stage {number}, train"
            if not any(parameter.requires_grad for parameter in stage.parameters(stage_lm, where=where)):
                raise ConfigError(
                    "names no weights that take gradients",
                    where=where,
                    remedy="Add adapters to these weights, or use all",
                )
        self.lm = self.lms[-1]
        self.train_rows: Any = conversion_rows(self.lm, args, train_dataset, "train_dataset")
        if args.show_rows and args.should_save:
            show_rows(self.lm.tokenizer, self.train_rows, args.show_rows)
        self.eval_rows = map_held_out(
            eval_dataset,
            lambda rows, place: None if rows is None else conversion_rows(self.lm, args, rows, place),
        )
        self.ends = stage_ends(args.stages, total_steps(args, self.train_rows))
        self.state = TrainerState(max_steps=self.ends[-1])  # of the whole conversion
        self.trainer: StageTrainer | None = None
        self.trackers = RunTrackers(self.args)
        self.changed: dict[str, Any] = {}
        self.resumed_step = 0
        self.found: dict[Any, Path | None] = {}  # as in `DiffusionTrainer`

    @property
    def model(self) -> Any:
        """The model, which all stages train. A compiled one that is assigned is compiled in place, as by
        `DiffusionTrainer`."""
        return self.lm.model

    @model.setter
    def model(self, model: Any) -> None:
        refuse_other_model(taken_apart(model)[0], self.lm)
        for lm in self.lms:
            lm.model = model

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> None:
        """Run the stages, or those that are not finished when resuming.

        Args:
            resume_from_checkpoint: True: resume from the last complete checkpoint in the output folder. A
                path: the checkpoint of a stage, also of another run, or the folder of a conversion, for its
                last checkpoint.

        Raises:
            TrainingError: there is no such checkpoint, or a later stage was trained in the output folder
                already.
        """
        checkpoint = self.checkpoint_to_resume(resume_from_checkpoint) if resume_from_checkpoint else None
        self.found.clear()
        if checkpoint is not None and self.args.should_save:
            self.run_record.show(self.changed, self.resumed_step, self.ends[-1])
        self.trackers.runs.resumed = bool(resume_from_checkpoint)
        every_stage = bool(resume_from_checkpoint) and self._is_output(resume_from_checkpoint)
        with running_in(self.args.output_folder):
            _ = self.run_record  # of the weights before training
            self.state.log_history = []
            start = 1 if checkpoint is None or every_stage else self._resumed_stage(checkpoint)
            for number in range(start, len(self.ends) + 1):
                if self.trainer is not None and self.trainer.uses_fsdp_or_deepspeed:
                    self.gather_weights(self.trainer)
                self.trainer = None  # frees the optimizer's states
                from_named = None if every_stage or number > start else checkpoint
                self.trainer = self._run_stage(number, every_stage if from_named is None else str(from_named))
            self.trackers.finish()
            self.lm.model.eval()

    @cached_property
    def run_record(self) -> RunRecord:
        """The settings and inputs of the run. It must be made before training changes the weights."""
        inputs = {"train_dataset": rows_fingerprint(self.train_rows)} | model_inputs(
            self.lm, weights_matter=self.teacher is not None
        )
        held_out = {place: rows_fingerprint(rows) for place, rows in by_place(self.eval_rows).items()}
        return RunRecord(self.args, inputs, held_out)

    def checkpoint_to_resume(self, named: str | Path | Literal[True]) -> Path | None:
        """The last checkpoint of any stage, or the named one; see `DiffusionTrainer`."""
        folder = self.args.output_folder
        if is_output := self._is_output(named):
            refuse_nothing(folder)
        if named not in self.found:
            self.found = {
                named: from_first(
                    lambda: last_of_run(folder) if is_output else named_checkpoint(Path(str(named)))
                )
            }
        if (checkpoint := self.found[named]) is None:
            return None
        number = stage_of(checkpoint)
        self.resumed_step = [0, *self.ends][min(number, len(self.ends)) - 1] + (steps_done(checkpoint) or 0)
        self.changed = self.run_record.resume(checkpoint, self.resumed_step)
        expect_visited(self.train_rows, checkpoint)
        return checkpoint

    def planned_steps(self, args: ConvertConfig) -> int:
        """The steps of all stages with these arguments. Refuses stages without steps."""
        return stage_ends(args.stages, total_steps(args, self.train_rows))[-1]

    def setup_seconds(self, args: ConvertConfig) -> float:
        """The estimated seconds before the first step."""
        return 0.0

    def _is_output(self, named: str | Path | bool | None) -> bool:
        return named is True or Path(str(named)).resolve() == self.args.output_folder.resolve()

    def _resumed_stage(self, checkpoint: Path) -> int:
        """The number of the stage of a named checkpoint. Restores the history of the earlier stages."""
        number = stage_of(checkpoint)
        for later in range(number + 1, len(self.ends) + 1):
            if found := checkpoints(self._stage_folder(later)):
                raise TrainingError(
                    "a later stage was trained already",
                    where=str(found[0]),
                    remedy="Remove it, choose another output_dir, or resume from the last checkpoint",
                )
        if (config := checkpoint / CONFIG_NAME).is_file():
            setattr(self.lm.config, HISTORY_KEY, json.loads(read_file(config)).get(HISTORY_KEY, []))
        return number

    def _stage_folder(self, number: int) -> Path:
        return self.args.output_folder / f"stage-{number}"

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the converted model, and push it to the hub with `push_to_hub`. Every process has to call it,
        because sharded weights are gathered from all."""
        self.save_whole(Path(output_dir or str(self.args.output_dir)))
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save")

    def save_whole(self, folder: Path) -> None:
        """Write the converted model with adapters merged."""
        if self.trainer is not None:
            self.trainer.save_whole(folder)
        elif self.args.should_save:
            self.lm.save(folder)

    def push_to_hub(self, *arguments: Any, **named: Any) -> Any:
        """Upload the converted model, as `DiffusionTrainer.push_to_hub`. Raises TrainingError before
        training."""
        if self.trainer is None:
            raise TrainingError("no stage was trained", where="push_to_hub", remedy="Call train before")
        return self.trainer.push_to_hub(*arguments, **named)

    def gather_weights(self, trainer: StageTrainer) -> None:
        """Save the whole weights to a folder and reload them for the next stage: FSDP and DeepSpeed leave a
        model changed."""
        folder = trainer.args.output_folder / "whole"
        trainer.save_whole(folder)
        trainer.accelerator.wait_for_everyone()
        remote_code = any(
            base.__module__.startswith("transformers_modules") for base in type(self.lm.model).__mro__
        )
        parses = parses_special_tokens(self.lm.tokenizer)
        # Wrapped weights may have another dtype.
        lm = load(folder, dtype=self.dtype, trust_remote_code=remote_code, parse_special_tokens=parses)
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            shutil.rmtree(folder)
        self.lms = [self._with_pattern(lm, stage) for stage in self.args.stages]
        self.lm = self.lms[-1]

    def _add_adapters(self, peft_config: peft.PeftConfig) -> None:
        """Add adapters, which all stages share."""
        set_seed(self.args.seed)
        adapted = with_adapters(self.lms[-1], with_trained_mask_row(peft_config, self.lms[-1])).model
        self.lms = [lm.bind(adapted) for lm in self.lms]

    def _with_pattern(self, lm: DiffusionLM, stage: ConversionStage) -> DiffusionLM:
        args, attention = self.args, stage.attention or self.args.attention
        by_blocks = attention == "block_causal"
        block_size = stage.block_size or (args.block_size or DEFAULT_BLOCK if by_blocks else None)
        changed = with_pattern(
            lm,
            attention,
            block_size,
            args.logit_shift,
            causal_context=args.causal_context and by_blocks,
            time_embedding=args.time_embedding or None,  # None keeps an existing one
        )
        return changed.with_noise(args.noise, args.p_uniform)

    def _run_stage(self, number: int, resume: str | bool) -> StageTrainer:
        """Train a stage. `resume`: as in `DiffusionTrainer.train`; True also takes over a finished stage."""
        (first, last), total = [0, *self.ends][number - 1 : number + 1], self.ends[-1]
        stage = self.args.stages[number - 1]
        args = with_fresh_accelerator_state(self.args)
        args.output_dir = str(self._stage_folder(number))
        args.hub_model_id = self.args.hub_model_id or self.args.output_folder.absolute().name
        args.max_steps, args.learning_rate = last - first, self.args.learning_rate * stage.rate
        if stage.final_rate is not None:
            args.lr_scheduler_type = "cosine_with_min_lr"
            args.lr_scheduler_kwargs = {"min_lr_rate": stage.final_rate / stage.rate}
        args.seed = self.args.seed + number - 1  # otherwise every stage would see the same rows and masks
        args.report_to = []  # `self.trackers`, a callback, reports the whole run
        args.assigned.clear()  # they are no user's
        for stop in self.callbacks:
            if isinstance(stop, StopOnSignal):
                stop.steps_before = first
        log = RunLog(folder=self.args.output_folder, first_step=first, stage=number)
        trainer = StageTrainer(
            self.lms[number - 1],
            args,
            train_dataset=rows_from_step(self.train_rows, args, first),
            eval_dataset=self.eval_rows,
            stage=stage,
            teacher=self.teacher,
            steps_before=first,
            total_steps=total,
            run_record=self.run_record,
            log=log,
            progress=self.progress and ProgressPart(self.progress, first / total, last / total),
            callbacks=[*self.callbacks, self.trackers.part(first, number)],
            **self.rest,
        )
        if not (restored := resume is True and trainer.restore()):
            with freezing(trainer.lm, stage):
                trainer.train(resume_from_checkpoint=resume)
        if self.eval_rows is not None and (not restored or from_first(log.ends_with_summary)):
            trainer.evaluate()
        self.state.log_history += [
            line | {"step": line["step"] + first, "stage": number} for line in trainer.state.log_history
        ]
        self.state.global_step = first + trainer.state.global_step
        return trainer


def conversion_rows(
    lm: DiffusionLM, args: ConvertConfig, dataset: Iterable[Mapping[str, Any]], where: str
) -> Sequence[TokenRow] | StreamedRows:
    """The token rows of a dataset of prompts and completions, of messages, or of text, which may be a stream;
    or of prompts alone, for states of the sampler."""
    if args.states == "sampler":
        return conversion_prompts(lm, args, dataset, where)
    check_dataset(dataset, where, streams=True)
    first_row = next(iter(dataset), None)
    if isinstance(first_row, Mapping) and not {"completion", "messages"}.isdisjoint(first_row):
        if not isinstance(dataset, Sized):
            raise DataError(
                "is a stream of prompts and completions",
                where=where,
                remedy="Give a list of rows or a datasets.Dataset",
            )
        limits = RowLimits(
            row_length(lm, args), args.canvas_length, lm.block_size or 1, context=lm.context_length
        )
        report = DataReport(where, max_unknown=args.max_unknown)
        how: dict[str, Any] = {"ends": lm.eos_token_ids, "processes": args.dataset_num_proc}
        return stored_rows(partial(pair_rows, lm.tokenizer, dataset, limits, report, **how), TOKENS, report)
    return corpus_rows(lm, args, dataset, where)
