r"""One spelling for each answer: of symbols, and without what may be there or not.

A unit, a variable (`x =`) or a percent sign may be there or not if the reference has it or the question names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate

from unmask.rewards.final_form import TEXT, UNIT, number_kind, occurs

MACRO = re.compile(r"\\([a-zA-Z]+)")
SPELLINGS = {
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys((r"\textit", r"\operatorname"), r"\text"),
    **dict.fromkeys((rf"\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")), ""),
    **dict.fromkeys((r"\left", r"\right", r"\displaystyle", r"\textstyle"), ""),
    **dict.fromkeys((r"\quad", r"\qquad"), " "),
    **{r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\degree": r"^\circ"},
}
SPELLING = re.compile("|".join(rf"{re.escape(word)}(?![a-zA-Z])" for word in SPELLINGS))
SIGNS = str.maketrans(
    {
        **{"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u222a": r"\cup "},
        **{"\u00b0": r"^\circ ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne "},
    }
)
SPACE = re.compile(r"\s*(?P<row>\\\\)(?:\[[0-9.]+ ?[a-z]{2}\])?\s*|(?P<nothing>\\[!$])|(?:\\[,;: ]|~|\s)+")
SHORT_FRACTION = re.compile(r"\\frac ?([0-9]|\{[0-9]+\}) ?([0-9]|\{[0-9]+\})")
BASES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
REWRITTEN: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile("\u221a ?(?:\\(([^()]*)\\)|([0-9]+|[a-z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"\{([^{}]*[^{} ]) ?\\over(?![a-z]) ?([^{}]+)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"([0-9]) ?/ ?(?=[0-9])"), r"\1/"),
    (re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{3})"), ","),
    (re.compile(r"(?<=[0-9}]) ?(?:\\cdot|\\times|\*) ?i(?![a-zA-Z])"), "i"),
    (re.compile(r"\\(begin|end)\{bmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"[(\[] ?\\begin\{array\} ?\{[clr]+\}(.*?)\\end\{array\} ?[)\]]"), r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (re.compile(r"^[({]([0-9]+)[)}](?=_)"), r"\1"),
    (re.compile(rf"_\{{\\text\{{({'|'.join(BASES)})\}}\}}"), lambda found: f"_{BASES.index(found[1])}"),
]
"""Other spellings of roots, fractions, thousands, products with i, matrices and bases."""
WRAPPERS = [(r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ("(", ")"), ("**", "**")]
WRAPPERS += [(rf"\{style}{{", "}") for style in ("mathbf", "boldsymbol", "underline")]
MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]{1,2})/([0-9]+)")
AND = re.compile(r",? ?(?:\\text\{ ?(?:and|or) ?\}|(?<= )(?:and|or)(?= )) ?")
LABEL = re.compile(r"([^=<>]+?) ?(?:=|\\in(?![a-zA-Z])) ?([^=<>]*)")
VARIABLE = re.compile(r"[a-zA-Z](?: ?\([a-zA-Z]\))?")
WORDS = re.compile(r"(?<=[0-9})]) ?(?<!\\)\b([a-zA-Z]{2,}(?: [a-zA-Z]+)*)(\^[0-9])?$")
LAST_UNIT = re.compile(rf" ?{UNIT.pattern}$")
PERCENT = re.compile(r" ?(?:\\?%|\\text\{ ?percent ?\}|percent)$")
PERCENT_ASKED = re.compile(r"\b(?:what|which|as an?|in|nearest|is the|find the|tenth of a) percent(?:age)?\b", re.IGNORECASE)
SIGN_OF_UNIT = {"dollar": r"\$", "degree": r"\circ"}
FORMULA = re.compile(r"\$+([^$]+)\$+|\\\[(.+?)\\\]", re.DOTALL)


def plain(text: str) -> str:
    """The text with one spelling of each symbol, without redundant space, outer dollar signs and a final full stop."""
    text = SPELLING.sub(lambda found: SPELLINGS[found[0]], text.translate(SIGNS))
    text = SPACE.sub(lambda found: r" \\ " if found["row"] else "" if found["nothing"] else " ", text)
    for pattern, spelling in REWRITTEN:
        text = pattern.sub(spelling, text)
    text = re.sub(r"([_^])\{(.)\}", r"\1\2", text)
    text = SHORT_FRACTION.sub(lambda found: rf"\frac{{{found[1].strip('{}')}}}{{{found[2].strip('{}')}}}", text)
    return text.strip(" $").removesuffix(".").strip()


def words(text: str) -> str:
    r"""The text without the `\text` around words, spaces, and the parentheses of a choice, (C)."""
    text = TEXT.sub(r"\1", text).replace(" ", "")
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)", text) else text


def bare(answer: str, reference: str, question: str) -> tuple[str, str]:
    """An answer and its reference as plain as they can be compared."""
    given, wanted = _unwrapped(plain(answer)), _unwrapped(plain(reference))
    if r"\pm" in wanted and not re.search(r"\\(?:pm|mp)", given) and "," not in wanted:
        wanted = ", ".join(wanted.replace(r"\pm", sign) for sign in "+-")
    if (found := MIXED.fullmatch(given)) and int(found[2]) < int(found[3]):
        given = rf"{found[1]}\frac{{{found[2]}}}{{{found[3]}}}"
    labelled = LABEL.fullmatch(wanted)
    label = labelled[1] if labelled and VARIABLE.fullmatch(labelled[1]) and not _letters(labelled[2]) else None
    wanted = labelled[2] if labelled and label else wanted
    if not re.search(r"[=<>]|\\(?:in|le|ge|ne)(?![a-zA-Z])", wanted):
        named = label or " ; ".join(plain("".join(formula)) for formula in FORMULA.findall(question.replace(r"\$", "")))
        spaced = " ?".join(map(re.escape, given.replace(" ", "")))
        shown = not label and re.search(f"{spaced}(?![0-9])", plain(question))
        parts = _parts(given) if number_kind(wanted) is None and "," in wanted and not wanted.startswith(("(", "[", "\\")) else [given]
        given = given if shown else ", ".join(_unlabelled(part, named) for part in parts)
    return _unwrapped(_without_unit(given, wanted, reference, question)), wanted


def _parts(listed: str) -> list[str]:
    """The members of a list of values, however joined."""
    return [part.strip() for part in AND.sub(", ", _inside(listed, r"\{", r"\}") or listed).split(",")]


def _unlabelled(text: str, named: str) -> str:
    """The text without what it says to be equal to, if that is named."""
    found = LABEL.fullmatch(text)
    return found[2] if found and re.search("[a-zA-Z]", found[1]) and occurs(found[1], named) else text


def _without_unit(given: str, wanted: str, reference: str, question: str) -> str:
    """The answer without a unit that the reference lacks and the question names."""
    if UNIT.search(wanted) is None and "%" not in wanted and PERCENT.search(given):
        return PERCENT.sub("", given) if PERCENT_ASKED.search(question) else given
    if not _letters(UNIT.sub("", wanted)):
        given = WORDS.sub(r"\\text{\1}\2", given)
    found = LAST_UNIT.search(given)
    if found is None or UNIT.search(wanted) or not re.fullmatch("[a-zA-Z ]*[a-zA-Z][a-zA-Z ]*", found[1]):
        return given
    unit = found[1].strip().lower().removesuffix("s")
    sign = SIGN_OF_UNIT.get(unit)
    named = re.search(rf"\b{re.escape(unit)}(?:s|es)?\b", question.lower()) or (sign and sign in question + reference)
    return given[: found.start()] if named and found.start() else given


def _letters(text: str) -> bool:
    return re.search("[a-zA-Z]", MACRO.sub("", text)) is not None


def _unwrapped(text: str) -> str:
    """The text without signs around all of it: of formulas, bold type, and braces or parentheses around one value."""
    for opening, closing in WRAPPERS:
        inner = _inside(text, opening, closing)
        if inner and not (opening == "(" and "," in inner):
            return _unwrapped(inner)
    return text


def _inside(text: str, opening: str, closing: str) -> str | None:
    """What stands between two marks that belong together."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    inner = text[len(opening) : -len(closing)]
    left = "{" if opening.endswith("{") and closing == "}" else opening
    marks = re.findall(f"{re.escape(left)}|{re.escape(closing)}", inner)
    depths = [0, *accumulate(1 if mark == left else -1 for mark in marks)]
    return inner.strip() if min(depths) == depths[-1] == 0 else None
