"""`unmask serve`."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Annotated

import typer

from unmask.artifacts import read_file
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig
from unmask.errors import ConfigError, ModelError, require
from unmask.models.model_paths import check_model, near_path
from unmask.variables import ADMIN_KEY, API_KEY


@spread_configs
def serve(
    model: ModelConfig,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen on; 0.0.0.0: all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model's name for clients; unset: that of its folder."),
    ] = None,
    adapters: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="LoRA adapters on MODEL; repeatable.")
    ] = None,
    more_models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME=PATH", help="Another model; repeatable.")
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences of all requests that run at once, in each worker.")
    ] = 8,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="The most tokens of a model's running sequences, padded.")
    ] = None,
    queue_size: Annotated[
        int, typer.Option(min=1, help="Sequences that may wait; further requests are answered with 429.")
    ] = 256,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Compute every sequence separately: company changes no last bit of an answer; slow.",
        ),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="The most new tokens, and denoising steps, that a request may ask for.")
    ] = 4096,
    max_answers: Annotated[int, typer.Option(min=1, help="The most answers to a prompt (n).")] = 16,
    max_connections: Annotated[int, typer.Option(min=1, help="The most connections at once.")] = 512,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds that a request may take, waiting included.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that accepted requests have at the end (SIGTERM).")
    ] = 30.0,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keys of clients, one a line, beside UNMASK_API_KEY; their requests take turns.",
        ),
    ] = None,
    weights_from: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR", help="A folder from which weights may be replaced, with UNMASK_ADMIN_KEY."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN", help="A site whose pages may use the server, such as https://example.org."
        ),
    ] = None,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="Log each request, with its prompt.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that each have the model; unset: the server itself has it."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Worker devices, e.g. cuda:0,cuda:1. Default: all GPUs, else CPU."
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, for many clients at once: OpenAI's API, denoising to watch, and the rollouts of
    reinforcement learning."""
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        require(library, where="unmask serve")
    name = name or name_of(model.path)
    adapted, others = names_and_paths(name, adapters or (), more_models or ())
    for path in (model.path, *others.values()):
        check_model(path)
    for path in filterfalse(os.path.exists, adapted.values()):
        raise ModelError("no such folder", where=path, remedy=near_path(Path(path)))
    from unmask.serving.app import AppSettings
    from unmask.serving.connections import ConnectionLimits
    from unmask.serving.limits import RequestLimits
    from unmask.serving.middleware import LOOPBACK
    from unmask.serving.run import Serving
    from unmask.serving.served_models import ServedModels
    from unmask.serving.server import open_port

    placed, queue_size = place_workers(workers, devices, model, queue_size)
    settings = AppSettings(
        limits=RequestLimits(
            max_tokens=max_tokens, steps=max_tokens, n=max_answers, sequences=queue_size, timeout=timeout
        ),
        api_keys=keys_of(api_keys),
        loopback=host in LOOPBACK,
        admin_key=os.environ.get(ADMIN_KEY) or None,
        weights_from=tuple(weights_from or ()),
        allow_origins=tuple(allow_origin or ()),
        log_requests=log_requests,
    )
    if log_requests:
        show_requests()
    scheduling = {
        "batch_size": batch_size,
        "max_batch_tokens": max_batch_tokens,
        "queue_size": queue_size,
        "deterministic": deterministic,
    }
    served = ServedModels(
        model.path, model.load_arguments(), name, adapted, others, scheduling, settings.limits, grace
    )
    with open_port(host, port) as listener:
        Serving(
            served,
            settings,
            listener,
            ConnectionLimits(max_connections),
            partial(announce, listener, len(placed)),
        ).run(placed)


def place_workers(
    workers: int | None, devices: str | None, model: ModelConfig, queue_size: int
) -> tuple[list[str], int]:
    """The device of each worker, and how many sequences may wait in each; no devices: there are no
    workers."""
    if workers is None and devices is None:
        return [], queue_size
    from unmask.serving.workers.devices import place

    if model.device_map is not None:
        what = "one model on all GPUs leaves none for other workers"
        raise ConfigError(what, where="--device-map", remedy="Leave it out, or --workers and --devices")
    placed = place(workers, devices, model.device if "device" in model.model_fields_set else None)
    if queue_size < len(placed):
        what = f"{queue_size} sequences for {len(placed)} workers, each of which has its own"
        raise ConfigError(what, where="--queue-size", remedy="Let one wait for each worker at least")
    return placed, queue_size // len(placed)


def announce(listener: socket.socket, workers: int, what: str) -> None:
    """Say what is served, and where; the address is the last word of the first line."""
    from unmask.serving.app import PLAYGROUND

    address = listener.getsockname()
    place = f"[{address[0]}]" if ":" in address[0] else address[0]
    by = f" by {workers} workers" if workers else ""
    url = f"http://{place}:{address[1]}"
    page = f"; in a browser: {url}" if (PLAYGROUND / "index.html").is_file() else ""
    typer.echo(f"{what}{by} at {url}\nnext: for OpenAI's clients base_url={url}/v1{page}")


class _Formatter(logging.Formatter):
    """Lines of a log, of which only the first of a record is not indented: no text of a client looks like
    another record."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


def show_requests() -> None:
    """Log requests to stderr. Other libraries stay quiet: some would log what the server asks its workers."""
    logging.basicConfig()
    logging.getLogger().handlers[0].setFormatter(_Formatter("%(asctime)s %(message)s"))
    logging.getLogger("unmask").setLevel(logging.INFO)


def names_and_paths(name: str, adapters: Sequence[str], models: Sequence[str]) -> list[dict[str, str]]:
    """The paths of adapters, and of models beside the one of this name, by their names, of options NAME=PATH.
    Raises ConfigError for one without a name or a path, or for a name that is taken."""
    taken = {name: "MODEL"}
    found: list[dict[str, str]] = []
    for option, texts in (("--adapters", adapters), ("--model", models)):
        paths: dict[str, str] = {}
        for text in texts:
            called, _, path = text.partition("=")
            if not (called and path):
                remedy = f"Use {option} as in {option} style=runs/style/model"
                raise ConfigError(f"{text!r} is not NAME=PATH", where=option, remedy=remedy)
            if called in taken:
                what = f"{called!r} is the name of {taken[called]} already"
                remedy = "Give every model a name of its own; --name is that of MODEL"
                raise ConfigError(what, where=option, remedy=remedy)
            taken[called], paths[called] = f"{option} {text}", path
        found.append(paths)
    return found


def keys_of(file: Path | None) -> tuple[str, ...]:
    """The keys of which clients must send one: that of the environment, and those of a file."""
    lines = [] if file is None else [line for line in read_file(file).splitlines() if line.strip()]
    if file is not None and not lines:
        raise ConfigError("has no key", where=str(file), remedy="Write a key on each line")
    keys = map(str.strip, [os.environ.get(API_KEY, ""), *lines])
    return tuple(dict.fromkeys(key for key in keys if key))


def name_of(path: str) -> str:
    """The name of a model for clients: that of its folder, of which they do not learn where it is, or its id
    on the hub."""
    folder = Path(path)
    return folder.resolve().name if folder.exists() else path
