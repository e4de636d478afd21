"""What the server measures, in the format of Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

OTHER = "other"
"""The label of a path that is no route: clients may not make up labels."""
COUNTED = "unmask.counted"
"""Set in the scope of a request that another process has counted."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class RequestMetrics:
    """The figures of the requests to one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "unmask_requests", "Answers, by route and status.", ["route", "status"], **own
        )
        self.request_seconds = Histogram(
            "unmask_request_seconds",
            "From a request to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            **own,
        )

    def text(self) -> bytes:
        """All figures, for a scraper."""
        return generate_latest(self.registry)


class Metrics(RequestMetrics):
    """The figures of a server and of its engine."""

    def __init__(self) -> None:
        super().__init__()
        own: dict[str, Any] = {"registry": self.registry}
        self.queue_length = Gauge("unmask_queue_length", "Sequences that wait.", **own)
        self.running = Gauge("unmask_running_sequences", "Sequences that are denoised.", **own)
        self.sequences = Counter(
            "unmask_sequences", "Sequences that ended, by outcome.", ["model", "outcome"], **own
        )
        self.prompt_tokens = Counter(
            "unmask_prompt_tokens", "Tokens that were given, of finished sequences.", ["model"], **own
        )
        self.tokens = Counter(
            "unmask_tokens", "Tokens that were revealed, of finished sequences.", ["model"], **own
        )
        self.forward_passes = Counter(
            "unmask_forward_passes", "Forward passes, of any number of sequences.", ["model"], **own
        )
        self.engine_seconds = Counter(
            "unmask_engine_seconds", "Time in the engine's steps.", ["model"], **own
        )
        self.engine_failures = Counter(
            "unmask_engine_failures", "Steps of the engine that failed.", ["model"], **own
        )
        self.first_frame_seconds = Histogram(
            "unmask_first_frame_seconds",
            "From a request to the first frame of a sequence that is streamed.",
            buckets=SECONDS,
            **own,
        )
