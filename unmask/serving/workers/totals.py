"""The figures of several processes as those of one, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

WORKER = "worker"
"""The label with the number of a worker."""
Samples = dict[tuple[str, str, tuple[tuple[str, str], ...]], float]
"""Values by the names of a metric and of its series, and the labels."""


class Totals:
    """Adds up the counters and histograms of workers. What a process that has ended had counted when it was
    asked last stays in the sums, so that they never fall. Gauges are of the present, and each is of one
    worker."""

    def __init__(self) -> None:
        self._kinds: dict[str, Metric] = {}  # without values, by name
        self._ended: Samples = {}
        # by worker: which of its processes, and what it has counted
        self._counted: dict[int, tuple[int, Samples]] = {}

    def text(self, own: bytes, found: Mapping[int, tuple[int, bytes]]) -> bytes:
        """All figures, for a scraper.

        Args:
            own: those of this process.
            found: those of the workers that answer, by number: which of its processes it is, and the figures.
        """
        counted, gauges = self._read(own)
        for number, (process, text) in found.items():
            theirs, present = self._read(text)
            self._see(number, process, theirs)
            gauges |= {
                (kind, name, (*labels, (WORKER, str(number)))): value
                for (kind, name, labels), value in present.items()
            }
        metrics = {name: Metric(name, kind.documentation, kind.type) for name, kind in self._kinds.items()}
        sums = added([counted, self._ended, *(figures for _, figures in self._counted.values())])
        for (kind, name, labels), value in (sums | gauges).items():
            metrics[kind].add_sample(name, dict(labels), value)
        return generate_latest(Found(metrics.values()))

    def _read(self, text: bytes) -> tuple[Samples, Samples]:
        """What is counted, and the gauges."""
        counted: Samples = {}
        gauges: Samples = {}
        for metric in text_string_to_metric_families(text.decode()):
            # when a process began to count, which says nothing about a sum
            if metric.name.endswith("_created"):
                continue
            self._kinds.setdefault(metric.name, metric)
            figures = gauges if metric.type == "gauge" else counted
            figures |= {
                (metric.name, sample.name, tuple(sample.labels.items())): sample.value
                for sample in metric.samples
            }
        return counted, gauges

    def _see(self, number: int, process: int, counted: Samples) -> None:
        before, figures = self._counted.get(number, (process, {}))
        if before != process:
            self._ended = added([self._ended, figures])
        self._counted[number] = process, counted


class Found(Collector):
    """Metrics that are known already."""

    def __init__(self, metrics: Iterable[Metric]):
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def added(figures: Iterable[Samples]) -> Samples:
    """Their sums."""
    sums: Samples = {}
    for each in figures:
        for series, value in each.items():
            sums[series] = sums.get(series, 0) + value
    return sums
