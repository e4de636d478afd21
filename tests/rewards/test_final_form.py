"""Results are accepted in every usual form; formulas that equal them are not."""

from __future__ import annotations

import pytest

from unmask.rewards.final_form import is_final, lowest_terms, number_kind, occurs
from unmask.rewards.symbolic import equivalent


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("0.5", r"\frac{1}{2}"), ("1/2", r"\frac12"), (r"\frac12", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("1,000", "1000"),
        ("1000", "1,000"), (r"10\,000", "10000"), ("5", r"5\text{ cm}"), (r"5\text{ cm}", r"5 \text{ cm}"), ("90", r"90^\circ"),
        (r"90^{\circ}", r"90^\circ"), ("90°", r"90^\circ"), (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
        ("(3,4]", r"\left(3, 4\right]"), ("9i+6", "6+9i"), ("x^3 - 6 + 3x", "x^3+3x-6"), ("(b+2)(a+5)", "(a+5)(b+2)"),
        (r"\frac{9a+11}{20}", r"\frac{11+9a}{20}"), (r"\frac{9a}{20}+\frac{11}{20}", r"\frac{11+9a}{20}"),
        (r"\frac{3}{4}\sqrt{3}", r"\frac{3\sqrt{3}}{4}"), (r"11(\sqrt{5}+1)", r"11 \sqrt{5} + 11"),
        (r"1\pm\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}", r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}"),
        (r"\frac{9}{5}", r"1\frac{4}{5}"), ("1.8", r"1\frac{4}{5}"), (r"1\frac45", r"1\frac{4}{5}"), ("137.5", r"137 \frac{1}{2}"),
        (r"\frac{-3}{4}", r"-\frac{3}{4}"), (r"-\frac{3}{4}", "-0.75"), ("7, 5, 3", "3, 5, 7"), ("y=3+2x", "y = 2x + 3"),
        ("2(k+1)", "2k+2"), (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)"), ("3.0", "3"), (r"\$5", r"\$5.00"), ("$5$", "5"),
        (r"\sqrt{3}/3", r"\frac{\sqrt{3}}{3}"), (r"\frac{1}{3}\sqrt{3}", r"\frac{\sqrt{3}}{3}"), ("1-12i", "-12i+1"),
        (r"8\cdot\pi", r"8\pi"), (r"\frac{270}{7}", r"\frac{270}7\text{ degrees}"),
        (r"\left[\frac{\pi^2}{8},\frac{5\pi^2}{4}\right]", r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]"), ("4210_5", "4210_{5}"),
        (r"\frac{1}{8}\pi^2", r"\frac{\pi^2}{8}"), ("-1/2", r"-\frac12"), ("52_{8}", "52_8"), ("864", r"864 \mbox{ inches}^2"),
        (r"864 \text{ inches}^2", r"864 \mbox{ inches}^2"), ("+5", "5"), (r"\frac{\pi}{4}\sqrt{3}", r"\frac{\pi\sqrt{3}}{4}"),
        (r"2\pi + 18", r"18+2\pi"), ("11,111,111,100", r"11,\! 111,\! 111,\! 100"), (r"\frac{1}{x+1}", r"\frac{1}{1+x}"),
        (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"), (r"\frac{n^2+n}{2}", r"\frac{n(n+1)}{2}"),
        ("1+4n(2n+1)", "4n(2n+1)+1"), (r"\frac{3}{2\pi}", r"\frac{3}{2 \pi}"), (r"\frac{2(x+1)}{3}", r"\frac{2x+2}{3}"), (r"-\frac{3}{4}x", r"-\frac{3x}{4}"),
        (r"\frac{1}{x}y", r"\frac{y}{x}"), (r"20000\cdot\frac{1}{\pi}", r"\frac{20000}{\pi}"), ("-7y+5x+4+11z=0", "5x-7y+11z+4=0"), ("0=5x-7y+11z+4", "5x-7y+11z+4=0"), ("2x-y+3=0", "y=2x+3"), ("x-2y+6=0", r"y=\frac{x}{2}+3"),
        (r"\sqrt[3]{4}", "4^{1/3}"), (r"\sqrt[4]{8}", "8^{1/4}"),
    ],
)  # fmt: skip
def test_results_in_other_forms_are_right(answer, reference):
    assert equivalent(answer, reference, "").solved


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("513^2-487^2", "26000"), ("84/2", "42"), (r"\frac{84}{2}", "42"), (r"\frac{6}{8}", r"\frac34"), ("6/8", "0.75"), ("42/1", "42"),
        (r"6 \times 7", "42"), (r"\sqrt{4}", "2"), (r"\sqrt{8}", r"2\sqrt2"), (r"\frac{\sqrt{8}}{2}", r"\sqrt2"),
        ("(x+1)(x+2)", "x^2+3x+2"), ("x^2+3x+2", "(x+1)(x+2)"), ("x^2+2x+1", "(x+1)^2"), ("(x+1)^2", "x^2+2x+1"), ("2+1+x", "x+3"),
        ("2x+x", "3x"), (r"x\cdot x", "x^2"), ("(1+i)(1+i)", "2i"), ("5!", "120"), (r"\binom{5}{2}", "10"), ("10^2", "100"),
        ("2^5x", "32x"), (r"(1+2,\frac{\pi}{2})", r"(3,\frac{\pi}{2})"), ("[1-3,7]", "[-2,7]"),
        (r"\begin{pmatrix}1+1\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"), (r"\frac{x^2-1}{x-1}", "x+1"),
        (r"\frac{1}{\tan x}", r"\cot x"), (r"\frac{2\pi}{4}", r"\frac\pi2"), (r"\frac{1}{\sqrt{3}}", r"\frac{\sqrt3}{3}"),
        (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}"), (r"\sqrt{13}+2\sqrt{13}", r"3\sqrt{13}"), ("1e3", "1000"), ("2-3", "-1"), ("--3", "3"),
        ("|{-3}|", "3"), (r"3+\frac12", "3.5"), ("0.5/2", "0.25"), (r"\frac{\frac12}{2}", "0.25"), ("180-35", r"145^\circ"),
        (r"180^\circ-35^\circ", r"145^\circ"), (r"\lfloor 3.5\rfloor", "3"), ("i^2", "-1"), (r"\cos 0", "1"), ("x^{1+1}", "x^2"),
        ("(x^2)^3", "x^6"), (r"\frac{22+18a}{40}", r"\frac{11+9a}{20}"), (r"\frac{40000}{2\pi}", r"\frac{20000}{\pi}"), (r"\frac{12+18i}{2}", "6+9i"),
        (r"\frac{4}{2x+6}", r"\frac{2}{x+3}"), ("5(x+1)-7y+11z-1=0", "5x-7y+11z+4=0"), ("y=2(x+1)+1", "y=2x+3"), ("4n(2n+1)+1", "8n^2+4n+1"),
        ("x-(1-x)", "2x-1"), (r"\cot(x+\pi)", r"\cot x"), (r"-(-12\pi)", r"12\pi"), (r"(-12)(-\pi)", r"12\pi"), ("p-q+0", "p-q"), ("p-q+0p", "p-q"), ("p-q+0pq", "p-q"),
        (r"(p-q)\cdot 1", "p-q"), ("p^1-q", "p-q"), ("p-1q", "p-q"), (r"\frac{p-q}{1}", "p-q"), ("p/1-q", "p-q"), (r"x^0y", "y"), (r"\sqrt[1]{x}", "x"), (r"\sqrt{1}x", "x"),
        (r"3\sqrt{13}\cdot 1", r"3\sqrt{13}"), (r"\sqrt[4]{25}", r"\sqrt5"), (r"25^{1/4}", r"\sqrt5"), (r"\frac{kx}{x}", "k+0x"), (r"\frac{2k^2}{k}", "2k"), (r"\frac{\pi^2}{\pi}", r"\pi"), (r"\frac{\cot^2 x}{\cot x}", r"\cot x"),
        ("10x-14y+22z+8=0", "5x-7y+11z+4=0"), ("-5x+7y-11z-4=0", "5x-7y+11z+4=0"), ("0=-5x+7y-11z-4", "5x-7y+11z+4=0"), (r"\frac{5}{2}x-\frac{7}{2}y+\frac{11}{2}z+2=0", "5x-7y+11z+4=0"), ("2y=4x+6", "y=2x+3"),
        (r"-\begin{pmatrix}2\\3\end{pmatrix}", r"\begin{pmatrix}-2\\-3\end{pmatrix}"), (r"\frac{1}{4}\begin{pmatrix}1\\3\end{pmatrix}", r"\begin{pmatrix}1/4\\3/4\end{pmatrix}"),
        (r"\begin{pmatrix}2\\0\end{pmatrix}+\begin{pmatrix}0\\3\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
        (r"\begin{pmatrix}0&1\\-1&0\end{pmatrix}^2", r"\begin{pmatrix}-1&0\\0&-1\end{pmatrix}"),
        (r"\begin{pmatrix}0&1\\1&0\end{pmatrix}\begin{pmatrix}3\\2\end{pmatrix}", r"\begin{pmatrix}2\\3\end{pmatrix}"),
    ],
)  # fmt: skip
def test_what_is_still_to_be_computed_is_not(answer, reference):
    verdict = equivalent(answer, reference, "")
    assert verdict.value == 0.0 and verdict.status in {"wrong", "malformed"}, verdict


def test_without_a_question_equal_is_enough():
    assert equivalent(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}").solved and equivalent("513^2-487^2", "26000").solved
    assert equivalent(r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", "").detail == "equal, but still to be computed"


@pytest.mark.parametrize(
    ("answer", "question", "solved"),
    [
        ("p-q", "Simplify $-q + p$.", True), ("-q+p", "Simplify $-q + p$.", False), (r"- q\!+ p", "Simplify $-q+p$.", False),
        ("-q+p", r"Simplify $2-q+p1$.", True),
    ],
)  # fmt: skip
def test_a_formula_of_the_question_is_no_answer(answer, question, solved):
    assert equivalent(answer, "p - q", question).solved == solved


DRESSED = [
    "-(q)+p", "(-q)+(p)", "-{q}+{p}", "-q++p", "[-q+p]", r"\{-q+p\}", r"\left(-q+p\right)", "+(-q)+p", "+(-1)q+p", r"-q+\mathrm{p}", r"-q\text{}+p",
    r"-q+p\cdot{1}", "-q+p*1.0", "-q+p^{1}", "-q+1p", "--(-q)+p", "-q+p+0", "-q-(-p)", r"-1\cdot q+p", r"1.0(-q+p)", "-q+p.", r"\,-q+\!p", r"\mathbf{-q+p}",
]  # fmt: skip


@pytest.mark.parametrize("answer", DRESSED)
def test_a_formula_of_the_question_is_no_answer_in_other_clothes(answer):
    assert not equivalent(answer, "p - q", "Simplify $-q + p$.").solved


@pytest.mark.parametrize(
    "answer",
    [
        r"\frac{3}{x}\cdot 1",
        r"1\cdot\frac{3}{x}",
        r"\frac{+3}{x}",
        r"\frac{03}{x}",
        r"\frac{3}{(x)}",
        r"\frac{3}{x}\cdot(1)",
    ],
)
def test_nor_is_a_fraction_of_it(answer):
    assert not equivalent(answer, r"3x^{-1}", r"Let $\frac{3}{x}$ be").solved


def test_a_number_may_occur_in_the_question_in_the_notation_of_the_reference():
    assert (
        equivalent("1000", "1,000", "Of 1000 people").solved
        and equivalent("1/2", r"\frac{1}{2}", "with probability 1/2").solved
    )
    assert not equivalent("0.5", r"\frac{1}{2}", "Write 0.5 as a fraction.").solved
    assert equivalent("0.5", r"\frac{1}{2}", "Write 10.5 as a fraction.").solved


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-1,234", "integer"), ("1234567", "integer"), ("12 000", "integer"), (r"5\text{ cm}^2", "integer"), ("90^\\circ", "integer"), (r"\$5", "integer"),
        (".5", "decimal"), ("1,000.25", "decimal"), ("-3/4", "fraction"), (r"\frac{-3}{4}", "fraction"), (r"1\frac{1}{2}", "mixed number"),
        ("1+1", None), ("x", None), ("", None), ("1,2", None), ("2^5", None),
    ],
)  # fmt: skip
def test_kinds_of_numbers(text, kind):
    assert number_kind(text) == kind


def test_lowest_terms():
    assert lowest_terms(r"\frac{3}{4}x + 5/6") and lowest_terms("") and lowest_terms(r"\frac{x}{2}")
    assert not any(
        map(lowest_terms, (r"\frac{6}{4}", "x + 6/4", "6/1", "0/7", "0.5/2", r"\frac{0.5}{2}", "6 / 4"))
    )


def test_what_occurs():
    assert (
        occurs("x+1", "of x + 1.")
        and not occurs("x+1", "of 2x+1")
        and not occurs("12", "of 312")
        and not occurs("pi", r"\pi")
    )
    assert is_final("x+1", "1+x", "") and not is_final("x+1", "1+x", "Let x+1 be")
