"""Fill-in-the-middle prompts of causal models, with tiny models that have the tokens of each family."""

from __future__ import annotations

import copy

import pytest
from transformers import AutoTokenizer

from tests.errors import raises
from tests.helpers import shared_path
from tests.tiny import float64_causal, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.errors import GenerationError
from unmask.generation.fill_in_the_middle import FORMATS, FillFormat, fill_format, fim_prompt
from unmask.generation.sampler import generate
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

every_format = pytest.mark.parametrize("known", FORMATS, ids=lambda known: known.families)


def tokens_of(known: FillFormat) -> list[str]:
    return [known.before, known.hole, known.end, known.ends_middle]


def family(known: FillFormat, *, ends: bool = True) -> DiffusionLM:
    """A tiny causal model with the tokens of a family."""
    model, tokenizer = float64_causal()
    tokenizer.add_special_tokens({"extra_special_tokens": tokens_of(known)})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm = make_diffusion(model, tokenizer, attention="causal")
    if ends:
        lm.eos_token_ids = (*lm.eos_token_ids, tokenizer.convert_tokens_to_ids(known.ends_middle))
    return lm


@every_format
def test_a_prompt_is_before_prefix_hole_suffix_end(known):
    lm = family(known)
    before, hole, end, ends_middle = lm.tokenizer.convert_tokens_to_ids(tokens_of(known))
    bos, (a, b, c, d) = lm.tokenizer.bos_token_id, lm.tokenizer.convert_tokens_to_ids(list("abcd"))
    assert fill_format(lm.tokenizer) == known
    assert fim_prompt(lm, "ab", "cd") == [bos, before, a, b, hole, c, d, end]
    assert fim_prompt(lm, "", "") == [bos, before, hole, end]
    generation = generate(
        lm, [fim_prompt(lm, "ab", "cd")], SamplerConfig(max_new_tokens=8, allowed_tokens=[ends_middle])
    )
    assert generation.tokens == [[ends_middle]] and generation.texts == [""]


def test_budgets_keep_what_is_next_to_the_gap():
    lm = family(FORMATS[0])

    def between(**budgets: int) -> str:
        return lm.tokenizer.decode(fim_prompt(lm, "abcdef", "fedcba", **budgets)[1:])

    before, hole, end, _ = tokens_of(FORMATS[0])
    assert between(prefix_budget=2) == f"{before}ef{hole}fedcba{end}"
    assert between(suffix_budget=3) == f"{before}abcdef{hole}fed{end}"
    assert between(prefix_budget=0, suffix_budget=0) == f"{before}{hole}{end}"
    assert between(prefix_budget=99, suffix_budget=99) == between()
    with raises(GenerationError, where="suffix_budget"):
        between(suffix_budget=-1)


def test_no_space_is_added_before_the_suffix():
    """As in CodeLlama's own `encode_infilling`: SentencePiece would write one before any text."""
    tokenizer = AutoTokenizer.from_pretrained(shared_path("models", "stories260K"))
    codellama = FORMATS[-1]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens_of(codellama)})
    lm = copy.copy(float64_lm())
    lm.tokenizer, lm.eos_token_ids = tokenizer, (tokenizer.convert_tokens_to_ids(codellama.ends_middle),)
    pieces = tokenizer.convert_ids_to_tokens(fim_prompt(lm, "the cat", "s and dogs"))
    hole = pieces.index(codellama.hole)
    assert pieces[:2] == ["<s>", codellama.before] and "".join(pieces[2:hole]) == "▁the▁cat"
    assert "".join(pieces[hole + 1 : -1]) == "s▁and▁dogs" and pieces[-1] == codellama.end


@every_format
def test_a_user_s_text_holds_no_hole(known):
    lm = family(known)
    before, hole, end, _ = lm.tokenizer.convert_tokens_to_ids(tokens_of(known))
    prompt = fim_prompt(lm, f"a{known.hole}b", f"c{known.end}d")
    assert [prompt.count(token) for token in (before, hole, end)] == [1, 1, 1]
    lm.tokenizer.parse_special_tokens = True
    with raises(GenerationError, where="fim_prompt"):
        fim_prompt(lm, f"a{known.hole}b", "c")


def test_models_that_cannot_are_refused():
    with raises(GenerationError, where="fim_prompt"):
        fim_prompt(float64_lm(), "a", "b")
    with raises(GenerationError, where="fim_prompt"):
        fim_prompt(float64_lm("phi", "bidirectional"), "a", "b")
    for known in FORMATS:
        lm = family(known, ends=False)
        with raises(GenerationError, where="fim_prompt"):
            fim_prompt(lm, "a", "b")
