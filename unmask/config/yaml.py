"""The YAML of configs: version 1.2, in which `1e-5` is a number and `no` is a text."""

from __future__ import annotations

import re
from typing import Any

import yaml

from unmask.errors import ConfigError

# Plain scalars as in YAML 1.2: `1e-5` is a float and `no` a string, where YAML 1.1 (PyYAML's default) has a string and False.
CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (filled below, in PyYAML's own way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a text; write it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice; keep one", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (filled below, in PyYAML's own way)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Quote text with Unicode line breaks, which are preserved only if escaped."""
        style = '"' if re.search("[\x85\u2028\u2029]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)
for _name, (_pattern, _first) in CORE_SCHEMA.items():
    for _yaml_class in (_Loader, _Dumper):
        _yaml_class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is not YAML, or a key occurs twice; the error names `where` (a file, a variable) and the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{error.problem}", where=f"{where}{line}", remedy="Fix the YAML there") from error
    except (yaml.YAMLError, ValueError) as error:  # characters that YAML forbids, or a number too large for Python
        raise ConfigError(f"this is not YAML: {error}", where=where, remedy="Fix the YAML there") from error


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
