r"""Patterns of strings in JSON schemas, as patterns of what stands between the quotes.

They are read as ECMA 262 has them with its flag `u`, which JSON schemas use, or without it if they are
patterns only so. They are written in Rust's syntax with every class and dot as a set of code points: `&&`,
`--` and `~~`, `\d` and `\s`, and the line ends of a dot mean other things there.

A character that JSON writes with a backslash is never matched: the strings are those of the pattern that need
none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

from unmask.errors import GenerationError
from unmask.generation.constraints.unicode_properties import SCRIPTS, is_property

PLAIN = r'[^"\\\x00-\x1F\x{100000}-\x{10FFFF}]'
"""A character that JSON writes as it is, without the private ones of the last plane."""
SPACES = r"\x{9}-\x{D}\x{20}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": SPACES}
SYNTAX = "^$\\.*+?()[]{}|/"
"""What may follow a backslash with the flag `u` and stand for itself."""
SETS |= {name.upper(): f"[^{inside}]" for name, inside in SETS.items()}
"""What `\\d`, `\\w` and so on add to a class."""
DOT = r"[[^\x{A}\x{D}\x{2028}\x{2029}]&&" + PLAIN + "]"
CONTROLS = {"b": 0x8, "t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
ESCAPE = re.compile(
    r"\\(?:(?P<set>[dDwWsS])|(?P<property>[pP]\{[A-Za-z0-9_=]+\})|(?P<control>[btnvfr])"
    r"|c(?P<letter>[A-Za-z])|(?P<zero>0)(?![0-9])"
    r"|x(?P<two>[0-9A-Fa-f]{2})"
    r"|u(?P<high>[Dd][89ABab][0-9A-Fa-f]{2})\\u(?P<low>[Dd][C-Fc-f][0-9A-Fa-f]{2})"
    r"|u(?P<four>[0-9A-Fa-f]{4})"
    r"|u\{(?P<any>[0-9A-Fa-f]{1,8})\}|(?P<same>[^A-Za-z0-9]))",
    re.DOTALL,
)
REPEATED = re.compile(r"(?:[*+?]|\{([0-9]+)(?:,([0-9]*))?\})")
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{CLOCK})"
LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
FORMATS = {
    "date": f"[0-9]{{4}}-{DAY}",
    "date-time": f"[0-9]{{4}}-{DAY}T{TIME}",
    "email": rf"[a-z0-9_+-]+(?:\.[a-z0-9_+-]+)*@{LABEL}(?:\.{LABEL})+",
    "ipv4": rf"(?:{BYTE}\.){{3}}{BYTE}",
    "time": TIME,
    "uri": rf"https?://{LABEL}(?:\.{LABEL})*(?::[0-9]{{1,4}})?(?:/[A-Za-z0-9._~-]+)*/?"
    r"(?:\?[A-Za-z0-9._~=&-]+)?(?:#[A-Za-z0-9._~-]+)?",
    "uuid": "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}
"""Common forms of each format: all of them valid, but not all that are."""


def string_pattern(pattern: Any, where: str) -> str:
    """The pattern, of whole strings, in Rust's syntax.

    Raises:
        GenerationError: it is no text or no pattern, is not regular, or has a character that JSON escapes.
    """
    if not isinstance(pattern, str):
        raise GenerationError(
            f"{pattern!r} is not a pattern", where=where, remedy="Give a regular expression"
        )
    return _Pattern(pattern, where).read()


@dataclass
class _Group:
    """A group that is open: its place, whether the string may begin at it, and which anchors are in it."""

    place: int
    starts: bool
    anchored: bool = False
    ended: bool = False


class _Pattern:
    """A pattern that is read from left to right."""

    def __init__(self, text: str, where: str):
        self.text, self.where, self.at = text, where, 0
        # means something else without the flag `u`; is no pattern with it
        self.needs_flag = self.needs_no_flag = False

    def read(self) -> str:
        """The whole, as a group."""
        groups, parts = [_Group(-1, starts=True)], ["(?:"]
        starts, ended = True, False  # whether the string may begin here, and whether it has ended
        while self.at < len(self.text):
            place, character = self.at, self.text[self.at]
            self.at += 1
            group = groups[-1]
            if character == "^" and starts:
                group.anchored = True
            elif character == "$":
                group.anchored = group.ended = ended = True
            elif character == "|":
                parts.append("|")
                starts, ended = group.starts, False
            elif character == ")" and len(groups) > 1:
                groups.pop()
                parts.append(")" + self._repetition(anchored=group.anchored))
                starts, ended = False, group.ended
                groups[-1].anchored |= group.anchored
                groups[-1].ended |= group.ended
            elif ended or character == "^":
                self._refuse("an anchor within the text", place, "Leave it out: the whole text has to match")
            elif character == "(":
                parts.append(self._opening(place))
                groups.append(_Group(place, starts))
            else:
                parts.append(self._atom(character, place) + self._repetition())
                starts = False
        if len(groups) > 1:
            self._refuse(
                "an unterminated group", groups[-1].place, "Close it, or write a backslash before it"
            )
        if self.needs_flag and self.needs_no_flag:
            what = (
                f"the pattern {self.text!r} has properties or \\u{{...}}, and what is no pattern beside them"
            )
            remedy = (
                "Escape a brace or bracket that stands for itself, a hyphen in a class, and no other "
                "character that needs no escape"
            )
            raise GenerationError(what, where=self.where, remedy=remedy)
        return "".join([*parts, ")"])

    def _opening(self, place: int) -> str:
        """The beginning of a group."""
        if self.text.startswith("?", self.at):
            named = re.compile(r"\?(?::|<[A-Za-z_$][A-Za-z0-9_$]*>)").match(self.text, self.at)
            if named is None:
                self._refuse(
                    "a group of a kind that is not supported", place, "Write out what may stand there"
                )
            self.at = named.end()
        return "(?:"

    def _repetition(self, *, anchored: bool = False) -> str:
        """What follows an atom: how often it stands there."""
        found = REPEATED.match(self.text, self.at)
        if found is None:
            return ""
        low, high = found[1], found[2]
        if anchored:
            self._refuse("an anchor that is repeated", self.at, "Leave it out: the whole text has to match")
        if high and int(low[:9]) > int(high[:9]):
            self._refuse("a repetition whose bounds are reversed", self.at, "Change one of them")
        self.at = found.end()
        self.at += self.text.startswith("?", self.at)  # lazy, which changes no whole match
        return found[0]

    def _atom(self, character: str, place: int) -> str:
        """A character, a class, or an escape; what `place` is of."""
        if character in "*+?" or (character == "{" and REPEATED.match(self.text, place)):
            self._refuse("a repetition of nothing", place, "Write a backslash before it")
        if character == ")":
            self._refuse("an unbalanced parenthesis", place, "Open it, or write a backslash before it")
        if character == ".":
            return DOT
        if character == "[":
            return self._class(place)
        if character != "\\":
            self.needs_no_flag |= character in "{}]"
            return self._literal(ord(character))
        found = self._escape(place)
        return f"[[{found}]&&{PLAIN}]" if isinstance(found, str) else self._literal(found)

    def _literal(self, code: int) -> str:
        if code < 0x20 or chr(code) in '"\\':
            what = (
                f"the pattern {self.text!r} has a quote, a backslash or a control character, which JSON "
                "escapes"
            )
            raise GenerationError(what, where=self.where, remedy="Leave the character out")
        return _code_point(code)

    def _escape(self, place: int, *, in_class: bool = False) -> int | str:
        """The code point of an escape, or what it adds to a class."""
        found = ESCAPE.match(self.text, place)
        if found is None or (found["control"] == "b" and not in_class):
            what = "an escape that is no character, such as an anchor or a reference to a group"
            self._refuse(what, place, "Leave it out, or write out what may stand there")
        self.at = found.end()
        parts = found.groupdict()
        self.needs_flag |= bool(parts["property"] or parts["any"])
        self.needs_no_flag |= bool(parts["same"]) and parts["same"] not in SYNTAX + "-" * in_class
        if parts["set"]:
            return SETS[parts["set"]]
        if parts["property"]:
            if not is_property(name := parts["property"][2:-1]):
                remedy = (
                    f"Write Script={name}"
                    if name in SCRIPTS
                    else "Write it as ECMA 262 does, as Lu, Letter, Alphabetic or Script=Greek"
                )
                self._refuse(f"{name}, which is no property of characters,", place, remedy)
            return f"\\{parts['property']}"
        if parts["high"]:
            return 0x10000 + ((int(parts["high"], 16) - 0xD800) << 10) + int(parts["low"], 16) - 0xDC00
        if digits := parts["two"] or parts["four"] or parts["any"]:
            code = int(digits, 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                self._refuse("an escape that is no character", place, "Leave it out")
            return code
        if parts["letter"]:
            return ord(parts["letter"]) % 32
        return 0 if parts["zero"] else CONTROLS[parts["control"]] if parts["control"] else ord(parts["same"])

    def _class(self, place: int) -> str:
        """A class, without the characters that JSON escapes."""
        negated = self.text.startswith("^", self.at)
        self.at += negated
        if self.text.startswith("]", self.at):
            self._refuse("a class that begins with its end", place, r"Write \] for a bracket")
        members = list[str]()
        while not self.text.startswith("]", self.at):
            low = self._member(place)
            last = self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in (
                "",
                "]",
            )
            if not last:
                members.append(low if isinstance(low, str) else _code_point(low))
                continue
            begin, self.at = self.at, self.at + 1
            high = self._member(place)
            if isinstance(low, int) and isinstance(high, int):
                if low > high:
                    self._refuse("a range whose ends are reversed", begin - 1, "Change one of them")
                members.append(f"{_code_point(low)}-{_code_point(high)}")
            else:  # a hyphen beside a set is one
                self.needs_no_flag = True
                members += [
                    each if isinstance(each, str) else _code_point(each) for each in (low, ord("-"), high)
                ]
        self.at += 1
        return f"[[{'^' * negated}{''.join(members)}]&&{PLAIN}]"

    def _member(self, place: int) -> int | str:
        """The next code point of a class, or a set in it."""
        if self.at >= len(self.text):
            self._refuse("a class that is not closed", place, "Add a ]")
        if self.text[self.at] == "\\":
            return self._escape(self.at, in_class=True)
        self.at += 1
        return ord(self.text[self.at - 1])

    def _refuse(self, what: str, place: int, remedy: str) -> NoReturn:
        raise GenerationError(f"{what} at character {place + 1}", where=self.where, remedy=remedy)


def _code_point(code: int) -> str:
    """A character, in Rust's syntax."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
