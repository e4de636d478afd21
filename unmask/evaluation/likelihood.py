"""Log-likelihoods of texts under any DiffusionLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from unmask.data.encoding import encode_completion, encode_prompt
from unmask.data.rows import Column, pad_rows
from unmask.data.sources import load_rows
from unmask.diffusion.likelihood import elbo, exact_log_likelihood
from unmask.diffusion.rng import sequence_key
from unmask.diffusion.views import Draw
from unmask.errors import ConfigError, DataError, GenerationError
from unmask.generation.requests import check_ids
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import evaluating

ROWS_PER_PASS = 128


@torch.no_grad()
def log_likelihood(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[int]],
    estimator: Literal["elbo", "exact"] = "elbo",
    samples: int = 32,
    seed: int = 0,
) -> Tensor:
    """log p(completion | prompt) of each pair, in nats.

    Args:
        prompts: strings, chat messages or lists of token ids.
        completions: strings or lists of token ids; no EOS is added.
        estimator: "elbo": an unbiased estimate of the lower bound (exact-count masks in complementary pairs); "exact": one pass for a
            causal model, otherwise any-order dynamic programming for at most 12 tokens (or blocks of at most 12).
        samples: noised views per pair (elbo).
        seed: of the masks; they depend only on the seed and the pair.

    Returns:
        [B] on the CPU; 0 for an empty completion.

    Raises:
        ConfigError: an unknown estimator, or fewer than one sample.
        GenerationError: the lists have different lengths, a pair exceeds the context, a model with a logit shift has an empty prompt, a
            token id is outside the vocabulary, or an exact likelihood would need groups of more than 12 tokens.
        DataError: a prompt or completion cannot be encoded.
    """
    if estimator not in ("elbo", "exact") or samples < 1:
        what, remedy = f"estimator {estimator!r} with {samples} samples", "Use elbo or exact, and samples >= 1"
        raise ConfigError(what, where="log_likelihood", remedy=remedy)
    if len(prompts) != len(completions):
        what = f"{len(prompts)} prompts and {len(completions)} completions"
        raise GenerationError(what, where="log_likelihood", remedy="Give one completion per prompt")
    pairs = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids = encode_prompt(lm.tokenizer, prompt)
        ids = encode_completion(lm.tokenizer, prompt, completion) if isinstance(completion, str) else list(completion)
        check_ids(lm, [*prompt_ids, *ids], f"pair {index}")
        _check_length(lm, index, len(prompt_ids), len(ids))
        pairs.append((prompt_ids, ids))
    by_length = sorted(range(len(pairs)), key=lambda index: sum(map(len, pairs[index])))
    log_prob_B = torch.zeros(len(pairs), dtype=torch.float64)
    batch_size = max(1, ROWS_PER_PASS // samples)
    with evaluating(lm):
        for start in range(0, len(pairs), batch_size):
            batch = by_length[start : start + batch_size]
            log_prob_B[batch] = _log_probs(lm, [pairs[index] for index in batch], estimator, samples, seed).double().cpu()
    return log_prob_B.to(lm.log_prob_dtype)


def likelihood_of_file(
    lm: DiffusionLM, path: str, rows: int, estimator: Literal["elbo", "exact"] | None, samples: int, seed: int
) -> dict[str, Any]:
    """The result of `unmask evaluate --likelihood` on a file's first documents: the negative log-likelihood of each document's tokens after
    the first, up to the model's context. Without an estimator: exact for a causal model, otherwise the ELBO. Raises DataError if no
    document has two tokens."""
    texts = list(Column(load_rows(path, max_rows=rows), "text", path))
    documents = [ids[: lm.context_length] for ids in (encode_prompt(lm.tokenizer, text) for text in texts) if len(ids) > 1]
    if not documents:
        raise DataError("no document has two tokens or more", where=path, remedy="Give a file with text.")
    estimator = estimator or ("exact" if lm.autoregressive else "elbo")
    log_probs = log_likelihood(lm, [ids[:1] for ids in documents], [ids[1:] for ids in documents], estimator, samples, seed)
    tokens = sum(len(ids) - 1 for ids in documents)
    return {"estimator": estimator, "documents": len(documents), "tokens": tokens, "nats per token": -float(log_probs.sum()) / tokens}


def _log_probs(lm: DiffusionLM, pairs: list[tuple[list[int], list[int]]], estimator: str, samples: int, seed: int) -> Tensor:
    ids_BT = pad_rows([p + c for p, c in pairs], lm.pad_token_id).long().to(lm.device)
    maskable_BT = pad_rows([[False] * len(p) + [True] * len(c) for p, c in pairs], False).bool().to(lm.device)
    real_BT = pad_rows([[1] * (len(p) + len(c)) for p, c in pairs], 0).long().to(lm.device)
    mask_BT = None if real_BT.all() else real_BT
    if estimator == "exact":
        return exact_log_likelihood(lm, ids_BT, mask_BT, maskable_BT, chunk=ROWS_PER_PASS)
    key_B = torch.tensor([sequence_key([*p, -1, *c]) for p, c in pairs], device=lm.device)
    return elbo(lm, ids_BT, mask_BT, maskable_BT, Draw(seed, key_B), samples=samples, chunk=ROWS_PER_PASS)


def _check_length(lm: DiffusionLM, index: int, prompt: int, completion: int) -> None:
    if lm.context_length is not None and prompt + completion > lm.context_length:
        what = f"{prompt} prompt and {completion} completion tokens exceed the context of {lm.context_length}"
        raise GenerationError(what, where=f"pair {index}", remedy="Shorten the prompt or the completion")
    if lm.logit_shift and prompt == 0 and completion:
        raise GenerationError("the prompt is empty", where=f"pair {index}", remedy="Give at least one token (such as BOS)")
