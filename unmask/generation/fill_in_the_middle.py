"""Fill-in-the-middle prompts, by which a causal model that was trained on them fills a gap: it reads the text
before and after the gap, and continues with the middle, which an end token ends (Bavarian et al. 2022,
"Efficient training of language models to fill in the middle").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from unmask.data.encoding import encode_completion, encode_prompt
from unmask.errors import GenerationError
from unmask.models.diffusion_lm import DiffusionLM


@dataclass(frozen=True)
class FillFormat:
    """How a family writes the prompt: before, text before the gap, hole, text after the gap, end (prefix,
    suffix, middle: PSM).

    Attributes:
        families: of models that were trained with it.
        before, hole, end: special tokens.
        ends_middle: the token that ends the middle.
        source: where the authors show it.
    """

    families: str
    before: str
    hole: str
    end: str
    ends_middle: str
    source: str


FORMATS = (
    FillFormat(
        families="Qwen2.5-Coder",
        before="<|fim_prefix|>",
        hole="<|fim_suffix|>",
        end="<|fim_middle|>",
        ends_middle="<|endoftext|>",
        source="https://github.com/QwenLM/Qwen2.5-Coder, README, file-level code completion",
    ),
    FillFormat(
        families="StarCoder, StarCoder2",
        before="<fim_prefix>",
        hole="<fim_suffix>",
        end="<fim_middle>",
        ends_middle="<|endoftext|>",
        source="https://huggingface.co/bigcode/starcoder, model card",
    ),
    FillFormat(
        families="DeepSeek-Coder",
        before="<\uff5cfim\u2581begin\uff5c>",
        hole="<\uff5cfim\u2581hole\uff5c>",
        end="<\uff5cfim\u2581end\uff5c>",
        ends_middle="<\uff5cend\u2581of\u2581sentence\uff5c>",
        source="https://github.com/deepseek-ai/DeepSeek-Coder, README, code insertion",
    ),
    FillFormat(
        families="CodeLlama 7B and 13B",
        before="\u2581<PRE>",
        hole="\u2581<SUF>",
        end="\u2581<MID>",
        ends_middle="\u2581<EOT>",
        source="https://github.com/meta-llama/codellama, llama/generation.py, infilling_prompt_tokens",
    ),
)


def fim_prompt(
    lm: DiffusionLM,
    prefix: str,
    suffix: str,
    *,
    prefix_budget: int | None = None,
    suffix_budget: int | None = None,
) -> list[int]:
    """The prompt with which `unmask.generate` fills the gap between two texts, as token ids. The completion
    is the middle.

    The texts are tokenised apart: special tokens that they spell stay text, and a tokenizer that writes a
    space before a text writes none before the suffix.

    Args:
        lm: a causal model whose tokenizer has the tokens of one of `FORMATS`.
        prefix: the text before the gap.
        suffix: the text after it.
        prefix_budget: its last tokens that the model reads; None: all.
        suffix_budget: its first tokens that the model reads; None: all.

    Raises:
        GenerationError: the model is not causal, has no such tokens, or does not stop at the token that ends
            the middle; or a budget is negative.
        DataError: a text cannot be encoded.
    """
    tokenizer = lm.tokenizer
    for name, budget in (("prefix_budget", prefix_budget), ("suffix_budget", suffix_budget)):
        if budget is not None and budget < 0:
            raise GenerationError(f"{budget} tokens", where=name, remedy="Give 0 or more, or None for all")
    if not lm.autoregressive:
        what = f"is for causal models, and this one has {lm.attention} attention"
        raise GenerationError(
            what, where="fim_prompt", remedy="Use unmask.infill, for which it reads both sides of a gap"
        )
    chosen = fill_format(tokenizer)
    before, hole, end, ends_middle = (
        tokenizer.convert_tokens_to_ids(token)
        for token in (chosen.before, chosen.hole, chosen.end, chosen.ends_middle)
    )
    if ends_middle not in lm.eos_token_ids:
        what = f"the model does not stop at {chosen.ends_middle!r}, which ends the middle"
        remedy = f"Load it with eos_token_ids={[*lm.eos_token_ids, ends_middle]}"
        raise GenerationError(what, where="fim_prompt", remedy=remedy)
    start = encode_prompt(tokenizer, "")
    prefix_ids = encode_prompt(tokenizer, prefix)[len(start) :]
    suffix_ids = encode_completion(tokenizer, chosen.before, suffix)
    if {before, hole, end} & {*prefix_ids, *suffix_ids}:
        what = f"a text holds one of the tokens {chosen.before}, {chosen.hole}, {chosen.end}"
        raise GenerationError(what, where="fim_prompt", remedy="Remove it")
    first = 0 if prefix_budget is None else max(0, len(prefix_ids) - prefix_budget)
    return [*start, before, *prefix_ids[first:], hole, *suffix_ids[:suffix_budget], end]


def fill_format(tokenizer: PreTrainedTokenizerBase) -> FillFormat:
    """The first of `FORMATS` whose tokens the tokenizer has. Raises GenerationError if it has none."""
    for candidate in FORMATS:
        if _has(tokenizer, [candidate.before, candidate.hole, candidate.end, candidate.ends_middle]):
            return candidate
    known = "; ".join(f"{each.families}: {each.before} {each.hole} {each.end}" for each in FORMATS)
    what = "the tokenizer has no tokens for fill-in-the-middle"
    raise GenerationError(
        what, where="fim_prompt", remedy=f"Use a model that was trained with them ({known})"
    )


def _has(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> bool:
    """Whether these are tokens that were added to the vocabulary, or special ones."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(
        tokenizer.all_special_tokens
    )
    return added.issuperset(tokens)
