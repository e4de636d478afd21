"""Which model a server serves, and how."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from unmask.models.load import load
from unmask.serving.limits import Limits
from unmask.serving.scheduler import Scheduler


@dataclass(frozen=True)
class ServedModel:
    """A model and its scheduler, before it is loaded.

    Attributes:
        path: of the model.
        loading: the other arguments of `unmask.load`.
        name: of the model, as clients give it.
        scheduling: the options of its `Scheduler`.
        limits: of a request.
        grace: seconds that accepted requests have at the end.
    """

    path: str
    loading: dict[str, Any]
    name: str
    scheduling: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    grace: float = 30.0

    def make_scheduler(self) -> Scheduler:
        """Load the model. Errors as of `unmask.load`."""
        return Scheduler(load(self.path, **self.loading), self.name, **self.scheduling)

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """From a line of `to_json`."""
        values = json.loads(line)
        return cls(**{**values, "limits": Limits(**values["limits"])})
