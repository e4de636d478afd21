"""The sandbox, the environment variables, and the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import httpx2 as httpx

from unmask.cli.doctor.findings import Finding
from unmask.sandbox.isolation import LAYERS, probe

VARIABLE = re.compile(
    r"(UNMASK|DIFFU|GRPO|HF|HUGGING_?FACE|TRANSFORMERS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|CUDA|NCCL"
    r"|ACCELERATE|OMP|MKL|ATEN|XDG_CACHE)_\w+"
    r"|(\w+_proxy)|CC|CXX|RANK|WORLD_SIZE|LOCAL_RANK|PYTHONPATH",
    re.IGNORECASE,
)
"""The names of variables that change what Unmask does."""
OWN = {"HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TORCH_CPP_LOG_LEVEL"}
"""Those that the command line sets itself (`unmask/cli/quiet.py`)."""
NETWORK_SECONDS = 5.0
"""For each part of a request: to connect, to send, to read."""


def sandbox() -> Iterator[Finding]:
    """A line for each layer, as in `unmask sandbox probe`."""
    host = probe()
    for layer, risk in LAYERS.items():
        missing = layer in host.missing
        yield Finding(
            layer,
            f"missing: {host.missing[layer]}" if missing else "works",
            f"{risk} (docs/sandbox.md)" if missing else "",
        )


def variables() -> Iterator[Finding]:
    """The names alone: values may be secrets."""
    names = sorted(name for name in os.environ if VARIABLE.fullmatch(name) and name not in OWN)
    yield Finding("variables set", ", ".join(names) or "none", "only their names are read" if names else "")
    if "OMP_NUM_THREADS" not in names:
        yield Finding(
            "OMP_NUM_THREADS",
            "not set",
            "torch uses all cores: set it if several programs share this machine",
        )


def offline() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    found = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "HF_HUB_OFFLINE is not set"
    yield Finding(
        "hub", found, "models and data come from files and the hub cache alone" if HF_HUB_OFFLINE else ""
    )


def reach_hub() -> Iterator[Finding]:
    """Whether the hub answers."""
    from huggingface_hub.constants import ENDPOINT

    try:
        status = httpx.head(ENDPOINT, timeout=NETWORK_SECONDS).status_code
    except httpx.HTTPError as error:
        remedy = (
            "without it load models and data by their paths. Behind a proxy: set HTTPS_PROXY; for a "
            "mirror: HF_ENDPOINT"
        )
        yield Finding("network", f"{ENDPOINT} does not answer: {type(error).__name__}", remedy)
        return
    yield Finding("network", f"{ENDPOINT} answers ({status})")
