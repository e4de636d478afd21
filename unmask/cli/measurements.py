"""What is measured of the model that a training run makes."""

from __future__ import annotations

import gc

from accelerate import PartialState

from unmask.cli.evaluation import import_harness
from unmask.cli.inputs import held_out_problems
from unmask.cli.retention import Retention, check_retention, retention_of_run
from unmask.config.run import ModelConfig, RunConfig
from unmask.console import Progress
from unmask.evaluation.provenance import write_result_of_run
from unmask.evaluation.result_file import EvaluationResult
from unmask.evaluation.tasks import check_evaluation, evaluate_task
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.model_paths import TRAINED_MODEL
from unmask.training.config import TrainingConfig
from unmask.training.run.around import naming_lost_process, running_in
from unmask.training.run.folder import RunFolder
from unmask.training.sharding import weight_sharding_setting


class Measurements:
    """The answers to held-out problems of the run's task (`evaluation.json`), and what was kept of the model
    that it started from (`retention.json`). Their problems are read before the training.

    Attributes:
        result: of the held-out problems, once they are answered, in the first process.

    Raises:
        UnmaskError: an error of `measure_retention` that can be found without weights, or a file of problems
            that cannot be read.
    """

    def __init__(self, settings: RunConfig):
        self._settings = settings
        self._retained = check_retention(settings, import_harness)
        self._task, self._problems = held_out_problems(settings)
        self.result: EvaluationResult | None = None

    @property
    def phases(self) -> list[tuple[str, float]]:
        """What the progress display shows besides the training."""
        return [("evaluate", 1.0)] if self._problems else []

    def check(self, lm: DiffusionLM) -> None:
        """Raise UnmaskError if the trained model could not be measured, such as for a constraint that its
        vocabulary cannot spell."""
        if self._task and self._problems:
            check_evaluation(lm, self._task, self._problems, self._settings.sampler)
        for part in self._retained.values():
            check_evaluation(lm, part.task, part.rows, part.sampler)

    def evaluate(self, lm: DiffusionLM, folder: RunFolder, args: TrainingConfig, progress: Progress) -> None:
        """Answer the held-out problems, if there are any, in the first process."""
        if self._task and self._problems and args.should_save:
            with progress.phase("evaluate") as phase:
                lm = whole_model(lm, self._settings.model, folder, args)
                sampler = self._settings.sampler
                result = evaluate_task(lm, self._task, self._problems, sampler, progress=phase)
                self.result = write_result_of_run(folder.path, lm, folder.path / TRAINED_MODEL, result)

    def finish(self, folder: RunFolder) -> Retention | None:
        """Compare the trained model with the one that it started from, if `retention` is set, and leave the
        other processes. Returns what was found, in the first process."""
        found, processes = None, PartialState()
        if self._settings.retention is not None:
            gc.collect()  # the trainer, whose memory two models need now
            with naming_lost_process(folder.path), running_in(folder.path, folder.ended):
                found = retention_of_run(self._settings, folder.path / TRAINED_MODEL, import_harness)
                folder.finish()
        # A process aborts if it exits while others still communicate with it.
        processes.wait_for_everyone()
        processes.destroy_process_group()
        return found


def whole_model(lm: DiffusionLM, model: ModelConfig, folder: RunFolder, args: TrainingConfig) -> DiffusionLM:
    """The trained model for one process. If its weights are sharded, a forward pass would need every process:
    it is loaded again."""
    if not weight_sharding_setting(args):
        return lm
    kept = {name: getattr(model, name) for name in ("trust_remote_code", "parse_special_tokens")}
    return load(folder.path / TRAINED_MODEL, device=str(args.device), **kept)
