"""The YAML of configs: version 1.2, in which `1e-5` is a number and `no` is a text."""

from __future__ import annotations

import io
import re
from typing import Any

from ruamel.yaml import YAML, Node, ScalarNode
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import SafeRepresenter

from unmask.errors import ConfigError
from unmask.redaction import ASSIGNED, SECRET_KEY

PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
"""Which plain scalars are no text, with their first characters: the core schema of YAML 1.2. A number that
begins with 0 stays a text, such as the hash of a commit. ruamel.yaml would also read `2024_05` and dates."""


class _Constructor(SafeConstructor):
    def check_mapping_key(self, node: Node, key_node: Node, mapping: Any, key: Any, value: Any) -> bool:
        """Refuse a key that is no text, and one that occurs twice, without quoting values."""
        wrong = "occurs twice; keep one" if key in mapping else "is not a text; write it in quotes"
        if key in mapping or not isinstance(key, str):
            raise ConstructorError(None, None, f"the key '{key}' {wrong}", key_node.start_mark)
        return True


class _Representer(SafeRepresenter):
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        """Quote text with Unicode line breaks, which are preserved only if escaped."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)

    def represent_float(self, data: float) -> ScalarNode:
        """Write `1.0e-05`, which readers of YAML 1.1 also take for a number, unlike `1e-05`."""
        node = super().represent_float(data)
        node.value = re.sub(r"^(-?\d+)e", r"\1.0e", node.value)
        return node


_Representer.add_representer(str, _Representer.represent_str)
_Representer.add_representer(float, _Representer.represent_float)


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor, yaml.Representer = _Constructor, _Representer
    resolvers = yaml.resolver.versioned_resolver
    resolvers.clear()
    for kind, (pattern, beginnings) in PLAIN.items():
        for first in beginnings:
            rule = f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})$")
            resolvers.setdefault(first, []).append(rule)
    yaml.default_flow_style, yaml.width = False, 140
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is not YAML, or a key occurs twice; the error names `where` (a file, a variable) and
            the line. It quotes nothing of the value of a secret key.
    """
    remedy, is_secret = "Fix the YAML there", SECRET_KEY.search(where) is not None
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        problem = str(error.problem)
        if mark := error.problem_mark:
            where = f"{where}, line {mark.line + 1}"
            line = "".join(text.splitlines()[mark.line : mark.line + 1])
            is_secret |= any(each.start() <= mark.column <= each.end() for each in ASSIGNED.finditer(line))
    except (YAMLError, ValueError, LookupError) as error:  # a forbidden character, a value unlike its tag
        problem = f"this is not YAML: {error}"
    if is_secret:
        problem, remedy = "the value of a secret is not YAML", "Write it in single quotes"
    elif "'\\t'" in problem:
        problem, remedy = "there is a tab where YAML has spaces", "Replace tabs by spaces"
    raise ConfigError(problem, where=where, remedy=remedy)


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as the same value."""
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue()
