"""The facts in which `unmask serve` and its clients must agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from unmask.models.diffusion_lm import DiffusionLM

OPENAI_NAMES = {name: name for name in ("temperature", "top_p", "seed")}
OPENAI_NAMES |= {"max_new_tokens": "max_tokens", "top_log_probs": "top_logprobs"}
"""OpenAI's names of settings of `SamplerConfig`; the others are fields of `diffusion`."""
SERVER_SETTINGS = ("batch_size", "max_batch_tokens", "deterministic", "agreement_prompts")
"""Settings of `SamplerConfig` that are the server's own, and none of a request."""
OTHER_WEIGHTS = 409  # the status of a request for weights that the server does not hold


def model_facts(lm: DiffusionLM) -> dict[str, Any]:
    """The facts that a server's model must share with the trained one: all but the weights and their
    dtype."""
    vocabulary = json.dumps(sorted(lm.tokenizer.get_vocab().items()))
    return {
        "model_type": lm.config.model_type,
        **lm.settings,
        "vocab_size": lm.vocab_size,
        "context_length": lm.context_length,
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
    }


def differences(facts: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """A description of the facts of a model that are not as expected; empty: all are."""
    return ", ".join(
        f"{name} is {facts.get(name)!r} and not {fact!r}"
        for name, fact in expected.items()
        if facts.get(name) != fact
    )
