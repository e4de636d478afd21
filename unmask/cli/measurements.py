"""What is measured of the model that a training run makes."""

from __future__ import annotations

import gc
from pathlib import Path

from unmask.cli.inputs import task_of
from unmask.cli.retention import Retention, check_retention, retention_of_run
from unmask.config.run import ModelConfig, RunConfig
from unmask.console import Progress
from unmask.data.sources import held_out_problems, pose
from unmask.evaluation.provenance import write_result_of_run
from unmask.evaluation.result_file import EvaluationResult
from unmask.evaluation.tasks import check_evaluation, evaluate_task
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.model_paths import TRAINED_MODEL
from unmask.training.config import TrainingConfig
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
        self._retained = check_retention(settings)
        self._task, data = task_of(settings), settings.data
        problems = held_out_problems(self._task, data) if self._task else []
        self._problems = pose(self._task, problems, data.style) if self._task and problems else []
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

    def evaluate(self, lm: DiffusionLM, output: Path, args: TrainingConfig, progress: Progress) -> None:
        """Answer the held-out problems, if there are any, in the first process."""
        if self._task and self._problems and args.should_save:
            with progress.phase("evaluate") as phase:
                model, sampler = output / TRAINED_MODEL, self._settings.sampler
                lm = whole_model(lm, model, self._settings.model, args)
                found = evaluate_task(lm, self._task, self._problems, sampler, progress=phase)
                self.result = write_result_of_run(output, lm, model, found)

    def retention(self, model: Path) -> Retention | None:
        """Compare the trained model with the one that it started from, if the settings ask for it. Returns
        what was found, in the first process."""
        if self._settings.retention is None:
            return None
        gc.collect()
        return retention_of_run(self._settings, model)


def whole_model(lm: DiffusionLM, folder: Path, settings: ModelConfig, args: TrainingConfig) -> DiffusionLM:
    """The trained model for one process. If its weights are sharded, a forward pass would need every process:
    it is loaded again."""
    if not weight_sharding_setting(args):
        return lm
    kept = {name: getattr(settings, name) for name in ("trust_remote_code", "parse_special_tokens")}
    return load(folder, device=str(args.device), **kept)
