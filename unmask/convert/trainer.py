"""Conversion of a causal model to a diffusion model, stage by stage. A stage is one Trainer run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from unmask.config.run import SamplerConfig
from unmask.convert.distillation import learn
from unmask.convert.stages import ROW, ConversionStage, freezing, only_mask_row, stage_ends
from unmask.data.pairs import Room, pair_rows
from unmask.data.report import DataReport
from unmask.data.rows import Row, documents_apart
from unmask.data.token_cache import StreamedRows
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.rng import Stream, uniform
from unmask.diffusion.views import Draw, Views
from unmask.errors import ConfigError, DataError, TrainingError
from unmask.generation.sampler import generate
from unmask.models.adapters import training_mask_row, with_adapters
from unmask.models.attention import DEFAULT_BLOCK
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import as_diffusion_lm, load, with_pattern
from unmask.models.model_card import HISTORY_KEY
from unmask.training.checkpoints import check_weights, checkpoints, named_stage, steps_done
from unmask.training.config import row_length, total_steps
from unmask.training.hardware_checks import is_split, with_own_state
from unmask.training.run_log import Progress, RunLog
from unmask.training.text_config import corpus_rows, rows_from
from unmask.training.trackers import RunTrackers
from unmask.training.trainer import Batch, DiffusionTrainer

if TYPE_CHECKING:
    import peft
from unmask.convert.config import ConvertConfig


class StageTrainer(DiffusionTrainer):
    """One stage, on `conversion_rows`: the diffusion loss, with what the stage freezes and adds.

    Args:
        stage: what it is.
        teacher: the frozen causal model, for distillation and alignment.
        done: the steps of the stages before this one, of all stages.
    """

    streams = True

    def __init__(self, *arguments: Any, stage: ConversionStage, teacher: DiffusionLM | None, done: tuple[int, int], **rest: Any):
        self.stage, self.teacher = stage, teacher
        self.steps_before, self.steps_in_all = done
        super().__init__(*arguments, **rest)
        if teacher is not None:
            teacher.compile_as(self.lm)
            if not is_split(self.lm):
                teacher.model.to(self.args.device)

    def reported_settings(self) -> dict[str, Any]:
        """This stage's own in place of all stages."""
        told = super().reported_settings()
        told.pop("stages", None)
        return told | self.stage.model_dump(exclude_defaults=True)

    def restore(self) -> bool:
        """Take over the weights and the history of an earlier run that brought this stage to its end; whether there is one."""
        checkpoint = Path(str(self.args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{self.args.max_steps}"
        logged = self.metrics.read()
        # Sharded weights are loaded by a run alone, and so is the best checkpoint; it then has no step to make.
        if steps_done(checkpoint) is None or not any("train_loss" in line for line in logged):
            return False
        if self.sharded or self.args.load_best_model_at_end:
            return False
        check_weights(checkpoint)
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        self.state.log_history = logged
        self._remember()
        return True

    def plan(self, batch: Batch, draw: Draw) -> Views:
        group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
        views = self.args.plan(self.lm, group_BT, batch["documents"], draw, complementary=self.args.complementary)
        return views.beside_causal(batch["maskable"], self.stage.lm_loss) if self.stage.lm_loss else views

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> torch.Tensor:
        lm = self._annealed(lm)
        views = self.plan(batch, self.visit(batch))
        if self.teacher is None:
            return self.cross_entropy(lm, batch, views)
        if not views.causal:
            return self._lesson(lm, self.teacher, batch, views)
        noised, causal = views.apart()
        return self._lesson(lm, self.teacher, batch, noised) + self.cross_entropy(lm, batch, causal)

    def _annealed(self, lm: DiffusionLM) -> DiffusionLM:
        step, over = self.steps_before + self.state.global_step, self.args.attention_annealing * self.steps_in_all
        annealed = not self.means.evaluating and step < over and lm.attention == "bidirectional"
        return lm.annealed((step + 1) / (over + 1), self.args.seed + step) if annealed else lm

    def _lesson(self, lm: DiffusionLM, teacher: DiffusionLM, batch: Batch, views: Views) -> torch.Tensor:
        lesson = learn(lm, teacher, batch["input_ids"], documents_apart(batch), views, top_k=self.args.teacher_top_k)
        weight_N, count = views.weight_BMT[views.target_BMT], float(views.target_BMT.sum())
        for name, values in (("cross_entropy", -lesson.log_prob_N), ("kl", lesson.divergence_N), ("distance", lesson.distance_N)):
            self.record(name, values.detach().sum() / max(count, 1), count)
        share_N = self.args.distillation * lesson.taught_N.float()
        likelihood = (weight_N * ((1 - share_N) * -lesson.log_prob_N + share_N * lesson.divergence_N)).sum()
        return likelihood + self.args.alignment * lesson.distance_N.sum()

    def prepared(self, batches: list[Batch]) -> list[Batch]:
        return [self._continued(batch) for batch in batches] if self.args.on_policy else batches

    def _continued(self, batch: Batch) -> Batch:
        """The batch with a share of its rows cut at random and continued by the model itself; only what it wrote is learnt."""
        key_B = batch["sample_id"]
        chosen_B, at_B = (uniform(self.args.seed, key_B, step=self.state.global_step, position=i, stream=Stream.ROLLOUT) for i in (0, 1))
        length_B = (batch["documents"] == 1).sum(1) - self.args.rollout_tokens
        rows = (((chosen_B < self.args.on_policy) & (length_B > 0)).nonzero().flatten()).tolist()
        if not rows:
            return batch
        prompts = [batch["input_ids"][row, : 1 + int(at_B[row] * length_B[row])].tolist() for row in rows]
        seed = self.args.seed + self.steps_before + self.state.global_step
        sampler = SamplerConfig(max_new_tokens=self.args.rollout_tokens, temperature=1.0, policy="random", seed=seed)
        written = generate(self.lm, prompts, sampler, keys=key_B[rows].tolist()).tokens
        batch = {name: values.clone() if isinstance(values, torch.Tensor) else values for name, values in batch.items()}
        batch["one_document"] = False  # what is behind the text that it wrote becomes padding
        for row, prompt, tokens in zip(rows, prompts, written, strict=True):
            at_T = torch.arange(batch["input_ids"].shape[1], device=key_B.device)
            stop = len(prompt) + len(tokens)
            batch["input_ids"][row, len(prompt) : stop] = torch.tensor(tokens, device=key_B.device)
            batch["documents"][row] = (at_T < stop).long()
            batch["maskable"][row] = (at_T >= len(prompt)) & (at_T < stop)
        return batch

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """Weight decay must not move the embedding rows that a stage leaves as they are."""
        names = [name for name in super().get_decay_parameter_names(model) if ROW not in name]
        if not only_mask_row(self.lm, self.stage):
            return names
        table = model.get_input_embeddings().weight
        frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is table}
        return [name for name in names if name not in frozen]


class ConvertTrainer:
    """Converts a causal model on text, or on prompts and completions, in the stages of its config.

    Each stage writes its checkpoints under `output_dir/stage-N`; `train(resume_from_checkpoint=True)` goes on in the middle
    of any of them.

    Args:
        model: a DiffusionLM, or a path or id to load. Its weights are changed in place.
        args: pattern, steps, rates and stages. `max_steps` (or the epochs) are shared out among the stages.
        train_dataset: rows with `text` (perhaps a stream, see `corpus_rows`), or with `prompt` and `completion` (then only the completion
            is noised).
        eval_dataset: the same, held out; each stage ends with an evaluation.
        progress: a stage of a progress display to keep up to date.
        peft_config: train adapters, and the mask token's whole embedding row; a stage then trains the adapters of what it names. They are
            merged when the model is saved.
        rest: as in DiffusionTrainer.

    Raises:
        ConfigError: a causal pattern, adapters with a time embedding or DeepSpeed, or a stage that trains nothing or has no step.
        DataError: a row without its columns, or no text.
    """

    def __init__(
        self,
        model: DiffusionLM | PreTrainedModel | str | Path,
        args: ConvertConfig,
        train_dataset: Iterable[Mapping[str, Any]],
        eval_dataset: Sequence[Mapping[str, Any]] | None = None,
        *,
        progress: Progress | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: peft.PeftConfig | None = None,
        **rest: Any,
    ):
        lm = as_diffusion_lm(model, processing_class)
        self.args, self.progress, self.rest = args, progress, rest
        self.dtype = str(lm.weight_dtype).removeprefix("torch.")
        self.teacher = lm.as_causal().frozen_copy() if args.distillation or args.alignment else None
        self.lms = [self._pattern(lm, stage) for stage in args.stages]
        if peft_config is not None:
            self._add_adapters(peft_config)
        for number, (stage, stage_lm) in enumerate(zip(args.stages, self.lms, strict=True), start=1):
            where = f"stages, stage {number}, train"
            if not any(parameter.requires_grad for parameter in stage.parameters(stage_lm, where=where)):
                raise ConfigError("names no weights that take gradients", where=where, remedy="Give what it names adapters, or use all")
        self.lm = self.lms[-1]
        self.train_rows: Any = conversion_rows(self.lm, args, train_dataset, "train_dataset")
        self.eval_rows = None if eval_dataset is None else conversion_rows(self.lm, args, eval_dataset, "eval_dataset")
        self.ends = stage_ends(args.stages, total_steps(args, self.train_rows))
        self.log_history: list[dict[str, float]] = []
        self.trainer: StageTrainer | None = None
        self.trackers = RunTrackers(self.args)

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> None:
        """Run the stages, or those that are not finished yet.

        Args:
            resume_from_checkpoint: True: go on from the last whole checkpoint in the output folder. Or the checkpoint of a stage to go on
                from, perhaps of another run; or the folder of a conversion, for its last one.

        Raises:
            TrainingError: there is no such checkpoint, or later stages have been trained here already.
        """
        start, resume = 1, resume_from_checkpoint or False
        if not isinstance(resume, bool):
            own = Path(resume).resolve() == Path(str(self.args.output_dir)).resolve()
            start, resume = (1, True) if own else self._from_checkpoint(Path(resume))
        for number, (first, last) in enumerate(pairwise([0, *self.ends]), start=1):
            if number < start:
                continue
            if self.trainer is not None and self.trainer.sharded:
                self._gather(self.trainer)
            self.trainer = None  # and with it the optimizer's states
            self.trainer = self._run(number, first, last, resume)
            resume = resume if isinstance(resume, bool) else False
        self.trackers.finish()
        self.lm.model.eval()

    def planned_steps(self, args: ConvertConfig) -> int:
        """As of `DiffusionTrainer`; refuses stages that would have no step."""
        steps = total_steps(args, self.train_rows)
        stage_ends(args.stages, steps)
        return steps

    def planned_seconds(self, args: ConvertConfig) -> float:
        """As of `DiffusionTrainer`."""
        return 0.0

    def data_reports(self) -> dict[str, DataReport]:
        """As of `DiffusionTrainer`."""
        return {}

    def _from_checkpoint(self, path: Path) -> tuple[int, str]:
        """The stage that a checkpoint is of, and the checkpoint; the model remembers the stages before."""
        number, checkpoint = named_stage(path)
        if number > len(self.ends):
            what = f"is of stage {number}, of {len(self.ends)} here"
            raise TrainingError(what, where=str(path), remedy="Convert with the recipe of that run")
        length = self.ends[number - 1] - [0, *self.ends][number - 1]
        if (done := steps_done(checkpoint) or 0) > length:
            what = f"has made {done} steps of stage {number}, which has {length} here"
            raise TrainingError(what, where=str(checkpoint), remedy="Convert with the stages and max_steps of that run")
        for later in range(number + 1, len(self.ends) + 1):
            if found := checkpoints(self._folder(later)):
                remedy = "Remove it, choose another output_dir, or resume from the last checkpoint"
                raise TrainingError("a later stage was trained already", where=str(found[0]), remedy=remedy)
        if (config := checkpoint / CONFIG_NAME).is_file():
            setattr(self.lm.config, HISTORY_KEY, json.loads(config.read_text()).get(HISTORY_KEY, []))
        return number, str(checkpoint)

    def _folder(self, number: int) -> Path:
        return Path(str(self.args.output_dir)) / f"stage-{number}"

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the converted model; every process has to call it, as sharded weights are gathered from all."""
        folder = str(output_dir or self.args.output_dir)
        if self.trainer is not None:
            self.trainer.save_model(folder)
        elif self.args.should_save:
            self.lm.save(folder)

    def _gather(self, trainer: StageTrainer) -> None:
        """Begin the next stage with whole weights, through a folder: wrappers that shard a model leave it changed."""
        folder = Path(str(trainer.args.output_dir)) / "whole"
        trainer.save_model(str(folder))
        trainer.accelerator.wait_for_everyone()
        own_code = any(kind.__module__.startswith("transformers_modules") for kind in type(self.lm.model).__mro__)
        lm = load(folder, dtype=self.dtype, trust_remote_code=own_code)  # in a wrapper the weights may be of another type
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            shutil.rmtree(folder)
        self.lms = [self._pattern(lm, stage) for stage in self.args.stages]
        self.lm = self.lms[-1]

    def _add_adapters(self, peft_config: peft.PeftConfig) -> None:
        """The same adapters in every stage."""
        self.args.refuse_adapters(timed=any(lm.has_time_embedding for lm in self.lms))
        set_seed(self.args.seed)
        adapted = with_adapters(self.lms[-1], training_mask_row(peft_config, self.lms[-1])).model
        self.lms = [lm.bind(adapted) for lm in self.lms]

    def _pattern(self, lm: DiffusionLM, stage: ConversionStage) -> DiffusionLM:
        args, attention = self.args, stage.attention or self.args.attention
        block_size = (stage.block_size or args.block_size or DEFAULT_BLOCK) if attention == "block_causal" else stage.block_size
        context = args.causal_context and attention == "block_causal"
        time_embedding = args.time_embedding or None  # one that is there stays
        return with_pattern(lm, attention, block_size, args.logit_shift, causal_context=context, time_embedding=time_embedding)

    def _run(self, number: int, first: int, last: int, resume: str | Path | bool) -> StageTrainer:
        steps = self.ends[-1]
        stage, lm = self.args.stages[number - 1], self.lms[number - 1]
        args = with_own_state(self.args)
        args.output_dir = str(self._folder(number))
        args.max_steps, args.learning_rate = last - first, self.args.learning_rate * stage.rate
        if stage.final_rate is not None:
            args.lr_scheduler_type, args.lr_scheduler_kwargs = "cosine_with_min_lr", {"min_lr_rate": stage.final_rate / stage.rate}
        args.seed = self.args.seed + number - 1  # else each stage would see the rows and masks of the one before again
        rest = self.rest | {"progress": None if self.progress is None else Portion(self.progress, first / steps, last / steps)}
        args.report_to = []  # the trackers of the whole run are told by a callback
        rest["callbacks"] = [*(self.rest.get("callbacks") or []), self.trackers.part(first, number)]
        rows, done = rows_from(self.train_rows, args, first), (first, steps)
        log = RunLog(folder=Path(str(self.args.output_dir)), first_step=first, stage=number)
        trainer = StageTrainer(lm, args, rows, self.eval_rows, stage=stage, teacher=self.teacher, done=done, log=log, **rest)
        if not (resume is True and trainer.restore()):
            with freezing(trainer.lm, stage):
                trainer.train(resume_from_checkpoint=resume if isinstance(resume, bool) else str(resume))
            if self.eval_rows is not None:
                trainer.evaluate()
        self.log_history += [line | {"step": line["step"] + first, "stage": number} for line in trainer.state.log_history]
        return trainer


def conversion_rows(lm: DiffusionLM, args: ConvertConfig, dataset: Iterable[Mapping[str, Any]], where: str) -> Sequence[Row] | StreamedRows:
    """Rows of prompt and completion or of messages, or of text, which may be a stream."""
    if not {"completion", "messages"}.isdisjoint(next(iter(dataset), ())):
        if not isinstance(dataset, Sized):
            raise DataError("is a stream of prompts and completions", where=where, remedy="Give a list of rows or a datasets.Dataset")
        room = Room(row_length(lm, args), args.canvas_length, lm.block_size or 1)
        return pair_rows(lm.tokenizer, dataset, room, DataReport(where), ends=lm.eos_token_ids)
    return corpus_rows(lm, args, dataset, where)


@dataclass
class Portion:
    """A part of a stage of the progress display."""

    whole: Progress
    start: float
    stop: float

    def update(self, fraction: float, **metrics: float) -> None:
        self.whole.update(self.start + fraction * (self.stop - self.start), **metrics)
