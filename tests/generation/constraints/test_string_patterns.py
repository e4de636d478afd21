"""Patterns of strings in JSON schemas, against a JavaScript engine: what is written matches there, and the
reverse."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
from collections.abc import Sequence

import pytest

from tests.errors import raises
from unmask.errors import GenerationError
from unmask.generation.constraints.byte_automaton import ByteAutomaton, byte_automata
from unmask.generation.constraints.string_patterns import string_pattern
from unmask.generation.constraints.unicode_properties import BINARY, CATEGORIES, SCRIPTS, is_property

pytest.importorskip("outlines_core")
NODE = shutil.which("node")
MATCH = r"""
const asked = JSON.parse(require("fs").readFileSync(0, "utf8"));
const read = (pattern, flags) => [new RegExp(pattern, flags), new RegExp(`^(?:${pattern})$`, flags)];
console.log(JSON.stringify(asked.map(([pattern, texts]) => {
    let part, whole, comparable = () => true;
    try { [part, whole] = read(pattern, "u"); } catch (error) {
        [part, whole] = read(pattern, "");
        comparable = (text) => !/[\u{10000}-\u{10ffff}]|\\u/u.test(pattern + text);
    }
    return texts.map((text) => comparable(text) ? [part.test(text), whole.test(text)] : null);
})));
"""
"""Of each pattern and each text, whether it matches a part of it, and the whole. A pattern that is none with
the flag u is read without, where characters of the higher planes are two (null)."""
CHARACTERS = [
    *"ab&-~^#!.,:;@/_ 09Z",
    "é",
    "ß",
    "\x7f",
    "\x85",
    "\xa0",
    "\u180e",
    "\u2003",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u3000",
    "\ufeff",
    "猫",
    "😀",
]
ESCAPES = [
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\s",
    r"\S",
    r"\.",
    r"\-",
    r"\^",
    r"\]",
    r"\[",
    r"\/",
    r"\x41",
    r"\u2028",
    r"\u{1F600}",
    r"\ud83d\ude00",
]
ESCAPES += [
    r"\p{L}",
    r"\P{L}",
    r"\p{Script=Greek}",
    r"\t",
    r"\cA",
    r"\0",
    r"\$",
    r"\(",
    r"\|",
    r"\{",
    r"\+",
    r"\?",
]
TEXTS = [
    "",
    *CHARACTERS,
    *("".join(pair) for pair in itertools.pairwise(CHARACTERS)),
    "aab",
    "a" * 9,
    "0a-b&&c",
    "[]",
    "--",
    "&&~~",
]


def random_class(draw: random.Random) -> str:
    members = []
    for _ in range(draw.randint(1, 5)):
        match draw.randrange(5):
            case 0:
                members.append(draw.choice(ESCAPES))
            case 1:
                first, last = sorted(draw.sample([*"abyz09AZ&~!é猫"], 2))
                members.append(f"{first}-{last}")
            case 2:
                members.append(draw.choice(["&&", "--", "~~", "&&[", "[", "&", "-", "~", "[:alpha:", "\\b"]))
            case _:
                members.append(draw.choice(CHARACTERS))
    return f"[{'^' * draw.randrange(2)}{''.join(members)}]"


def random_pattern(draw: random.Random, depth: int = 2) -> str:
    parts = []
    for _ in range(draw.randint(1, 3)):
        match draw.randrange(8):
            case 0:
                parts.append(".")
            case 1 | 2:
                parts.append(random_class(draw))
            case 3:
                parts.append(draw.choice(ESCAPES))
            case 4 if depth:
                opening = draw.choice(["(", "(?:", "(?<name>", "(^", "(?:^"])
                parts.append(f"{opening}{random_pattern(draw, depth - 1)}{draw.choice(['', '', '', '$'])})")
            case _:
                parts.append(draw.choice(CHARACTERS))
        parts.append(draw.choice(["", "", "", "*", "+?", "?", "{2}", "{0,2}", "{1,}"]))
    whole = "".join(parts)
    if draw.randrange(4) == 0:
        whole += "|" + draw.choice(["", "^", "b$"]) + (random_pattern(draw, depth - 1) if depth else "b")
    return draw.choice(["", "", "^"]) + whole + draw.choice(["", "", "$"])


def walk(automaton: ByteAutomaton, draw: random.Random, most: int) -> bytes:
    """A text that is accepted, at random as long as it is short."""
    dead, state, written = len(automaton.next_S256) - 1, automaton.start, b""
    while not (automaton.accepts_S[state] and (len(written) > most or draw.random() < 0.2)):
        bytes_ = (automaton.next_S256[state] != dead).nonzero()[0]
        if not len(bytes_):
            break
        byte = int(draw.choice(bytes_)) if draw.random() < 0.7 else int(bytes_[0])
        state, written = int(automaton.next_S256[state, byte]), written + bytes([byte])
        if len(written) > 200:
            return written + b"\xff"
    return written


def accepts(automaton: ByteAutomaton, text: str) -> bool:
    state = automaton.start
    for byte in text.encode():
        state = automaton.next_S256[state, byte]
    return bool(automaton.accepts_S[state])


def engine(asked: Sequence[tuple[str, Sequence[str]]]) -> list[list[tuple[bool, bool] | None]]:
    assert NODE is not None
    done = subprocess.run(
        [NODE, "-e", MATCH], input=json.dumps(asked).encode(), capture_output=True, check=True
    )
    return json.loads(done.stdout)


def automata(patterns: Sequence[str]) -> dict[str, ByteAutomaton]:
    """Those of the patterns that are not refused."""
    taken = {}
    for pattern in patterns:
        with contextlib.suppress(GenerationError):
            taken[pattern] = string_pattern(pattern, "pattern")
    try:
        return dict(zip(taken, byte_automata([*taken.values()], "pattern", plain=True), strict=True))
    except GenerationError as error:  # one that no plain string matches
        assert "no text matches it" in str(error)
        half = [*taken][: len(taken) // 2]
        return automata(half) | automata([*taken][len(half) :]) if half else {}


@pytest.mark.skipif(NODE is None, reason="needs node, a JavaScript engine")
@pytest.mark.parametrize("seed, count", [(0, 25), pytest.param(1, 400, marks=pytest.mark.slow)])
def test_random_patterns_match_what_they_match_in_javascript(seed, count):
    draw = random.Random(seed)
    found, asked = automata([random_pattern(draw) for _ in range(count)]), []
    for pattern, automaton in found.items():
        texts = [walk(automaton, draw, 6) for _ in range(8)]
        asked.append((pattern, [*(text.decode() for text in texts if b"\xff" not in text), *TEXTS]))
    compared = 0
    for (pattern, texts), matches in zip(asked, engine(asked), strict=True):
        for text, (part, whole) in (
            (text, match) for text, match in zip(texts, matches, strict=True) if match
        ):
            accepted = accepts(found[pattern], text)
            assert not accepted or (part and whole), (pattern, text)
            assert accepted or not whole or text != json.dumps(text, ensure_ascii=False)[1:-1], (
                pattern,
                text,
            )
            compared += accepted
    assert len(asked) > count / 2 and compared > 4 * len(asked)


@pytest.mark.parametrize(
    "pattern, yes, no",
    [
        ("[^!&&#]{2}", ["ab"], ["#a", "!a", "&a"]),
        ("[a--b]", [], None),
        ("[+--]", ["+", ",", "-"], ["."]),
        ("[a&&&b]", ["a", "b", "&"], ["c"]),
        ("[~~a~~]", ["a", "~"], ["b"]),
        (".", ["\x85", "\ufeff", "é"], ["\u2028", "\u2029"]),
        (r"\s", ["\ufeff", "\u2028", "\xa0"], ["\x85", "\u180e", "\u200b"]),
        (r"\S", ["\x85", "\u200b"], ["\ufeff", "\u2028"]),
        (r"[\w-.]+", ["a-.", "_"], ["/"]),
        (r"^(?:a|b$)$", ["a", "b"], ["ab"]),
        ("x{2,}?|^y$|", ["xx", "y", ""], ["x"]),
        ("a{b}{", ["a{b}{"], ["ab"]),
        (r"[\n\x41\u{42}]", ["A", "B"], []),
    ],
)
def test_sets_are_those_of_ecma(pattern, yes, no):
    if no is None:
        with raises(GenerationError, where="pattern"):
            string_pattern(pattern, "pattern")
        return
    (automaton,) = byte_automata([string_pattern(pattern, "pattern")], "pattern", plain=True)
    assert [text for text in (*yes, *no) if accepts(automaton, text)] == yes


NAMED = [
    "lu",
    "L_",
    "greek",
    "Greek",
    "letter",
    "Lu",
    "Letter",
    "digit",
    "punct",
    "space",
    "cntrl",
    "LC",
    "Any",
    "ASCII",
    "Emoji",
    "White_Space",
]
NAMED += [
    "Script=Greek",
    "sc=Grek",
    "Script=greek",
    "scx=Greek",
    "script=Greek",
    "gc=Lu",
    "General_Category=Letter",
    "gc=lu",
    "Lu=Lu",
    "Script=",
]
NAMED += [
    "Basic_Emoji",
    "Alpha",
    "alpha",
    "Lower",
    "IsGreek",
    "InGreek",
    "Latin",
    "Script=Latin",
    "Script_Extensions=Latn",
    "L&",
    "Block=Greek",
]


@pytest.mark.skipif(NODE is None, reason="needs node, a JavaScript engine")
def test_properties_are_those_of_ecma():
    assert NODE is not None
    script = r"""
    const names = JSON.parse(require("fs").readFileSync(0, "utf8"));
    const known = (name) => { try { return Boolean(new RegExp(`\\p{${name}}`, "u")); } catch (error) { return false; } };
    console.log(JSON.stringify(names.map(known)));
    """
    names = [*NAMED, *sorted(CATEGORIES | BINARY | SCRIPTS), *(f"Script={name}" for name in sorted(SCRIPTS))]
    known = json.loads(
        subprocess.run(
            [NODE, "-e", script], input=json.dumps(names).encode(), capture_output=True, check=True
        ).stdout
    )
    assert {name: is_property(name) for name in names} == dict(zip(names, known, strict=True))
    for name in NAMED:
        if not is_property(name):
            for pattern in (f"\\p{{{name}}}", f"a[b\\P{{{name}}}]"):
                with raises(GenerationError, where="pattern"):
                    string_pattern(pattern, "pattern")
    taken = [
        f"\\{kind}{{{name}}}"
        for name in NAMED
        if is_property(name)
        for kind in "pP"
        if (kind, name) != ("P", "Any")
    ]
    texts = [*CHARACTERS, "\u03b1", "\u0391", "\u0301", "\u0663"]
    found = dict(
        zip(
            taken,
            byte_automata([string_pattern(each, "pattern") for each in taken], "pattern", plain=True),
            strict=True,
        )
    )
    for pattern, matches in zip(taken, engine([(pattern, texts) for pattern in taken]), strict=True):
        assert [accepts(found[pattern], text) for text in texts] == [
            match[1] for match in matches if match
        ], pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-\p{Lu}]",
        r"[\p{Lu}-z]",
        r"[\w-.]\p{L}",
        r"\p{L}\-",
        r"\P{L}{",
        r"\p{L}]",
        r"\u{61}\_",
        r"[\d-x\u{61}]",
        r"[\!\p{L}]",
    ],
)
def test_what_is_a_pattern_only_without_the_flag_has_no_properties(pattern):
    with raises(GenerationError, where="pattern"):
        string_pattern(pattern, "pattern")
    kept = re.sub(r"\\[pP]\{\w+\}|\\u\{61\}", "", pattern)  # what is left is a pattern
    if not kept.startswith(("[a-]", "[-z]", "{")):
        assert string_pattern(kept, "pattern")
    assert string_pattern(r"[\p{Lu}\-_]\/\{\u{61}", "pattern")


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{Greek}",
        "a(b",
        "a)b",
        "a[b",
        "[]a]",
        "[^]]",
        "[b-a]",
        "a{3,2}",
        "*a",
        "a**",
        "a^b",
        "a$b",
        "(^a)+",
        "(a$)?",
        "(a$|b)c",
        r"a\b",
        r"(a)\1",
        r"\q",
        r"\ud800",
        "(?=a)",
        "(?i)a",
        'say "',
        r"a\\b",
        r"\n",
    ],
)
def test_what_is_no_regular_pattern_of_plain_strings_is_refused(pattern):
    with raises(GenerationError, where="constraint.pattern"):
        string_pattern(pattern, "constraint.pattern")
