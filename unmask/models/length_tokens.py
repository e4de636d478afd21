"""Two tokens by which a model says how long a gap is (DreamOn, Wu et al. 2026, arXiv 2602.01326): at a hidden
position it may predict that this becomes two hidden positions (expand), or none (delete).

A position that may do so is open. It shows the expand token where others show the mask token, so that the
model knows what is still to be decided; the gaps in other texts have a length, and are read as ever. Except
while a gap of unknown length is filled or trained, both tokens are never predicted.
"""

from __future__ import annotations

import copy

import torch

from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import with_pattern

EXPAND_TOKEN, DELETE_TOKEN = "<|expand|>", "<|delete|>"


@torch.no_grad()
def add_length_tokens(lm: DiffusionLM) -> DiffusionLM:
    """A bidirectional model with both tokens, which are added to tokenizer and embeddings in place unless
    they are there. New embeddings start as the mean of the others, that of the expand token, which positions
    show, as the mask token's."""
    if lm.expand_token_id is not None:
        return lm
    known = lm.tokenizer.get_vocab()
    lm.tokenizer.add_special_tokens(
        {"extra_special_tokens": [EXPAND_TOKEN, DELETE_TOKEN]}, replace_extra_special_tokens=False
    )
    expand, delete = lm.tokenizer.convert_tokens_to_ids([EXPAND_TOKEN, DELETE_TOKEN])
    rows = lm.model.get_input_embeddings().weight.shape[0]
    if max(expand, delete) >= rows:
        lm.model.resize_token_embeddings(max(expand, delete) + 1, mean_resizing=False)
    new = [
        number
        for token, number in ((EXPAND_TOKEN, expand), (DELETE_TOKEN, delete))
        if token not in known or number >= rows
    ]
    others = [number for number in range(rows) if number not in (expand, delete)]
    inputs, outputs = (
        table.weight for table in (lm.model.get_input_embeddings(), lm.model.get_output_embeddings())
    )
    for weight in (inputs, outputs):
        weight[new] = weight[others].mean(0)
    if expand in new:
        inputs[expand] = inputs[lm.mask_token_id]
    return with_pattern(
        lm, lm.attention, logit_shift=lm.logit_shift, expand_token_id=expand, delete_token_id=delete
    )


def predicting_lengths(lm: DiffusionLM) -> DiffusionLM:
    """The same model, which also predicts its expand and delete tokens."""
    predicting = copy.copy(lm)
    predicting.never_predicted = (lm.mask_token_id,)
    return predicting
