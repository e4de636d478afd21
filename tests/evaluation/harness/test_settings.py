"""The options of requests: each is obeyed, or refused by name."""

from __future__ import annotations

import pytest

from unmask import SamplerConfig
from unmask.errors import ConfigError
from unmask.evaluation.harness.settings import read_gen_kwargs, split_settings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"max_new_tokens": 256, "temperature": 0.0}),
        ({"max_gen_toks": 8}, {"max_new_tokens": 8}),
        ({"max_tokens": 8}, {"max_new_tokens": 8}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        ),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        (
            {"steps": 4, "block_size": 2, "policy": "margin"},
            {"steps": 4, "block_size": 2, "policy": "margin"},
        ),
    ],
)
def test_options_are_obeyed(given, expected):
    sampler, until = read_gen_kwargs(given, SamplerConfig())
    assert {name: getattr(sampler, name) for name in expected} == expected and until == []


def test_a_request_comes_before_the_defaults():
    defaults = SamplerConfig(max_new_tokens=16, temperature=0.5, steps=4, seed=3)
    sampler, _ = read_gen_kwargs({"steps": 8}, defaults)
    assert (sampler.max_new_tokens, sampler.temperature, sampler.steps, sampler.seed) == (16, 0.5, 8, 3)
    assert read_gen_kwargs({"do_sample": True, "max_gen_toks": 9}, defaults)[0].temperature == 0.5
    assert read_gen_kwargs({"do_sample": False, "max_gen_toks": 9}, defaults)[0].max_new_tokens == 9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_beams": 4}, "'num_beams' is no option"),
        ({"temprature": 1}, "'temprature' is no option.*'temperature'"),
        ({"max_gen_toks": 8, "max_tokens": 9}, "max_gen_toks and max_tokens contradict"),
        ({"do_sample": True, "temperature": 0.0}, "do_sample with temperature 0"),
        ({"until": [3]}, r"until \[3\] is not a string"),
        ({"top_p": 2}, "top_p"),
    ],
)
def test_other_options_are_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        read_gen_kwargs(given, SamplerConfig())


def test_settings_are_of_the_model_or_of_the_sampler():
    assert split_settings({"dtype": "float64", "steps": 4}) == ({"dtype": "float64"}, {"steps": 4})
    with pytest.raises(ConfigError, match=r"unknown option 'sample'.*'samples'"):
        split_settings({"sample": 4})
