"""Figures of several processes as those of one."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from unmask.serving.metrics import Metrics, RequestMetrics
from unmask.serving.workers.totals import Totals


def figures(tokens: float, queue: float = 0.0, seconds: float | None = None) -> bytes:
    """What a worker tells."""
    metrics = Metrics()
    metrics.tokens.labels("tiny").inc(tokens)
    metrics.queue_length.set(queue)
    if seconds is not None:
        metrics.first_frame_seconds.observe(seconds)
    return metrics.text()


OWN = RequestMetrics().text()


def value(text: bytes, series: str, **labels: str) -> float | None:
    samples = [
        sample for family in text_string_to_metric_families(text.decode()) for sample in family.samples
    ]
    return next(
        (sample.value for sample in samples if sample.name == series and sample.labels == labels), None
    )


def test_counters_and_histograms_are_added_and_gauges_are_not() -> None:
    text = Totals().text(OWN, {0: (1, figures(3, 5, 0.02)), 2: (1, figures(4, 6, 0.3))})
    assert value(text, "unmask_tokens_total", model="tiny") == 7
    assert (
        value(text, "unmask_queue_length", worker="0"),
        value(text, "unmask_queue_length", worker="2"),
    ) == (5, 6)
    assert value(text, "unmask_queue_length") is None
    assert value(text, "unmask_first_frame_seconds_bucket", le="0.025") == 1
    assert (
        value(text, "unmask_first_frame_seconds_bucket", le="+Inf")
        == 2
        == value(text, "unmask_first_frame_seconds_count")
    )
    assert value(text, "unmask_first_frame_seconds_sum") == 0.32


def test_no_sum_falls_when_a_process_ends_and_another_one_takes_its_place() -> None:
    totals = Totals()
    totals.text(OWN, {0: (1, figures(3)), 1: (1, figures(10))})
    gone = totals.text(OWN, {1: (1, figures(11, queue=2))})
    assert (
        value(gone, "unmask_tokens_total", model="tiny") == 14
        and value(gone, "unmask_queue_length", worker="0") is None
    )
    assert value(totals.text(OWN, {}), "unmask_tokens_total", model="tiny") == 14
    again = totals.text(OWN, {0: (2, figures(1)), 1: (1, figures(11))})
    assert value(again, "unmask_tokens_total", model="tiny") == 15
    assert (
        value(
            totals.text(OWN, {0: (3, figures(5)), 1: (1, figures(11))}), "unmask_tokens_total", model="tiny"
        )
        == 20
    )
