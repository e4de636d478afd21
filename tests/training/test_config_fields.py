"""Settings are declared together with their bounds."""
# ruff: noqa: RUF009 (the calls make fields)

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import pytest

from tests.errors import raises
from unmask.errors import ConfigError
from unmask.training.config_fields import check_settings, check_types, limits_of, setting


@dataclass
class Config:
    kind: str = setting("a", "The kind", choices=("a", "b", "c"))
    share: float = setting(0.5, "A share", low=0, high=1)
    rates: list[float] | None = setting(None, "Rates", low=0)
    of_either: int = setting(3, "Of two kinds", needs=["kind=b|c"])
    on: bool = setting(False, "A switch")
    of_switch: str | None = setting(None, "Of the switch", needs=["on"])


def check(config: Config) -> None:
    """Check the settings, where those that differ from their defaults are set."""
    check_given(
        config,
        [each.name for each in fields(config) if getattr(config, each.name) not in (None, each.default)],
    )


def check_given(config: Config, given: list[str]) -> None:
    limited = {each.name: limits for each in fields(config) if (limits := limits_of(each)) is not None}
    check_settings(limited, given, partial(getattr, config))


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"kind": "d"}, "kind"),
        ({"share": 1.5}, "share"),
        ({"share": float("nan")}, "share"),
        ({"rates": [0.5, -1.0]}, "rates"),
        ({"of_either": 4}, "of_either"),
        ({"of_switch": "x"}, "of_switch"),
    ],
)
def test_what_is_out_of_range_unknown_or_without_effect_is_refused(given, where):
    with raises(ConfigError, where=where):
        check(Config(**given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"kind": "b", "of_either": 4},
        {"kind": "c", "of_either": 4},
        {"on": True, "of_switch": "x"},
        {"rates": [0, 9.0]},
        {"kind": None},
    ],
)
def test_the_rest_is_left_alone(given: dict[str, Any]):
    check(Config(**given))


def test_what_is_given_by_itself_may_be_told():
    config = Config(of_either=4)
    check_given(config, [])
    with raises(ConfigError, where="of_switch"):
        check_given(config, ["of_switch"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("of_either", "x"), ("of_either", 1.5), ("rates", 0.5), ("share", None), ("on", 3), ("kind", ["a"])],
)
def test_what_is_of_another_type_is_refused(name, value):
    with raises(ConfigError, where=name):
        check_types(Config(**{name: value}))


def test_what_can_be_read_as_the_type_is():
    args = Config(share=1, rates=[1])
    check_types(args)
    assert isinstance(args.share, float) and isinstance(args.rates[0], float)
