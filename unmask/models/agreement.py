"""Whether a model computes under Unmask's attention what it computes under its own, tried on a small copy of
its architecture.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PretrainedConfig, PreTrainedModel

from unmask.config.run import AttentionName
from unmask.errors import ModelError, UnmaskError, first_line
from unmask.models.attention import ATTENTION_NAME, Layout, make_mask
from unmask.models.compiled import description
from unmask.models.recurrent import read_in_blocks, recurrent_layers

LENGTH, WINDOW, VOCABULARY, WIDTH, EXPERTS, BLOCK = 9, 4, 32, 16, 4, 4
"""Sizes of the row and of the small copy: tokens, sliding windows, vocabulary, MLPs, experts, and blocks
for recurrent layers."""
TOLERANCE = 1e-2
"""The tolerance for float32 logits, in their standard deviations. Another mask or position changes them by
tens of this, rounding by a thousandth."""
REMEDY = "Use a model of a type that docs/models.md lists"
INNER = re.compile(r".*intermediate_size|.*ffn_dim|ffn_hidden_size|n_inner|mlp_hidden_size")
MANY = re.compile(r"num_.*experts|n_routed_experts|moe_num_experts")
CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k|num_selected_experts")
GROUPS = re.compile(r"n_group|num_expert_group|topk_group")
STATES = re.compile(r"mamba_(d_head|head_?dim|d_ssm)")
HEADS = re.compile(r".*attention_heads|n_head|num_heads")
found_positions: dict[tuple[type, str], str | int] = {}
"""What `first_position` found for each type and configuration: the position, or what differs."""


def first_position(model: PreTrainedModel) -> int:
    """The number that this model gives to the first position of a text: 0, or that after the padding token's
    (RoBERTa).

    Raises:
        ModelError: with either it would compute something else than transformers. What was found is kept for
            its configuration.
    """
    key = (type(model), description(model.config))
    if key not in found_positions:
        with (
            unset_fake_temporarily(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            found_positions[key] = _try(type(model), model.config)
    if isinstance(found := found_positions[key], str):
        raise ModelError(
            f"transformers computes something else: {found}", where=type(model).__name__, remedy=REMEDY
        )
    return found


def _try(kind: type[PreTrainedModel], config: PretrainedConfig) -> str | int:
    """The first position, or what differs. Small sizes may not fit one another; what the last copy raises is
    taken for the model's."""
    error = ""
    for change in small_configs(config):
        try:
            model = small_model(kind, change())
            found, (padding, there) = (
                _differs(model, 0),
                (each.get_text_config().pad_token_id for each in (model.config, config)),
            )
            return (
                there + 1
                if found and padding is not None and _differs(model, padding + 1) is None
                else found or 0
            )
        except Exception as raised:  # user code: modeling code raises anything
            what = (
                raised.what
                if isinstance(raised, UnmaskError)
                else f"{type(raised).__name__}: {first_line(raised)}"
            )
            error = f"it fails under Unmask's attention mask ({what})"
    return error


def small_model(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model with large random weights, the same at each call."""
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")  # fused ones need other widths
    for weight in model.parameters():
        if weight.dim() > 1 and weight.numel():  # no shared experts have no width
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return model


def _differs(model: PreTrainedModel, first: int) -> str | None:
    """What such a model does otherwise under Unmask's attention, on a row that is longer than its windows;
    None: nothing."""
    ids_BT = torch.randint(3, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation("eager")
    expected_BTV = model(input_ids=ids_BT, use_cache=False).logits
    model.set_attn_implementation(ATTENTION_NAME)
    recurrent = read_in_blocks(model)

    def close(ids_BT: Tensor, documents_BT: Tensor, copies: int = 0) -> bool:
        found_BTV = logits(ids_BT, documents_BT, copies=copies)[:, -LENGTH:]
        return torch.allclose(found_BTV, expected_BTV, rtol=0, atol=TOLERANCE * float(expected_BTV.std()))

    def logits(
        ids_BT: Tensor, documents_BT: Tensor, pattern: AttentionName = "causal", copies: int = 0
    ) -> Tensor:
        layout = Layout.of(documents_BT).with_noised_copies(copies)
        mask = make_mask(pattern, None, layout, layout)
        if recurrent:
            mask = replace(mask, recurrence=layout.recurrence(BLOCK, copies))
        return model(
            input_ids=ids_BT, position_ids=layout.position_BT + first, use_cache=False, unmask_mask=mask
        ).logits

    alone_BT = torch.ones_like(ids_BT)
    if not close(ids_BT, alone_BT):
        return "its logits are not those of its own attention"
    if not close(torch.cat([ids_BT[:, :3], ids_BT], 1), torch.cat([alone_BT[:, :3], alone_BT + 1], 1)):
        what = "the logits of a document depend on the one that is packed before it"
        layers = [
            f": layer {each.layer_idx} ({type(each).__name__}) reads on" for each in recurrent_layers(model)
        ]
        return what + "".join(layers[:1])
    if recurrent:
        both_BT = torch.cat([ids_BT, ids_BT], 1)
        return None if close(both_BT, alone_BT, copies=1) else "its layers do not continue from a state"
    other_BT = torch.cat([ids_BT[:, :-1], ids_BT[:, :1]], 1)
    if ids_BT[0, 0] != ids_BT[0, -1] and torch.equal(
        *(logits(each, alone_BT, "bidirectional")[:, :1] for each in (ids_BT, other_BT))
    ):
        return "its layers read from left to right under any mask"
    return None


def small_configs(config: PretrainedConfig) -> list[Callable[[], Any]]:
    """Makers of copies with a small vocabulary and small windows, the smallest copy first."""
    return [
        partial(_small, config, few=few, narrow=narrow)
        for few, narrow in ((True, True), (False, True), (True, False))
    ]


def _small(config: PretrainedConfig, *, few: bool, narrow: bool) -> PretrainedConfig:
    """`few`: with the first layers, as many as show all kinds. `narrow`: with fewer heads of the same width,
    and narrow MLPs."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None)
    kept = min(layers, max(2, 1 + max(map(kinds.index, set(kinds)))) if kinds else 2) if few else layers
    heads, width = text.num_attention_heads, text.hidden_size
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    key_divisor = key_heads // _factor(key_heads)
    divisor = heads // (_factor(key_heads) * _factor(heads // key_heads))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers > 1:
            setattr(text, name, [WIDTH] * kept if INNER.fullmatch(name) else value[:kept])
        elif name == "num_kv_shared_layers" and few:  # they read the keys of layers that are left out
            setattr(text, name, 0)
        elif name.endswith("_token_id"):
            setattr(text, name, min(value, 2) if isinstance(value, int) else None)
        elif name.startswith("vocab_size"):
            setattr(text, name, VOCABULARY)
        elif "window" in name and isinstance(value, int) and not isinstance(value, bool):
            setattr(text, name, min(value, WINDOW))
        elif narrow and isinstance(value, int) and not isinstance(value, bool):
            if INNER.fullmatch(name):
                value = WIDTH
            elif MANY.fullmatch(name) or CHOSEN.fullmatch(name):
                value = min(value, EXPERTS if MANY.fullmatch(name) else 2)
            elif GROUPS.fullmatch(name):
                value = 1
            elif name == "num_key_value_heads":
                value //= key_divisor
            elif HEADS.fullmatch(name) or STATES.fullmatch(name) or (value and value % width == 0):
                value //= divisor
            setattr(text, name, value)
    text.num_hidden_layers = kept
    for part in vars(config).values():
        # it reads images
        if isinstance(part, PretrainedConfig) and part is not text and "num_hidden_layers" in vars(part):
            setattr(part, "num_hidden_layers", 1)  # noqa: B010 (not of every config)
    return config


def _factor(number: int) -> int:
    """The least factor of a number above 1, or 1."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 1)
