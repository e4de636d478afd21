"""The model card: its statements are true, its commands run, and nothing is invented."""

from __future__ import annotations

import re

import pytest
import torch
from huggingface_hub import ModelCard

from tests.diffusion_gemma import loaded
from tests.models.configurations import tiny_lm
from tests.tiny import llama_lm
from unmask.models.load import load
from unmask.models.model_card import HISTORY_KEY, MARKER, history, render_card

STAGES = [
    {
        "verb": "pretrain",
        "data": "owner/stories",
        "rows": 1200,
        "steps": 10,
        "tokens": 51_200,
        "seed": 3,
        "settings": {"learning_rate": 1e-3},
        "metrics": {"loss": 2.51234},
        "versions": {"torch": "2.0"},
    },
    *(
        {
            "verb": "convert",
            "rows": 7,
            "steps": 2,
            "tokens": 5,
            "seed": 0,
            "settings": {"block_size": 4},
            "metrics": {"eval_loss": n},
            "versions": {},
        }
        for n in (4.0, 3.0)
    ),
]


def run_snippet(text: str) -> str:
    """Run the card's Python; its completions."""
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(code, names)
    return names["out"].texts[0]


@pytest.mark.parametrize("pattern", [("causal", None), ("block_causal", 4), ("bidirectional", None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_snippet_runs_on_the_saved_folder(tmp_path, monkeypatch, capsys, pattern, dtype):
    lm = llama_lm(*pattern)
    lm.model.to(dtype)
    lm.save(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = run_snippet((tmp_path / "README.md").read_text())
    assert isinstance(text, str) and capsys.readouterr().out.endswith(text + "\n")


def test_it_says_what_the_model_is():
    text = render_card(tiny_lm("llama", "block_causal", 4, shift=True))
    for words in (
        "block-causal",
        "blocks of 4 tokens",
        "LlamaForCausalLM",
        "output i predicts token i + 1",
        "(16)",
        "64 tokens",
    ):
        assert words in text
    assert "## How it was made" not in text and "## Losses" not in text
    assert "diffusion" not in render_card(tiny_lm("llama"))


def test_diffusion_gemma_has_no_mask_token(tmp_path, monkeypatch, capsys):
    lm = loaded(tmp_path / "model")
    lm.save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path / "saved")
    text = (tmp_path / "saved" / "README.md").read_text()
    assert "| noise | uniform" in text and "mask token" not in text
    assert "| mask token |" in render_card(llama_lm("bidirectional").with_noise("uniform"))  # it marks gaps
    assert run_snippet(text) == capsys.readouterr().out.removesuffix("\n")


def test_its_front_matter_is_one_that_the_hub_reads(tmp_path):
    llama_lm().save(tmp_path)
    data = ModelCard.load(tmp_path / "README.md").data
    assert (
        data.library_name == "unmask"
        and data.pipeline_tag == "text-generation"
        and "diffusion-language-model" in data.tags
    )
    assert (
        data.base_model is None and data.license is None and data.language is None and data.datasets is None
    )


def test_a_model_keeps_its_history(tmp_path):
    lm = llama_lm("block_causal", 4)
    setattr(lm.config, HISTORY_KEY, STAGES)
    lm.save(tmp_path / "one")
    again = load(tmp_path / "one")
    assert history(again) == STAGES
    again.save(tmp_path / "two")
    text = (tmp_path / "two/README.md").read_text()
    assert text == (tmp_path / "one/README.md").read_text()
    assert (
        "| pretrain | owner/stories | 1,200 | 10 | 51,200 | 3 |" in text
        and "| convert 2 |  | 7 | 2 | 5 | 0 |" in text
    )
    assert (
        "| pretrain | 2.512 |  |" in text
        and "| convert 1 |  | 4 |" in text
        and "| convert 2 |  | 3 |" in text
    )
    assert "- pretrain: `learning_rate=0.001` (torch 2.0)" in text and "- convert 1: `block_size=4`\n" in text
    assert ModelCard(text).data.datasets == ["owner/stories"]


def test_licence_language_and_base_come_from_the_card_of_the_model_it_was_loaded_from(tmp_path):
    llama_lm().save(tmp_path / "base")
    (tmp_path / "base/README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage:\n- en\nbase_model: owner/model\n---\n# Theirs\n"
    )
    load(tmp_path / "base").save(tmp_path / "new")
    data = ModelCard.load(tmp_path / "new/README.md").data
    assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en"], "owner/model")
    assert str(tmp_path) not in (tmp_path / "new/README.md").read_text()


def test_a_hub_model_is_the_base(tmp_path):
    lm = llama_lm()
    lm.config._name_or_path = "owner/model"
    assert ModelCard(render_card(lm)).data.base_model == "owner/model"


def test_what_somebody_else_wrote_stays(tmp_path):
    lm = llama_lm()
    (tmp_path / "README.md").write_text("# Mine\n")
    lm.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    (tmp_path / "README.md").write_text(f"# Old\n{MARKER}\n")
    lm.save(tmp_path)
    assert (tmp_path / "README.md").read_text() == render_card(lm)


def test_bars_do_not_break_a_table():
    rows = [line for line in render_card(llama_lm()).splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in rows)
    assert any(r"`<\|mask\|>`" in line for line in rows)
