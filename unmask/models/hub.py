"""Uploads to the hub."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from transformers.utils.hub import hf_api

EARLIER = [
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
]
"""Weights that an upload replaces as a whole: a merged model also replaces adapters, and fewer shards all."""


def upload_model(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> CommitInfo | Future[CommitInfo]:
    """Upload the folder of a model or of adapters as a repository's whole model. `revision`: a branch, which
    is created if need be; `options`: of `huggingface_hub.upload_folder`."""
    if revision is not None and not revision.startswith("refs/pr"):
        hf_api().create_branch(repo_id, branch=revision, token=token, exist_ok=True)
    return hf_api().upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=revision,
        token=token,
        delete_patterns=EARLIER,
        **options,
    )
