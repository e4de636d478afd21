"""Causal types of transformers compute what their own attention computes, or are refused at load;
docs/models.md lists them."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    StableLmConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.errors import raises
from tests.helpers import REPOSITORY
from tests.models.configurations import ALPHABET, CONFIGURATIONS, GROUPED, HEADS, NAMES, SIZES, random_ids
from unmask.data.characters import character_tokenizer
from unmask.errors import ModelError
from unmask.models import agreement
from unmask.models.agreement import first_position, small_configs
from unmask.models.load import make_diffusion

NARROW = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
MIXED = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2": MIXED,
    "lfm2_moe": MIXED | {"num_dense_layers": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "mamba": NARROW,
    "mamba2": NARROW | {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_mamba": NARROW,
    "rwkv": NARROW | {"attention_hidden_size": 64},
    "xlstm": NARROW | {"num_heads": 4},
    "zamba": NARROW
    | {"num_hidden_layers": 18, "intermediate_size": 64, "num_attention_heads": 4, "n_mamba_heads": 2},
}
"""Of types whose default configuration builds no model, or none with all kinds of layers that they have."""
MOST = 100_000_000
"""Parameters of a model that the table tries; some types are larger however they are made smaller."""
ROWS = {
    "": "all patterns",
    "blocks": "causal and block_causal: recurrent layers",
    "attention is built": "refused: attention is built into its modeling code",
    "none of its layers is attention": "refused: recurrent layers only, no attention",
    "layer ": "refused: layers that ignore the attention mask",
    "read on": "refused: recurrent layers that do not know where a document begins",
    "transformers computes something else: its layers do not": (
        "refused: recurrent layers that do not continue from a state"
    ),
    "transformers computes something else: the logits of a document": (
        "refused: positions do not begin again in packed documents"
    ),
    "transformers computes something else: its logits": "refused: another mask than attention takes",
    "transformers computes something else: it fails": (
        "refused: fails under the attention mask (attention sinks, no way for it)"
    ),
    "not tried": "not tried: cannot be built small",
}
AFTER_PADDING = ", with positions that begin after the padding token's"


def build(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32
    ).eval()


def smallest(name: str) -> PreTrainedModel | None:
    """The smallest model of a type; None: it cannot be built, or is large."""
    for number in range(4):
        try:
            config = CONFIG_MAPPING[name](**SETTINGS.get(name, {}))
            if hasattr(config, "is_decoder"):
                config.is_decoder = True
            if number < 3:
                config = small_configs(config)[number]()
            with torch.device("meta"):
                size = sum(
                    weight.numel()
                    for weight in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters()
                )
            if size <= MOST:
                return build(config)
        except Exception:  # the defaults of a type need not fit one another
            continue
    return None


def row_of(name: str) -> str:
    """The row of the table in which a type belongs."""
    if (model := smallest(name)) is None:
        return ROWS["not tried"]
    try:
        lm = make_diffusion(model, character_tokenizer(ALPHABET))
        if lm.recurrent:
            return ROWS["blocks"]
        return ROWS[""] + (AFTER_PADDING if lm.first_position else "")
    except ModelError as error:
        if error.what.endswith("reads on"):
            return ROWS["read on"]
        return next(row for start, row in ROWS.items() if start and error.what.startswith(start))


def table() -> str:
    rows = defaultdict(list)
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - {"diffusion_gemma"}):  # which Unmask adds
        rows[row_of(name)].append(name)
    lines = [
        f"| {row} | {len(names)} | {'' if row == ROWS['not tried'] else ', '.join(names)} |"
        for row, names in sorted(rows.items(), key=lambda each: -len(each[1]))
    ]
    return "\n".join([f"| with transformers {transformers.__version__} | types | |", "|---|---|---|", *lines])


REFUSED: dict[str, PreTrainedConfig] = {
    "BART's positions": BartConfig(**GROUPED, d_model=16, decoder_ffn_dim=24, is_decoder=True),
    "StableLM": StableLmConfig(**GROUPED),
    "Nemotron": NemotronConfig(**HEADS),
    "an encoder": BertConfig(**SIZES),
    "alibi": BloomConfig(hidden_size=16, n_layer=2, n_head=2, vocab_size=17),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_computes_something_else_is_refused_when_it_is_made(kind):
    model = build(REFUSED[kind])
    with raises(ModelError, where=type(model).__name__) as refused:
        make_diffusion(model, character_tokenizer(ALPHABET))
    assert refused.value.remedy


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_of_these_tests_agrees(name):
    assert first_position(build(CONFIGURATIONS[name])) == 0


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_positions_after_the_padding_token_are_those_of_transformers(padding):
    model = build(RobertaConfig(**SIZES | {"pad_token_id": padding}, is_decoder=True))
    ids_BT = random_ids(2, 8)
    with torch.no_grad():
        expected_BTV = model(ids_BT).logits.log_softmax(-1)
        lm = make_diffusion(model, character_tokenizer(ALPHABET))
        packed_BT, documents_BT = (
            torch.cat([ids_BT[:, 3:6], ids_BT], 1),
            torch.tensor([[1] * 3 + [2] * 8] * 2),
        )
        for logits_BTV in (lm.logits(ids_BT), lm.logits(packed_BT, documents_BT)[:, 3:]):
            found_BTV = logits_BTV[:, 1:, : len(lm.tokenizer) - 1].log_softmax(-1)
            torch.testing.assert_close(found_BTV, expected_BTV[:, :-1], rtol=0, atol=1e-5)
    assert (
        lm.first_position == padding + 1
        and lm.context_length == SIZES["max_position_embeddings"] - padding - 1
    )


def test_a_window_that_is_not_obeyed_is_noticed(monkeypatch):
    config = MistralConfig(**HEADS, sliding_window=11)
    monkeypatch.setattr(agreement, "found_positions", {})
    assert first_position(build(config)) == 0
    agreement.found_positions.clear()
    monkeypatch.setattr("unmask.models.attention.AttentionMask.within", lambda mask, window: mask)
    with raises(ModelError, where="MistralForCausalLM"):
        first_position(build(config))


def test_a_copy_is_small_and_is_tried_once(monkeypatch):
    """The sizes are those of models with 8 and 70 billion parameters."""
    tried: list[int] = []
    small_model = agreement.small_model

    def counted(*given: Any) -> PreTrainedModel:
        model = small_model(*given)
        tried.append(sum(weight.numel() for weight in model.parameters()))
        return model

    monkeypatch.setattr(agreement, "small_model", counted)
    monkeypatch.setattr(agreement, "found_positions", {})
    eight = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    large = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        models = [AutoModelForCausalLM.from_config(each) for each in (eight, large, eight)]
    state = torch.random.get_rng_state()
    assert [first_position(model) for model in models] == [0, 0, 0]
    assert len(tried) == 2 and max(tried) < 2_000_000
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_table_of_types_is_the_one_in_the_docs():
    text = (REPOSITORY / "docs/models.md").read_text(encoding="utf-8")
    if f"with transformers {transformers.__version__} " not in text:
        pytest.skip("the table is of another version of transformers")
    assert (found := table()) in text, found
