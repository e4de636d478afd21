"""Every field of TRL's configs has the same name here, or a reason in docs/migration.md."""

import re
from dataclasses import fields

import pytest
from transformers import TrainingArguments

import unmask
from tests.helpers import REPOSITORY

trl = pytest.importorskip("trl")
ROWS = re.findall(
    r"^\| (.*?) \| .+ \|$",
    (REPOSITORY / "docs" / "migration.md")
    .read_text()
    .split("Fields of TRL")[1]
    .split("**What differs.**")[0],
    re.M,
)


@pytest.mark.parametrize("name", ["SFTConfig", "DPOConfig", "GRPOConfig"])
def test_a_field_of_trl_has_the_same_name_or_a_reason(name):
    own = {field.name for field in fields(getattr(unmask, name))}
    theirs = {field.name for field in fields(getattr(trl, name))}
    explained = {
        field
        for row in ROWS
        if f"of `{name}`" in row or "of `" not in row
        for field in re.findall(r"`(\w+)`", row)
    }
    assert {field.name for field in fields(TrainingArguments)} <= own
    assert theirs - own <= explained


def test_no_reason_is_given_for_a_field_that_is_here_or_nowhere():
    names = ("SFTConfig", "DPOConfig", "GRPOConfig")
    missing = {name: set() for name in names}
    for name in names:
        own = {field.name for field in fields(getattr(unmask, name))}
        missing[name] = {field.name for field in fields(getattr(trl, name))} - own
    for row in ROWS:
        of = [name for name in names if f"of `{name}`" in row] or names
        for field in set(re.findall(r"`(\w+)`", row)) - {*names}:
            assert any(field in missing[name] for name in of), field
