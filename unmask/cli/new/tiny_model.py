"""The model that stands in for the user's own in a folder of `unmask new`, so that its commands work at once,
without a hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

TINY_MODEL = "tiny-model"


def write_tiny_model(folder: Path, kind: str) -> None:
    """Write a model with random weights to `folder/tiny-model`: 80,000 parameters, whose tokens are the
    characters of ASCII.

    It is causal for `kind` conversion, else bidirectional with a chat template. It is what `character_model`
    makes, but for the random numbers: torch takes seconds to import.
    """
    import numpy as np
    from safetensors.numpy import save_file

    (folder / TINY_MODEL).mkdir(parents=True, exist_ok=True)
    for template in (resources.files("unmask.cli.new") / "templates" / TINY_MODEL).iterdir():
        (folder / TINY_MODEL / template.name).write_text(
            template.read_text(encoding="utf-8"), encoding="utf-8"
        )
    path = folder / TINY_MODEL / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if kind == "conversion":
        config["unmask"] |= {"attention": "causal", "logit_shift": True}
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    rng = np.random.default_rng(0)
    weights = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else rng.normal(0, config["initializer_range"], shape).astype(np.float32)
        for name, shape in shapes(config)
    }
    save_file(weights, folder / TINY_MODEL / "model.safetensors", metadata={"format": "pt"})


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each weight of a Llama with tied embeddings."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield from ((f"{prefix}.self_attn.{name}_proj.weight", (width, width)) for name in "qkvo")
        yield from ((f"{prefix}.mlp.{name}_proj.weight", (inner, width)) for name in ("gate", "up"))
        yield f"{prefix}.mlp.down_proj.weight", (width, inner)
        yield from ((f"{prefix}.{name}_layernorm.weight", (width,)) for name in ("input", "post_attention"))
    yield "model.norm.weight", (width,)
