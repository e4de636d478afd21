"""What `unmask evaluate` measures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from unmask.config.base import Config
from unmask.errors import ConfigError

UNREAD = {
    "a task": ("estimator", "samples"),
    "a likelihood": ("data", "split", "style", "shots", "attempts", "pass_at"),
    "tasks of lm-eval": ("data", "split", "metric", "judge", "curve", "attempts", "pass_at"),
}
"""Settings that do not count for what is measured."""


class EvaluationConfig(Config):
    """What to measure.

    Raises:
        ConfigError: a value out of range, or two settings that contradict one another.
    """

    task: list[str] | None = None
    """A built-in task: sudoku, gsm8k, humaneval, ...; for several, repeat it or write a,b."""
    data: list[str] | None = None
    """The file of the task's problems, or a dataset on the hub; for several tasks NAME=FILE, repeated; unset: generated, held out."""
    split: str = "test"
    """The split of a hub dataset."""
    style: Literal["plain", "chat"] = "plain"
    """The format of a task's problems."""
    shots: int = Field(default=0, ge=0)
    """Solved examples before each problem: the first rows of the file, then left out."""
    protocol: str | None = None
    """Evaluate a task as the authors of a model did: llada-base, llada-instruct, dream-base, dream-instruct, sdar, d1, or a variant as
    NAME/VARIANT. Other options given replace its own."""
    rows: int = Field(default=200, ge=1)
    """Rows of a task, or documents of a file, at most."""
    metric: list[str] | None = None
    """Also measure the texts: entropy, distinct, self-bleu, perplexity, and of the task `text` rouge or bleu; repeatable."""
    judge: str | None = None
    """The causal model under which the metric perplexity is measured."""
    attempts: int = Field(default=1, ge=1)
    """Completions of each problem; more than one needs a temperature."""
    pass_at: list[str] | None = None
    """Report pass@K, the probability that one of K attempts is right; for several, repeat it or write 1,10; unset: of all attempts."""
    curve: str | None = None
    """A setting of the sampler and its values, as steps=8,16,32: each task at each of them."""
    likelihood: str | None = None
    """Instead of a task: the file whose documents' likelihood is measured."""
    lm_eval: list[str] | None = None
    """Instead of a task: tasks of lm-eval, repeated or as a,b; without `max_gen_toks` their texts have 256 tokens, as in lm-eval."""
    include_path: str | None = None
    """A folder with more task files of lm-eval."""
    estimator: Literal["elbo", "exact"] | None = None
    """The estimator of likelihoods; unset: exact for a causal model and blocks of at most 4 tokens, else elbo."""
    samples: int | None = Field(default=None, ge=1)
    """Noised views per likelihood of the elbo; unset: 32 for a document, 128 for a request of lm-eval."""

    def model_post_init(self, _: object) -> None:
        if bool(self.task) + bool(self.lm_eval) + (self.likelihood is not None) != 1:
            remedy = "Give either --task or --likelihood, or --lm-eval"
            raise ConfigError("takes either a task or a text to measure", where="evaluate", remedy=remedy)
        if self.protocol and self.likelihood:
            raise ConfigError("a protocol is for tasks", where="--protocol", remedy="Leave it out, or give --task")
        if (self.metric or self.judge) and self.likelihood:
            raise ConfigError("a likelihood compares no texts", where="--metric", remedy="Leave it out, or give --task text")
        if self.curve and self.likelihood:
            raise ConfigError("a likelihood has no sampler", where="--curve", remedy="Leave it out, or give --task")
        if self.include_path is not None and not self.lm_eval:
            raise ConfigError("only lm-eval reads task files", where="--include-path", remedy="Leave it out, or give --lm-eval")
        kind = "a task" if self.task else "a likelihood" if self.likelihood is not None else "tasks of lm-eval"
        if given := [name for name in UNREAD[kind] if getattr(self, name) != type(self).model_fields[name].default]:
            remedy = "Leave it out: the task's file says what it is" if self.lm_eval else "Leave it out"
            raise ConfigError(f"is not read by {kind}", where=f"--{given[0].replace('_', '-')}", remedy=remedy)

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, each once."""
        return _names(self.task)

    @property
    def harness_tasks(self) -> list[str]:
        """The names of the tasks of lm-eval, each once."""
        return _names(self.lm_eval)

    @property
    def ks(self) -> list[int]:
        """The values of K of pass@K, in order. Raises ConfigError for one that is no number."""
        texts = [text.strip() for texts in self.pass_at or [] for text in texts.split(",")]
        for text in texts:
            if not text.isdecimal():
                raise ConfigError(f"{text!r} is no number of attempts", where="pass_at", remedy="Write numbers, as in 1,10")
        return sorted(set(map(int, texts))) or ([self.attempts] if self.attempts > 1 else [])

    @property
    def sources(self) -> dict[str, str]:
        """The file of each task that has one. Raises ConfigError for one that belongs to no task, or to none of several."""
        found = {}
        for text in self.data or []:
            name, mark, source = text.partition("=")
            if mark and name in self.tasks:
                found[name] = source
            elif len(self.tasks) == len(self.data or []) == 1:
                found[self.tasks[0]] = text
            else:
                remedy = f"Write NAME={text}, with NAME one of {', '.join(self.tasks)}"
                raise ConfigError("does not say which task it belongs to", where=f"data {text}", remedy=remedy)
        return found


def _names(texts: list[str] | None) -> list[str]:
    return list(dict.fromkeys(name.strip() for names in texts or [] for name in names.split(",")))
