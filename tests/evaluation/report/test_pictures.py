"""Every chart, heat map and table of scores becomes a PNG."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from PIL import Image

from tests.evaluation.report.examples import convert_run, result
from unmask.errors import ConfigError
from unmask.evaluation.report.build import make_report
from unmask.evaluation.report.pictures import write_pictures


def report():
    runs = [
        dataclasses.replace(
            convert_run("a $x^2 \u202e _{b}", 0, 1),
            lines=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}],
        )
    ]
    return make_report(
        title="t", entries=["a", "b"], runs=runs, results=[result("b", 1, 0.9, steps) for steps in (2, 4)]
    )


def test_pictures_are_written_and_hold_more_than_one_color(tmp_path):
    paths = write_pictures(report(), tmp_path / "new" / "folder")
    names = [
        "01-stories.png",
        "02-loss.png",
        "03-b-steps-2-stories.png",
        "04-b-steps-4-stories.png",
        "05-stories.png",
    ]
    assert [path.name for path in paths] == names and sorted(
        path.name for path in paths[0].parent.iterdir()
    ) == names
    for path in paths:
        picture = Image.open(path)
        assert (
            picture.format == "PNG"
            and picture.width >= 900
            and len(picture.convert("RGB").getcolors(1 << 20)) > 10
        )


def test_pictures_are_the_same_each_time(tmp_path):
    first, second = (write_pictures(report(), tmp_path / name)[1].read_bytes() for name in ("a", "b"))
    assert first == second


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pictures: needs matplotlib, .*pip install 'unmask\[train\]'"):
        write_pictures(report(), tmp_path / "x")
    assert not (tmp_path / "x").exists()
