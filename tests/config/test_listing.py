"""Settings as a list: their types as words, and the first sentences of their descriptions."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal, Optional

import pytest

from unmask.config.base import kinds_of
from unmask.config.listing import SECTION, Setting, settings_of, type_name
from unmask.config.run import RunConfig


class Colour(Enum):
    RED, GREEN = "red", "green"


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "int"),
        (int | None, "int | null"),
        (Optional[Literal["a", "b"]], "a | b | null"),  # noqa: UP045
        (None | str | list[str], "str | list[str] | null"),
        (Annotated[dict[str, Any], 3] | None, "dict[str, Any] | null"),
        (Colour | str, "red | green | str"),
    ],
)
def test_types_as_words(annotation: Any, words: str) -> None:
    assert type_name(annotation) == words


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("One thing. Another.", "One thing"),
        ("tensorboard, wandb, ... or none.", "tensorboard, wandb, ... or none"),
        ("At most 0.5, e.g. `a.b`. Or not.", "At most 0.5, e.g. `a.b`"),
        ("LLaDA, Nie et al. 2025 (Dr. GRPO). More", "LLaDA, Nie et al. 2025 (Dr. GRPO)"),
        ("", ""),
    ],
)
def test_the_summary_is_the_first_sentence(text: str, first: str) -> None:
    assert Setting("a", "int", None, text).summary == first


def test_all_settings_of_a_run_are_listed_and_described() -> None:
    found = {setting.key: setting for setting in settings_of(RunConfig)}
    assert {key for key, setting in found.items() if setting.type != SECTION} == kinds_of(RunConfig).keys()
    assert not [key for key, setting in found.items() if not setting.summary]
    assert (
        found["data.eval_rows"].shown_default == "200"
        and found["model.trust_remote_code"].shown_default == "false"
    )
    assert (
        found["lora"].default is None
        and found["model.path"].default is None
        and found["sampler"].default == {}
    )
