# ruff: noqa: RUF001 (tables, signs)
"""Final answers in usual spellings are right; a unit or a variable may be there if the question names it or
the reference has it."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers import shared_path
from unmask.rewards.spelling import bare, plain, words
from unmask.rewards.symbolic import equivalent, equivalent_all


@pytest.mark.parametrize(
    ("answer", "reference", "question"),
    [
        ("x = 6", "6", "Solve for $x$: $2x = 12$."), (r"p(8) = \frac{3}{56}", r"\frac{3}{56}", r"Find $p(8).$"), ("5", "x=5", ""), ("[-2,7]", r"x \in [-2,7]", ""),
        (r"42\text{ inches}", "42", "What is it, in inches?"), ("42 inches", "42", "What is it, in inches?"), ("1 inch", "1", "How many inches?"),
        (r"120\text{ degrees}", "120", "How many degrees?"), ("120 degrees", r"120^\circ", ""), (r"120\degree", r"120^\circ", ""), (r"\sqrt{5} meters", r"\sqrt{5}", "in meters"),
        (r"10\%", "10", "By what percent does it grow?"), (r"10\text{ percent}", "10", "Express it as a percentage."), (r"36\text{ dollars}", r"\$36", ""), ("36 dollars", "36", r"It costs \$4"),
        ("C", r"\text{(C)}", ""), (r"\text{C}", r"\text{(C)}", ""), ("(C)", r"\text{(C)}", ""), (r"\textbf{(C)}", r"\text{(C)}", ""), (r"\operatorname{even}", r"\text{even}", ""), (r"\textit{even}", r"\text{even}", ""),
        (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}", ""), (r"1\mp\sqrt{19}", r"1 \pm \sqrt{19}", ""), (r"1-\sqrt{19}\text{ and }1+\sqrt{19}", r"1 \pm \sqrt{19}", ""),
        (r"\{3,5,7\}", "3, 5, 7", ""), (r"1 \text{ and } -2", "1,-2", ""), ("-2 or 1", "1,-2", ""), ("x=1, x=-2", "1,-2", "Solve for $x$."), ("x = 1, -2", "1,-2", "Solve for $x$."), (r"1,\quad -2", "1,-2", ""),
        ("3 / 56", r"\frac{3}{56}", ""), ("2{,}220", "2220", ""), (r"\(9\)", "9", ""), (r"\[9\]", "9", ""), ("(9)", "9", ""), ("{9}", "9", ""), (r"\mathbf{9}", "9", ""), (r"\boldsymbol{\frac{1}{2}}", r"\frac12", ""),
        (r"\underline{9}", "9", ""), ("**9**", "9", ""), ("4 2/3", r"\frac{14}{3}", ""), ("-4 2/3", r"-\frac{14}{3}", ""), (r"{14 \over 3}", r"\frac{14}{3}", ""), (r"\cfrac{14}{3}", r"\frac{14}{3}", ""), (r"\displaystyle\frac{14}{3}", r"\frac{14}{3}", ""),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", ""), (r"\left(\begin{array}{c} 1 \\[2pt] 2 \end{array}\right)", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", ""),
        (r"6 - 5\cdot i", "6-5i", ""), ("2√3", r"2\sqrt{3}", ""), ("√(13)", r"\sqrt{13}", ""), (r"(-∞,2)∪(3,∞)", r"(-\infty,2)\cup(3,\infty)", ""), (r"\big(2,3\big)", "(2,3)", ""),
        (r"x \in (2,\infty)", r"(2,\infty)", "For which $x$?"), ("(x,y) = (2,4)", "(2,4)", "Find $(x,y)$."), (r"204_{\text{five}}", "204_5", ""), ("(204)_5", "204_5", ""), ("{204}_5", "204_{5}", ""),
        ("5.40 cents", r"5.4 \text{ cents}", ""), (r"15\text{ cm}^2", r"15\mbox{ cm}^2", ""),
    ],
)  # fmt: skip
def test_usual_spellings_of_a_result_are_right(answer, reference, question):
    assert equivalent(answer, reference, question).solved


@pytest.mark.parametrize(
    ("answer", "reference", "question"),
    [
        ("x = 6", "6", ""), ("x = 6", "6", "Solve for $y$."), ("x = 6", "6", "An x that is no formula"), ("7 = 6", "6", "Is $7 = 6$?"), ("y = 5", "x=5", "$y$"), ("x = 6", "6", "Where $x = 6$, find $y$."),
        ("x = 12/2", "6", "Solve for $x$."), ("x = 5 + 1", "6", "Solve for $x$."), ("x = y = 6", "6", "Find $x$ and $y$."), ("x = 6, 7", "6", "Solve for $x$."), ("2x + 3", "y = 2x + 3", "$y$"), ("0", "5x - 7y = 0", "$x$"),
        ("f(x) = 3", "3", "where $f(x)=3x^4$"), ("x = 5", "5", "where $2x=5y$"),
        (r"42\text{ miles}", "42", "What is it, in inches?"), (r"5\text{ miles}", r"5\text{ cm}", "How many miles?"), (r"5\text{2}", "5", "There are 2"), (r"1\text{ way}0", "10", "How many ways?"), ("5 or 6 inches", "5", "How many inches?"),
        (r"6 \cdot 7\text{ inches}", "42", "How many inches?"), (r"10\%", "10", r"It is $2\%$ of what?"), ("10 percent", "10", "What is it?"), (r"50\%", r"\frac12", "as a percentage"),
        ("D", r"\text{(C)}", ""), ("c", r"\text{(C)}", ""), ("C or D", r"\text{(C)}", ""), (r"1+\sqrt{19}", r"1 \pm \sqrt{19}", ""), (r"1+\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}", ""),
        (r"\{3,5\}", "3, 5, 7", ""), ("5 or 6", "5", ""), (r"\{1,2\}", "(1,2)", ""), ("1 and 2", "(1,2)", ""), ("4 3/2", r"\frac{11}{2}", ""), ("1 234/500", r"1\frac{117}{250}", ""),
        ("(1,234)", "1234", ""), ("(2)(3)", "6", ""), (r"\(5\) or \(6\)", "5", ""), (r"{28 \over 6}", r"\frac{14}{3}", ""), ("28 / 6", r"\frac{14}{3}", ""), ("204_6", "204_5", ""), (r"204_{\text{six}}", "204_5", ""), ("(2,4)", "[2,4]", ""),
    ],
)  # fmt: skip
def test_others_are_not(answer, reference, question):
    assert equivalent(answer, reference, question).value == 0.0


def problems():
    return [
        json.loads(line) for line in shared_path("data", "math500", "math500.jsonl").read_text().splitlines()
    ]


def asks(unit, problem):
    return re.search(rf"how many {unit}\b", problem, re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spelt",
    [
        r"\({}\)",
        r"\[{}\]",
        "{{{}}}",
        r"\mathbf{{{}}}",
        r"\boldsymbol{{{}}}",
        r"\underline{{{}}}",
        "**{}**",
        r"\displaystyle {}",
    ],
)
def test_every_reference_of_math500_is_right_with_signs_around_it(spelt):
    asked = [(spelt.format(row["answer"]), row["answer"], row["problem"]) for row in problems()]
    assert [
        answer for answer, verdict in zip(asked, equivalent_all(asked), strict=True) if not verdict.solved
    ] == []


@pytest.mark.slow
def test_every_number_of_math500_is_right_with_what_its_question_names():
    asked = []
    for row in problems():
        problem, answer = row["problem"], row["answer"]
        if re.fullmatch(r"-?[0-9]+|\\frac\{[0-9]+\}\{[0-9]+\}", answer):
            named = re.search(r"(?:value of|[Ff]ind|[Ss]olve for) \$([a-zA-Z])\.?\$", problem)
            asked += [(f"{named[1]} = {answer}", answer, problem)] if named else []
            asked += [
                (rf"{answer}\text{{ {unit}}}", answer, problem)
                for unit in ("degrees", "ways", "units", "miles", "students")
                if asks(unit, problem)
            ]
            asked += [(f"({answer})", answer, problem)]
    assert len(asked) > 400
    assert [
        answer for answer, verdict in zip(asked, equivalent_all(asked), strict=True) if not verdict.solved
    ] == []


def test_parts_of_a_spelling():
    assert plain(r" $\dfrac12 \cdot\left(x\right).$ ") == r"\frac{1}{2} \cdot(x)"
    assert words(r"\text{(C)}") == "C" and words(r"5\text{ cm}") == "5cm"
    assert bare("x = 5", "x=5", "") == ("5", "5") and bare("(a+5)(b+2)", "1", "") == ("(a+5)(b+2)", "1")
