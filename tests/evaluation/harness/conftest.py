"""lm-eval is an optional library; its tests need no network."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install 'unmask[eval]')")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    import datasets
    import lm_eval.caching.cache as cache
    import lm_eval.evaluator as evaluator

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # it takes seconds
    datasets.disable_progress_bars()
