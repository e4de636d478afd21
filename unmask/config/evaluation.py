"""What `unmask evaluate` measures."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unmask.config.base import Config, OnResume
from unmask.errors import ConfigError

TASK, HARNESS, LIKELIHOOD = "task", "lm_eval", "likelihood"
LISTS = (TASK, HARNESS, "data", "metric", "pass_at")
"""The settings that a config may also give as one word or number."""
READ_BY = MappingProxyType(
    dict.fromkeys(("data", "metric", "judge", "attempts", "pass_at", "curve"), (TASK,))
    | dict.fromkeys(("style", "shots", "protocol"), (TASK, HARNESS))
    | dict.fromkeys(("estimator", "samples"), (LIKELIHOOD, HARNESS))
    | {"include_path": (HARNESS,), "text_column": (LIKELIHOOD,), "split": (TASK, LIKELIHOOD)}
)
"""The settings that not every kind of measurement reads."""
RETAINED = ["wikitext", "hellaswag", "arc_easy", "piqa"]
"""What `against` measures if nothing is named: tasks of lm-eval, whose data are on the hub."""


class EvaluationConfig(Config):
    """What to measure.

    Raises:
        ConfigError: a value out of range, or two settings that contradict one another.
    """

    on_resume: ClassVar[OnResume] = OnResume.ACTS

    task: list[str] | None = None
    """A task: sudoku, gsm8k, humaneval, ..., or your own as file.py:NAME or package.module:NAME; for several,
    repeat it or write a,b."""
    data: list[str] | None = None
    """The file of the task's problems, or a dataset on the hub; for several tasks NAME=FILE, repeated; unset:
    generated, held out."""
    split: str | None = None
    """The split, such as test[:10%] or all; unset: test of a task if there are several, else train."""
    style: Literal["plain", "chat"] = "plain"
    """The format of a task's problems."""
    shots: int = Field(default=0, ge=0)
    """Solved examples before each problem: the first rows of the file, then left out."""
    protocol: str | None = None
    """Evaluate a task as the authors of a model did: llada-base, llada-instruct, dream-base, dream-instruct,
    sdar, d1, or a variant as NAME/VARIANT. Other options given replace its own."""
    rows: int = Field(default=200, ge=1)
    """Rows of a task, or documents of a file, at most."""
    metric: list[str] | None = None
    """Also measure the texts: entropy, distinct, self-bleu, perplexity, and of the task `text` rouge or bleu;
    repeatable."""
    judge: str | None = None
    """The causal model under which the metric perplexity is measured."""
    attempts: int = Field(default=1, ge=1)
    """Completions of each problem; more than one needs a temperature."""
    pass_at: list[str] | None = None
    """Report pass@K, the probability that one of K attempts is right; for several, repeat it or write 1,10;
    unset: of all attempts."""
    curve: str | None = None
    """A setting of the sampler and its values, as steps=8,16,32: each task at each of them."""
    likelihood: str | None = None
    """The file, or dataset as NAME or NAME:CONFIG, whose documents' likelihood is measured: texts, or
    conversations and pairs, of which the answers are."""
    text_column: str | None = None
    """The column with the texts of `likelihood`; unset: text, or the columns that `unmask sft` reads."""
    lm_eval: list[str] | None = None
    """Tasks of lm-eval, repeated or as a,b; without `max_gen_toks` their texts have 256 tokens, as in
    lm-eval."""
    include_path: str | None = None
    """A folder with more task files of lm-eval."""
    estimator: Literal["elbo", "exact"] | None = None
    """The estimator of likelihoods; unset: exact for a causal model and masked blocks of at most 4 tokens,
    else elbo."""
    samples: int | None = Field(default=None, ge=1)
    """Noised views per likelihood of the elbo; unset: 32 for a document, 128 for a request of lm-eval."""
    against: str | None = None
    """The model that this one was made of: both are evaluated, and compared on the items that they share. If
    nothing else is named, on tasks of lm-eval: wikitext, hellaswag, arc_easy, piqa."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # refused by name
        lists = {name: values[name] for name in LISTS if values.get(name) is not None}
        values = values | {
            name: list(map(_text, each if isinstance(each, list) else [each])) for name, each in lists.items()
        }
        measured = any(values.get(kind) for kind in (TASK, HARNESS, LIKELIHOOD))
        return values | {HARNESS: RETAINED} if values.get("against") and not measured else values

    @property
    def measured(self) -> set[str]:
        """The settings that name something to measure."""
        return {kind for kind in (TASK, HARNESS, LIKELIHOOD) if getattr(self, kind)}

    def without_effect(self) -> Iterator[ConfigError]:
        for name, readers in READ_BY.items():
            if self.measured.isdisjoint(readers):
                needed = " or ".join(map(_option, readers))
                yield ConfigError(
                    f"is read by {needed} only", where=name, remedy=f"Leave it out, or give {needed}"
                )

    def check(self) -> None:
        if not self.measured:
            raise ConfigError(
                "nothing to measure", where="evaluate", remedy="Give --task, --lm-eval or --likelihood"
            )
        both = set(self.tasks) & set(self.harness_tasks)
        if both:
            what = f"{sorted(both)[0]} is a task of Unmask and of lm-eval"
            raise ConfigError(what, where="evaluate", remedy="Measure it in two evaluations")
        if self.curve and len(self.measured) > 1:
            what = "is of tasks alone, and a text or tasks of lm-eval are measured too"
            raise ConfigError(what, where="--curve", remedy="Measure them in two evaluations")
        if self.against is not None:
            self.refuse_of_one_model()

    def refuse_of_one_model(self) -> None:
        """Raise ConfigError for a setting with which two models are not evaluated alike."""
        single = [name for name in ("protocol", "curve") if getattr(self, name) is not None]
        if single:
            what = "is of one model, and two are evaluated alike"
            raise ConfigError(
                what,
                where=_option(single[0]),
                remedy="Leave it out, or evaluate each model and use `unmask compare`",
            )

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
                raise ConfigError(
                    f"{text!r} is no number of attempts", where="pass_at", remedy="Write numbers, as in 1,10"
                )
        return sorted(set(map(int, texts))) or ([self.attempts] if self.attempts > 1 else [])

    @property
    def sources(self) -> dict[str, str]:
        """The file of each task that has one. Raises ConfigError for one that belongs to no task, or to none
        of several."""
        found = {}
        for text in self.data or []:
            name, mark, source = text.partition("=")
            if mark and name in found:
                raise ConfigError("has two files", where=f"data {text}", remedy=f"Give {name} one")
            if mark and name in self.tasks:
                found[name] = source
            elif len(self.tasks) == len(self.data or []) == 1:
                found[self.tasks[0]] = text
            else:
                remedy = f"Write NAME={text}, with NAME one of {', '.join(self.tasks)}"
                raise ConfigError(
                    "does not say which task it belongs to", where=f"data {text}", remedy=remedy
                )
        return found


def _text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(texts: list[str] | None) -> list[str]:
    return list(dict.fromkeys(name.strip() for names in texts or [] for name in names.split(",")))
