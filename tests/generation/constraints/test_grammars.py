"""Grammars as automata: their language as Lark parses it, nested so deep at most."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.errors import raises
from tests.generation.cases import every_pattern
from tests.generation.constraints.vocabularies import SMALL, text_of, walks
from tests.helpers import partly_slow
from tests.tiny import float64_lm
from unmask.config.constraint import ConstraintConfig
from unmask.config.sampler import SamplerConfig
from unmask.errors import ConfigError, GenerationError
from unmask.generation import naive, sampler
from unmask.generation.constraints import bounded_process, grammars
from unmask.generation.constraints.byte_automaton import ByteAutomaton
from unmask.generation.constraints.compiled import compile_constraint
from unmask.generation.constraints.grammars import grammar_automaton

lark = pytest.importorskip("lark")
pytest.importorskip("outlines_core")

ARITHMETIC = """
start: sum
sum: product | sum "+" product
product: atom | product "*" atom
atom: "a" | "(" sum ")"
"""
GRAMMARS = {
    "arithmetic": (ARITHMETIC, "a+*()", 5),
    "palindromes": ('start: "a" start "a" | "b" start "b" | "c"', "abc", 7),
    "as many": ('start: "a" start "b" | "a" "b"', "ab", 8),
    "from the right": ('start: "a" start | other\nother: "b" start | "c"', "abc", 7),
    "from the left": ('start: start "a" | "b" | other\nother: start "c"', "abc", 7),
    "lists": ('start: "(" item* ")"\nitem: start | "a" ","?', "a(),", 6),
    "optional": ('start: ["a"] "b"~2..3 | empty "c"\nempty:', "abc", 5),
    "ignored": ('start: "a" ("b" start)? "c"\n%ignore " "', "abc ", 6),
    "characters of classes": (r"start: /[[&a]/ /[^[&]/? | /[^\w]\s/ | /\W\D/ | /[a&&b]#/", "[a&\x1c²#", 3),
    "marks and digits": (r"start: /\w+/ | /\S[\W\x20]/ | /[^\S]/", "a²\u0301\x1c ", 4),
    "terminals": ('start: WORD ("," WORD)*\nWORD: /a[ab]*/ | "b"i', "abB,", 6),
}


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = automaton.next_S256[state, byte]
    return bool(automaton.accepts_S[state])


def parses(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.UnexpectedInput:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")  # Python's, of brackets in classes
@partly_slow("name", GRAMMARS, *range(0, len(GRAMMARS), 4))
def test_the_language_is_that_of_lark(name):
    """All texts that are too short to be nested deeper."""
    grammar, alphabet, longest = GRAMMARS[name]
    automaton, parser = (
        grammar_automaton(grammar, 4, ""),
        lark.Lark(grammar, parser="earley", lexer="dynamic_complete"),
    )
    found = 0
    for length in range(longest + 1):
        for text in map("".join, itertools.product(alphabet, repeat=length)):
            expected = parses(parser, text)
            assert accepts(automaton, text) == expected, text
            found += expected
    assert found > 2


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_only_nested_recursion_is_bounded(depth):
    automaton = grammar_automaton(ARITHMETIC, depth, "")
    for nested in range(4):
        assert accepts(automaton, "(" * nested + "a*a+" * 50 + "a" + ")" * nested) == (nested <= depth)


@pytest.mark.parametrize(
    "grammar", ['start: start start | "a" | "(" start ")"', 'start: "x" start | start "y" | "z"']
)
def test_a_rule_that_recurs_at_both_ends_accepts_no_more_than_its_language(grammar):
    automaton, parser = (
        grammar_automaton(grammar, 2, ""),
        lark.Lark(grammar, parser="earley", lexer="dynamic_complete"),
    )
    alphabet = sorted(
        {character for character in grammar if character in "axyz()"} - {"a"}
        | ({"a"} if '"a"' in grammar else set())
    )
    texts = ["".join(text) for length in range(1, 6) for text in itertools.product(alphabet, repeat=length)]
    accepted = [text for text in texts if accepts(automaton, text)]
    assert len(accepted) > 8 and all(parses(parser, text) for text in accepted)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_any_json_is_nested_no_deeper(depth):
    automaton = compile_constraint(ConstraintConfig(json=True, depth=depth), SMALL, end="none")
    for length in (4, 9, 14):
        for tokens in walks(automaton, length, 10):
            json.loads(text_of(tokens))
    nested = grammar_automaton(grammars.JSON, depth, "")
    for levels in range(5):
        for text in ("[" * levels + "1" + "]" * levels, '{"a": ' * levels + "-1.5e3" + "}" * levels):
            assert accepts(nested, text) == (levels <= depth)
    assert accepts(nested, r'"\n\"é"') and not accepts(nested, '"\n"') and not accepts(nested, "01")


@every_pattern
@partly_slow("temperature", [0.0, 1.0], 1)
def test_completions_are_in_the_language_and_the_engine_gives_the_tokens_of_the_naive_sampler(
    attention, block_size, temperature
):
    lm, grammar = (
        float64_lm("phi", attention, block_size, eos_bias=1.0),
        'start: "a" start "b" | "c" ("d" | "e")*',
    )
    config = SamplerConfig(
        max_new_tokens=12, tokens_per_step=2, temperature=temperature, constraint={"grammar": grammar}
    )
    config = config.model_copy(update={"tokens_per_step": None}) if attention == "causal" else config
    prompts, parser = [[4, 5, 6], [9], [4, 5, 6], [7]], lark.Lark(grammar, parser="earley")
    generation = sampler.generate(lm, prompts, config)
    assert generation.tokens == naive.generate(lm, prompts, config).tokens
    assert all(parses(parser, text) for text in generation.texts)


def test_lark_reads_strings_of_its_own_grammar():
    """`common.ESCAPED_STRING` looks behind, which no automaton does."""
    automaton = grammar_automaton("start: ESCAPED_STRING\n%import common.ESCAPED_STRING", 0, "")
    assert accepts(automaton, r'"a \" b"') and not accepts(automaton, r'"a\"') and not accepts(automaton, "a")


@pytest.mark.parametrize(
    "grammar, where",
    [
        ("start: a", ""),
        ('start: "a', ""),
        ('begin: "a"', ""),
        ("start: WORD\nWORD: /a(?=b)/", ".WORD"),
        ('start: "(" start ")"', ""),
        ("start: SIGN\nSIGN: /[+--]/", ".SIGN"),
        ("", ""),
        ("start:", ""),
        ("start: start", ""),
        ("start: A\n%declare A", ".A"),
        ('start: A | "a"\nA: "\U0010fffd"', ".A"),
        ("start: A\nA: /a++b/", ".A"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, ""),
    ],
)
def test_a_grammar_that_is_invalid_is_refused(grammar, where):
    with raises(GenerationError, where=f"constraint.grammar{where}"):
        compile_constraint(ConstraintConfig(grammar=grammar), SMALL)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: " + " ".join(f'"{letter}"?' for letter in "abcdefghijklmnopqrstuvw"),  # each may be left out
        pytest.param('start: A\nA: ("a" | "b")~100000', marks=pytest.mark.slow),
        pytest.param('start: e~20000\ne: "a" |', marks=pytest.mark.slow),
    ],
)
def test_a_grammar_that_takes_too_long_is_refused_in_time(monkeypatch, grammar):
    monkeypatch.setattr(bounded_process, "SECONDS", 2)
    with raises(GenerationError, where="constraint.grammar"):
        compile_constraint(ConstraintConfig(grammar=grammar), SMALL)


def test_the_states_that_are_reached_without_a_byte_are_bounded(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_CLOSED", 1000)
    with raises(GenerationError, where=""):
        grammar_automaton('start: e~100\ne: "a" |', 0, "")


def test_a_grammar_whose_automaton_is_too_large_is_refused(monkeypatch):
    with raises(GenerationError, where=""):
        grammar_automaton(grammars.JSON, 9, "")
    monkeypatch.setattr(grammars, "MAX_STATES", 100)
    with raises(GenerationError, where=""):
        grammar_automaton(grammars.JSON, 2, "")
    with raises(ConfigError, where="depth"):
        ConstraintConfig(regex="a", depth=1)
