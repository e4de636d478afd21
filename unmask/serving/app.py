"""The application of a server: its routes, and the middlewares before them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NotRequired

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp
from typing_extensions import TypedDict

from unmask.errors import ConfigError
from unmask.serving import weights
from unmask.serving.errors import add_error_handlers, documented, error_response
from unmask.serving.limits import RequestLimits
from unmask.serving.metrics import RequestMetrics
from unmask.serving.middleware import ApiKeys, BodyLimits, CountRequests, SameOrigin, SecurityHeaders
from unmask.serving.openai import routes
from unmask.serving.scheduler import Scheduler
from unmask.variables import ADMIN_KEY, API_KEY

HEALTH, METRICS = "/health", "/metrics"
PLAYGROUND = Path(__file__).with_name("static")


@dataclass(frozen=True)
class AppSettings:
    """Who may use a server, and for what.

    Attributes:
        api_keys: one of which clients must send; none: anyone may ask.
        loopback: whether the server listens on this machine's own address only.
        admin_key: of those who may replace the weights.
        weights_from: folders within which new weights may lie; none: they cannot be replaced.
        allow_origins: of pages of other sites that may use the server from a browser.
        log_requests: whether requests are logged, with their prompts.
    """

    limits: RequestLimits = field(default_factory=RequestLimits)
    api_keys: tuple[str, ...] = ()
    loopback: bool = True
    admin_key: str | None = None
    weights_from: tuple[Path, ...] = ()
    allow_origins: tuple[str, ...] = ()
    log_requests: bool = False

    def __post_init__(self) -> None:
        if self.weights_from and not self.admin_key:
            remedy = f"Set {ADMIN_KEY} to a secret of those who may replace the weights"
            raise ConfigError(
                "weights may be replaced only with a key of its own", where="--weights-from", remedy=remedy
            )
        for origin in self.allow_origins:
            if not is_origin(origin):
                remedy = "Give scheme, name and port as browsers send them, such as https://example.org"
                raise ConfigError(
                    f"{origin!r} is not the origin of a site", where="--allow-origin", remedy=remedy
                )
        if not self.loopback and not self.api_keys:
            remedy = f"Set {API_KEY} to a secret that clients send, or use --host 127.0.0.1"
            raise ConfigError(
                "other machines can reach this address, and the server has no API key",
                where="--host",
                remedy=remedy,
            )


class Health(TypedDict):
    """The state of the engines. `degraded`: some models fail, which `failing` names."""

    status: Literal["ok", "degraded", "failing"]
    failing: NotRequired[list[str]]


router = APIRouter()


@router.get(
    HEALTH,
    response_model=Health,
    responses={**documented(), 503: {"model": Health, "description": "No model works"}},
)
async def health(request: Request) -> Response:
    """Whether the engines work."""
    scheduler: Scheduler = request.app.state.scheduler
    if not (failing := scheduler.failing):
        return JSONResponse({"status": "ok"})
    status, code = ("degraded", 200) if scheduler.healthy else ("failing", 503)
    return JSONResponse({"status": status, "failing": failing}, code)


@router.get(METRICS, response_class=PlainTextResponse, responses=documented())
async def metrics(request: Request) -> Response:
    """What the server measures, for Prometheus."""
    return Response(request.app.state.scheduler.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers send it: a scheme, a name and perhaps a port, in lower case."""
    return re.fullmatch(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?", text) is not None


def make_app(scheduler: Scheduler, settings: AppSettings) -> ASGIApp:
    """The application of a scheduler, which it starts and, if nobody did before, stops at once at its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await scheduler.stop(grace=0)

    app = FastAPI(title="Unmask", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.routes.extend(router.routes)
    routes.add_routes(app, scheduler, settings.limits)
    add_weights(app, settings, partial(weights.replace_weights, scheduler))
    return finished(app, settings, scheduler.metrics)


def add_weights(app: FastAPI, settings: AppSettings, replace: weights.Replace) -> None:
    """Add the route for new weights, where it is allowed."""
    if settings.admin_key and settings.weights_from:
        weights.add_route(app, replace, settings.weights_from, settings.admin_key)


def finished(app: FastAPI, settings: AppSettings, metrics: RequestMetrics) -> ASGIApp:
    """An application that has all its routes, with errors in OpenAI's shape, the playground, and the
    middlewares before it; the last one here is the first to see a request."""
    add_error_handlers(app)
    app.add_exception_handler(Exception, _failed)
    if (PLAYGROUND / "index.html").is_file():
        # mounted it would hide which methods a route has
        app.router.default = StaticFiles(directory=PLAYGROUND, html=True)
    guarded: ASGIApp = BodyLimits(app, settings.limits, log=settings.log_requests)
    guarded = ApiKeys(guarded, settings.api_keys, {HEALTH, weights.PATH})  # that route has a key of its own
    if settings.allow_origins:
        guarded = CORSMiddleware(
            guarded, settings.allow_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    alone = settings.loopback and not settings.api_keys
    guarded = SameOrigin(guarded, settings.allow_origins, loopback=alone)
    return CountRequests(SecurityHeaders(guarded), metrics)


async def _failed(_: Request, __: Exception) -> Response:
    """What nobody foresaw: the log has its traceback."""
    return error_response("the server failed to answer this request", 500)
