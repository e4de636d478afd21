"""Names and words of the package: one type a name, plain English, American spelling."""

import ast
import re
from collections import defaultdict

from tests.helpers import REPOSITORY

MODULES = {path: ast.parse(path.read_text()) for path in sorted((REPOSITORY / "unmask").rglob("*.py"))}
PAGES = [*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md"]
OPENINGS = re.compile(r"(Of|As|Inside|Theirs|Those|Whose)\b(?! soon)")
AVOIDED = re.compile(
    r"\b(learnt|mend(s|ed|ing)?|weigh(s|ed|ing)?|told|anew|so many|behaviour"
    r"|(initial|normal|optim|quant|token|recogn|summar|penal|serial|synchron|general)is(e|es|ed|er|ing|ation)"
    r"|colours?|labelled|cancelling|neighbours?)\b",
    re.IGNORECASE,
)


def strings() -> dict[str, str]:
    """Every string of the package, by its place."""
    return {
        f"{path.relative_to(REPOSITORY)}:{node.lineno}": node.value
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    }


def is_type(node):
    """Whether a statement defines a type by another name, and not a variable of types."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            named = name[0].isupper() and not name.isupper()
            return named and not ast.unparse(value).startswith(("TypeVar(", "ParamSpec("))
    return False


def test_the_name_of_a_type_is_defined_once():
    places = defaultdict(list)
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.name)
        for node in filter(is_type, tree.body):
            places[node.targets[0].id].append(path.name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_string_begins_in_the_middle_of_a_sentence():
    assert not {place: text[:60] for place, text in strings().items() if OPENINGS.match(text)}


def test_words_are_plain_and_american():
    found = {
        place: word[0]
        for place, text in strings().items()
        if "unicode_properties" not in place  # it names the script Mend
        for word in AVOIDED.finditer(text)
    }
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
        found.update({f"{page.name}, {word.start()}": word[0] for word in AVOIDED.finditer(prose)})
    assert not found
