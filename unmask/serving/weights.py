"""POST /v1/weights: new weights for the model that is served, from folders that the server was started with."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from unmask.errors import ConfigError, DataError, ModelError, UnmaskError
from unmask.generation.remote.protocol import differences, model_facts
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load
from unmask.serving.errors import OpenAIRoute, documented
from unmask.serving.middleware import given_key, keys_match
from unmask.serving.scheduler import Scheduler
from unmask.serving.service import ServiceError

logger = logging.getLogger(__name__)
PATH = "/v1/weights"
REMEDY = "Give a folder that DiffusionLM.save wrote from the same model"


class AdminKeyError(ServiceError):
    """The key for changing the server is wrong or missing."""

    status = 401


class NewWeights(BaseModel):
    """Weights to serve from now on."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(min_length=1, max_length=4096)
    """A folder that `DiffusionLM.save` wrote, within those that the server may read; relative to one of them, or absolute."""
    version: str = Field(min_length=1, max_length=4096)
    """The name of these weights, by which requests may demand them."""


class Served(TypedDict):
    """The name of the weights that are served."""

    version: str | None


def make_router(scheduler: Scheduler, folders: Sequence[Path], admin_key: str) -> APIRouter:
    """The route for new weights. `folders`: those within which they may lie; `admin_key`: what its callers must send."""

    async def check_key(request: Request) -> None:
        if not keys_match(given_key(request.headers.get("authorization", "")), admin_key):
            raise AdminKeyError("the admin key is wrong or missing", where="authorization")

    router, roots = APIRouter(route_class=OpenAIRoute), [folder.resolve() for folder in folders]

    @router.post(PATH, dependencies=[Depends(check_key)], responses=documented(400, 429, 503))
    async def replace_weights(body: NewWeights) -> Served:
        """Serve other weights of the same model, once what runs has finished. A refusal changes nothing."""
        folder = await asyncio.to_thread(allowed_folder, body.path, roots)
        try:
            await scheduler.replace_weights(partial(load_weights, scheduler.lm, folder), body.version)
        except (ConfigError, DataError, ModelError) as error:
            raise ModelError(error.what.replace(str(folder), body.path), where="path", remedy=REMEDY) from error
        except (OSError, RuntimeError) as error:  # of the disk, or of the device
            logger.exception("weights cannot be loaded")
            raise ModelError("they cannot be loaded; the server's log has the cause", where="path", remedy=REMEDY) from error
        return {"version": scheduler.version}

    return router


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


def load_weights(lm: DiffusionLM, folder: Path) -> None:
    """Load the weights of a folder into a model. ModelError if they are not safetensors of a whole model like it, which stays as it was."""
    where = str(folder)
    new = load(where, dtype=str(next(lm.model.parameters()).dtype).removeprefix("torch."))
    if differ := differences(model_facts(new), model_facts(lm)):
        raise ModelError(f"another model: {differ}", where=where, remedy=REMEDY)
    weights = new.model.state_dict()
    shapes, expected = ({name: tuple(w.shape) for name, w in state.items()} for state in (weights, lm.model.state_dict()))
    if differ := differences(shapes, expected) or differences(expected, shapes):
        raise ModelError(f"another architecture: {differ}"[:300], where=where, remedy=REMEDY)
    lm.model.load_state_dict(weights)
