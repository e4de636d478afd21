"""POST /v1/weights: new weights for a model that is served, from folders that the server was started with."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NotRequired

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from typing_extensions import TypedDict

from unmask.errors import ConfigError, DataError, ModelError, UnmaskError
from unmask.generation.remote.protocol import differences, model_facts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.model_paths import ADAPTER_CONFIG
from unmask.models.stored_adapters import put_adapters, read_adapters
from unmask.serving.errors import OpenAIRoute, documented
from unmask.serving.middleware import given_key, keys_match
from unmask.serving.openai.models import find_model
from unmask.serving.scheduler import ModelEngine, Scheduler
from unmask.serving.submission import ServiceError

logger = logging.getLogger(__name__)
PATH = "/v1/weights"
REMEDY = "Give a folder of the same model that DiffusionLM.save wrote, or for adapters one of such adapters"
Files = tuple[tuple[str, int, int, int, int], ...]
"""What lies in a folder: of each file, and of what a link leads to, the inode, the size, and when it changed
last, which no program can set."""


class AdminKeyError(ServiceError):
    """The key for changing the server is wrong or missing."""

    status = 401


class ChangedError(ModelError):
    """The files of a folder have changed while they were read."""


class NewWeights(BaseModel):
    """Weights to serve from now on."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=4096)
    """The model that gets them: a name that `/v1/models` lists."""
    path: str = Field(min_length=1, max_length=4096)
    """A folder that `DiffusionLM.save` wrote, or for adapters one with such, within those that the server may
    read; relative to one of them, or absolute."""
    version: str = Field(min_length=1, max_length=4096)
    """The name of these weights, by which requests may demand them."""


class Served(TypedDict):
    """The name of the weights that the model serves. `workers`: how many hold them by now, of a server with
    workers."""

    version: str | None
    workers: NotRequired[int]


@dataclass(frozen=True)
class Folder:
    """A folder of weights.

    Attributes:
        path: where it lies, without links.
        given: its name, as the caller gave it.
        roots: within which it has to lie.
    """

    path: Path
    given: str
    roots: tuple[Path, ...]

    @classmethod
    def find(cls, given: str, roots: tuple[Path, ...]) -> Folder:
        """The folder of this name. Raises ModelError as `allowed_folder`."""
        return cls(allowed_folder(given, roots), given, roots)

    def files(self) -> Files:
        """What lies in it now. Raises ModelError if it is not allowed any more."""
        if allowed_folder(str(self.path), self.roots) != self.path:
            raise ModelError("it was moved", where="path", remedy=REMEDY)
        inside = [
            Path(parent, name) for parent, folders, files in os.walk(self.path) for name in [*folders, *files]
        ]
        found = [
            (path, state) for path in sorted([self.path, *inside]) for state in (path.lstat(), path.stat())
        ]
        return tuple(
            (str(path), state.st_dev, state.st_ino, state.st_size, state.st_ctime_ns) for path, state in found
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Errors of reading it within this context name it as the caller did, and never say where it lies."""
        try:
            yield
        except ChangedError:
            raise
        except (ConfigError, DataError, ModelError) as error:
            raise ModelError(
                error.what.replace(str(self.path), self.given), where="path", remedy=REMEDY
            ) from error
        except (OSError, RuntimeError) as error:  # of the disk, or of the device
            logger.exception("weights cannot be loaded")
            raise ModelError(
                "they cannot be loaded; the server's log has the cause", where="path", remedy=REMEDY
            ) from error


Replace = Callable[[str, Folder, str], Awaitable[Served]]
"""Serves the weights of a folder as those of a model, under the name of a version, and returns which ones are
served. Raises ServiceError and ModelError for a refusal, which changes nothing."""
router = APIRouter(route_class=OpenAIRoute)


def add_route(app: FastAPI, replace: Replace, folders: Sequence[Path], admin_key: str) -> None:
    """Add the route for new weights. `folders`: those within which they may lie; `admin_key`: what its
    callers must send."""
    app.state.replace, app.state.admin_key = replace, admin_key
    app.state.roots = tuple(folder.resolve() for folder in folders)
    app.router.routes.extend(router.routes)


def _check_key(request: Request) -> None:
    """Raise AdminKeyError if the key of a request is another."""
    if not keys_match(given_key(request.headers.get("authorization", "")), request.app.state.admin_key):
        raise AdminKeyError("the admin key is wrong or missing", where="authorization")


@router.post(
    PATH,
    dependencies=[Depends(_check_key)],
    responses=documented(400, 404, 429, 503),
    response_model_exclude_unset=True,
)
async def new_weights(body: NewWeights, request: Request) -> Served:
    """Serve other weights of the same model, once what runs of it has finished. A refusal changes nothing."""
    state = request.app.state
    folder = await asyncio.to_thread(Folder.find, body.path, state.roots)
    served: Served = await state.replace(body.model, folder, body.version)
    return served


async def replace_weights(scheduler: Scheduler, name: str, folder: Folder, version: str) -> Served:
    """`Replace` for a model of a scheduler."""
    model = replaceable(scheduler, name)
    with folder.reading():
        await scheduler.replace_weights(
            name, lambda: put_weights(model, read_weights(model, folder)), version
        )
    return {"version": model.version}


def replaceable(scheduler: Scheduler, name: str) -> ModelEngine:
    """The model of this name. Raises NotFoundError if there is none, and ModelError if adapters are on its
    weights, which would be others, too."""
    model = find_model(scheduler.models, name)
    if adapters := [other.name for other in scheduler.models.values() if other.parent == name]:
        what = f"the adapters {', '.join(adapters)} are on the weights of {name!r}"
        raise ModelError(what, where="model", remedy="Replace adapters, or start a server without them")
    return model


def allowed_folder(given: str, roots: Sequence[Path]) -> Path:
    """The folder of this name within one of the roots. Raises ModelError if it is not one, or if a link in it
    leads out of them; the error is the same for what lies elsewhere and what does not exist."""
    refusal = ModelError(
        "no folder from which weights may be read",
        where="path",
        remedy="Use a folder within one given to --weights-from",
    )
    for root in roots:
        try:
            folder = (root / given).resolve(strict=True)
            inside = any(folder.is_relative_to(each) for each in roots)
            if inside and folder.is_dir():
                _refuse_links(folder, roots, refusal)
                return folder
        # absent, without permission, with a zero byte, links in a circle
        except (OSError, ValueError, RuntimeError):
            continue
    raise refusal


def _refuse_links(folder: Path, roots: Sequence[Path], refusal: UnmaskError) -> None:
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if not any(Path(parent, name).resolve().is_relative_to(root) for root in roots):
                raise refusal


def read_weights(model: ModelEngine, folder: Folder) -> Mapping[str, Tensor]:
    """The weights of a folder, by name, off the memory of its files. ModelError if they are not those of a
    whole model like this one (of such adapters, if it is adapters) in safetensors, or if the folder is not
    allowed, or changes while it is read."""
    before = folder.files()
    weights = (
        _whole_model(model.lm, str(folder.path))
        if model.parent is None
        else read_adapters(model.lm, folder.path)
    )
    if folder.files() != before:
        raise ChangedError(
            "its files changed while they were read",
            where="path",
            remedy="Send it again once they are written",
        )
    return weights


def put_weights(model: ModelEngine, weights: Mapping[str, Tensor]) -> None:
    """Put weights that `read_weights` has read into a model."""
    if model.parent is None:
        model.lm.model.load_state_dict(weights)
    else:
        put_adapters(model.lm, weights)


def _whole_model(lm: DiffusionLM, where: str) -> Mapping[str, Tensor]:
    if (Path(where) / ADAPTER_CONFIG).is_file():  # whose base may lie anywhere
        raise ModelError("holds adapters, not a whole model", where=where, remedy=REMEDY)
    new = load(where, dtype=str(next(lm.model.parameters()).dtype).removeprefix("torch."))
    if differ := differences(model_facts(new), model_facts(lm)):
        raise ModelError(f"another model: {differ}", where=where, remedy=REMEDY)
    for weight in chain(new.model.parameters(), new.model.buffers()):
        weight.data = weight.data.clone()  # else a file that is written now would be what is loaded
    weights: Mapping[str, Tensor] = new.model.state_dict()
    shapes, expected = (
        {name: tuple(w.shape) for name, w in state.items()} for state in (weights, lm.model.state_dict())
    )
    if new.model.config.tie_word_embeddings != lm.model.config.tie_word_embeddings:
        raise ModelError(
            "another architecture: one of the two has a head of its own", where=where, remedy=REMEDY
        )
    if differ := differences(shapes, expected) or differences(expected, shapes):
        raise ModelError(f"another architecture: {differ}"[:300], where=where, remedy=REMEDY)
    return weights
