r"""One spelling for each answer: of symbols, and without what may be there or not.

A unit, a variable (`x =`) or a percent sign may be there or not if the reference has it or the question names
it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from unmask.rewards.final_form import TEXT, UNIT, Rules, number_kind, occurs, substituted

MACRO = re.compile(r"\\([a-zA-Z]+)")
SPELLINGS = {
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"),
    **dict.fromkeys((r"\textit", r"\operatorname"), r"\text"),
    **dict.fromkeys(
        (rf"\{size}{side}" for size in ("big", "Big", "bigg", "Bigg") for side in ("", "l", "r")), ""
    ),
    **dict.fromkeys((r"\left.", r"\right.", r"\left", r"\right", r"\displaystyle", r"\textstyle"), ""),
    **dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom"),
    **dict.fromkeys((r"\quad", r"\qquad"), " "),
    **dict.fromkeys((r"\leq", r"\leqslant"), r"\le"),
    **dict.fromkeys((r"\geq", r"\geqslant"), r"\ge"),
    r"\neq": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    r"\degree": r"^\circ",
    r"\textdollar": r"\$",
    r"\langle": "(",
    r"\rangle": ")",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\varnothing": r"\emptyset",
}
SPELLING = re.compile("|".join(rf"{re.escape(word)}(?![a-zA-Z])" for word in SPELLINGS))
SIGNS = str.maketrans(
    {
        "\u03c0": r"\pi ",
        "\u221e": r"\infty ",
        "\u2212": "-",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u222a": r"\cup ",
        "\u00b0": r"^\circ ",
        "\u2264": r"\le ",
        "\u2265": r"\ge ",
        "\u2260": r"\ne ",
        "\u00b2": "^2",
        "\u00b3": "^3",
    }
)
SEPARATED = re.compile(r"(?<=[0-9])(?:\{,\}|,(?:\\! ?)+)(?=[0-9]{3})")
SPACE = re.compile(r"\s*(?P<row>\\\\)(?:\[[0-9.]+ ?[a-z]{2}\])?\s*|(?P<nothing>\\!)|(?:\\[,;: ]|~|\s)+")
THOUSANDS = re.compile(
    r"(?P<opens>(?<!\\)[(\[]|\\\{)|(?P<closes>(?<!\\)[)\]]|\\\})|_\{[^{}]*\}"
    r"|(?P<number>(?<![0-9.,^_])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9]|,\S))"
)
"""A number with commas between its thousands, and what a list may be in: brackets and subscripts."""
OUTER = re.compile(r"^[ $]+|(?:(?<!\\)[ $])*\.?(?:(?<!\\)[ $])*$")
ARGUMENTS = {"frac": 2, "binom": 2, "sqrt": 1}
TAKES_ARGUMENTS = re.compile(rf"\\({'|'.join(ARGUMENTS)})(?![a-zA-Z])")
BASES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
NOTHING, ANYTHING = "(?:none|(?:there (?:is|are) )?no solutions?|(?:the )?empty set)", "all real(?: number)?s"
SPELLED: Rules = [
    ("\u221a ?(?:\\(([^()]*)\\)|([0-9]+|[a-z]))", r"\\sqrt{\1\2}"),
    (r"\{([^{}]*[^{} ]) ?\\over(?![a-z]) ?([^{}]+)\}", r"\\frac{\1}{\2}"),
    (r"(?<![a-zA-Z\\])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"(?<=[0-9a-zA-Z)}]) ?\*\* ?(?=[0-9a-zA-Z({-])", "^"),
    (r"([0-9]) ?/ ?(?=[0-9])", r"\1/"),
    (r"(?<=[0-9}]) ?(?:\\cdot|\\times|\*) ?i(?![a-zA-Z])", "i"),
    (r"\\(begin|end)\{bmatrix\}", r"\\\1{pmatrix}"),
    (
        r"[(\[] ?\\begin\{(?:array\} "
        r"?\{[clr]+|(?:small)?matrix)\}(.*?)\\end\{(?:array|(?:small)?matrix)\} ?[)\]]",
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (r"^[({]([0-9]+)[)}](?=_)", r"\1"),
    (rf"_\{{\\text\{{({'|'.join(BASES)})\}}\}}", lambda found: f"_{BASES.index(found[1])}"),
    (r"\\mathbb(?: ?R|\{R\})(?![a-zA-Z^])", r"(-\\infty, \\infty)"),
    (r"\+ ?(?=\\infty)", ""),
    (r" ?\\text\{ ?per ?cent ?\}$|(?<=[0-9)}]) ?(?:per ?cent|%)$", r"\\%"),
    (rf"(?i)\\\{{ ?\\\}}|^\\text\{{ ?{NOTHING} ?\}}$|^{NOTHING}$", r"\\emptyset"),
    (rf"(?i)^\\text\{{ ?{ANYTHING} ?\}}$|^{ANYTHING}$", r"(-\\infty, \\infty)"),
    (" ?; ?", ", "),
    (r"(\\log_(?:[0-9a-z]|\{[0-9a-z]+\})) ?([0-9]+)(?![0-9a-zA-Z])", r"\1{\2}"),
    (r"([0-9]*)\.([0-9]*)\\overline\{([0-9]{1,40})\}", lambda found: _repeating(*found.groups())),
    (r"([_^])\{(.)\}", r"\1\2"),
]
"""Other spellings of roots, fractions, products with i, matrices, bases, sets, lists, logarithms and
repeating decimals."""
SIGNS_OF_UNITS: Rules = [
    (r"(?<=[0-9)}])\^(?:\\circ|\{ ?\\circ ?\})(?= ?(?:$|[,)\]]))", r"\\text{ degrees}"),
    (r"^(-?) ?\\\$ ?(-?[0-9.,]+)$|^(-?[0-9.,]+) ?\\\$$", r"\1\2\3\\text{ dollars}"),
]
WRAPPERS = [(r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ("(", ")"), ("\u201c", "\u201d")]
WRAPPERS += [(mark, mark) for mark in ("**", "*", "```", "`", '"', "'")]
WRAPPERS += [(rf"\{style}{{", "}") for style in ("mathbf", "boldsymbol", "underline")]
MIXED = re.compile(r"([+-]?[0-9]+) ([0-9]{1,2})/([0-9]+)")
AND, OR, AND_OR = (
    re.compile(rf",? ?(?:\\text\{{ ?(?:{word}) ?\}}|(?<= )(?:{word})(?= )) ?")
    for word in ("and", "or", "and|or")
)
LABEL = re.compile(r"([^=<>]+?) ?(?:=|\\in(?![a-zA-Z])) ?([^=<>]*)")
RELATION = re.compile(r"[=<>]|\\(?:in|le|ge|ne)(?![a-zA-Z])")
LESS, MORE = (rf" ?({signs}) ?" for signs in (r"<|\\le(?![a-zA-Z])", r">|\\ge(?![a-zA-Z])"))
SET_BUILDER = re.compile(r"\\\{ ?([a-zA-Z]) ?(?:\\in ?\(-\\infty, \\infty\) ?)?(?:\\mid|[|:]) ?(.*?) ?\\\}")
RANGES = [
    re.compile(rf"(?:([^<>=,]*[^<>=, ]){sign})?([a-zA-Z])(?:{sign}([^<>=,]+))?") for sign in (LESS, MORE)
]
ALL_BUT_ONE = [
    re.compile(r"([a-zA-Z]) ?\\ne(?![a-zA-Z]) ?([^,=<>]+)"),
    re.compile(r"(\(-\\infty, \\infty\)) ?\\(?:setminus|backslash)(?![a-zA-Z]) ?\\\{ ?([^,=<>]+?) ?\\\}"),
]
INTERVAL = re.compile(r"[(\[][^()\[\],]*,[^()\[\],]*[)\]]")
OPEN_INTERVAL = re.compile(r"\((?!.*\\infty).*\)")
"""An interval that may as well be a point."""
ASKS_FOR_INTERVAL = re.compile(
    r"interval|domain|range|inequalit|values|solution set|[<>]|\\[lg](?:e|eq|t)(?![a-z])", re.IGNORECASE
)
TUPLE = re.compile(r"\(([a-zA-Z](?:, ?[a-zA-Z])+)\)")
VARIABLE = re.compile(r"[a-zA-Z](?: ?\([a-zA-Z]\))?")
WORDS = re.compile(
    r"(?<=[0-9})]) ?(?<!\\)((?:[a-zA-Z]{2,}|[a-zA-Z](?=[./][a-zA-Z]))(?:[ ./][a-zA-Z]+)*)(\^[0-9])?$"
)
LAST_UNIT = re.compile(rf" ?{UNIT.pattern}$")
PERCENT = re.compile(r" ?(?:\\?%|\\text\{ ?percent ?\}|percent)$")
PERCENT_ASKED = re.compile(
    r"\b(?:what|which|as an?|in|nearest|is the|find the|tenth of a) percent(?:age)?\b", re.IGNORECASE
)
SIGN_OF_UNIT = {"dollar": r"\$", "degree": r"\circ"}
ABBREVIATIONS = {
    "in": "inch",
    "ft": "foot",
    "yd": "yard",
    "mi": "mile",
    "mm": "millimeter",
    "cm": "centimeter",
    "m": "meter",
    "km": "kilometer",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter",
    "l": "liter",
    "gal": "gallon",
    "s": "second",
    "sec": "second",
    "min": "minute",
    "h": "hour",
    "hr": "hour",
    "deg": "degree",
    "sq": "square",
    "cu": "cubic",
    "mph": "mile hour",
    "kph": "kilometer hour",
    "kmh": "kilometer hour",
    "usd": "dollar",
}
IRREGULAR = {
    "feet": "foot",
    "metre": "meter",
    "centimetre": "centimeter",
    "kilometre": "kilometer",
    "litre": "liter",
    "squared": "square",
}
POWERS = {"square": "2", "cubic": "3", "cubed": "3"}
POWER_NAMED = {"2": r"square|area|\^2", "3": r"cubi|cube|volume|\^3"}
SHORT_UNIT = "|".join(name for name in ABBREVIATIONS if name != "in")
UNITS_OF_NUMBERS = re.compile(rf"(?<=[0-9]) ?(?:{SHORT_UNIT})(?![a-zA-Z])|{UNIT.pattern}")
UNIT_ASKED = re.compile(rf"\bin ((?:{SHORT_UNIT})(?: ?/ ?(?:{'|'.join(ABBREVIATIONS)}))?)(?![a-zA-Z])")
INFINITY = r"\infty"
FORMULA = re.compile(r"\$+([^$]+)\$+|\\\[(.+?)\\\]", re.DOTALL)


def plain(text: str) -> str:
    """The text with one spelling of each symbol, without redundant space, outer dollar signs and a final full
    stop."""
    text = SPELLING.sub(lambda found: SPELLINGS[found[0]], SEPARATED.sub("", text.translate(SIGNS)))
    text = SPACE.sub(lambda found: r" \\ " if found["row"] else "" if found["nothing"] else " ", text)
    return _braced(substituted(OUTER.sub("", text), SPELLED)).strip()


def _braced(text: str) -> str:
    r"""The text with braces around each argument of a fraction, binomial or root, as TeX reads it:
    `\frac\pi2` is `\frac{\pi}{2}`."""
    for found in reversed(list(TAKES_ARGUMENTS.finditer(text))):
        at, arguments = found.end(), found[0]
        if text.startswith("[", at) and "]" in text[at:]:
            at = text.index("]", at) + 1
            arguments = text[found.start() : at]
        for _ in range(ARGUMENTS[found[1]]):
            start, at = _argument(text, at)
            arguments += text[start:at] if text.startswith("{", start) else f"{{{text[start:at]}}}"
        arguments = f"{{{arguments}}}" if text.startswith("^", found.start() - 1) else arguments
        text = text[: found.start()] + arguments + text[at:]
    return text


def _argument(text: str, at: int) -> tuple[int, int]:
    """Where TeX begins and ends to read an argument: a group, a macro with its groups, or a character."""
    start = len(text) - len(text[at:].lstrip(" "))
    macro = MACRO.match(text, start)
    if macro is None and not text.startswith("{", start):
        return start, min(start + 1, len(text))
    stop = macro.end() if macro else start
    for _ in range(ARGUMENTS.get(macro[1], 0) if macro else 1):
        depths = accumulate((character == "{") - (character == "}") for character in text[stop:])
        stop = next((at for at, depth in enumerate(depths, stop) if depth <= 0), len(text) - 1) + 1
    return start, stop


def _repeating(whole: str, decimals: str, repeated: str) -> str:
    """A repeating decimal as a fraction."""
    nines = 10 ** len(decimals) * (10 ** len(repeated) - 1)
    return exact(Fraction(int(f"0{whole}{decimals}{repeated}") - int(f"0{whole}{decimals}"), nines))


def exact(value: Fraction) -> str:
    """A number as an integer or a fraction in lowest terms."""
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def without_thousands(text: str) -> str:
    """The text without commas between thousands; inside of brackets, as in `(1,234)`, a comma separates
    members."""
    depths = accumulate(bool(found["opens"]) - bool(found["closes"]) for found in THOUSANDS.finditer(text))
    return THOUSANDS.sub(
        lambda found: found[0].replace(",", "") if next(depths) <= 0 and found["number"] else found[0], text
    )


def words(text: str) -> str:
    r"""The text without the `\text` around words, spaces beside no two digits, and the parentheses of a
    choice, (C)."""
    text = re.sub(r"(?<![0-9]) +| +(?![0-9])", "", TEXT.sub(r"\1", text))
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)", text) else text


def is_word(text: str) -> bool:
    r"""Whether a text is words alone, in a `\text` or capitalized, whose case does not matter, and no letter
    that names a choice."""
    found = TEXT.fullmatch(text)
    return (
        re.fullmatch(r"[A-Za-z' -]{2,}", found[1].strip()) is not None
        if found
        else re.fullmatch("[A-Z][a-z]{2,}", text) is not None
    )


def bare(answer: str, reference: str, question: str) -> tuple[str, str]:
    """An answer and its reference as plain as they can be compared."""
    given, wanted = unwrapped(plain(answer)), _with_numbers(unwrapped(plain(reference)))
    given = _with_numbers(given.removeprefix("=").strip(), wanted)
    if (found := MIXED.fullmatch(given)) and int(found[2]) < int(found[3]):
        given = rf"{found[1]}\frac{{{found[2]}}}{{{found[3]}}}"
    labeled = LABEL.fullmatch(wanted)
    label = labeled[1] if labeled and VARIABLE.fullmatch(labeled[1]) and not _letters(labeled[2]) else None
    wanted = labeled[2] if labeled and label else wanted
    asked = ASKS_FOR_INTERVAL.search(question) is not None
    given, wanted = (
        _as_interval(given, wanted, may_be_point=not asked),
        _as_interval(wanted, given, may_be_point=False),
    )
    given = _as_tuple(given, wanted, question)
    if not RELATION.search(wanted):
        named = label or " ; ".join(
            plain("".join(formula)) for formula in FORMULA.findall(question.replace(r"\$", ""))
        )
        spaced = " ?".join(map(re.escape, given.replace(" ", "")))
        shown = not label and re.search(f"{spaced}(?![0-9])", plain(question))
        listed = number_kind(wanted) is None and len(members(wanted)) > 1
        wanted = ", ".join(members(wanted)) if listed else inside(wanted, r"\{", r"\}") or wanted
        inner = None if listed else inside(given, r"\{", r"\}")
        given = ", ".join(split_at(",", inner)) if inner else given
        parts = [_unlabeled(part, "" if shown else named) for part in (members(given) if listed else [given])]
        parts = [unwrapped(_without_unit(unwrapped(part), wanted, question)) for part in parts]
        given = ", ".join(each for part in parts for each in (members(part) if listed else [part]))
    return given, wanted


def members(listed: str) -> list[str]:
    r"""The members of a list or set of values, however joined; `a \pm b` is two."""
    parts = split_at(",", AND_OR.sub(", ", inside(listed, r"\{", r"\}") or listed))
    both = [re.split(r"\\(?:pm|mp)(?![a-zA-Z])", part) for part in parts]
    pairs = [
        [f"{each[0]}{sign}{each[1]}".removeprefix("+").strip() for sign in "+-"] if len(each) == 2 else []
        for each in both
    ]
    return [member for part, pair in zip(parts, pairs, strict=True) for member in pair or [part]]


def split_at(separator: str, text: str) -> list[str]:
    """The parts of a text between separators outside of all brackets."""
    depths = list(accumulate((character in "([{") - (character in ")]}") for character in text))
    cuts = [at for at, depth in enumerate(depths) if depth == 0 and text.startswith(separator, at)]
    ends = zip([0, *(at + len(separator) for at in cuts)], [*cuts, len(text)], strict=True)
    return [text[start:stop].strip() for start, stop in ends]


def _with_numbers(text: str, other: str = "") -> str:
    """The text without commas between thousands, if all other commas separate members, as spaces after them
    show.

    A list of as many members as the other text is left as it is: `1,234` for `1, 234`.
    """
    count = len(members(other))
    read = without_thousands(text)
    listed = count > 1 and count == len(members(text)) and not re.search(",0[0-9]", text)
    return text if listed or len(split_at(",", read)) > len(split_at(", ", read)) else read


def _as_interval(text: str, other: str, *, may_be_point: bool) -> str:
    """The inequalities of one variable as intervals, if the other text has intervals, which are no points, or
    either joins inequalities."""
    read, other_read = _intervals(text), _intervals(other)
    if (
        read
        and other_read
        and read[0] == other_read[0]
        and any(AND_OR.search(each) or "," in each for each in (text, other))
    ):
        return read[1]
    others = [re.sub(r"^[a-zA-Z] ?\\in(?![a-zA-Z]) ?", "", part) for part in split_at(r"\cup", other)]
    may_be_point = may_be_point and len(others) == 1
    if not all(
        INTERVAL.fullmatch(part) and not (may_be_point and OPEN_INTERVAL.fullmatch(part)) for part in others
    ):
        return text
    return read[1] if read else text


def _intervals(text: str) -> tuple[str, str] | None:
    """The variable and the intervals of inequalities that are joined by "and" or "or"."""
    builder = SET_BUILDER.fullmatch(text)
    found = list(map(_interval, split_at(r"\cup", OR.sub(r" \\cup ", builder[2] if builder else text))))
    names = {part[0] if part else None for part in found} | ({builder[1]} if builder else set())
    name = names.pop()
    return None if name is None or names else (name, r" \cup ".join(part[1] for part in found if part))


def _interval(text: str) -> tuple[str, str] | None:
    """The variable and the interval of an inequality, or of two that bound it on either side."""
    if found := next(filter(None, (pattern.fullmatch(text) for pattern in ALL_BUT_ONE)), None):
        return found[1], rf"(-\infty, {found[2]}) \cup ({found[2]}, \infty)"
    names, lows, highs = set(), [], []
    for part in split_at(",", AND.sub(", ", text)):
        found = next(filter(None, (pattern.fullmatch(part) for pattern in RANGES)), None)
        if found is None or not RELATION.search(part):
            return None
        ends = [(found[1], found[2]), (found[5], found[4])]
        lower, upper = ends if found.re is RANGES[0] else ends[::-1]
        names.add(found[3])
        lows += [lower] if lower[1] else []
        highs += [upper] if upper[1] else []
    if len(names) > 1 or len(lows) > 1 or len(highs) > 1:
        return None
    (low, low_sign), (high, high_sign) = (lows or [("-" + INFINITY, "<")])[0], (highs or [(INFINITY, "<")])[0]
    left, right = "[" if "\\" in low_sign else "(", "]" if "\\" in high_sign else ")"
    return names.pop(), f"{left}{low}, {high}{right}"


def _as_tuple(text: str, other: str, question: str) -> str:
    """`a = 1, b = 2` as `(1, 2)`, if the other text is a tuple, and the question asks for (a, b)."""
    labeled = [LABEL.fullmatch(part) for part in split_at(",", AND.sub(", ", text))]
    values = {found[1]: found[2] for found in labeled if found}
    asked = {tuple(re.split(", ?", names)) for names in TUPLE.findall(plain(question))}
    named = [names for names in asked if sorted(names) == sorted(values)]
    if len(values) < len(labeled) or len(named) != 1 or not inside(other, "(", ")"):
        return text
    return f"({', '.join(values[name] for name in named[0])})"


def _unlabeled(text: str, named: str) -> str:
    """The text without what it says to be equal to, if that is named."""
    found = LABEL.fullmatch(text)
    return found[2] if found and re.search("[a-zA-Z]", found[1]) and occurs(found[1], named) else text


def _without_unit(given: str, wanted: str, question: str) -> str:
    """The answer without a unit that the reference lacks and the question names."""
    if UNIT.search(wanted) is None and "%" not in wanted and PERCENT.search(given):
        return PERCENT.sub("", given) if PERCENT_ASKED.search(question) else given
    if not _letters(UNIT.sub("", wanted)):
        given = WORDS.sub(r"\\text{\1}\2", given)
    found = LAST_UNIT.search(given)
    if (
        found is None
        or UNIT.search(wanted)
        or not found.start()
        or not re.fullmatch(r" ?[a-zA-Z][a-zA-Z. /]*(?:\^[0-9])?", found[1])
    ):
        return given
    unit, _, power = unit_of(found[0]).partition("^")
    sign = SIGN_OF_UNIT.get(unit)
    abbreviated = [*(each[0] for each in UNITS_OF_NUMBERS.finditer(question)), *UNIT_ASKED.findall(question)]
    units = " ".join([_singular(question), *(unit_of(each).partition("^")[0] for each in abbreviated)])
    named = unit and (unit == "unit" or f" {unit} " in f" {units} " or (sign and sign in question))
    return (
        given[: found.start()]
        if named and re.search(POWER_NAMED.get(power, ""), question, re.IGNORECASE)
        else given
    )


def unit_of(text: str) -> str:
    r"""The name of a unit: `\text{ sq. in}`, `\text{ inches}^2` and `\text{square inches}` are `inch^2`."""
    power = "".join(re.findall(r"\^([0-9])", text))
    text = re.sub(r"\b([a-zA-Z])\.(?=[a-zA-Z]\b)", r"\1", TEXT.sub(r" \1 ", text))  # a.m.
    names = [ABBREVIATIONS.get(name, name) for name in _singular(text).split()]
    power = power or "".join(POWERS.get(name, "") for name in names)
    return " ".join(name for name in names if name not in POWERS) + (f"^{power}" if power else "")


def _singular(text: str) -> str:
    """The words of a text in lower case and without the ending of plurals."""
    found = (re.sub(r"(?:(?<=[xhz])e|(?<=[^s]))s$", "", word) for word in re.findall("[a-z]+", text.lower()))
    return " ".join(IRREGULAR.get(word, word) for word in found if word != "per")


def _letters(text: str) -> bool:
    return re.search("[a-zA-Z]", MACRO.sub("", text)) is not None


def unwrapped(text: str) -> str:
    """The text without signs around all of it (of formulas, bold type, braces or parentheses around one
    value), and with units as words."""
    text = OUTER.sub("", text)
    for opening, closing in WRAPPERS:
        inner = inside(text, opening, closing)
        if inner and not (opening == "(" and "," in inner):
            return unwrapped(inner)
    return substituted(text, SIGNS_OF_UNITS)


def inside(text: str, opening: str, closing: str) -> str | None:
    """What stands between two marks that belong together."""
    if not (text.startswith(opening) and text.endswith(closing)):
        return None
    inner = text[len(opening) : -len(closing)]
    left = "{" if opening.endswith("{") and closing == "}" else opening
    marks = re.findall(f"{re.escape(left)}|{re.escape(closing)}", inner)
    depths = [0, *accumulate(1 if mark == left else -1 for mark in marks)]
    return inner.strip() if min(depths) == depths[-1] == 0 else None
