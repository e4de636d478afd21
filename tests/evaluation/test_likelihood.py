"""Log-likelihoods of texts: correct, independent of the batch, and with clear errors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import enumeration
from tests.errors import raises
from tests.helpers import each_once, partly_slow, shared_path
from tests.tiny import KINDS, TOY_VOCABULARY, lm_of_tokenizer, toy_lm
from tests.tokenizers import tokenizer as every_kind
from unmask import generate, log_likelihood
from unmask.config.sampler import SamplerConfig
from unmask.data.decoding import text_after
from unmask.data.encoding import encode_completion, encode_prompt
from unmask.errors import ConfigError, GenerationError
from unmask.evaluation.likelihood import default_estimator, is_greedy, log_likelihoods
from unmask.models.load import load

EXACT = {"rtol": 0, "atol": 1e-10}
PAIRS = [("ab", "ba"), ("b", "abab"), ("abbab", "a"), ("a", ""), ("bb", "bbb"), ("ab", "ba")]
PROMPTS, COMPLETIONS = [prompt for prompt, _ in PAIRS], [completion for _, completion in PAIRS]
CAUSAL = ("causal", None, True)


def any_toy(kind):
    return toy_lm(attention=CAUSAL) if kind == "causal" else toy_lm(kind)


def tables(lm, prompt, completion):
    ids = [
        *lm.tokenizer(prompt)["input_ids"],
        *lm.tokenizer(completion, add_special_tokens=False)["input_ids"],
    ]
    row = torch.tensor(ids)
    return [
        enumeration.conditionals(lm, row, positions)
        for positions in enumeration.groups(lm, len(ids) - len(completion), len(ids))
    ]


@pytest.mark.parametrize("estimator", ["exact", "elbo"])
def test_a_causal_model_has_its_stock_likelihood(tmp_path, estimator):
    lm = toy_lm(attention=CAUSAL)
    lm.save(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    expected = []
    for prompt, completion in PAIRS:
        ids = lm.tokenizer(prompt + completion, return_tensors="pt")["input_ids"]
        log_prob = (
            stock(ids, attention_mask=torch.ones_like(ids)).logits[0, :-1, :TOY_VOCABULARY].log_softmax(-1)
        )
        expected.append(log_prob.gather(1, ids[0, 1:, None])[len(ids[0]) - 1 - len(completion) :].sum())
    torch.testing.assert_close(
        log_likelihood(lm, PROMPTS, COMPLETIONS, estimator=estimator, samples=3),
        torch.stack(expected),
        **EXACT,
    )


@partly_slow("kind", KINDS, 0, 1)
def test_exact_is_any_order_and_elbo_averages_to_the_bound_below_it(kind):
    lm = toy_lm(kind)
    exact = log_likelihood(lm, PROMPTS, COMPLETIONS, estimator="exact")
    assert exact.tolist() == pytest.approx(
        [sum(map(enumeration.any_order, tables(lm, *pair))) for pair in PAIRS], abs=1e-10
    )
    bounds = [sum(map(enumeration.lower_bound, tables(lm, *pair))) for pair in PAIRS]
    repeats = 20
    estimates = torch.stack(
        [log_likelihood(lm, PROMPTS, COMPLETIONS, "elbo", samples=3, seed=seed) for seed in range(repeats)]
    )
    errors = estimates.std(0) / math.sqrt(repeats)
    for mean, error, bound in zip(estimates.mean(0).tolist(), errors.tolist(), bounds, strict=True):
        assert mean == pytest.approx(bound, abs=5 * error + 1e-5)
    assert (torch.tensor(bounds, dtype=torch.float64) <= exact + 1e-10).all()


@each_once("kind, estimator", [*KINDS, "causal"], ["exact", "elbo"])
def test_a_pair_does_not_depend_on_its_batch(kind, estimator):
    lm = any_toy(kind)
    together = log_likelihood(lm, PROMPTS, COMPLETIONS, estimator=estimator, samples=5)
    alone = [
        log_likelihood(lm, [prompt], [completion], estimator=estimator, samples=5)
        for prompt, completion in PAIRS
    ]
    torch.testing.assert_close(together, torch.cat(alone), **EXACT)
    backwards = log_likelihood(lm, PROMPTS[::-1], COMPLETIONS[::-1], estimator=estimator, samples=5)
    torch.testing.assert_close(backwards.flip(0), together, **EXACT)
    assert together[0].item() == pytest.approx(together[5].item(), abs=1e-10)  # the same pair twice
    assert together[3] == 0  # nothing to predict


def test_results_are_in_the_order_of_the_pairs():
    lm = toy_lm()
    prompts, completions = [PROMPTS[i % 6] for i in range(70)], [COMPLETIONS[i % 5] for i in range(70)]
    scores = log_likelihood(lm, prompts, completions, samples=4)
    of_pair = dict(zip(zip(prompts, completions, strict=True), scores.tolist(), strict=True))
    assert len(of_pair) == 25
    assert scores.tolist() == pytest.approx(
        [of_pair[pair] for pair in zip(prompts, completions, strict=True)], abs=1e-10
    )


def test_text_and_ids_are_the_same():
    lm = toy_lm()
    prompts = [lm.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    completions = [
        lm.tokenizer(completion, add_special_tokens=False)["input_ids"] for completion in COMPLETIONS
    ]
    assert torch.equal(
        log_likelihood(lm, prompts, completions, samples=4),
        log_likelihood(lm, PROMPTS, COMPLETIONS, samples=4),
    )


def test_messages_are_rendered_by_the_template():
    lm = toy_lm()
    lm.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}b{% "
        "endif %}"
    )
    rendered = lm.tokenizer("aab", add_special_tokens=False)["input_ids"]
    scores = log_likelihood(lm, [[{"role": "user", "content": "aa"}]], ["ab"], estimator="exact")
    assert torch.equal(scores, log_likelihood(lm, [rendered], ["ab"], estimator="exact"))


def test_only_the_seed_changes_the_estimate():
    lm = toy_lm()
    before = torch.get_rng_state()
    one = log_likelihood(lm, PROMPTS, COMPLETIONS, samples=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(log_likelihood(lm, PROMPTS, COMPLETIONS, samples=3, seed=0), one)
    # of few masks two may be the same
    others = [log_likelihood(lm, PROMPTS, COMPLETIONS, samples=3, seed=seed) for seed in range(1, 5)]
    assert not all(torch.equal(other, one) for other in others)
    exact = [log_likelihood(lm, PROMPTS, COMPLETIONS, estimator="exact", seed=seed) for seed in (0, 1)]
    assert torch.equal(*exact)


def test_more_samples_are_more_accurate():
    lm = toy_lm()
    spread = [
        torch.stack([log_likelihood(lm, ["ab"], ["abba"], samples=n, seed=seed) for seed in range(20)]).std()
        for n in (3, 31)
    ]
    assert spread[1] < 0.5 * spread[0]


def test_the_model_is_unchanged():
    lm = toy_lm()
    for module in lm.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    expected = log_likelihood(lm, PROMPTS, COMPLETIONS)
    lm.model.train()
    scores = log_likelihood(lm, PROMPTS, COMPLETIONS)
    assert lm.model.training and torch.equal(scores, expected)
    assert not scores.requires_grad and all(weight.grad is None for weight in lm.model.parameters())


def test_the_mask_token_is_refused():
    lm = toy_lm()
    for estimator in ("exact", "elbo"):
        assert log_likelihood(lm, ["a"], [[4, lm.mask_token_id, 5]], estimator=estimator).item() == -math.inf


def test_no_pairs_and_empty_completions():
    lm = toy_lm()
    assert log_likelihood(lm, [], []).shape == (0,)
    for estimator in ("exact", "elbo"):
        assert log_likelihood(lm, ["ab", "a"], ["", ""], estimator=estimator).tolist() == [0, 0]
        assert log_likelihood(lm, [[]], [[]], estimator=estimator).tolist() == [0]
    assert log_likelihood(toy_lm(attention=CAUSAL), [[]], [[]]).tolist() == [0]


def test_only_a_logit_shift_needs_a_prompt():
    lm = toy_lm()
    expected = enumeration.any_order(enumeration.conditionals(lm, torch.tensor([4, 5, 4]), [0, 1, 2]))
    assert log_likelihood(lm, [[]], [[4, 5, 4]], estimator="exact").item() == pytest.approx(
        expected, abs=1e-10
    )


@pytest.mark.parametrize(
    ("kind", "asked", "error", "where"),
    [
        ("bidirectional", {"estimator": "guess"}, ConfigError, "estimator"),
        ("bidirectional", {"samples": 0}, ConfigError, "samples"),
        ("bidirectional", {"completions": ["a"]}, GenerationError, "log_likelihood"),
        ("bidirectional", {"completions": ["a", "b" * 31]}, GenerationError, "pair 1"),
        (
            "bidirectional",
            {"completions": ["a", "ab" * 7], "estimator": "exact"},
            GenerationError,
            "estimator='exact'",
        ),
        ("causal", {"prompts": ["a", []]}, GenerationError, "pair 1"),
        ("blocks of three with a shift", {"prompts": [[], "a"]}, GenerationError, "pair 0"),
    ],
)
def test_wrong_arguments_are_refused(kind, asked, error, where):
    with raises(error, where=where):
        log_likelihood(any_toy(kind), **({"prompts": ["a", "b"], "completions": ["a", "b"]} | asked))


def test_a_pair_may_fill_the_context():
    assert log_likelihood(toy_lm(), ["b"], ["a" * 30], samples=2).isfinite()


def test_results_have_the_precision_of_the_model():
    lm = toy_lm()
    assert log_likelihood(lm, PROMPTS, COMPLETIONS).dtype == torch.float64
    wide = log_likelihood(lm, PROMPTS, COMPLETIONS)
    lm.model.float()
    narrow = log_likelihood(lm, PROMPTS, COMPLETIONS)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4)


def test_a_real_model_prefers_english():
    lm = load(shared_path("models", "stories260K"))
    completions = [", there was a little girl", " girl little a was there ,"]
    likely, unlikely = log_likelihood(lm, ["Once upon a time"] * 2, completions, estimator="exact")
    assert likely > unlikely + 10 and math.isfinite(unlikely)


def test_the_default_is_exact_where_that_is_cheap():
    kinds = {
        "bidirectional": "elbo",
        "blocks of three": "exact",
        "causal": "exact",
        "causal without a shift": "elbo",
    }
    assert {kind: default_estimator(any_toy(kind)) for kind in kinds} == kinds
    assert default_estimator(toy_lm(attention=("block_causal", 5, True))) == "elbo"


@pytest.mark.parametrize("noise", ["uniform", "hybrid"])
def test_no_likelihood_of_random_tokens_is_exact(noise):
    lm = toy_lm("blocks of three").with_noise(noise, 0.1 if noise == "hybrid" else None)
    assert default_estimator(lm) == "elbo"
    with raises(ConfigError, where="estimator"):
        log_likelihood(lm, PROMPTS, COMPLETIONS, estimator="exact")


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_small_blocks_are_summed_over_all_orders(size, shift):
    lm = toy_lm(attention=("block_causal", size, shift))
    expected = [sum(map(enumeration.any_order, tables(lm, *pair))) for pair in PAIRS]
    assert log_likelihood(lm, PROMPTS, COMPLETIONS).tolist() == pytest.approx(expected, abs=1e-9)


def test_completions_of_one_prompt_have_common_masks():
    """Of equal tokens the estimates are equal, those of another prompt's key are not, and `keys` sets
    them."""
    lm = toy_lm()
    found = log_likelihoods(lm, ["ab"] * 2, ["abbab", "abbaa"], samples=9)
    difference = (found.differences[0] - found.differences[1]).square().sum().sqrt()
    assert difference < found.standard_errors.square().sum().sqrt()
    own = log_likelihoods(lm, ["ab", "ab"], ["abbab", "abbab"], samples=9, keys=[1, 2])
    assert own.values[0] != own.values[1]
    assert torch.equal(log_likelihoods(lm, ["ab"], ["abbab"], samples=9, keys=[2]).values, own.values[1:])


@pytest.mark.parametrize("kind", [*KINDS, "causal"])
def test_the_bits_do_not_depend_on_other_pairs(kind):
    lm = any_toy(kind)
    together = log_likelihoods(lm, PROMPTS, COMPLETIONS, samples=9)
    for index, (prompt, completion) in enumerate(PAIRS):
        alone = log_likelihoods(lm, [prompt], [completion], samples=9)
        assert torch.equal(alone.values, together.values[index : index + 1])
        assert torch.equal(alone.differences[0], together.differences[index])


def test_exact_values_have_no_error():
    found = log_likelihoods(any_toy("causal"), PROMPTS, COMPLETIONS)
    assert found.standard_errors.tolist() == found.half_widths().tolist() == [0] * 6


def test_few_samples_give_no_interval_except_of_what_is_known():
    """Of at most two tokens three views are all that there are."""
    lm = toy_lm()
    for samples in (1, 4, 9, 16):
        assert log_likelihoods(lm, ["ab"], ["abab"], "elbo", samples=samples).half_widths().isinf().all()
    for completion in ([4], [5, 4]):
        found = log_likelihoods(lm, ["ab"], [completion], "elbo", samples=3)
        row_T, start = (
            torch.tensor([*encode_prompt(lm.tokenizer, "ab"), *completion]),
            len(encode_prompt(lm.tokenizer, "ab")),
        )
        truth = enumeration.lower_bound(enumeration.conditionals(lm, row_T, list(range(start, len(row_T)))))
        assert float(found.values[0]) == pytest.approx(
            float(truth), abs=1e-6
        ) and found.half_widths().tolist() == [0.0]
    assert log_likelihoods(lm, ["ab"], ["abab"], "elbo", samples=17).half_widths().isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "samples", [33, *(pytest.param(count, marks=pytest.mark.nightly) for count in (17, 128))]
)
def test_the_interval_holds_the_bound_as_often_as_it_says(samples):
    """2,000 requests, whose bounds are the sums over all masks."""
    lm, inside = toy_lm(), 0
    for number in range(100):
        row = enumeration.random_row(enumeration.PROMPT + 4 + number % 4, seed=number).tolist()
        truth = enumeration.lower_bound(
            enumeration.conditionals(lm, torch.tensor(row), list(range(enumeration.PROMPT, len(row))))
        )
        prompts, completions = [row[: enumeration.PROMPT]] * 20, [row[enumeration.PROMPT :]] * 20
        found = log_likelihoods(
            lm, prompts, completions, "elbo", samples=samples, keys=range(20 * number, 20 * number + 20)
        )
        inside += int(((found.values - truth).abs() <= found.half_widths()).sum())
    assert 0.93 <= inside / 2000 <= 0.97


def test_a_causal_pair_may_be_one_token_longer_than_the_context():
    lm = any_toy("causal")
    assert log_likelihood(
        lm, ["b"], ["a" * 32 if len(lm.tokenizer("b")["input_ids"]) == 1 else "a" * 31]
    ).isfinite()
    with raises(GenerationError, where="pair 0"):
        log_likelihood(lm, ["b"], ["a" * 33])


@pytest.mark.parametrize("kind", ["bytes", "llama", "mistral", "metaspace", "wordpiece"])
@pytest.mark.parametrize("prompt", ["Once upon a time", "", [1], [1, 2], [1, 150, 2]])
def test_the_likelihood_of_a_text_is_that_of_the_tokens_that_wrote_it(kind, prompt):
    """Whether text, nothing or a special token precedes it."""
    tokenizer = every_kind(kind)
    lm, before = lm_of_tokenizer(tokenizer, "causal", None), encode_prompt(tokenizer, prompt)
    for text in ("there was a girl", " there was a girl", ", there.", ". then  was"):
        ids = encode_completion(tokenizer, before, text)
        written = text_after(tokenizer, before, ids)
        assert log_likelihood(lm, [prompt], [written]) == log_likelihood(lm, [prompt], [ids])


def test_the_likelihood_of_what_a_model_of_stories_writes():
    lm = load(str(shared_path("models", "stories260K")))
    made = generate(
        lm, ["Once upon a time", "Once upon a time,", "One day"], SamplerConfig(max_new_tokens=24)
    )
    assert torch.equal(
        log_likelihood(lm, made.prompts, made.texts), log_likelihood(lm, made.prompts, made.tokens)
    )


@partly_slow("kind", [*KINDS, "causal"], 0, 3)
def test_the_greedy_completion_is_what_generation_writes(kind):
    lm = any_toy(kind)
    for seed in range(6):
        prompt = enumeration.random_row(3, seed).tolist()
        written = generate(lm, [prompt], SamplerConfig(max_new_tokens=5, stop_at_eos=False)).tokens[0]
        assert is_greedy(lm, prompt, written)
        for place in range(5):
            other = [
                (token + 1) % TOY_VOCABULARY if index == place else token
                for index, token in enumerate(written)
            ]
            assert not is_greedy(lm, prompt, other)


def test_the_greedy_completion_of_random_tokens_is_what_generation_writes():
    lm = toy_lm().with_noise("uniform")
    prompt, config = enumeration.random_row(3, 0).tolist(), SamplerConfig(max_new_tokens=5, stop_at_eos=False)
    [written] = generate(lm, [prompt], config).tokens
    assert is_greedy(lm, prompt, written) and not is_greedy(lm, prompt, [written[0] ^ 1, *written[1:]])


@pytest.mark.parametrize("size", [1, 2])
def test_few_random_tokens_have_more_than_a_few_views(size):
    lm = toy_lm().with_noise("uniform")
    found = log_likelihoods(lm, [[4, 5]], [[4, 5][:size]], samples=9)
    assert found.differences[0].numel() and found.differences[0].abs().sum() > 0


def test_asking_for_the_greedy_completion_leaves_the_model_as_it_was():
    lm = toy_lm()
    lm.model.train()
    is_greedy(lm, [4], [5, 4])
    assert lm.model.training
