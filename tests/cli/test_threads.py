"""Threads of small models."""

import json

import pytest

from unmask.cli import threads


@pytest.mark.parametrize(
    ("config", "cores", "given", "found"),
    [
        ({"hidden_size": 256}, 4, {}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "4000"}),
        ({"n_embd": 64}, 2, {"GOMP_SPINCOUNT": "7"}, {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "7"}),
        ({"hidden_size": 257}, 4, {}, {}),
        ({}, 4, {}, {}),
        ({"hidden_size": 64}, 1, {}, {}),
        ({"hidden_size": 64}, 4, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_a_small_model_has_two_threads_that_wait_briefly(
    config, cores, given, found, tmp_path, monkeypatch, capsys
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    environ = dict(given)
    monkeypatch.setattr(threads.os, "environ", environ)
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    threads.choose_threads(str(tmp_path))
    assert environ == found
    assert ("two threads" in capsys.readouterr().err) == (environ != given)


def test_what_is_no_model_is_left_to_its_own_error(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "config.json").write_text("[1")
    for path in (tmp_path, tmp_path / "absent"):
        threads.choose_threads(str(path))
    assert "OMP_NUM_THREADS" not in threads.os.environ
