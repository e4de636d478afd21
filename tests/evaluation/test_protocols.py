"""Every protocol: valid, with sources, and its tokens are those of a plain transcription of its authors'
sampler."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import nn
from transformers import DiffusionGemmaGenerationConfig

from tests.diffusion_gemma import CANVAS, exact, exact_models, generated
from tests.errors import raises
from tests.evaluation.authors_samplers import dream, llada, run, sdar
from tests.helpers import partly_slow
from tests.tiny import float64_causal, float64_lm
from unmask.config.sampler import SamplerConfig
from unmask.config.yaml import parse_yaml
from unmask.errors import ConfigError
from unmask.evaluation.protocols import cut as ended
from unmask.evaluation.protocols import protocol_names, protocol_tasks, read_protocol
from unmask.generation import naive, sampler
from unmask.generation.requests import make_requests
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

PROMPTS = [
    torch.randint(4, 9, (4 + seed % 4,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(64)
]
KEYS = list(range(64))
SOURCE = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(blob|tree)/[0-9a-f]{40}/")
LENGTH = 12
# so that end tokens are neither rare nor all
END_BIAS = {"llada": [2.0, 1.0], "d1": [2.0, 1.0], "dream": [-1.0, 0.0], "sdar": [1.0, 0.0]}
CANVASES = "diffusion-gemma"
EVERY = [
    (name if variant is None else f"{name}/{variant}", task)
    for name in protocol_names()
    for task, variants in protocol_tasks(name).items()
    for variant in [None, *variants]
]


@cache
def random_model(name: str) -> DiffusionLM:
    """Of the pattern of the protocol's models, in float64, with two end tokens: EOS and, as a turn's end,
    "f". Both are frequent."""
    attention, block_size = ("block_causal", 4) if name == "sdar" else ("bidirectional", None)
    model, tokenizer = float64_causal("phi", layers=2)
    for weight in model.parameters():
        weight.data *= 2 if weight.dim() == 2 else 1  # so that predictions differ from prompt to prompt
    end_of_turn = tokenizer.convert_tokens_to_ids("f")
    pattern = {"attention": attention, "block_size": block_size, "logit_shift": name.startswith("dream")}
    lm = make_diffusion(model, tokenizer, eos_token_ids=[tokenizer.eos_token_id, end_of_turn], **pattern)
    bias_V = torch.zeros(model.lm_head.weight.shape[0], dtype=torch.float64)
    bias_V[list(lm.eos_token_ids)] = torch.tensor(END_BIAS[name.partition("-")[0]], dtype=torch.float64)
    lm.model.lm_head.bias = nn.Parameter(bias_V)
    return lm


def shortened(name: str, task: str) -> tuple[SamplerConfig, dict[str, bool]]:
    """The sampler of a protocol at a length of 12 tokens, with as many steps per token and up to 3 blocks;
    and its rules about EOS."""
    protocol = read_protocol(name, task)
    config = protocol.sampler(random_model(protocol.name))
    given = {"max_new_tokens": LENGTH}
    if config.steps:
        given["steps"] = LENGTH * config.steps // config.max_new_tokens
    if config.block_size and protocol.name != "sdar":
        given["block_size"] = LENGTH // min(config.max_new_tokens // config.block_size, 3)
    rules = {
        "logits_eos_inf": protocol.logits_eos_inf,
        "confidence_eos_eot_inf": protocol.confidence_eos_eot_inf,
    }
    return protocol.sampler(random_model(protocol.name), given), rules


def distinct_samplers() -> list[ParameterSet]:
    """A protocol and a task for each distinct sampler of each file; those that only variants have are
    slow."""
    found: dict[str, ParameterSet] = {}
    for name, task in sorted(EVERY, key=lambda pair: "/" in pair[0]):
        if name != CANVASES and read_protocol(name, task).generation is not None:
            case = pytest.param(
                name, task, id=f"{name}-{task}", marks=[pytest.mark.slow] if "/" in name else []
            )
            found.setdefault(name.partition("/")[0] + shortened(name, task)[0].model_dump_json(), case)
    return list(found.values())


def transcribed(name: str, config: SamplerConfig, rules: dict[str, bool]) -> list[list[int]]:
    """The canvases that the authors' sampler fills."""
    lm = random_model(name)
    if name == "sdar":
        settings = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "threshold": config.threshold or 1.0,
        }
        after = {"confidence_after_filters": config.filtered_confidence}
        return run(
            lm,
            [
                sdar(lm, prompt, LENGTH, key=key, **settings, **after)
                for prompt, key in zip(PROMPTS, KEYS, strict=True)
            ],
        )
    if name.startswith("dream"):
        settings = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "rounded_down": config.schedule == "dream",
        }
        return run(
            lm,
            [
                dream(lm, prompt, LENGTH, config.steps, key=key, **settings)
                for prompt, key in zip(PROMPTS, KEYS, strict=True)
            ],
        )
    removed = {"as_written": rules["confidence_eos_eot_inf"] and not config.filtered_confidence}
    return run(
        lm,
        [
            llada(lm, prompt, LENGTH, config.steps, config.block_size, **rules, **removed)
            for prompt in PROMPTS
        ],
    )


def cut(canvas: list[int], ends: tuple[int, ...]) -> list[int]:
    """Up to and including the first end token."""
    return canvas[: next((at + 1 for at, token in enumerate(canvas) if token in ends), len(canvas))]


@partly_slow("name, task", distinct_samplers(), 0, 4, 8)
def test_the_tokens_are_those_of_the_authors_sampler(name, task):
    config, rules = shortened(name, task)
    family = name.partition("/")[0]
    lm, expected = random_model(family), transcribed(family, config, rules)
    generation = sampler.generate(lm, PROMPTS, config.model_copy(update={"trace": True}), KEYS)
    # the last block may be larger there; and decoding stops there after a block with an end token, as here
    if family == "sdar":
        whole = [LENGTH - (len(prompt) + LENGTH) % 4 for prompt in PROMPTS]
        canvases = [trace.canvas[:end] for trace, end in zip(generation.trace, whole, strict=True)]
        assert canvases == [canvas[:end] for canvas, end in zip(expected, whole, strict=True)]
    else:
        canvases = [trace.canvas for trace in generation.trace]
        assert canvases == expected
        assert generation.tokens == (
            [cut(canvas, lm.eos_token_ids) for canvas in expected] if config.stop_at_eos else expected
        )
    assert len({tuple(canvas) for canvas in canvases}) > 40
    assert naive.generate(lm, PROMPTS[:4], config, KEYS[:4]).tokens == generation.tokens[:4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_tokens_on_canvases_are_those_of_transformers(tmp_path):
    """Its authors published no other code than `generate`, with these settings as its defaults."""
    lm, model = exact_models(tmp_path)
    protocol = read_protocol(CANVASES, "gpqa_diamond_cot_zeroshot")
    config = protocol.sampler(lm, {"max_new_tokens": 3 * CANVAS})
    named = DiffusionGemmaGenerationConfig(**DiffusionGemmaGenerationConfig._get_default_generation_params())
    named.max_new_tokens = config.max_new_tokens
    with exact():
        for request in make_requests(lm, PROMPTS[:8], config, KEYS[:8]):
            [expected] = generated(model, lm, [request], config, named)
            found = sampler.generate(lm, [request.prompt], config, [request.key])
            assert found.tokens == [cut(expected, lm.eos_token_ids)]


@pytest.mark.parametrize(
    "task, others", [("humaneval", {"logits_eos_inf": False}), ("gsm8k", {"confidence_eos_eot_inf": False})]
)
def test_the_rules_about_eos_change_tokens(task, others):
    lm = random_model("llada-instruct")
    config, rules = shortened("llada-instruct", task)
    with_rule, without = (transcribed("llada-instruct", config, asked) for asked in (rules, rules | others))
    assert sum(a != b for a, b in zip(with_rule, without, strict=True)) > 32
    eos = [row.count(lm.eos_token_id) for row in with_rule]
    assert sum(eos) == 0 if task == "humaneval" else sum(eos) > 64


def test_the_rule_as_coded_and_as_written_differ():
    coded, written = (
        transcribed("llada-instruct", *shortened(name, "gsm8k"))
        for name in ("llada-instruct", "llada-instruct/as-written")
    )
    assert 0 < sum(a != b for a, b in zip(coded, written, strict=True)) < 64


def test_where_only_end_tokens_remain_they_are_revealed_from_left_to_right():
    lm = float64_lm("phi", "bidirectional", eos_bias=99.0)
    config = SamplerConfig(max_new_tokens=6, reveal_last=[lm.eos_token_id], stop_at_eos=False)
    for rule in ({}, {"threshold": 0.5}):
        generation = sampler.generate(lm, [[4, 5]], config.model_copy(update=rule))
        assert generation.tokens == [[lm.eos_token_id] * 6] and generation.steps == [list(range(6))]


@pytest.mark.parametrize("name", protocol_names())
def test_a_protocol_names_its_sources_by_commit(name):
    for task, variants in protocol_tasks(name).items():
        for variant in [None, *variants]:
            protocol = read_protocol(name if variant is None else f"{name}/{variant}", task)
            assert (protocol.name, protocol.task, protocol.variant) == (name, task, variant)
            assert (protocol.generation is None) == (protocol.likelihood_samples is not None)
            assert protocol.differences and all(map(SOURCE.match, protocol.sources))


def test_known_settings():
    """As the authors' files have them."""
    gsm8k = read_protocol("llada-instruct", "gsm8k")
    assert (gsm8k.shots, gsm8k.template, gsm8k.confidence_eos_eot_inf, gsm8k.generation["steps"]) == (
        4,
        True,
        True,
        512,
    )
    blocks = read_protocol("llada-instruct/blocks", "gsm8k")
    assert (blocks.confidence_eos_eot_inf, blocks.generation["block_size"], blocks.generation["steps"]) == (
        False,
        8,
        256,
    )
    assert read_protocol("llada-instruct", "humaneval").logits_eos_inf
    assert read_protocol("llada-base", "mmlu_anatomy").likelihood_samples == 1
    assert read_protocol("llada-base", "truthfulqa_mc2").cfg_scale == 2.0
    assert read_protocol("llada-base/without-guidance", "truthfulqa_mc2").cfg_scale == 0.0
    assert read_protocol("dream-base", "mbpp").generation["temperature"] == 0.2
    assert read_protocol("dream-instruct", "gpqa_main_n_shot").likelihood_samples == 32
    assert read_protocol("d1/length-512", "sudoku").generation["steps"] == 256
    assert read_protocol("d1", "math").task == "math500"


def test_given_settings_win_and_are_named():
    protocol, lm = read_protocol("llada-instruct", "gsm8k"), random_model("llada-instruct")
    given = {"max_new_tokens": 16, "block_size": 8, "threshold": 0.9}
    config = protocol.sampler(lm, given)
    assert (config.max_new_tokens, config.block_size, config.threshold, config.steps) == (16, 8, 0.9, None)
    assert config.reveal_last == list(lm.eos_token_ids) and config.filtered_confidence
    assert protocol.replaced(lm, given) == {
        "max_new_tokens": {"protocol": 512, "used": 16},
        "steps": {"protocol": 512, "used": None},
        "block_size": {"protocol": 512, "used": 8},
        "threshold": {"protocol": None, "used": 0.9},
    }
    assert protocol.replaced(lm, {"temperature": 0.0}) == {}


@pytest.mark.parametrize(
    "name, task, where",
    [
        ("llada-bse", "gsm8k", "protocol"),
        ("gemma", "gsm8k", "protocol"),
        ("d1", "gsm9k", "protocol d1"),
        ("llada-base", "mmlu_pro", "protocol llada-base"),
        ("d1/length-64", "gsm8k", "protocol d1"),
        ("llada-base/paper", "piqa", "protocol llada-base"),
    ],
)
def test_unknown_names(name, task, where):
    with raises(ConfigError, where=where):
        read_protocol(name, task)


def test_a_task_scored_by_likelihood_has_no_sampler():
    with raises(ConfigError, where="protocol llada-base"):
        read_protocol("llada-base", "piqa").sampler(random_model("llada-base"))


def test_stop_strings_are_those_of_lm_evals_task():
    """Of tasks that Unmask has too, where its authors' code obeys lm-eval's."""
    tasks = Path(pytest.importorskip("lm_eval.tasks").__file__).parent
    for name, task in (
        ("llada-base", "gsm8k"),
        ("llada-base", "humaneval"),
        ("llada-base", "mbpp"),
        ("dream-base", "mbpp"),
    ):
        published = re.search(r"\n  until:\n((?:    - .*\n)+)", (tasks / task / f"{task}.yaml").read_text())
        assert read_protocol(name, task).until == parse_yaml(published.group(1), task)
    assert (
        read_protocol("dream-base", "humaneval").until == []
        and read_protocol("dream-base", "humaneval").ignore_until
    )
    for name in ("llada-base", "dream-base"):
        assert any(line.startswith("Stop strings:") for line in read_protocol(name, "mbpp").differences)


def test_a_text_ends_before_the_first_stop_string():
    assert (
        ended("a. b\n\nc", ["\n\n", "."]) == "a"
        and ended("abc", ["d"]) == "abc"
        and ended("abc", []) == "abc"
    )
