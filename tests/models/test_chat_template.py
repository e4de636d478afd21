"""End tokens: all that a model's files name are found, kept on saving, loading and exporting, and can be
set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.data.test_encoding import CHATML, LLAMA3
from tests.errors import raises
from tests.models.test_released import END, MASK, write_published
from tests.tiny import build_causal
from tests.training.tiny_runs import make
from unmask.data.characters import character_tokenizer
from unmask.errors import ModelError
from unmask.generation.remote.protocol import model_facts
from unmask.models.chat_template import TEMPLATES
from unmask.models.export import export
from unmask.models.load import initialize, load, with_pattern
from unmask.models.model_card import render_card

TURNS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"]
EOS, IM_END, EOT, EOM, A = 2, 11, 12, 13, 4
ROWS = 16


def write(folder: Path, generation: Any = None, template: str | None = None, config: Any = EOS) -> Path:
    """Write a causal model whose files name end tokens in these places; its tokenizer names EOS."""
    tokenizer = character_tokenizer("abcdef")
    tokenizer.add_special_tokens({"additional_special_tokens": TURNS})
    assert tokenizer.convert_tokens_to_ids(TURNS[1:]) == [IM_END, EOT, EOM]
    tokenizer.chat_template = template
    sizes = {"layers": 1, "context": 32, "intermediate_size": 24, "vocab_size": ROWS}
    model, _ = build_causal("phi", tokenizer, eos_token_id=config, **sizes)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=generation).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({}, (EOS,)),
        ({"generation": EOS}, (EOS,)),
        ({"generation": [IM_END, EOS]}, (EOS, IM_END)),
        ({"generation": [EOM, EOT]}, (EOS, EOT, EOM)),
        ({"generation": EOT, "config": [EOM, EOS]}, (EOS, EOT, EOM)),
        ({"template": CHATML}, (EOS, IM_END)),
        ({"template": LLAMA3, "generation": [EOM, EOS]}, (EOS, EOT, EOM)),
        ({"template": TEMPLATES["simple"], "generation": EOS}, (EOS,)),
        ({"generation": "<eos>"}, (EOS,)),
        ({"generation": 11.0}, (EOS,)),
        # a class's default may be a word of the vocabulary, or none
        ({"config": A, "generation": [A, ROWS + 9, IM_END]}, (EOS, IM_END)),
    ],
)
def test_all_places_are_read_and_the_tokenizers_comes_first(named, ends, tmp_path):
    lm = load(write(tmp_path, **named))
    assert lm.eos_token_ids == ends and lm.eos_token_id == EOS


@pytest.mark.parametrize("asked", [None, [IM_END], [], [A, EOS]])
def test_saving_loading_and_exporting_keep_them(asked, tmp_path):
    lm = load(write(tmp_path / "stock", [EOT, EOS], CHATML), eos_token_ids=asked)
    ends = {None: (EOS, IM_END, EOT), (IM_END,): (EOS, IM_END), (): (EOS,), (A, EOS): (EOS, A)}[
        asked if asked is None else tuple(asked)
    ]
    assert lm.eos_token_ids == ends
    lm.save(tmp_path / "own")
    export(lm, tmp_path / "hf", "hf")
    for folder in ("own", "hf"):
        written = json.loads((tmp_path / folder / "generation_config.json").read_text())["eos_token_id"]
        assert written == (list(ends) if len(ends) > 1 else ends[0])
    again = load(tmp_path / "own")
    assert (
        again.eos_token_ids == ends
        and again.settings == lm.settings
        and model_facts(again) == model_facts(lm)
    )
    blocks = with_pattern(again, "block_causal", 4)
    assert (
        blocks.eos_token_ids == again.frozen_copy().eos_token_ids == again.as_causal().eos_token_ids == ends
    )
    blocks.save(tmp_path / "converted")
    assert load(tmp_path / "converted").eos_token_ids == ends
    assert load(tmp_path / "own", eos_token_ids=[EOM]).eos_token_ids == (EOS, EOM)
    names = ", ".join(f"`{lm.tokenizer.convert_ids_to_tokens(end)}` ({end})" for end in ends)
    assert f"| end tokens | {names} |" in render_card(again).replace("\\|", "|")


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_generation_config_that_transformers_would_not_write_is_kept(template, tmp_path):
    """Many published ones name a temperature without `do_sample`; transformers saves such a config only where
    nothing in it was changed."""
    folder, odd = write(tmp_path / "stock", template=template), {"temperature": 0.9, "top_p": 0.6}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS} | odd))
    lm = load(folder)
    lm.save(tmp_path / "own")
    export(lm, tmp_path / "hf", "hf")
    # It names the tokenizer's special tokens.
    trainer = make("sft", tmp_path / "run", lm, save_strategy="steps", save_steps=2, max_unknown=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    for saved in ("own", "hf", "run/checkpoint-2", "trained"):
        assert odd.items() <= json.loads((tmp_path / saved / "generation_config.json").read_text()).items()


def test_a_released_model_with_an_odd_generation_config_is_exported(tmp_path):
    folder = write_published("sdar", tmp_path / "sdar")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    lm = load(folder)
    lm.model.generation_config.bos_token_id = END
    with pytest.warns(RuntimeWarning, match="the mask token is"):
        export(lm, tmp_path / "back", "sdar")
    assert json.loads((tmp_path / "back/generation_config.json").read_text())["top_p"] == 0.6


def test_a_server_of_a_model_with_other_ends_holds_another_model(tmp_path):
    here, there = (load(write(tmp_path, [IM_END, EOS]), eos_token_ids=ends) for ends in (None, []))
    assert json.loads(json.dumps(model_facts(here)))["eos_token_ids"] == [EOS, IM_END] and model_facts(
        here
    ) != model_facts(there)


def test_transformers_stops_where_unmask_does(tmp_path):
    lm = load(write(tmp_path / "stock", template=CHATML))
    lm.model.get_output_embeddings().bias.data[IM_END] = 99.0
    export(lm, tmp_path / "hf", "hf")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[A, A]])
    assert plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)[
        0, 2:
    ].tolist() == [IM_END]


def test_a_released_model_with_several_ends(tmp_path):
    """Like SDAR-Chat: generation_config.json names the end of a turn and EOS, config.json and tokenizer only
    EOS."""
    folder = write_published("sdar", tmp_path / "sdar")
    turn_end = MASK + 1
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"][str(turn_end)] = {
        "content": "<|im_end|>",
        "special": True,
        "normalized": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn_end, END]}))
    lm = load(folder)
    assert lm.eos_token_ids == (END, turn_end) and lm.eos_token_id == END
    with pytest.warns(RuntimeWarning, match="the mask token is"):
        export(lm, tmp_path / "back", "sdar")
    # as published
    assert json.loads((tmp_path / "back/generation_config.json").read_text())["eos_token_id"] == [
        turn_end,
        END,
    ]
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == END
    assert load(tmp_path / "back").eos_token_ids == lm.eos_token_ids


@pytest.mark.parametrize("wrong", [ROWS, -1, None])
def test_ends_that_cannot_be_generated_are_refused(wrong, tmp_path):
    lm = load(write(tmp_path))
    with raises(ModelError, where="eos_token_ids"):
        load(tmp_path, eos_token_ids=[IM_END, lm.mask_token_id if wrong is None else wrong])


@pytest.mark.parametrize("wrong", [["<|im_end|>"], "<|im_end|>", [11.0]])
def test_ends_that_are_no_ids_are_refused(wrong, tmp_path):
    with raises(ModelError, where="eos_token_ids"):
        load(write(tmp_path), eos_token_ids=wrong)


def test_one_end_may_stand_alone(tmp_path):
    assert load(write(tmp_path), eos_token_ids=IM_END).eos_token_ids == (EOS, IM_END)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_another_chat_template_brings_its_end(attention, tmp_path):
    lm = load(write(tmp_path / "stock"), attention=attention)
    lm.set_chat_template(CHATML)
    assert lm.eos_token_ids == (EOS, IM_END)
    lm.set_chat_template("simple")
    assert lm.tokenizer.chat_template == TEMPLATES["simple"]
    assert lm.eos_token_ids == (EOS, IM_END)
    lm.save(tmp_path / "own")
    lm.model.save_pretrained(tmp_path / "by_transformers")
    lm.tokenizer.save_pretrained(tmp_path / "by_transformers")
    for folder in ("own", "by_transformers"):
        loaded = load(tmp_path / folder)
        assert (loaded.attention, loaded.eos_token_ids) == (attention, (EOS, IM_END))


def test_new_weights_have_the_ends_of_their_tokenizer(tmp_path):
    write(tmp_path, template=CHATML)
    assert initialize(tmp_path, seed=0).eos_token_ids == (EOS, IM_END)
    assert initialize(tmp_path, seed=0, eos_token_ids=[EOT]).eos_token_ids == (EOS, EOT)


def test_a_tokenizer_without_eos_has_the_ends_of_the_files(tmp_path):
    write(tmp_path, [IM_END, EOT])
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["eos_token"] = None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    lm = load(tmp_path)
    assert lm.eos_token_id is None and lm.eos_token_ids == (EOS, IM_END, EOT)
