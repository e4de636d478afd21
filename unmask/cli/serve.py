"""`unmask serve`."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unmask.config.layers import ADMIN_KEY, API_KEY
from unmask.config.option_per_field import spread_configs
from unmask.config.run import ModelConfig
from unmask.errors import ConfigError, first_line, require
from unmask.redaction import shown

if TYPE_CHECKING:
    from unmask.models.diffusion_lm import DiffusionLM
    from unmask.serving.scheduler import Scheduler


@spread_configs
def serve(
    model: ModelConfig,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any free one.")] = 8000,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name for clients; unset: that of its folder.")] = None,
    adapters: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="LoRA adapters on MODEL; repeatable.")] = None,
    more_models: Annotated[list[str] | None, typer.Option("--model", metavar="NAME=PATH", help="Another model; repeatable.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of all requests that run at once.")] = 8,
    max_batch_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of a model's running sequences, padded.")] = None,
    queue_size: Annotated[int, typer.Option(min=1, help="Sequences that may wait; further requests are answered with 429.")] = 256,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Compute every sequence separately: company changes no last bit of an answer; slow.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="The most new tokens, and denoising steps, that a request may ask for.")] = 4096,
    max_answers: Annotated[int, typer.Option(min=1, help="The most answers to a prompt (n).")] = 16,
    max_connections: Annotated[int, typer.Option(min=1, help="The most connections at once.")] = 512,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take, waiting included.")] = 600.0,
    grace: Annotated[float, typer.Option(min=0, help="Seconds that accepted requests have at the end (SIGTERM).")] = 30.0,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys of clients, one a line, beside UNMASK_API_KEY; their requests take turns.")
    ] = None,
    weights_from: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="A folder from which weights may be replaced, with UNMASK_ADMIN_KEY.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A site whose pages may use the server, such as https://example.org.")
    ] = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Log each request, with its prompt.")] = False,
) -> None:
    """Serve models over HTTP, for many clients at once: OpenAI's API, denoising to watch, and the rollouts of reinforcement learning."""
    for library in ("fastapi", "uvicorn", "prometheus_client"):
        require(library, "serve", where="unmask serve")
    from unmask.serving.app import AppSettings, make_app
    from unmask.serving.connections import ConnectionLimits
    from unmask.serving.limits import Limits
    from unmask.serving.middleware import LOOPBACK
    from unmask.serving.scheduler import Scheduler
    from unmask.serving.server import make_server, open_port

    names = names_and_paths(name or name_of(model.path), adapters or (), more_models or ())
    settings = AppSettings(
        limits=Limits(max_tokens=max_tokens, steps=max_tokens, n=max_answers, sequences=queue_size, timeout=timeout),
        api_keys=keys_of(api_keys),
        loopback=host in LOOPBACK,
        admin_key=os.environ.get(ADMIN_KEY) or None,
        weights_from=tuple(weights_from or ()),
        allow_origins=tuple(allow_origin or ()),
        log_requests=log_requests,
    )
    if log_requests:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with open_port(host, port) as listener:
        most: dict[str, Any] = {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens, "queue_size": queue_size}
        models, adapted = load_models(model, *names)
        scheduler = Scheduler(models, adapters=adapted, **most, deterministic=deterministic)
        limits, tell = ConnectionLimits(max_connections), partial(typer.echo, description(scheduler, *listener.getsockname()[:2]))
        server = make_server(make_app(scheduler, settings), scheduler, connections=limits, grace=grace, on_start=tell)
        server.run(sockets=[listener])


def names_and_paths(name: str, adapters: Sequence[str], models: Sequence[str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """The name of the first model, and the paths of adapters and of further models by their names, of options NAME=PATH. Raises ConfigError
    for one without a name or a path, or for a name that is taken."""
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
                remedy = "Give every model a name of its own; --name is that of MODEL"
                raise ConfigError(f"{called!r} is the name of {taken[called]} already", where=option, remedy=remedy)
            taken[called], paths[called] = f"{option} {text}", path
        found.append(paths)
    return name, found[0], found[1]


def load_models(
    model: ModelConfig, name: str, adapters: dict[str, str], more: dict[str, str]
) -> tuple[dict[str, DiffusionLM], dict[str, DiffusionLM]]:
    """The models by their names, and those that are adapters on the first one."""
    from unmask.models.load import load
    from unmask.models.stored_adapters import load_adapters

    options = model.load_arguments()
    models = {called: load(path, **options) for called, path in {name: model.path, **more}.items()}
    return models, {called: load_adapters(models[name], path) for called, path in adapters.items()}


def description(scheduler: Scheduler, host: str, port: int) -> str:
    """What is served, and where."""
    [name, first], *others = [(model.name, model.lm) for model in scheduler.models.values()]
    more = "".join(f", {shown(str(lm))} as {shown(called)}" for called, lm in others)
    place = f"[{host}]" if ":" in host else host
    return f"{shown(str(first))} is served as {shown(name)}{more} at http://{place}:{port}"


def keys_of(file: Path | None) -> tuple[str, ...]:
    """The keys of which clients must send one: that of the environment, and those of a file."""
    lines = [os.environ.get(API_KEY, "")]
    if file is not None:
        try:
            lines += file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot be read ({first_line(error)})", where=str(file), remedy="Give a text file with a key a line"
            ) from error
        if not any(line.strip() for line in lines[1:]):
            raise ConfigError("has no key", where=str(file), remedy="Write a key on each line")
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))


def name_of(path: str) -> str:
    """The name of a model for clients: that of its folder, of which they do not learn where it is, or its id on the hub."""
    folder = Path(path)
    return folder.resolve().name if folder.exists() else path
