"""The application of a server with workers: what clients see of it is what one server shows."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import Counter, Gauge
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from unmask.serving.app import HEALTH, METRICS, AppSettings, add_weights, finished
from unmask.serving.metrics import RequestMetrics
from unmask.serving.workers.forward import Forward
from unmask.serving.workers.pool import Pool, Worker
from unmask.serving.workers.totals import Totals
from unmask.serving.workers.weights import SharedWeights

FORWARDED = ("/v1/{path:path}", "/openapi.json")


class FrontMetrics(RequestMetrics):
    """The figures that no worker knows: of the requests that reach none, and of the workers themselves."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.live = Gauge("unmask_workers", "Workers that take requests.", registry=self.registry)
        self.live.set_function(lambda: len(pool.live))
        self.deaths = Counter(
            "unmask_worker_deaths", "Processes of workers that ended.", registry=self.registry
        )


def make_front(pool: Pool, weights: SharedWeights, settings: AppSettings, metrics: FrontMetrics) -> ASGIApp:
    """The application that hands requests to workers. Who may use it, and how large and slow requests may be,
    is decided here; playground, health and metrics are here as well."""
    app = FastAPI(title="Unmask", openapi_url=None, docs_url=None, redoc_url=None)
    _add_state(app, pool, metrics)
    add_weights(app, settings, weights.replace)
    forward = Forward(pool)
    for path in FORWARDED:
        # an ASGI application, and of all methods
        app.add_route(path, forward, include_in_schema=False)  # type: ignore[arg-type]
    return finished(app, settings, metrics)


def _add_state(app: FastAPI, pool: Pool, metrics: FrontMetrics) -> None:
    totals = Totals()

    @app.get(HEALTH)
    async def health() -> Response:
        """How many workers take requests."""
        live, count = len(pool.live), len(pool.workers)
        status = "ok" if live == count else "degraded" if live else "failing"
        return JSONResponse({"status": status, "workers": count, "live": live}, 200 if live else 503)

    @app.get(METRICS)
    async def all_metrics() -> Response:
        """What the workers and the server itself measure, for Prometheus."""
        answers = await asyncio.gather(*map(_figures, pool.workers))
        found = {
            worker.number: answer
            for worker, answer in zip(pool.workers, answers, strict=True)
            if answer is not None
        }
        return Response(totals.text(metrics.text(), found), headers={"Content-Type": CONTENT_TYPE_LATEST})


async def _figures(worker: Worker) -> tuple[int, bytes] | None:
    """Which process a worker is, and its figures; None if it has ended."""
    process = worker.starts
    answer = await worker.ask("GET", METRICS)
    return None if answer is None else (process, answer.content)
