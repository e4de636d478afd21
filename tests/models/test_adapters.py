"""Merged adapters compute what the adapted model does, over PEFT's kinds, tied or not; what cannot be merged
is refused before training."""

from __future__ import annotations

import copy
import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    ElectraConfig,
    GPTBigCodeConfig,
    ModernBertDecoderConfig,
    PhimoeConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from tests.errors import raises
from tests.helpers import REPOSITORY, each_once, partly_slow
from tests.models.configurations import (
    ALPHABET,
    CONFIGURATIONS,
    GROUPED,
    HYBRIDS,
    LAYERS,
    SHARED,
    SIZES,
    tiny_lm,
)
from tests.tiny import llama_lm
from tests.training.tiny_runs import TEXTS, equal, prepared, settings, weights
from unmask.convert.config import ConvertConfig
from unmask.convert.trainer import ConvertTrainer
from unmask.data.characters import character_tokenizer
from unmask.errors import ConfigError
from unmask.models.adapters import add_adapters, merged, with_adapters
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import load, make_diffusion
from unmask.models.recurrent import recurrent_layers
from unmask.planning.blueprint import is_tied

PLACES: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "table": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "DoRA of the table": {"target_modules": ["embed_tokens", "down_proj"], "use_dora": True},
    "parameters": {"target_modules": [], "target_parameters": ["embed_tokens.weight"]},
    "the whole table": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "the whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "both whole, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "rows of the table": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 6]}},
    "rows of the head": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [5, 6]}},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
}
IDS_BT = torch.randint(3, 11, (2, 9), generator=torch.Generator().manual_seed(2))
STAY_TIED = {"attention", "both whole, tied", "rows", "rows of the table", "biases"}
"""Those that change table and head alike; PEFT trains the same rows of both."""
UNMERGEABLE: dict[str, dict[str, Any]] = {
    "of an invocation": {"alora_invocation_tokens": [5]},
    "with a bias for layers without": {"lora_bias": True},
    "of replicated layers": {"layer_replication": [(0, 1), (0, 2)]},
}
MODELS: dict[str, PreTrainedConfig] = {
    **{name: config for name, config in CONFIGURATIONS.items() if not name.endswith("_windows")},
    "bert": BertConfig(**SIZES, is_decoder=True),
    "roberta": RobertaConfig(**SIZES, is_decoder=True),
    "electra": ElectraConfig(**SIZES, embedding_size=8, is_decoder=True),
    "gpt_bigcode": GPTBigCodeConfig(n_embd=16, n_layer=LAYERS, n_head=4, n_positions=64, **SHARED),
    "modernbert": ModernBertDecoderConfig(**SIZES),
}
"""All are tied in the test: by default, or because their configuration says so."""
ON_MODELS: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "table": {"target_modules": ["TABLE"]},
    "head": {"target_modules": ["HEAD"]},
    "the whole table": {"modules_to_save": ["TABLE"]},
    "the whole head": {"modules_to_save": ["HEAD"]},
    "all around the head": {"modules_to_save": ["AROUND"]},
    "both whole, tied": {"modules_to_save": ["TABLE"], "ensure_weight_tying": True},
    "all around the head, tied": {"modules_to_save": ["AROUND"], "ensure_weight_tying": True},
    "the whole head, tied": {"modules_to_save": ["HEAD"], "ensure_weight_tying": True},
    "table, tied": {"target_modules": ["TABLE"], "ensure_weight_tying": True},
    "rows": {"trainable_token_indices": [5, 6]},
    "row of the mask": {"trainable_token_indices": ["MASK"], "ensure_weight_tying": True},
    "rows, tied": {"trainable_token_indices": [5, 6], "ensure_weight_tying": True},
}
"""Adapters, with TABLE and so on for the names that a model gives to them; AROUND is the outermost module
that holds the head."""
SETTINGS = {  # of kinds whose defaults do not fit tiny layers
    "OFT": {"r": 0, "oft_block_size": 4},
    "BOFT": {"boft_block_size": 4},
    "FOURIERFT": {"n_frequency": 8},
    "WAVEFT": {"n_frequency": 8},
    "ADALORA": {"total_step": 10},
    "C3A": {"block_size": 4},
    "ROAD": {"group_size": 4},
    "VBLORA": {"vector_length": 4, "num_vectors": 16},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6]},
    "IA3": {"feedforward_modules": []},
}

KINDS = sorted(each.value for each in peft.PeftType)
REASONS = {
    "change what the model reads": "change what the model reads, not its weights",
    "cannot be merged": "PEFT cannot merge them into the weights",
}
"""Why kinds are refused: the table's words, by those of the error."""


def lora(**settings: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings)


def of_kind(kind: str, **settings: Any) -> peft.PeftConfig:
    """The config of any kind, with what it takes of these settings."""
    config_class = next(each for name, each in PEFT_TYPE_TO_CONFIG_MAPPING.items() if name.value == kind)
    taken = {field.name for field in dataclasses.fields(config_class)}
    every = {"task_type": "CAUSAL_LM", "r": 2, "num_virtual_tokens": 2, **settings, **SETTINGS.get(kind, {})}
    return config_class(**{name: value for name, value in every.items() if name in taken})


def moved(lm: DiffusionLM) -> DiffusionLM:
    """The model in eval mode, with all that is trained moved at random."""
    lm.model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in lm.model.parameters():
            if weight.requires_grad:
                weight += 0.1 * torch.randn(weight.shape, generator=generator).to(weight)
    return lm


def log_probs(lm: DiffusionLM) -> torch.Tensor:
    """Of all tokens but those that are never predicted, at some positions, which only the head of these rows
    computes."""
    rows_BT = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    with torch.no_grad():
        logits = lm.logits(IDS_BT, rows_BT=rows_BT)
    return logits[:, torch.isfinite(logits[0])].log_softmax(-1)


def check_saved(lm: DiffusionLM, folder: Path) -> DiffusionLM:
    """The saved and loaded model, which computes as the one in memory; that is unchanged by it."""
    before = log_probs(lm)
    merged(lm).save(folder)
    loaded = load(folder, dtype=str(lm.dtype).removeprefix("torch."))
    torch.testing.assert_close(log_probs(loaded), before, rtol=0, atol=1e-5)
    assert torch.equal(log_probs(lm), before)
    return loaded


# of an untied model
@pytest.mark.filterwarnings("ignore:You have requested .ensure_weight_tying.:UserWarning")
@each_once("place, tied", PLACES, [True, False])
def test_the_saved_model_is_the_trained_one(place, tied, tmp_path):
    lm = llama_lm(tie_word_embeddings=tied)
    start = log_probs(lm)
    lm.save(tmp_path / "base")
    adapted = moved(with_adapters(load(tmp_path / "base"), lora(**PLACES[place])))
    adapted.save(tmp_path / "adapters")
    assert torch.equal(log_probs(load(tmp_path / "adapters")), log_probs(adapted))
    assert (log_probs(adapted) - start).abs().max() > 1e-3
    assert is_tied(check_saved(adapted, tmp_path / "merged").model) == (tied and place in STAY_TIED)


def tied_lm(name: str) -> DiffusionLM:
    config = copy.deepcopy(MODELS[name])
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            # new ones are zero, so that leaving one out would change nothing
            if weight_name.endswith("bias"):
                weight.normal_(0, 0.3)
    return make_diffusion(model, character_tokenizer(ALPHABET), attention="bidirectional")


def on_model(lm: DiffusionLM, place: str) -> dict[str, Any]:
    """The settings of adapters, with the model's own names."""
    names = {module: name.split(".") for name, module in lm.model.named_modules()}
    table, head = names[lm.model.get_input_embeddings()], names[lm.model.get_output_embeddings()]
    own = {"TABLE": table[-1], "HEAD": head[-1], "AROUND": head[0], "MASK": lm.mask_token_id}
    given = {"target_modules": "all-linear", **ON_MODELS[place]}
    return {
        name: [own.get(each, each) for each in value] if isinstance(value, list) else value
        for name, value in given.items()
    }


def refused_on(lm: DiffusionLM, place: str) -> bool:
    """Whether PEFT cannot do it on this model: it ties only what has one of two names, and leaves out the
    bias of a head with rows."""
    if ON_MODELS[place].get("trainable_token_indices") == [5, 6]:
        return lm.model.get_output_embeddings().bias is not None
    tied, saved = "tied" in place, set(on_model(lm, place).get("modules_to_save", ()))
    return tied and not saved & {"embed_tokens", "lm_head"}


@pytest.mark.filterwarnings("ignore:You have requested .ensure_weight_tying.:UserWarning")
@pytest.mark.filterwarnings("ignore:ensure_weight_tying=True but the model:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT sets it for GPT-2
@partly_slow("name", MODELS, list(MODELS).index("gpt2"))
def test_so_it_is_on_tied_architectures_or_it_is_refused(name, tmp_path):
    for place in ON_MODELS:
        lm = tied_lm(name)
        refused, start, config = refused_on(lm, place), log_probs(lm), lora(**on_model(lm, place))
        if refused:
            with pytest.raises(ConfigError) as caught:
                with_adapters(lm, config)
            assert caught.value.where.startswith("lora (peft_config)")
            continue
        adapted = with_adapters(lm, config)
        torch.testing.assert_close(log_probs(adapted), start, rtol=0, atol=1e-6, msg=place)
        check_saved(moved(adapted), tmp_path / place)


def test_adapters_with_which_the_model_fails_are_refused_before_training():
    """The router of PhiMoE is a linear layer that returns a tuple."""
    model = AutoModelForCausalLM.from_config(
        PhimoeConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2)
    )
    lm = make_diffusion(model, character_tokenizer(ALPHABET), attention="bidirectional")
    with raises(ConfigError, where="lora (peft_config), target_modules or modules_to_save") as refused:
        with_adapters(copy.deepcopy(lm), lora(target_modules="all-linear"))
    assert "attention alone" in refused.value.remedy
    with_adapters(lm, lora(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


def logits(lm: DiffusionLM) -> torch.Tensor:
    with torch.no_grad():
        return lm.logits(IDS_BT)


def row_of(kind: str, folder: Path) -> str:
    """The row of the table in which a kind belongs, once it has been trained, or refused."""
    lm = llama_lm("block_causal", block_size=2, tie_word_embeddings=True)
    try:
        check_saved(
            moved(with_adapters(lm, of_kind(kind, target_modules=["embed_tokens"]))), folder / "table"
        )
    except ConfigError as error:  # many have no adapters of tables
        assert error.where.startswith("lora (peft_config)")
    lm = llama_lm("block_causal", block_size=2, tie_word_embeddings=True)
    lm.save(folder / "base")
    config = of_kind(kind, target_modules=["q_proj"])
    try:
        trainer = prepared("sft", folder / "run", str(folder / "base"), peft_config=config)
    except ConfigError as error:
        assert error.where.startswith("lora (peft_config)") and kind in error.what and error.remedy
        return "refused: " + next(reason for words, reason in REASONS.items() if words in error.what)
    trainer.train()
    trainer.lm.model.eval()
    expected = logits(trainer.lm)
    assert not torch.equal(expected, logits(lm))
    trainer.save_model(str(folder / "merged"))
    torch.testing.assert_close(logits(load(folder / "merged")), expected, rtol=0, atol=1e-5)
    trainer.lm.save(folder / "adapters")
    assert torch.equal(logits(load(folder / "adapters")), expected)
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, folder / "adapters").eval()(IDS_BT).logits
    assert torch.equal(theirs, expected)
    again = prepared("sft", folder / "again", str(folder / "adapters"))
    again.train()
    assert not torch.equal(logits(again.lm), expected)
    return "trained, saved, loaded here and in PEFT, trained further"


@cache
def documented() -> dict[str, str]:
    """The row of each kind in docs/models.md."""
    text = (REPOSITORY / "docs/models.md").read_text(encoding="utf-8")
    version, rest = re.search(
        r"\| with PEFT (\S+) \|.*?\n\|[-|]+\n(.*?)\n\n", text + "\n\n", re.DOTALL
    ).groups()
    if version != peft.__version__:
        pytest.skip("the table is of another version of PEFT")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest.splitlines()]
    assert all(int(count) == len(names.split(", ")) for _, count, names in rows)
    return {name: row for row, _, names in rows for name in names.split(", ")}


@pytest.mark.filterwarnings("ignore")  # PEFT's own, of some kinds
@partly_slow("kind", KINDS, *map(KINDS.index, ("BEFT", "IA3", "LORA", "PROMPT_TUNING", "SHIRA", "XLORA")))
def test_every_kind_is_saved_as_trained_or_refused_as_the_docs_say(kind, tmp_path):
    assert documented().keys() == {each.value for each in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert row_of(kind, tmp_path) == documented()[kind]


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed:UserWarning")
@pytest.mark.parametrize("kind", UNMERGEABLE)
def test_what_cannot_be_merged_is_refused_before_training(kind, tmp_path):
    with raises(ConfigError, where="lora (peft_config)"):
        prepared("sft", tmp_path, peft_config=lora(target_modules=["q_proj"], **UNMERGEABLE[kind]))
    prepared("sft", tmp_path, peft_config=lora(target_modules=["q_proj"]))  # the remedy


def test_tied_adapters_of_two_layers_are_refused():
    settings = lora(target_modules=["embed_tokens"], ensure_weight_tying=True)
    with raises(ConfigError, where="lora (peft_config)"):  # PEFT's models with them cannot be copied
        with_adapters(llama_lm(tie_word_embeddings=True), settings)


@partly_slow("name", [name for name in HYBRIDS if name != "zamba2"], *range(0, len(HYBRIDS) - 1, 3))
def test_all_linear_layers_of_recurrent_models_have_adapters_but_outputs_of_mamba(name):
    adapted = moved(
        with_adapters(
            tiny_lm(name, "block_causal", 3), lora(target_modules="all-linear", init_lora_weights=True)
        )
    )
    whole, found = merged(adapted), log_probs(adapted)
    torch.testing.assert_close(found, log_probs(whole), rtol=0, atol=1e-5)
    assert (found - log_probs(tiny_lm(name, "block_causal", 3))).abs().max() > 1e-3
    for layer in recurrent_layers(adapted.model):
        if hasattr(layer, "out_proj"):
            assert hasattr(layer.out_proj, "lora_A") != hasattr(layer, "ssm_state_size")


def test_adapters_of_a_weight_that_layers_share_are_refused():
    with raises(ConfigError, where="lora (peft_config)"):
        with_adapters(tiny_lm("zamba2", "block_causal", 3), lora(target_modules="all-linear"))
    with_adapters(tiny_lm("zamba2", "block_causal", 3), lora(target_modules=["in_proj"]))  # the remedy


def test_an_adapter_of_the_head_alone_gets_gradients_in_chunks_too(monkeypatch):
    def gradients() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        adapted = moved(with_adapters(llama_lm(dtype=torch.float64), lora(target_modules=["lm_head"])))
        inputs = adapted.noised_inputs(IDS_BT, None, torch.ones(2, 9, dtype=torch.bool))
        adapted.log_probs(inputs, IDS_BT.flatten()).sum().backward()
        return {
            name: weight.grad for name, weight in adapted.model.named_parameters() if weight.requires_grad
        }

    whole = gradients()
    monkeypatch.setattr("unmask.models.hooks.head.LOGITS_AT_ONCE", 40)
    chunked = gradients()
    assert whole.keys() == chunked.keys() and all(
        "lm_head" in name and grad.any() for name, grad in whole.items()
    )
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=0, atol=1e-9)


def test_adapters_can_be_switched_off_wherever_they_are():
    for place, given in PLACES.items():
        lm = llama_lm(tie_word_embeddings=True)
        start = log_probs(lm)
        adapted = moved(add_adapters(lm, lora(**given)))
        if place != "biases":  # PEFT trains those of the base model
            with adapted.model.disable_adapter():
                torch.testing.assert_close(log_probs(adapted), start, rtol=0, atol=1e-6, msg=place)


VERBS = ("sft", "pretrain", "dpo", "kto", "grpo")
RUNS = [
    (verb, place, tied)
    for verb in VERBS
    for place in PLACES
    for tied in (True, False)
    if tied or verb == "sft"
]
QUICK = {
    ("sft", "table", True),
    ("dpo", "both whole, tied", True),
    ("grpo", "rows", True),
    ("pretrain", "head", True),
}


@pytest.mark.filterwarnings("ignore:You have requested .ensure_weight_tying.:UserWarning")
@pytest.mark.parametrize(
    ("verb", "place", "tied"),
    [pytest.param(*run, marks=[] if run in QUICK else pytest.mark.slow) for run in RUNS],
)
def test_every_verb_saves_what_it_trained_and_resumes_it(verb, place, tied, tmp_path):
    def trainer() -> Any:
        lm = llama_lm("causal" if verb == "pretrain" else "bidirectional", tie_word_embeddings=tied)
        adapters = lora(**PLACES[place], init_lora_weights="gaussian")
        return prepared(verb, tmp_path / "run", lm, peft_config=adapters, save_strategy="steps", save_steps=1)

    straight = trainer()
    start = log_probs(straight.lm)
    straight.train()
    straight.save_model(str(tmp_path / "model"))
    straight.lm.model.eval()
    assert not torch.equal(log_probs(straight.lm), start)
    torch.testing.assert_close(log_probs(load(tmp_path / "model")), log_probs(straight.lm), rtol=0, atol=1e-5)
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-1"))
    assert equal(weights(resumed.lm), weights(straight.lm))


@pytest.mark.filterwarnings("ignore:You have requested .ensure_weight_tying.:UserWarning")
@partly_slow("place", ["rows", "attention", "head", "the whole head", "DoRA of all layers"], 0)
@pytest.mark.parametrize("tied", [True, False])
def test_a_conversion_saves_what_it_trained(tied, place, tmp_path):
    adapters = lora(
        **PLACES.get(place, {"target_modules": "all-linear", "use_dora": True}), init_lora_weights="gaussian"
    )
    args = ConvertConfig(**settings(tmp_path / "run", max_steps=10, max_length=32))
    trainer = ConvertTrainer(
        llama_lm("causal", tie_word_embeddings=tied), args, train_dataset=TEXTS, peft_config=adapters
    )
    start = log_probs(trainer.lm)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    assert not torch.equal(log_probs(trainer.lm), start)
    torch.testing.assert_close(log_probs(load(tmp_path / "model")), log_probs(trainer.lm), rtol=0, atol=1e-5)
