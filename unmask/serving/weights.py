"""POST /v1/weights: new weights for a model that is served, from folders that the server was started with."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from unmask.errors import ConfigError, DataError, ModelError, UnmaskError
from unmask.generation.remote.protocol import differences, model_facts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.models.stored_adapters import REMEDY as ADAPTERS_REMEDY
from unmask.models.stored_adapters import replace_adapters
from unmask.serving.errors import OpenAIRoute
from unmask.serving.middleware import given_key, keys_match
from unmask.serving.model_engine import ModelEngine
from unmask.serving.openai.models import find_model
from unmask.serving.scheduler import Scheduler
from unmask.serving.service import ServiceError

logger = logging.getLogger(__name__)
PATH = "/v1/weights"
REMEDY = "Give a folder that DiffusionLM.save wrote from the same model"
Files = list[tuple[str, int, int, int, int]]


class AdminKeyError(ServiceError):
    """The key for changing the server is wrong or missing."""

    status = 401


class NewWeights(BaseModel):
    """Weights to serve from now on."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=4096)
    """The model that gets them: a name that `/v1/models` lists."""
    path: str = Field(min_length=1, max_length=4096)
    """A folder that `DiffusionLM.save` wrote, or one with adapters for a model that is adapters, within those that the server may read;
    relative to one of them, or absolute."""
    version: str = Field(min_length=1, max_length=4096)
    """The name of these weights, by which requests may demand them."""


class Served(TypedDict):
    """The name of the weights that the model serves."""

    version: str | None


def make_router(scheduler: Scheduler, folders: Sequence[Path], admin_key: str) -> APIRouter:
    """The route for new weights. `folders`: those within which they may lie; `admin_key`: what its callers must send."""

    async def check_key(request: Request) -> None:
        if not keys_match(given_key(request.headers.get("authorization", "")), admin_key):
            raise AdminKeyError("the admin key is wrong or missing", where="authorization")

    router, roots = APIRouter(route_class=OpenAIRoute), [folder.resolve() for folder in folders]

    @router.post(PATH, dependencies=[Depends(check_key)])
    async def replace_weights(body: NewWeights) -> Served:
        """Serve other weights of the same model, once what runs of it has finished. A refusal changes nothing."""
        model = find_model(scheduler.models, body.model)
        refuse_shared(model, scheduler)
        folder = await asyncio.to_thread(allowed_folder, body.path, roots)
        change, remedy = (load_weights, REMEDY) if model.parent is None else (load_adapters, ADAPTERS_REMEDY)
        try:
            await scheduler.replace_weights(body.model, partial(change, model.lm, folder, roots), body.version)
        except (ConfigError, DataError, ModelError) as error:
            raise ModelError(error.what.replace(str(folder), body.path), where="path", remedy=remedy) from error
        except (OSError, RuntimeError) as error:  # of the disk, or of the device
            logger.exception("weights cannot be loaded")
            raise ModelError("they cannot be loaded; the server's log has the cause", where="path", remedy=remedy) from error
        return {"version": model.version}

    return router


def refuse_shared(model: ModelEngine, scheduler: Scheduler) -> None:
    """Raise ModelError for a model on whose weights adapters are: they would be others, too."""
    if adapters := [other.name for other in scheduler.models.values() if other.parent == model.name]:
        what = f"the adapters {', '.join(adapters)} are on the weights of {model.name!r}"
        raise ModelError(what, where="model", remedy="Replace adapters, or start a server without them")


def allowed_folder(given: str, roots: Sequence[Path]) -> Path:
    """The folder of this name within one of the roots. Raises ModelError if it is not one, or if a link in it leads out of them; what
    lies elsewhere is not told from what does not exist."""
    refusal = ModelError("no folder from which weights may be read", where="path", remedy="Use a folder within one given to --weights-from")
    for root in roots:
        try:
            folder = (root / given).resolve(strict=True)
            inside = any(folder.is_relative_to(each) for each in roots)
            if inside and folder.is_dir():
                _refuse_links(folder, roots, refusal)
                return folder
        except (OSError, ValueError, RuntimeError):  # absent, without permission, with a zero byte, links in a circle
            continue
    raise refusal


def _refuse_links(folder: Path, roots: Sequence[Path], refusal: UnmaskError) -> None:
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if not any(Path(parent, name).resolve().is_relative_to(root) for root in roots):
                raise refusal


def load_weights(lm: DiffusionLM, folder: Path, roots: Sequence[Path]) -> None:
    """Load the weights of a folder within the roots into a model. ModelError if they are not safetensors of a whole model like it, or if
    the folder is not allowed or changes while it is read; the model then stays as it was."""
    where, before = str(folder), _files(folder, roots)
    new = load(where, dtype=str(next(lm.model.parameters()).dtype).removeprefix("torch."))
    if differ := differences(model_facts(new), model_facts(lm)):
        raise ModelError(f"another model: {differ}", where=where, remedy=REMEDY)
    for weight in chain(new.model.parameters(), new.model.buffers()):
        weight.data = weight.data.clone()  # else a file that is written now would be what is loaded
    weights = new.model.state_dict()
    shapes, expected = ({name: tuple(w.shape) for name, w in state.items()} for state in (weights, lm.model.state_dict()))
    if differ := differences(shapes, expected) or differences(expected, shapes):
        raise ModelError(f"another architecture: {differ}"[:300], where=where, remedy=REMEDY)
    _check_unchanged(before, folder, roots)
    lm.model.load_state_dict(weights)


def load_adapters(lm: DiffusionLM, folder: Path, roots: Sequence[Path]) -> None:
    """Load the adapters of a folder within the roots into a model that has such ones. ModelError as of `replace_adapters` and
    `load_weights`; the model then stays as it was."""
    before = _files(folder, roots)
    replace_adapters(lm, folder, check=lambda: _check_unchanged(before, folder, roots))


def _check_unchanged(before: Files, folder: Path, roots: Sequence[Path]) -> None:
    if _files(folder, roots) != before:
        raise ModelError("its files changed while they were read", where=str(folder), remedy="Send it again once they are written")


def _files(folder: Path, roots: Sequence[Path]) -> Files:
    """What lies in a folder now: of each file, and of what a link leads to, the inode, the size, and when it changed last, which no program
    can set. Raises ModelError if the folder is not allowed."""
    if allowed_folder(str(folder), roots) != folder:
        raise ModelError("it was moved", where=str(folder), remedy=REMEDY)
    inside = [Path(parent, name) for parent, folders, files in os.walk(folder) for name in [*folders, *files]]
    found = [(path, state) for path in sorted([folder, *inside]) for state in (path.lstat(), path.stat())]
    return [(str(path), state.st_dev, state.st_ino, state.st_size, state.st_ctime_ns) for path, state in found]
