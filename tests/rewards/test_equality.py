"""What mathematics says is equal is right, in any notation; what differs is wrong, by however little."""

from __future__ import annotations

from fractions import Fraction

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import cost, examples
from unmask.rewards.equality import same
from unmask.rewards.spelling import members, plain, split_at, unit_of
from unmask.rewards.symbolic import equivalent

EQUAL = [
    (r"5\text{ cm}", "5", "What is the length in cm?"), (r"5\text{ m/s}", "5", "What is the speed in m/s?"), (r"5\text{ km/h}", "5", "speed in km/h"), (r"12\text{ cm}^2", "12", "area in cm$^2$"), ("f'(x)", "f'(x)", ""),
    ("(3,4)", "3<x<4", ""), (r"\frac12<x<3", r"(\frac12, 3)", "Find the interval."),
    (r"\frac{1}{2^{99}}", "2^{-99}", ""), (r"1.6\times10^{-19}", r"1.6\cdot 10^{-19}", ""), (r"-1.6\times 10^{-19}", r"-1.6\times10^{-19}", ""),
    ("10^{-30}x", r"\frac{x}{10^{30}}", ""), ("0.000000000000000001", r"\frac{1}{1000000000000000000}", ""), ("2^{100}", "2^{100}", ""),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{2}\sqrt{2}", ""), ("0.125", r"\frac18", ""), (r"0.\overline{3}", r"\frac13", ""), (r"0.1\overline{6}", r"\frac16", ""),
    (r"2.\overline{27}", r"\frac{25}{11}", ""), ("-0.5", r"-\frac12", ""), ("3.50", "3.5", ""), ("007", "7", ""), (r"\sqrt{5}-\sqrt{3}", r"-\sqrt{3}+\sqrt{5}", ""),
    ("12345678901234567890123", "12,345,678,901,234,567,890,123", ""), (r"-\sqrt{2}, \sqrt{2}", r"\sqrt{2}, -\sqrt{2}", ""), ("1/3, 2/3", r"\frac13, \frac23", ""),
    (r"\frac23,\frac13", r"\frac13, \frac23", ""), (r"\pm\sqrt2", r"\sqrt{2}, -\sqrt{2}", ""), (r"\sqrt2\text{ and }-\sqrt2", r"-\sqrt{2}, \sqrt{2}", ""),
    (r"\pi, 0", r"0, \pi", ""), (r"\{0,\frac{\pi}{2}\}", r"\frac\pi2, 0", ""), (r"\frac12, 3", r"3, \frac{1}{2}", ""), ("3, 0.5", r"\frac{1}{2}, 3", ""),
    ("(1,2), (3,4)", "(3,4),(1,2)", ""), (r"(0,0) \text{ and } (1,1)", "(1,1), (0,0)", ""), (r"1+\sqrt5, 1-\sqrt5, -2", r"\{1\pm\sqrt{5},-2\}", ""),
    (r"-2, 1\pm\sqrt5", r"\{1\pm\sqrt{5},-2\}", ""), ("2, -2", r"\pm 2", ""), (r"x=\pm 2", "2,-2", "Solve for $x$: $x^2=4$"),
    (r"\left\{\frac13,\frac23\right\}", r"\frac13, \frac23", ""), (r"1/3 \text{ or } 2/3", r"\frac13, \frac23", ""), (r"\{5\}", "5", ""), ("x_2+x_1", "x_1+x_2", ""),
    (r"\frac\pi2", r"\frac{\pi}{2}", ""), (r"\frac{\pi}2", r"\frac{\pi}{2}", ""), (r"\frac \pi 6", r"\frac{\pi}{6}", ""), (r"\sqrt3/3", r"\frac{\sqrt{3}}{3}", ""),
    (r"\frac{\sqrt3}3", r"\frac{\sqrt{3}}{3}", ""), (r"\frac{\sqrt3}{3}", r"\sqrt3/3", ""), (r"\frac x2", r"\frac{x}{2}", ""), (r"\frac xy", r"\frac{x}{y}", ""),
    (r"\sqrt\pi", r"\sqrt{\pi}", ""), (r"\frac{1}\pi", r"\frac{1}{\pi}", ""), (r"2\sqrt 3", r"2\sqrt{3}", ""), (r"-\frac\pi6", r"-\frac{\pi}{6}", ""),
    (r"\dfrac\pi3", r"\pi/3", ""), (r"\frac\sqrt32", r"\frac{\sqrt{3}}{2}", ""), (r"x^\frac12", r"x^{\frac{1}{2}}", ""), (r"\sqrt[3]2", r"\sqrt[3]{2}", ""),
    ("11111111100", r"11,\! 111,\! 111,\! 100", ""), ("11,111,111,100", r"11,\! 111,\! 111,\! 100", ""), ("11{,}111{,}111{,}100", "11111111100", ""),
    ("10{,}080", r"10,\!080", ""), (r"5{,}000\pi", r"5000\pi", ""), (r"3<x\le4", "(3,4]", ""), (r"4\ge x>3", "(3,4]", ""), ("x>5", r"(5,\infty)", ""),
    ("5<x", r"(5,\infty)", ""), (r"x\le0", r"(-\infty, 0]", ""), (r"x<2 \text{ or } x>3", r"(-\infty, 2) \cup (3, \infty)", ""),
    (r"x > 3 \text{ or } x < 2", r"(-\infty, 2) \cup (3, \infty)", ""), (r"(3,\infty)\cup(-\infty,2)", r"(-\infty, 2) \cup (3, \infty)", ""),
    ("-2<x<5", "(-2,5)", "Find all $x$ with $x^2<3x+10$. Give an interval."), ("(3,4]", r"3<x\le4", ""), (r"x\in(3,4]", r"3<x\le 4", "Find $x$"),
    (r"\mathbb{R}", r"(-\infty,\infty)", ""), (r"(-\infty,+\infty)", r"\mathbb R", ""),
    (r"\left(-\infty,2\right)\cup\left(2,\infty\right)", r"(-\infty,2)\cup(2,\infty)", ""), ("2<x", "x>2", ""), ("5>x>2", "2<x<5", ""),
    (r"864\text{ in}^2", r"864 \mbox{ inches}^2", ""), (r"864\text{ square inches}", r"864 \mbox{ inches}^2", ""), ("864 in^2", r"864 \mbox{ inches}^2", ""),
    (r"15\,\mathrm{cm}^2", r"15\mbox{ cm}^2", ""), (r"15\text{ sq. cm}", r"15\mbox{ cm}^2", ""), (r"15\text{ centimeters}^2", r"15\mbox{ cm}^2", ""),
    (r"5\text{ ft}", r"5\text{ feet}", ""), (r"5\text{ hrs}", r"5\text{ hours}", ""), (r"30\text{ mph}", r"30\text{ miles per hour}", ""),
    (r"90\text{ deg}", r"90^\circ", ""), ("90 degrees", r"90^\circ", ""), (r"45^\circ", "45", "How many degrees are in the angle?"), (r"\$36", "36", "How many dollars?"),
    (r"36\text{ dollars}", r"\$36", ""), (r"\$18.90", r"\$18.9", ""), (r"42\text{ in}", "42", "How many inches long is it?"),
    (r"42\text{ cm}^2", "42", "Find the area, in square centimeters."), (r"30^\circ, 60^\circ", r"60^\circ, 30^\circ", ""), ("1 foot", r"1\text{ ft}", ""),
    (r"\text{Even}", r"\text{even}", ""), ("Even", r"\text{even}", ""), (r"\text{EAST}", r"\text{east}", ""), (r"\text{evelyn}", r"\text{Evelyn}", ""),
    (r"\text{ No }", r"\text{no}", ""), ("y=2x+3", "2x+3=y", ""), ("2x-y=-3", "y=2x+3", ""), ("x=6", "6", "Solve for $x$"),
    (r"\begin{pmatrix}1/3\\0.5\end{pmatrix}", r"\begin{pmatrix}\frac13\\\frac12\end{pmatrix}", ""), (r"\langle 1,2\rangle", "(1,2)", ""), ("3:2", "3 : 2", ""),
    ("1:2:3", "1:2:3", ""), (r"\varnothing", r"\emptyset", ""), (r"\{\}", r"\emptyset", ""), ("-5i+6", "6-5i", ""), (r"2\sin x\cos x", r"2\cos x\sin x", ""),
    (r"\frac{-1}{2}", r"-\frac12", ""), (r"\frac{a}{\sin A}", r"\frac{a}{\sin A}", ""), (r"1\,234\,567", "1234567", ""), (r"{45^\circ}", r"45^\circ", ""),
    (r"\mathbf{\$5}", r"\$5", ""), (r"\$5, \$6", "6, 5", "How many dollars each?"),
    (r"x>3 \text{ and } x\le4", "(3,4]", ""), (r"3<x, x\le4", "(3,4]", ""), ("x > 3 and x < 4", "(3,4)", "Give an interval."), ("(3,4]", r"x>3 \text{ and } x\le4", ""),
    (r"x\le-1 \text{ or } x>3 \text{ and } x<5", r"(-\infty,-1]\cup(3,5)", ""), (r"x<2, \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)", ""), (r"1<x \text{ and } x<2 \text{ or } x>3", r"(1,2)\cup(3,\infty)", ""),
    (r"x>3 and x\le4", r"3<x\le4", ""), (r"3<x\le4", r"x>3 \text{ and } x\le4", ""), (r"x>2 \text{ or } x<1", r"x<1 \text{ or } x>2", ""), ("x>2 or x<1", "x<1 or x>2", ""), (r"x\le4, x>3", r"x>3 \text{ and } x\le4", ""),
    (r"\{x\in\mathbb{R} : x>3\}", r"(3,\infty)", ""), (r"\{x \mid 3<x\le4\}", "(3,4]", ""), (r"\left\{ x \in \mathbb R \mid x \ge 2 \right\}", r"[2,\infty)", ""),
    (r"x\ne0", r"(-\infty,0)\cup(0,\infty)", ""), (r"\mathbb{R}\setminus\{0\}", r"(-\infty,0)\cup(0,\infty)", ""), (r"x \neq -\frac12", r"(-\infty,-\frac12)\cup(-\frac12,\infty)", ""),
    (r"(-\infty,2)\cup(2,\infty)", r"\mathbb{R} \setminus \{2\}", ""), (r"\{x : x\ne 2\}", r"(-\infty,2)\cup(2,\infty)", ""),
    (r"\$32,348", r"\$32,\!348", ""), ("32,348 dollars", r"\$32,\!348", ""), (r"\$32,348.00", r"\$32,\!348", ""), (r"\$1250", r"\$1,250", ""), (r"\$1,250.00", r"\$1250", ""), (r"\$1,250", r"\$1,250.00", ""),
    (r"2,000\pi", r"2000\pi", ""), (r"2000\pi", r"2,000\pi", ""), ("1,234x", "1234x", ""), ("1234x", "1,234x", ""), ("1,000i", "1000i", ""), (r"1,000\text{ cm}", r"1000\text{ cm}", ""), (r"1,000\%", r"1000\%", ""),
    (r"1,000^\circ", r"1000^\circ", ""), (r"\frac{1,000}{3}", r"\frac{1000}{3}", ""), (r"\frac{1000}{3}", r"\frac{1,000}{3}", ""), (r"\sqrt{1,001}", r"\sqrt{1001}", ""), ("1,000,000", "10^6", ""), ("-1,234,567", "-1234567", ""),
    ("1,000, 2,000", "1000, 2000", ""), ("2000, 1000", "1,000, 2,000", ""), (r"1,000 \text{ and } 2,000", "1000, 2000", ""), ("x^2+1,000", "1000+x^2", ""), ("12,345.5x", "12345.5x", ""),
    ("1, 234x", "1, 234x", ""), ("1,234x", "1, 234x", ""), ("(1,234)", "(1, 234)", ""), (r"\{1,234\}", r"\{234, 1\}", ""), ("58500", "58,500", ""), ("x=1,000", "1000", "Solve for $x$"), (r"1,\!000x", "1,000x", ""),
    (r"\log_2 3", r"\log_{2}{3}", ""), (r"\log_{2} 3", r"\log_2 3", ""), (r"\log_23", r"\log_{2}{3}", ""), (r"\log_{10}{7}", r"\log_{10} 7", ""), ("5 percent", r"5\%", ""), (r"5\text{ percent}", r"5\%", ""), ("5%", r"5\%", ""), (r"5\%", "5 percent", ""),
    ("a=1, b=2", "(1,2)", "Find the ordered pair $(a,b)$."), (r"b=2 \text{ and } a=1", "(1,2)", "Find the ordered pair $(a, b)$."), (r"x = \frac12, y = 3, z = -1", r"(\frac{1}{2}, 3, -1)", "Find $(x,y,z)$."),
    ("1; 2; 3", "1,2,3", ""), ("3;1", "1, 3", ""), ("(1; 2)", "(1,2)", ""), (r"10\text{ a.m.}", r"10 \text{ AM}", ""), ("10 a.m.", r"10 \text{ AM}", ""), ("10 AM", r"10 \text{ a.m.}", ""), ("3 pm", r"3\text{ p.m.}", ""),
    (r"12\text{ square units}", "12", "What is the area of the triangle?"), (r"12\text{ units}", "12", "What is the distance?"), (r"12\text{ cubic units}", "12", "What is its volume?"), (r"12\text{ units}^2", "12", "Find the area."),
    (r"60\text{ km/h}", "60", "How fast is it, in kilometers per hour?"), ("60 km/h", "60", "How fast is it, in kilometers per hour?"), (r"60\text{ kilometers per hour}", r"60\text{ km/h}", ""), ("5 m/s", "5", "in meters per second"),
    (r"\text{none}", r"\emptyset", ""), (r"\text{No solution}", r"\emptyset", ""), ("none", r"\varnothing", ""), ("no solutions", r"\{\}", ""), (r"\emptyset", r"\text{no solutions}", ""), (r"\text{the empty set}", r"\emptyset", ""),
    (r"6\times10^5", "600000", ""), (r"1.5\times10^{-3}", "0.0015", ""), (r"1.5 \cdot 10^{-3}", "0.0015", ""), (r"-6.02\times 10^{23}", "-602,000,000,000,000,000,000,000", ""), ("600000", r"6\times10^5", ""), (r"6\times10^5\text{ km}", r"600000\text{ km}", ""),
    (r"6.0\times10^{5}", r"6\times10^5", ""), (r"2\times10^{-1}", r"\frac15", ""), (r"\text{EVEN}", r"\text{even}", ""), ("ab", "ab", ""), ("AB", r"\text{AB}", ""), (r"\text{yes}", "Yes", ""), ("yes", "Yes", ""), ("all real numbers", r"\mathbb{R}", ""), (r"(-\infty,\infty)", r"\text{all real numbers}", ""), (r"\text{There are no solutions}", r"\emptyset", ""), ("5 per cent", r"5\%", ""), ("`18`", "18", ""), ('"18"', "18", ""), ("= 18", "18", ""), ("$= 18$", "18", ""),
]  # fmt: skip
"""Answers and their references, with a question where it matters."""
DIFFERENT = [
    ("f'(x)", "f(x)", ""), ("x'", "x", ""), ("x''", "x'", ""), ("x'+1", "x+1", ""), (r"\triangle A'B'C'", r"\triangle ABC", ""), ("0,123", "123", ""), ("00,123", "123", ""), (r"5\text{ cm}", "5", "What is the length in m?"),
    (r"\frac12<x<3", r"(\frac12, 3)", ""), (r"5\text{ per}", "5", ""), (r"5\text{ square}", "5", "the area"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", ""), (r"-1.6\times10^{-19}", r"1.6\times10^{-19}", ""), (r"1.6\times10^{-19}", r"1.7\times10^{-19}", ""),
    ("10^{-30}", "0", ""), ("10^{-20}", "10^{-21}", ""), (r"\frac{1}{10^{40}}", r"-\frac{1}{10^{40}}", ""), ("(10^{-20}, 1)", "(10^{-21}, 1)", ""),
    ("[0, 10^{-20}]", "[0, 10^{-19}]", ""), ("10^{-20}x", "10^{-21}x", ""), (r"\frac{x}{2^{80}}", r"\frac{x}{2^{81}}", ""), ("x+10^{-30}", "x", ""),
    (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}10^{-21}\\1\end{pmatrix}", ""), ("y=10^{-20}x", "y=10^{-21}x", ""), ("e^{-50}", "e^{-51}", ""),
    ("10^{-20},1", "1,10^{-21}", ""), ("2^{200}+1", "2^{200}", ""), ("3.14159265358979323846264338327950288419716939937510", r"\pi", ""),
    ("1.41421356237309504880168872420969807856967187537694", r"\sqrt{2}", ""), ("0.3333333333333333333333", r"\frac13", ""),
    ("12345678901234567890123", "12345678901234567890124", ""), (r"\sqrt{10^{30}+1}", "10^{15}", ""), ("x^2+10^{-16}", "x^2", ""), ("2^{-99}i", "2^{-98}i", ""),
    (r"10^{-17}\pi", r"2\cdot10^{-17}\pi", ""), (r"0.\overline{3}", "0.3", ""), (r"0.\overline{6}", r"\frac{6}{10}", ""), (r"\sqrt{2}, \sqrt{2}", r"\sqrt{2}, -\sqrt{2}", ""),
    ("1/3, 1/3", r"\frac13, \frac23", ""), ("2,2,3", "2,3,3", ""), ("(1,2),(4,3)", "(1,2),(3,4)", ""), ("(2,1)", "(1,2)", ""), (r"\{1,2\}", "(1,2)", ""),
    ("1,2", "(1,2)", ""), ("[1,2]", "(1,2)", ""), ("(1,2]", "[1,2)", ""), (r"\pm 2", "2", ""), ("2", r"\pm 2", ""), (r"1+\sqrt5, -2", r"\{1\pm\sqrt{5},-2\}", ""),
    (r"1\pm\sqrt5", r"\{1\pm\sqrt{5},-2\}", ""), ("1, 2, 3", "1, 2", ""), ("1", "1, 2", ""), ("1 or 2", "1", ""), ("52_6, 33_8", "52_8, 33_6", ""),
    (r"(\frac12,\frac13)", r"(\frac13,\frac12)", ""), (r"\sqrt2,\pi", r"\sqrt3,\pi", ""), (r"\frac12,\frac13,\frac14", r"\frac12,\frac13", ""),
    (r"\frac\pi2", r"\frac{\pi}{3}", ""), (r"\sqrt3/3", r"\frac{\sqrt{3}}{2}", ""), (r"\frac12", "12", ""), (r"\frac123", r"\frac{12}{3}x", ""),
    (r"\sqrt13", r"\sqrt{13}", ""), (r"4\quad 2", "42", ""), (r"4\qquad2", "42", ""), ("4 2", "42", ""), (r"4\;2", "42", ""), (r"4\ 2", "42", ""), ("4~2", "42", ""),
    (r"4\,2", "42", ""), ("1 23", "123", ""), ("4, 2", "42", ""), (r"4\$2", "42", ""), (r"1\quad 000", "1,000x", ""), (r"\frac{4 2}{5}", r"\frac{42}{5}", ""),
    (r"4\quad 2\pi", r"42\pi", ""), (r"45^\circ", "45", ""), (r"45^{\circ}", "45", "What is it?"), (r"\$36", "36", ""), (r"36\$", "36", ""), (r"\$36", r"36^\circ", ""),
    (r"36^\circ", r"\$36", ""), (r"(30^\circ,60^\circ)", "(30,60)", ""), (r"30^\circ, 60^\circ", "30, 60", ""), (r"5\text{ cm}", "5", ""),
    (r"5\text{ ft}", r"5\text{ in}", ""), (r"5\text{ in}^3", r"5\text{ inches}^2", ""), (r"42\text{ in}", "42", "What is in the box?"),
    (r"42\text{ inches}^3", "42", "Find the area in square inches."), (r"5\text{ cm}, 6\text{ in}", r"6\text{ cm}, 5\text{ in}", ""), (r"50\%", "50", ""),
    ("0.5", r"50\%", ""), (r"5\text{ miles}", r"5\text{ minutes}", ""), (r"5\text{ m}", r"5\text{ mm}", ""), (r"\text{Odd}", r"\text{even}", ""), ("e", r"\text{(E)}", ""),
    (r"\text{(b)}", r"\text{(B)}", ""), ("X", "x", ""), ("ab", "AB", ""), (r"\text{even or odd}", r"\text{even}", ""), (r"3\le x\le4", "(3,4]", ""), ("3<x<4", "(3,4]", ""),
    (r"3<x\le5", "(3,4]", ""), ("x<5", r"(5,\infty)", ""), (r"x\ge5", r"(5,\infty)", ""), ("x>2", r"(-\infty, 2) \cup (3, \infty)", ""),
    (r"x<3 \text{ or } x>2", r"(-\infty, 2) \cup (3, \infty)", ""), ("3<x<4", "(3,4)", "At which point do they meet?"), ("x", r"(-\infty,\infty)", ""),
    (r"x<2 \text{ or } y>3", r"(-\infty, 2) \cup (3, \infty)", ""), ("x>3", "x<3", ""), (r"x\ge3", "x>3", ""), ("3<x", "x<3", ""), ("2<x<6", "2<x<5", ""),
    ("y=2x+4", "y=2x+3", ""), ("y=-2x-3", "y=2x+3", ""), ("-x>2", "x>2", ""), ("x+y=0", "x-y=0", ""), ("1:2:3", "1:3:2", ""), ("2:30", "4:60", ""), ("3:2", "2:3", ""),
    (r"\frac{A}{\sin a}", r"\frac{a}{\sin A}", ""), ("A^2a", "a^2A", ""), (r"\sqrt{x^2}", "x", ""), ("|x|", "x", ""), (r"x+\frac{|x-9|-|x-8|}{9}", "x", ""),
    (r"\infty", r"-\infty", ""), (r"\frac10", r"\infty", ""), (r"\emptyset", "0", ""), ("i", "-i", ""), ("6+5i", "6-5i", ""), (r"{45^\circ}", "45", ""),
    (r"x+45^\circ", "x+45", ""), (r"\mathbf{\$5}", "5", ""), (r"(45^\circ)", "45", ""), (r"\$5, \$6", "5, 6", ""),
    (r"x<1 \text{ and } x>2", r"(-\infty,1)\cup(2,\infty)", ""), ("x>3 and x<5", r"(3,\infty)\cup(-\infty,5)", ""), ("x<1 and x>2", r"(-\infty,1)\cup(2,\infty)", ""), ("x<1, x>2", r"(-\infty,1)\cup(2,\infty)", ""),
    (r"x>3 \text{ or } x\le4", "(3,4]", ""), (r"x>3 \text{ and } x<4", "(3,4]", ""), (r"x>3 \text{ and } y\le4", "(3,4]", ""), (r"x>3 \text{ and } x>2", r"(3,\infty)\cup(2,\infty)", ""), (r"x>3 \text{ and } x>2", r"(2,\infty)", ""),
    ("x<4 and x>3 and x<9", "(3,9)", ""), ("x>3 and x<4", "(3,4)", "At which point do they meet?"), (r"3<x, 4", "(3,4)", ""), (r"x\ne0", r"(-\infty,\infty)", ""), (r"x\ne1", r"(-\infty,0)\cup(0,\infty)", ""),
    (r"\mathbb{R}\setminus\{0,1\}", r"(-\infty,0)\cup(0,\infty)", ""), (r"x\ne0 \text{ or } x\ne1", r"(-\infty,0)\cup(0,\infty)", ""), (r"x\ne0 \text{ and } x\ne1", r"(-\infty,0)\cup(0,\infty)", ""), (r"\{x\in\mathbb{Z} : x>3\}", r"(3,\infty)", ""),
    (r"\{x\in\mathbb{R} : y>3\}", r"(3,\infty)", ""), ("x<1 and x>2", "x<1 or x>2", ""), ("x<1 or x>2", "x<1 and x>2", ""), (r"x<1 \text{ and } x>2", r"x<1 \text{ or } x>2", ""), ("x<1, x>2", r"x<1 \text{ or } x>2", ""), ("y>2 or y<1", "x<1 or x>2", ""), ("x>3 or x<4", "3<x<4", ""), (r"\text{ab}", "AB", ""), (r"\text{AB}", "ab", ""), (r"\text{Ab}", "AB", ""), (r"\text{xy}", "XY", ""), ("ab", "aB", ""),
    (r"\$32,348", r"\$32,\!349", ""), (r"\$1,25", r"\$125", ""), (r"\$1,2500", r"\$12500", ""), (r"\$0,125", r"\$125", ""), (r"\$1250.01", r"\$1,250", ""), (r"2,00\pi", r"200\pi", ""), (r"0,234\pi", r"234\pi", ""), ("1234,567x", "1234567x", ""),
    ("1,234x", "234x", ""), ("234x", "1,234x", ""), ("1, 234x", "1234x", ""), ("1, 234", "1234", ""), ("234,1", "1,234", ""), ("(1,234)", "(1234)", ""), (r"\{1,234\}", "1234", ""), (r"\{1,234\}", r"\{1234\}", ""), ("[1,234]", "1234", ""), ("(1,234x)", "1234x", ""),
    ("1,234,5", "1234, 5", ""), ("5,1,234x", "5, 1234x", ""), ("1,234x,5", "1234x, 5", ""), (r"\frac{1,00}{3}", r"\frac{100}{3}", ""), ("a_{1,234}", "a_{1234}", ""), ("x_1,234", "x_1234", ""), ("x^1,234", "x^{1234}", ""), ("1,000; 2", "1000.2", ""),
    (r"\pi\cdot2,000", r"2000\pi", r"What is $\pi\cdot 2,000$?"), (r"\pi\cdot2000", r"2000\pi", r"What is $\pi\cdot 2,000$?"), (r"\pi\cdot2,000", r"2000\pi", r"What is $\pi\cdot 2000$?"), ("1,000", "0, 1", ""), ("1,000", "1, 0", ""), ("1,000x", "1000000x", ""), ("1,000 2,000", "10002000", ""), ("1,000,000", "10^5", ""),
    (r"\log_2 3", r"\log_{3}{2}", ""), (r"\log_2 3", r"\log_{23}", ""), (r"\log_{2}{34}", r"\log_{23}{4}", ""), ("5 percent", "5", ""), ("5 percent", "0.05", ""), ("50 percent", r"5\%", ""), ("5 percentage points", r"5\%", ""),
    ("a=1, b=2", "(1,2)", ""), ("a=2, b=1", "(1,2)", "Find the ordered pair $(a,b)$."), ("a=1, b=2", "(1,2)", "Find the ordered pair $(b,a)$."), ("a=1, c=2", "(1,2)", "Find the ordered pair $(a,b)$."), ("a=1, a=2", "(1,2)", "Find $(a,b)$."),
    (r"a=1 \text{ or } b=2", "(1,2)", "Find the ordered pair $(a,b)$."), ("a=1, b=2, a=3", "(1,2)", "Find $(a,b)$."), ("a=1, b=2", "(1,2)", "Find $(a,b)$ or $(b,a)$."), ("a=1, b=2", "[1,2]", "Find $(a,b)$."), ("a=1, b=1+1", "(1,2)", "Find $(a,b)$."),
    ("1; 2", "1", ""), ("1;234", "1234", ""), ("1; 2; 4", "1,2,3", ""), ("1;2", "(1,2)", ""), (r"10\text{ a.m.}", r"10 \text{ PM}", ""), (r"10\text{ a.m.}", "10", ""), (r"10\text{ AM}", r"10\text{ m}", ""), (r"12\text{ square units}", "12", "What is its volume?"),
    (r"12\text{ units}", "13", "What is the distance?"), (r"12\text{ square units}", r"12\text{ cm}^2", "the area"), (r"12\text{ unicorns}", "12", "in units"), (r"60\text{ km/h}", "60", "How fast is it, in miles per hour?"), (r"60\text{ km/h}", r"60\text{ miles/h}", ""),
    (r"60\text{ km}", "60", "How fast is it, in miles per hour?"), (r"60/\text{h}", "60", ""), (r"\text{none}", "0", ""), (r"\text{none}", "5", ""), (r"\text{none or } 5", r"\emptyset", ""), (r"\text{one solution}", r"\emptyset", ""), (r"\text{no}", r"\emptyset", ""), (r"\text{no real solutions}", r"\emptyset", ""), (r"\text{all real numbers}", r"(0,\infty)", ""), (r"\text{all integers}", r"\mathbb{R}", ""), ("no", "Yes", ""), (r"\text{sas}", "SAS", ""),
    (r"6\times10^5", "60000", ""), (r"6\times10^{-5}", "600000", ""), (r"60\times10^4", "600000", ""), (r"0.6\times10^6", "600000", ""), (r"6\times10^5+0", "600000", ""), (r"3\times2\times10^5", "600000", ""), (r"6\times10^5", "600000", r"What is $6\times10^5$?"),
    ("600000", r"6\times10^5", "Write 600000 in scientific notation."), (r"2\times10^2\times3", "600", ""), (r"6\times 11^5", "966306", ""), (r"6\times10^5x", "6x", ""), ("10^5", "100000", ""), (r"6\times10^{999}", r"6\times10^{998}", ""), (r"6\times10^{99999}", "6", ""),
    ("`17` or `18`", "18", ""), ('"17"18"', "18", ""), ("== 18", "18", ""), ("17 = 18", "18", ""), ("= 17", "18", ""), ('18"', "18", ""),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference", "question"), EQUAL)
def test_equal_answers_are_right(answer, reference, question):
    assert equivalent(answer, reference, question).solved


@pytest.mark.parametrize(("answer", "reference", "question"), DIFFERENT)
def test_different_answers_are_not(answer, reference, question):
    verdict = equivalent(answer, reference, question)
    assert verdict.value == 0.0 and verdict.status in {"wrong", "malformed"}


def test_the_tables_are_long_and_have_no_pair_twice():
    assert len({*EQUAL}) == len(EQUAL) >= 200 and len({*DIFFERENT}) == len(DIFFERENT) >= 200
    assert not {*EQUAL} & {*DIFFERENT}


numbers = st.fractions(max_denominator=10**6) | st.integers(-30, 30).map(lambda power: Fraction(10) ** power)
x, y = sympy.symbols("x y", real=True)


@examples(30)
@given(numbers, numbers)
def test_numbers_are_equal_if_their_fractions_are(one, other):
    left, right = (sympy.Rational(each.numerator, each.denominator) for each in (one, other))
    for factor in (1, sympy.pi, sympy.sqrt(2), x, sympy.I):
        assert same(left * factor, right * factor) == (one == other)
        assert same(left + factor, right + factor) == (one == other)
    assert same(sympy.Eq(y, left * x + 1), sympy.Eq(y, right * x + 1)) == (one == other)


@given(
    st.lists(
        st.sampled_from([sympy.Integer(2), sympy.sqrt(2), x, sympy.pi / 2, sympy.Rational(1, 3)]),
        min_size=1,
        max_size=4,
    ),
    st.randoms(),
)
def test_a_matrix_is_equal_to_itself_alone(entries, shuffled):
    others = shuffled.sample(entries, len(entries))
    assert same(sympy.Matrix(entries), sympy.Matrix(others)) == (entries == others)
    assert not same(sympy.Matrix(entries), sympy.Matrix([*entries, 1]))


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (x < y, y > x, True), (x < y, 2 * x < 2 * y, True), (x < y, -y < -x, True), (x < y, x > y, False), (x < y, x <= y, False), (sympy.Eq(x, 2 * y), sympy.Eq(y, x / 2), True),
        (sympy.Eq(x, y), sympy.Eq(x, -y), False), (sympy.Eq(x, y), x - y, False), (sympy.sin(x) ** 2 + sympy.cos(x) ** 2, sympy.Integer(1), True), (sympy.Abs(x), x, False),
        (sympy.sqrt(5 + 2 * sympy.sqrt(6)), sympy.sqrt(2) + sympy.sqrt(3), True), (sympy.oo, sympy.oo, True), (sympy.oo, -sympy.oo, False), (sympy.zoo, sympy.zoo, False), (sympy.nan, sympy.nan, False),
        (sympy.pi, sympy.Rational(sympy.pi.evalf(500)), False), (sympy.Max(x, 10**4) - 10**4 + x, x, False), (sympy.log(x**2), 2 * sympy.log(x), False),
    ],
)  # fmt: skip
def test_formulas(one, other, equal):
    assert same(one, other) == same(other, one) == equal


@pytest.mark.parametrize(
    "answer",
    [
        *("(" * 200 + "1" + ")" * 200, "{" * 250 + "}" * 250, "1," * 250 + "1", r"\pm" * 120, r"\{" * 100, "x" + r"\cup x" * 70, "[1,2)" * 80, "9" * 512, "1:" * 250 + "1", "a<" * 250 + "b"),
        *(r"0.\overline{" + "9" * 480 + "}", "1\u00b2" * 200, " " * 500 + "1", "sqrt(" * 100, r"\sqrt" * 80 + "2", r"\frac" * 80 + "12", "x" * 10**7, r"\frac" * 10**6, "{" * 10**6, "\0" * 10**6),
        *(pytest.param(tower, marks=pytest.mark.slow) for tower in ("9^9^9", "9^{9^{9^9}}", "(10^9)!", "2^{2^{2^{99}}}")),
    ],
    ids=range(24),
)  # fmt: skip
def test_hostile_answers_are_answered_in_bounded_time(answer):
    assert equivalent(answer, r"\frac{\pi}{2}", "").value == equivalent(answer, "1, 2", "").value == 0.0


@pytest.mark.parametrize(
    "text",
    [
        r"\sqrt",
        r"\frac1",
        r"\frac{",
        "{",
        "(",
        "$" * 200 + "a",
        " ." * 200,
        r"\{",
        "5^",
        r"\text{",
        "1" * 100 + " " * 100,
        "<" * 200,
    ],
)
def test_reading_a_text_takes_linear_time(text):
    assert cost(lambda: (plain(text), members(text), split_at(",", text), unit_of(text))) < 50


def test_parts_of_a_text():
    assert (
        plain(r"\frac\pi2 \sqrt\frac12 x^\frac12 \binom52")
        == r"\frac{\pi}{2} \sqrt{\frac{1}{2}} x^{\frac{1}{2}} \binom{5}{2}"
    )
    assert members(r"\{1\pm\sqrt2, (3,4) \text{ and } 5\}") == [r"1+\sqrt2", r"1-\sqrt2", "(3,4)", "5"]
    assert split_at(r"\cup", r"(1,2]\cup[3,4)") == ["(1,2]", "[3,4)"]
    assert {
        unit_of(text)
        for text in (r"\text{ sq. in}", r"\text{ inches}^2", r"\text{square inches}", r"\mbox{ in}^2")
    } == {"inch^2"}
