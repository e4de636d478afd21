"""Which models a server serves, and how."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from unmask.models.load import load
from unmask.models.stored_adapters import load_adapters
from unmask.redaction import shown
from unmask.serving.limits import RequestLimits
from unmask.serving.scheduler import Scheduler


@dataclass(frozen=True)
class ServedModels:
    """Models and their scheduler, before they are loaded.

    Attributes:
        path: of the first model.
        loading: the other arguments of `unmask.load`, for all models.
        name: of the first model, as clients give it.
        adapters, models: the paths of adapters on the first model, and of further models, by their names.
        scheduling: the options of the `Scheduler`.
        limits: of a request.
        grace: seconds that accepted requests have at the end.
    """

    path: str
    loading: dict[str, Any]
    name: str
    adapters: dict[str, str] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    scheduling: dict[str, Any] = field(default_factory=dict)
    limits: RequestLimits = field(default_factory=RequestLimits)
    grace: float = 30.0

    def make_scheduler(self) -> Scheduler:
        """Load the models. Errors as of `unmask.load` and `load_adapters`."""
        models = {
            name: load(path, **self.loading) for name, path in {self.name: self.path, **self.models}.items()
        }
        adapters = {name: load_adapters(models[self.name], path) for name, path in self.adapters.items()}
        return Scheduler(models, adapters=adapters, **self.scheduling)

    def to_json(self) -> str:
        """These models as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """From a line of `to_json`."""
        values = json.loads(line)
        return cls(**{**values, "limits": RequestLimits(**values["limits"])})


def description(scheduler: Scheduler) -> str:
    """What is served, for people."""
    [first, *others] = [(shown(str(model.lm)), shown(model.name)) for model in scheduler.models.values()]
    return f"{first[0]} is served as {first[1]}" + "".join(f", {model} as {name}" for model, name in others)
