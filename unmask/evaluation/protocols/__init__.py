"""The protocols of authors: how they evaluated their models, task by task. Each is a file of data in this
folder, with its sources.

Where an author's code and text differ, the code is the default, the text a variant, and
`Protocol.differences` says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_core import to_jsonable_python

from unmask.config.base import Config
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import parse_yaml
from unmask.data.encoding import Prompt, encode_completion, encode_prompt
from unmask.errors import ConfigError, did_you_mean
from unmask.models.diffusion_lm import DiffusionLM

FILES = Path(__file__).parent
RULES = ("steps", "tokens_per_step", "threshold", "factor", "entropy_bound")
"""The settings that say how many tokens a step reveals: one replaces another."""


class Protocol(Config):
    """How the authors of a model evaluated it on a task."""

    name: str
    task: str
    variant: str | None = None
    """The variant of the authors' settings; None: the settings of their evaluation code."""
    model: str
    """The model that they evaluated, by its hub id."""
    sources: list[str] = Field(min_length=1)
    """Addresses of the files that the settings are from, by commit."""
    differences: list[str]
    """Where code and text differ, and what differs here."""
    shots: int = Field(ge=0)
    """Examples in the prompt."""
    template: bool
    """Whether prompts are conversations in the model's chat template."""
    multiturn: bool = False
    """Whether each example is a turn of its own in the conversation."""
    add_bos: bool = False
    """Whether the prompt begins with BOS."""
    prefill: str = ""
    """The text that begins the answer, given with the prompt."""
    ignore_until: bool = False
    """Whether the stop strings of lm-eval's task are ignored."""
    until: list[str] = Field(default_factory=list)
    """The stop strings for a task of Unmask that is not lm-eval's: answers are cut before them."""
    likelihood_samples: int | None = Field(default=None, ge=1)
    """Masks per likelihood (`mc_num`); None: answers are generated."""
    cfg_scale: float = Field(default=0.0, ge=0)
    """The scale of classifier-free guidance (`cfg`), for likelihoods too."""
    logits_eos_inf: bool = False
    """Whether EOS is never produced."""
    confidence_eos_eot_inf: bool = False
    """Whether end tokens are revealed last."""
    generation: dict[str, Any] | None = None
    """Settings of `SamplerConfig`; None: the task is scored by likelihood."""

    def sampler(self, lm: DiffusionLM, given: Mapping[str, Any] | None = None) -> SamplerConfig:
        """The settings to generate with.

        Args:
            lm: its end tokens are those of the rules about them.
            given: settings of the user, by the names of `SamplerConfig`. They win.

        Raises:
            ConfigError: the task is scored by likelihood, the model has no end token, or settings contradict
                one another.
        """
        return SamplerConfig(**_over(self._settings(lm), given or {}))

    def prompt(self, text: str, lm: DiffusionLM) -> str:
        """The text of a prompt with BOS, if it is to have one and has none, and with the beginning of the
        answer."""
        bos = str(lm.tokenizer.bos_token or "") if self.add_bos else ""
        return ("" if text.startswith(bos) else bos) + text + self.prefill

    def prompt_ids(self, lm: DiffusionLM, prompt: Prompt) -> list[int]:
        """The token ids of a text or of messages, with what `prompt` adds."""
        ids, bos = encode_prompt(lm.tokenizer, prompt), [lm.tokenizer.bos_token_id]
        answer = encode_completion(lm.tokenizer, ids, self.prefill) if self.prefill else []
        return bos * (self.add_bos and bos != [None] and ids[:1] != bos) + ids + answer

    def record(self, lm: DiffusionLM, given: Mapping[str, Any]) -> dict[str, Any]:
        """The protocol for a result file, with what the user's settings replace."""
        replaced = {} if self.generation is None else self.replaced(lm, given)
        return {**self.model_dump(mode="json", exclude_defaults=True), "replaced": replaced}

    def replaced(self, lm: DiffusionLM, given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What `given` changes, for the result: by setting the protocol's value and the one that is used.
        Errors as `sampler`."""
        ours, used = (to_jsonable_python(dict(self.sampler(lm, each))) for each in (None, given))
        return {
            name: {"protocol": value, "used": used[name]}
            for name, value in ours.items()
            if value != used[name]
        }

    def _settings(self, lm: DiffusionLM) -> dict[str, Any]:
        where = f"protocol {self.name}"
        if self.generation is None:
            what = f"the answers of {self.task} are scored by likelihood"
            raise ConfigError(what, where=where, remedy="Choose a task that generates")
        if (self.logits_eos_inf or self.confidence_eos_eot_inf) and lm.eos_token_id is None:
            remedy = "Give the tokenizer an EOS token, or choose another protocol"
            what = "has rules about end tokens, and the model has none"
            raise ConfigError(what, where=where, remedy=remedy)
        settings: dict[str, Any] = self.generation | ({"cfg_scale": self.cfg_scale} if self.cfg_scale else {})
        if self.logits_eos_inf:
            settings["forbidden_tokens"] = [lm.eos_token_id]
        if self.confidence_eos_eot_inf:
            settings["reveal_last"] = list(lm.eos_token_ids)
        return settings


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first stop string."""
    return text[: min((place for stop in until if (place := text.find(stop)) >= 0), default=len(text))]


def protocol_names() -> list[str]:
    """The names of all protocols."""
    return sorted(path.stem for path in FILES.glob("*.yaml"))


def protocol_tasks(name: str) -> dict[str, list[str]]:
    """The tasks of a protocol, each with the names of its variants. Raises ConfigError if the name is
    unknown."""
    content = _read(name)
    return {
        task: sorted(_merged(content["defaults"], values)["variants"])
        for task, values in content["tasks"].items()
    }


def read_protocol(name: str, task: str) -> Protocol:
    """The protocol `name` (or `name/variant`) for a task.

    Args:
        task: its name there; those of lm-eval's subtasks are known too (`mmlu_anatomy` is of `mmlu`).

    Raises:
        ConfigError: an unknown protocol, task or variant; the remedy has the nearest name.
    """
    name, _, variant = name.partition("/")
    content = _read(name)
    tasks = content["tasks"]
    matching = (key for key in tasks if re.fullmatch(tasks[key].get("also", ""), task))
    if (found := task if task in tasks else next(matching, None)) is None:
        raise ConfigError(f"has no task {task!r}", where=f"protocol {name}", remedy=did_you_mean(task, tasks))
    values = _merged(content["defaults"], tasks[found])
    variants = values["variants"]
    if variant and variant not in variants:
        what = f"has no variant {variant!r} of the task {found}"
        remedy = did_you_mean(variant, variants) if variants else "Leave the variant out"
        raise ConfigError(what, where=f"protocol {name}", remedy=remedy)
    if variant:
        values = _merged(values, variants[variant])
    if values.get("likelihood_samples"):
        values["generation"] = None
    about = {key: content[key] for key in ("model", "sources", "differences")}
    own = {key: value for key, value in values.items() if key not in ("variants", "also")}
    return Protocol(**about, **own, name=name, task=found, variant=variant or None)


@cache
def _read(name: str) -> dict[str, Any]:
    if name not in (names := protocol_names()):
        remedy = did_you_mean(name, names)
        raise ConfigError(f"there is no protocol {name!r}", where="protocol", remedy=remedy)
    content: dict[str, Any] = parse_yaml((FILES / f"{name}.yaml").read_text(encoding="utf-8"), name)
    return content


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Values of both; those above win, in `generation` and `variants` one by one."""
    generation = _over(below.get("generation", {}), above.get("generation", {}))
    variants = below.get("variants", {}) | above.get("variants", {})
    return {**below, **above, "generation": generation, "variants": variants}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of both; those above win, and a rule for the number of tokens replaces another."""
    if any(above.get(rule) is not None for rule in RULES):
        below = {name: value for name, value in below.items() if name not in RULES}
    return {**below, **above}
