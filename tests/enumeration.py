"""Likelihoods from their definitions, slowly: of a model so small that its sequences, masks and orders can be
listed.

The expectation of a plan of views is computed exactly: the plan itself runs on a list of all the random numbers
that matter (`Listed`).

Shapes: T tokens, L tokens of one group, S = 2^L sets of hidden tokens of it, N listed cases, M views.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.tiny import TOY_VOCABULARY, toy_lm
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.rng import RngStream
from unmask.diffusion.views import Views
from unmask.models.diffusion_lm import DiffusionLM

PROMPT, LENGTH = 2, 5  # of the row whose tables are known

Tables = list[tuple[list[int], Tensor]]
"""Of each group of tokens that are noised together its positions and its conditionals."""


def random_row(length: int, seed: int = 0) -> Tensor:
    return torch.randint(TOY_VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))


def groups(lm: DiffusionLM, start: int, stop: int) -> list[list[int]]:
    """The positions start..stop-1 by attention block, of a row that begins at position 0."""
    block = {"bidirectional": stop, "causal": 1}.get(lm.attention, lm.block_size)
    return [
        list(members)
        for _, members in itertools.groupby(range(start, stop), key=lambda position: position // block)
    ]


@torch.no_grad()
def conditionals(lm: DiffusionLM, row_T: Tensor, positions: Sequence[int]) -> Tensor:
    """[S, L]: log p(token of position i | all but the hidden ones), bit i of the row number says whether it
    is hidden; else 0.

    In a model by blocks nothing that comes after the block of these positions is there yet.
    """
    count = len(positions)
    stop = len(row_T) if lm.attention == "bidirectional" else positions[-1] + 1
    if lm.attention == "block_causal":
        stop = min(len(row_T), (positions[-1] // lm.block_size + 1) * lm.block_size)
    hidden_SL = torch.arange(2**count)[:, None] >> torch.arange(count) & 1 == 1
    noisy_ST = row_T[:stop].repeat(2**count, 1)
    noisy_ST[:, positions] = torch.where(hidden_SL, lm.mask_token_id, row_T[positions])
    is_hidden_ST = torch.zeros_like(noisy_ST, dtype=torch.bool)
    is_hidden_ST[:, positions] = hidden_SL
    log_prob_STV = lm.logits(noisy_ST, hidden_BT=is_hidden_ST).log_softmax(-1)
    return (
        log_prob_STV[:, positions].gather(2, row_T[positions].expand(2**count, count)[..., None]).squeeze(2)
        * hidden_SL
    )


def lower_bound(table_SL: Tensor) -> float:
    """The ELBO: the sum over k of 1/k times the mean, over the sets of k hidden tokens, of their summed
    log-probabilities."""
    count = table_SL.shape[1]
    sets = [
        sum(1 << i for i in chosen)
        for k in range(1, count + 1)
        for chosen in itertools.combinations(range(count), k)
    ]
    return sum(table_SL[s].sum().item() / s.bit_count() / math.comb(count, s.bit_count()) for s in sets)


def any_order(table_SL: Tensor) -> float:
    """The log of the mean over all orders of revealing the tokens of the product of conditionals."""
    count = table_SL.shape[1]
    orders = []
    for order in itertools.permutations(range(count)):
        left = [sum(1 << i for i in order[place:]) for place in range(count)]
        orders.append(sum(table_SL[hidden, i] for hidden, i in zip(left, order, strict=True)))
    return (torch.stack(orders).logsumexp(0) - math.log(len(orders))).item()


def tables_of(kind: str) -> tuple[Tensor, Tables]:
    """The groups of a completion under a toy: their row of group numbers, and (positions, conditionals) of
    each."""
    lm = toy_lm(kind)
    row = random_row(PROMPT + LENGTH, seed=3)
    maskable = (torch.arange(PROMPT + LENGTH) >= PROMPT)[None]
    tables = [
        (positions, conditionals(lm, row, positions)) for positions in groups(lm, PROMPT, PROMPT + LENGTH)
    ]
    return noise_groups(lm, maskable, None), tables


def bound_of(tables: Tables) -> float:
    """Their ELBO."""
    return sum(lower_bound(table) for _, table in tables)


def estimates(views: Views, tables: Tables) -> Tensor:
    """The weighted score of every view [N, V], by looking the conditionals up."""
    total = torch.zeros(views.hidden_BMT.shape[:2], dtype=torch.float64)
    for positions, table in tables:
        sets = (views.hidden_BMT[..., positions] * 2 ** torch.arange(len(positions))).sum(-1)
        total += (views.weight_BMT[..., positions].double() * table[sets]).sum(-1)
    return total


class Listed:
    """A Draw whose numbers are given: one time for all groups and views, and one row of noise."""

    def __init__(self, time_N: Tensor, noise_NT: Tensor):
        self.time_N, self.noise_NT, self.rows_before_B = time_N, noise_NT, None
        self.key_B = torch.arange(len(noise_NT))

    def per_sequence(self, views: int, stream: RngStream) -> Tensor:
        return self.time_N[:, None].expand(-1, views)

    def uniform(self, position_BT: Tensor, views: int, stream: RngStream) -> Tensor:
        shape = (len(position_BT), views, position_BT.shape[1])
        return (self.noise_NT[:, None] if stream == RngStream.MASK else self.time_N[:, None, None]).expand(
            shape
        )


def listed_counts(width: int) -> Listed:
    """Every order of the tokens, at the middles of sixty equal stretches of time: all that plans of exact
    counts depend on.

    Within the stretches their numbers are constant, for up to six counts at random.
    """
    orders = list(itertools.permutations(range(LENGTH)))
    stretches = math.lcm(1, 2, 3, 4, 5)
    time_N = torch.tensor(
        [(stretch + 0.5) / stretches for stretch in range(stretches) for _ in orders], dtype=torch.float64
    )
    noise_NT = torch.zeros(len(time_N), width, dtype=torch.float64)
    noise_NT[:, PROMPT:] = (torch.tensor(orders * stretches) + 0.5) / LENGTH
    return Listed(time_N, noise_NT)
