"""Drafts of mode self-speculative, read by a causal model on a vLLM server: the `prompt_logprobs` of the
texts that end in them.

Shapes: B sequences of a pass, J nodes of the tree of drafts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from unmask.config.sampler import SamplerConfig
from unmask.generation.engine.slots import SpeculativeEntry
from unmask.generation.remote.vllm_client import RemoteLM
from unmask.generation.speculation import Tree
from unmask.models.diffusion_lm import DiffusionLM

AT_ONCE = 64  # requests


def server_logits(
    server: RemoteLM,
    lm: DiffusionLM,
    ids_BT: Sequence[Sequence[int]],
    entries: Sequence[SpeculativeEntry],
    tree: Tree,
    config: SamplerConfig,
) -> Tensor:
    """The log-probabilities [B, J, V] of the token after each node, as the server gives them.

    Greedy decoding needs the likeliest tokens alone; the rest of the probability is spread evenly over the
    others. Sampling needs all.

    Args:
        ids_BT: the sequences.

    Raises:
        GenerationError: the server gives too few log-probabilities, or it refuses or does not answer.
    """
    banned = len({lm.mask_token_id, *(config.forbidden_tokens or ())})
    greedy = config.temperature == 0 and not config.allowed_tokens and not config.trace  # entropies need all
    texts, places = [], []
    for member, (ids, entry) in enumerate(zip(ids_BT, entries, strict=True)):
        drafts, leaves = entry.draft_G.tolist(), leaves_of(tree, len(entry.draft_G) + 1)
        for path in leaves:
            nodes = [0, *path]
            after = [drafts[node - 1] for node in path]
            text, place = (
                [*ids[: entry.base], *after],
                [(member, node, entry.base + depth) for depth, node in enumerate(nodes)],
            )
            if len(text) < entry.length:
                text.append(ids[0])  # whose own log-probability is not read
            texts.append(text)
            places.append(place[: len(text) - entry.base])
    with ThreadPoolExecutor(min(AT_ONCE, len(texts))) as pool:
        answers = list(
            pool.map(lambda text: server.prompt_log_probs(text, 1 + banned if greedy else -1), texts)
        )
    widest = 1 + max(len(entry.draft_G) for entry in entries)
    out_BJV = torch.zeros(len(entries), widest, lm.vocab_size, dtype=lm.log_prob_dtype)
    for answer, place in zip(answers, places, strict=True):
        for member, node, position in place:
            out_BJV[member, node] = distribution(answer[position], out_BJV.shape[2], lm.never_predicted).to(
                out_BJV.dtype
            )
    return out_BJV.to(lm.device)


def leaves_of(tree: Tree, count: int) -> list[list[int]]:
    """The paths from the first draft to each leaf, in the tree of the first `count` nodes; one empty path
    without drafts."""
    inside = [[child for child in children if child < count] for children in tree.children[:count]]
    return [
        tree.path_JJ[node, :count].nonzero().flatten().tolist() for node in range(count) if not inside[node]
    ]


def distribution(known: Mapping[int, float], vocabulary: int, never: Collection[int]) -> Tensor:
    """Log-probabilities [V] of all tokens, of which some are known: what is left is spread evenly over the
    others, and some are never written. A server's model may have more rows than tokens: they are left out.
    Not normalized if those have a probability."""
    inside = {
        token: log_prob for token, log_prob in known.items() if token < vocabulary and token not in never
    }
    rest = max(0.0, 1.0 - sum(map(math.exp, known.values())))
    others = vocabulary - len({*inside, *never})
    out_V = torch.full((vocabulary,), rest / others if others else 0.0, dtype=torch.float64).log()
    out_V[list(inside)] = torch.tensor(list(inside.values()), dtype=torch.float64)
    for token in never:
        out_V[token] = -torch.inf
    return out_V
