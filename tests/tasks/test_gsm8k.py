"""Which texts answer a question of gsm8k."""

from __future__ import annotations

import pytest

from unmask.tasks import get_task


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("72", "ok"), (" so 48 + 24 = 72 #### 72", "ok"), ("<answer>72</answer>", "ok"), ("#### $72.00", "ok"), ("72.0", "ok"),
        ("<reasoning>\n7\n</reasoning>\n<answer>\n72\n</answer>\n", "ok"), ("#### 71", "wrong"), ("720", "wrong"), ("7272", "wrong"),
        ("the answer is 72", "ok"), ("#### 72 #### 73", "malformed"), ("72 clips", "malformed"), ("<answer>72", "malformed"),
        ("144/2", "wrong"), ("#### 72/1", "wrong"), (r"\frac{144}{2}", "wrong"), ("144.0/2", "wrong"), ("48+24", "malformed"), ("72,0", "malformed"),
        ("<answer>72</answer><answer>71</answer>", "malformed"), ("72=71", "malformed"), ("", "malformed"),
    ],
)  # fmt: skip
def test_the_number_of_gsm8k(text, status):
    task = get_task("gsm8k")
    (row,) = task.rows(
        [
            (
                "row 1",
                {
                    "question": "How many?",
                    "answer": "48/2 = <<48/2=24>>24 and 48+24 = <<48+24=72>>72.\n#### 72",
                },
            )
        ]
    )
    assert row["completion"] == " 48/2 = 24 and 48+24 = 72.\n#### 72"
    assert task.verify(text, row).status == status


@pytest.mark.parametrize(
    ("answer", "text", "solved"),
    [("0.5", "1/2", True), ("0.5", "2/4", False), ("1,234", "1234", True), ("1234", "2,468/2", False)],
)
def test_fractions_are_in_lowest_terms(answer, text, solved):
    (row,) = get_task("gsm8k").rows([("row 1", {"question": "How many?", "answer": f"#### {answer}"})])
    assert get_task("gsm8k").verify(text, row).solved == solved


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("#### 18 dollars", "ok"), ("18 dollars", "ok"), (r"\$18", "ok"), ("**18**", "ok"), ("####  **18**", "ok"), (r"so \boxed{18}.", "ok"), (r"<answer>\boxed{18}</answer>", "ok"),
        (r"<answer>$\boxed{18}$</answer>", "ok"), ("x=18", "ok"), ("#### $x = 18$", "ok"), ("#### 18\n\nQuestion: And then?\nAnswer: 5\n#### 5", "ok"), ("####\n18\n", "ok"),
        ("#### 17\n#### 18", "wrong"), ("#### 17\n\\boxed{18}", "wrong"), (r"\boxed{36/2}", "wrong"), ("x=17", "wrong"), ("#### 17 dollars", "wrong"),
        ("18 cents", "malformed"), ("18%", "malformed"), ("y=18", "malformed"), ("#### 17 18", "malformed"), ("18 dollars or 17 dollars", "malformed"),
        ("#### 18 #### 17", "malformed"), ("#### ", "malformed"), (r"\boxed{18", "malformed"), ("(" * 300 + "18" + ")" * 300, "malformed"), ("#### 18 or 17", "malformed"),
    ],
)  # fmt: skip
def test_spellings_of_a_number(text, status):
    (row,) = get_task("gsm8k").rows(
        [("row 1", {"question": "She sells $x$ eggs. How many dollars has she?", "answer": "#### 18"})]
    )
    assert get_task("gsm8k").verify(text, row).status == status


@pytest.mark.parametrize(
    ("answer", "question", "text"),
    [("18", "Eggs are $2 each. How much is it?", "18 dollars"), ("1,234", "How many?", "1{,}234"), ("1,234", "How many?", r"1\,234"), ("18", "What percent of them?", "18%"), ("18", "What percent of them?", "18 percent")],
)  # fmt: skip
def test_thousands_percentages_and_amounts(answer, question, text):
    (row,) = get_task("gsm8k").rows([("row 1", {"question": question, "answer": f"#### {answer}"})])
    assert get_task("gsm8k").verify(f"#### {text}", row).solved


READ = [
    "The answer is 18", "Answer: 18", "18!", "The answer is 18.", "the final answer is: 18", "**Answer:** 18", "Answer: **18**", "The answer is $18.", r"The answer is \boxed{18}", "#### 18!", "answer = 18", "The answer is 18 dollars!",
    "She has 9 eggs left. So the answer is 18.", "16 - 7 = 9\n9 * 2 = 18\nTherefore, the answer is 18", "<answer>The answer is 18</answer>", "Final Answer: $18$", r"\boxed{18}, that is \boxed{18}",
    "The answer is **18**.", "In conclusion, the answer is 18.", "### Answer: 18", "## Final Answer\n18", "**Final Answer**\n**18**", "A: 18", "16 - 7 = 9\n9 * 2 = 18\nA: $18", "#### A: 18", "Overall, we find that the answer is 18.", "Ans: 18",
    "The total is 18.", "16 - 7 = 9\n9 * 2 = 18\nSo the total is $18.", "The total amount is 18 dollars.", "She has $18.", "So she has 18 dollars left.", "It is 18.", "They have 18!", "`18`", '"18"', "= 18", "18 USD", "18 dollars.", "$18 dollars", "The answer is `18`.", "The answer is \"18\".",
    "#### **$18**", "#### `18`", "#### = 18", "#### The answer is 18.", r"#### $\boxed{18}$", r"#### \boxed{18} dollars", "#### 18.", "The answer is 18.\n\nQ: And then?\nA: 17", "18\n\nQ: And then?\nA: 17\n#### 17", "The answer is 18.\nQuestion: And then? The answer is 17.", r"\boxed{18}" + "\n\n**Problem 2:** And?\n\\boxed{17}",
    "The total is 9. The answer is 18.", r"The answer is \boxed{18}. The answer is 18.", r"The answer is 9 + 9 = \boxed{18}.", r"So, $9 \times 2 = \boxed{18}$ dollars. The answer is 18.", "The answer is 18.\n#### 18", r"The answer is 18: \boxed{18}", r"It is \boxed{18}, as 9 * 2 = 18", "Question: How many?\nAnswer: 18", "The final answer is 18. I hope it is correct.", "The answer is therefore 18.", "The answer is therefore 18.\n#### 18", "The answer is 9 + 9 = 18.\n#### 18", "*18*", "'18'",
]  # fmt: skip
FORGED = [
    "The answer is 17 or 18", "The answer is 17. The answer is 18", "The answer is 18. The answer is 17", "The answer is not 18", "The answer is 17, no, 18", "The answer is 18?", "17 18!", "18! 17!", "Answer: 17\nAnswer: 18", "Answer: 18 Answer: 18",
    "The answer is 18 17", "The answer is 17\n18", "The answer is 18\n17", "The answer is 18 or so", "The answer is at most 18", "The answer is 17 + 1", "The answer is 36/2", "17!", "3!*3", "The answer is 1 8", "Answer: x", "The answer is", "Answer:", "!", "!18", "1 2 3 18",
    "If the answer is 18, it is even", "Suppose the answer is 18", "Perhaps the answer is 18", "17 answer is 18", "#### 17 answer is 18", "It is wrong that the answer is 18", "The answer is 18 and not 17", "The answer is <answer>18", "Answer: 17, 18", "Answer: 18=17",
    r"\boxed{17} \boxed{18}", r"\boxed{18}, \boxed{17}", r"The answer is \boxed{17} or \boxed{18}", r"\boxed{17} so 18", r"\boxed{18\}} \boxed{17} \boxed{18}", r"\boxed{1} \boxed{2} \boxed{18}", "The answer is " * 3 + "18",
    "#### 17. The answer is 18", "#### 18. The answer is 17", "#### 17, the answer is 18", "#### The answer is 17. The answer is 18", r"#### 17 \boxed{18}", r"#### \boxed{18} 17", r"#### 18 \boxed{17}", "#### **17** **18**", "####18 or 17", "#### 17 A: 18",
    r"The answer is \boxed{18}. The answer is 17.", r"The answer is 17. The answer is \boxed{18}.", r"\boxed{18} The answer is 17", r"\boxed{18}. The answer is 17", r"\boxed{18}" + "\nAnswer: 17", r"A: 17" + "\n\\boxed{18}", r"The answer is 17, \boxed{18}", r"The answer is 17 or \boxed{18}",
    r"\boxed{180} \boxed{18}", r"\boxed{18} \boxed{180}", r"\boxed{18} or 17", r"17 or \boxed{18}", r"\boxed{18}, 17", r"\boxed{18} and not 17", r"17 \boxed{18}", r"\boxed{18} dollars, or 17 dollars", r"17 dollars or \boxed{18}", r"The answer is 17 and \boxed{18}", r"The answer is between 17 and \boxed{18}", r"\boxed{18} \boxed{}", r"\boxed{17 or 18}", r"\boxed{18}, or perhaps 17",
    "The answer is 17.\n#### 18", "\\boxed{17}\n#### 18", "A: 17\nThe answer is 18", "A: 18\nB: 17", "B: 18", "a = 17. The answer is 18. The answer is 17", "The total is 17. The answer is 18. The total is 18. The answer is 17", "The total is 18. The total is 17.", "The total is 17. The total is 18.", "The total is 17 or 18.",
    "The total is not 18.", "The total is 18 or so.", "If so, the total is 17 + 1.", "The total is 18. Or 17?", "The total is 18, perhaps", "The total was 18 yesterday.", "The answer is 17. The total is 18.", r"\boxed{17}" + "\nThe total is 18.", "She has no 18.", "She has 17 or 18.", "She has 17. She has 18.", "She never has $18.", "Nobody has 18.",
    "She has 18?", "She might have 18.", "She has at most 18.", "If she has 18.", "She has $18 and he $17.", "He has 17\nShe has 18", "She has 18 cents.", "She has 18 eggs.", "It is 18 or not.", "It is not 18.", "`17` `18`", '"17" "18"', "= 17 = 18", "17 = 18", "18 EUR", "18 USD or 17 USD", "#### **$17** **$18**", "17\n\nQ: And then?\nA: 18",
    "The answer is 17.\n\nQ: And?\n#### 18", "Q: How many?\nA: 17\nQ: How many?\nA: 18", "The answer is 17 or 18.\n\nQ: And?\nThe answer is 18", "## Answer\n17\n18", "#### Answer", "The answer\nmay be 18", "The answer is 17. I hope it is 18", "I hope it is correct. 17 or 18", "The answer is 9 + 9 = 17.\n#### 18", "The answer is 17 or 18.\n#### 18", "*17* *18*", "The answer 18", "18`", '"18', "**18", "18 **17**", "The answer is **17** **18**.", 
    "The answer is 18 " * 900,
]  # fmt: skip


@pytest.mark.parametrize("text", READ)
def test_an_answer_in_a_sentence_is_read(text):
    (row,) = get_task("gsm8k").rows(
        [("row 1", {"question": "How many dollars has she?", "answer": "#### 18"})]
    )
    assert get_task("gsm8k").verify(text, row).solved


@pytest.mark.parametrize("text", FORGED)
def test_several_answers_or_none_are_not(text):
    (row,) = get_task("gsm8k").rows(
        [("row 1", {"question": "How many dollars has she?", "answer": "#### 18"})]
    )
    assert get_task("gsm8k").verify(text, row).value == 0.0
