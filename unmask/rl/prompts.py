"""The prompts of a dataset: their groups, their order, and the choice of prompts by the rewards so far.

Shapes: N prompts of the dataset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from unmask.artifacts import read_file, write_atomic
from unmask.data.formats import read_prompt
from unmask.data.prompts import prompt_ids
from unmask.data.row_store import stored_rows
from unmask.data.unknown_tokens import UnknownTokens
from unmask.diffusion.rng import RngStream, sequence_key, uniform
from unmask.errors import ConfigError
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.training.config import first_of_stream, row_length

HISTORY_FILE = "prompts.json"


class PromptRow(NamedTuple):
    """A prompt for one completion.

    Attributes:
        columns: the columns of the dataset row, with the prompt.
        sample_id: index of the prompt in the dataset.
        repeat: index of the completion in its group.
        ids: of the prompt's tokens; None: not rendered yet.
    """

    columns: Mapping[str, Any]
    sample_id: int
    repeat: int
    ids: Sequence[int] | None = None

    @property
    def prompt(self) -> Any:
        """Text, messages or ids."""
        return self.columns["prompt"]


class PromptRows(Dataset):
    """Prompts, each repeated for its group: item i is prompt i // group, repeat i % group. Columns that a row
    lacks are None. `ids` are the tokens of the prompts, as rows with `ids`."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], group: int, ids: Sequence[Mapping[str, Any]] | None = None
    ):
        self.rows, self.group, self.ids = rows, group, ids
        named = getattr(rows, "column_names", None)  # of a dataset
        self.columns = dict.fromkeys(named or (name for row in rows for name in row))

    def __len__(self) -> int:
        return len(self.rows) * self.group

    def __getitem__(self, index: int) -> PromptRow:
        sample_id, repeat = divmod(index, self.group)
        row = self.rows[sample_id]
        return PromptRow(
            {**self.columns, **row, "prompt": read_prompt(row)["prompt"]},
            sample_id,
            repeat,
            None if self.ids is None else self.ids[sample_id]["ids"],
        )


def prompt_rows(
    lm: DiffusionLM, args: GRPOConfig, dataset: Sequence[Mapping[str, Any]], where: str
) -> PromptRows:
    """The prompts of a dataset, each of which fits into a row with a completion.

    Raises:
        DataError: a prompt does not fit, or is malformed, or too many of the tokens are unknown.
    """
    unknown = UnknownTokens(args.max_unknown)
    ids = partial(
        prompt_ids,
        lm.tokenizer,
        dataset,
        unknown,
        max_length=row_length(lm, args),
        max_new_tokens=args.max_completion_length,
        setting="max_completion_length",
        context=lm.context_length,
        where=where,
        variables=args.chat_template_kwargs,
        processes=args.dataset_num_proc,
    )
    stored = stored_rows(ids, {"ids": ["int32"]}, unknown)
    unknown.check(where)
    return PromptRows(dataset, args.num_generations, stored)


@dataclass(eq=False)
class GroupSampler(Sampler[int]):
    """Shuffled prompts, as in TRL's RepeatSampler: each prompt `group_size` times in a row, and each step
    (`prompts_per_step` prompts) `repeats` times."""

    count: int
    prompts_per_step: int
    group_size: int
    repeats: int
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count // self.prompts_per_step * self.prompts_per_step * self.group_size * self.repeats

    def __iter__(self) -> Iterator[int]:
        order = self._order(self.epoch)
        for index in range(self.count // self.prompts_per_step):
            for _ in range(self.repeats):
                yield from self._rows(order, index)

    def rollout(self, number: int) -> list[int]:
        """The rows of rollout `number` of a run, over all processes."""
        epoch, index = divmod(number, self.count // self.prompts_per_step)
        return self._rows(self._order(epoch), index)

    def _order(self, epoch: int) -> list[int]:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()

    def _rows(self, order: list[int], index: int) -> list[int]:
        chosen = order[index * self.prompts_per_step : (index + 1) * self.prompts_per_step]
        return [
            sample_id * self.group_size + repeat for sample_id in chosen for repeat in range(self.group_size)
        ]


def completion_key(row: PromptRow, step: int | None) -> int:
    """The key of a completion's noise, for one seed of the run. `step`: as in `GRPOTrainer.sample`."""
    return sequence_key([row.sample_id] if step is None else [row.sample_id, step], row.repeat)


def prompts_per_step(args: GRPOConfig, dataset: Sequence[Any] | None) -> int:
    """The number of prompts in an optimizer step, over all ranks.

    Raises:
        ConfigError: a step cannot hold whole groups, or the dataset has fewer prompts than a step.
    """
    completions = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if completions % args.num_generations:
        what = f"{completions} completions a step are not a multiple of {args.num_generations}"
        whole = args.num_generations // math.gcd(
            args.train_batch_size * args.world_size, args.num_generations
        )
        steps = whole * max(1, round(args.gradient_accumulation_steps / whole))
        raise ConfigError(what, where="num_generations", remedy=f"Set gradient_accumulation_steps to {steps}")
    chooses = args.curriculum is not None or args.max_resample_rounds
    if chooses and args.world_size > 1 and args.train_batch_size % args.num_generations:
        what = (
            f"{args.train_batch_size} completions a device do not hold whole groups of {args.num_generations}"
        )
        raise ConfigError(
            what,
            where="per_device_train_batch_size",
            remedy="Use a multiple, or leave out curriculum and max_resample_rounds",
        )
    prompts = completions // args.num_generations
    if dataset is not None and len(dataset) < prompts:
        raise ConfigError(
            f"{len(dataset)} prompts, but a step needs {prompts}",
            where="train_dataset",
            remedy="Give more prompts, or make the step smaller",
        )
    return prompts


def first_prompts(args: GRPOConfig, stream: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of a stream that a run of `max_steps` steps may need. Raises ConfigError if it is not set."""
    rollouts = math.ceil(args.max_steps / args.num_iterations) * (1 + args.max_resample_rounds)
    return first_of_stream(args, stream, rollouts * prompts_per_step(args, None))


@dataclass
class PromptHistory:
    """The mean reward of every prompt so far, and draws of prompts without replacement.

    Attributes:
        count: prompts in the dataset.
        target: prompts whose mean reward is near this are preferred: their weight is exp(-distance / spread);
            spread is the standard deviation of all means, but at least 1e-6 * max(1, largest distance). New
            prompts have the weight of those at the target. None: all weights are equal.
        seen: by prompt, the number of scored completions, and their mean reward.
    """

    count: int
    target: float | None = None
    seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, prompt: int, reward: float) -> None:
        """Add the reward of a completion; NaN (unscored) is ignored."""
        if not math.isnan(reward):
            number, mean = self.seen.get(prompt, (0, 0.0))
            self.seen[prompt] = number + 1, mean + (reward - mean) / (number + 1)

    def log_weights(self) -> Tensor:
        """The log-weight of every prompt [N]; bounded, so that adding the noise of a draw does not round the
        noise away."""
        log_weight_N = torch.zeros(self.count, dtype=torch.float64)
        if self.target is None or len(self.seen) < 2:
            return log_weight_N
        prompts = torch.tensor(list(self.seen))
        means = torch.tensor([mean for _, mean in self.seen.values()], dtype=torch.float64)
        distances = (means - self.target).abs()
        log_weight_N[prompts] = -distances / means.std().clamp_min(1e-6 * max(1.0, float(distances.max())))
        return log_weight_N

    def choose(self, number: int, seed: int, step: int, exclude: Collection[int] = ()) -> list[int]:
        """At most `number` different prompts, drawn in proportion to their weights (Gumbel top-k, Kool et al.
        2019), by history, seed and step."""
        uniform_N = uniform(seed, torch.arange(self.count), step=step, stream=RngStream.ROLLOUT)
        perturbed_N = self.log_weights() - (-uniform_N.clamp_min(2.0**-53).log()).log()
        perturbed_N[list(exclude)] = -torch.inf
        return perturbed_N.topk(min(number, self.count - len(set(exclude)))).indices.tolist()

    def save(self, folder: Path) -> None:
        """Write the history into a checkpoint."""
        stored = sorted((prompt, *counts) for prompt, counts in self.seen.items())
        write_atomic(folder / HISTORY_FILE, json.dumps(stored))

    def load(self, folder: Path) -> None:
        """Read the history of a checkpoint."""
        stored = json.loads(read_file(folder / HISTORY_FILE))
        self.seen = {prompt: (number, mean) for prompt, number, mean in stored}
