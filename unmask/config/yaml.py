"""The YAML of configs: version 1.2, in which `1e-5` is a number and `no` is a text."""

from __future__ import annotations

import re
from typing import Any

import yaml

from unmask.errors import ConfigError
from unmask.redaction import SECRET_KEY

# Plain scalars as in YAML 1.2: `1e-5` is a float and `no` a string, where YAML 1.1 (PyYAML's default) has a
# string and False.
CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        (
            r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)"
            r"|\.(nan|NaN|NAN)"
        ),
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


MAX_CHARACTERS, MAX_NODES, MAX_DEPTH = 1_000_000, 100_000, 40
"""The largest YAML text that is read: its characters, its values with every alias counted in full, and their
nesting."""
MAX_DIGITS = 200  # of an integer, which is then also a finite float
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # in no file name, and in no UTF-8 text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (filled below, in PyYAML's own way)

    def __init__(self, text: str, is_secret: bool = False):
        super().__init__(text)
        self.depth = self.nodes = 0
        self.sizes: dict[int, int] = {}  # the values in each finished node, by its id
        self.in_secret = is_secret  # whether what is read now is, or is within, the value of a secret key
        self.secrets: set[int] = set()  # the ids of the nodes that are

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """As of PyYAML, which lets a few lines of aliases stand for any number of values."""
        was_in_secret = self.in_secret
        self.in_secret |= isinstance(index, yaml.ScalarNode) and SECRET_KEY.search(index.value) is not None
        is_alias, mark, before = self.check_event(yaml.AliasEvent), self.peek_event().start_mark, self.nodes
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.composer.ComposerError(
                None, None, f"values are nested more than {MAX_DEPTH} deep", mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias and id(node) not in self.sizes:
            raise yaml.composer.ComposerError(None, None, "the alias is inside of its own anchor", mark)
        self.nodes += self.sizes[id(node)] if is_alias else 1
        if self.nodes > MAX_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MAX_NODES:,} values, counting every alias in full", mark
            )
        self.sizes[id(node)] = self.nodes - before
        self.secrets |= {id(node)} if self.in_secret else set()
        self.in_secret = was_in_secret  # after an error it stays
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        was_in_secret, self.in_secret = self.in_secret, id(node) in self.secrets
        value = super().construct_object(node, deep)
        self.in_secret = was_in_secret
        return value

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value = super().construct_scalar(node)
        if UNWRITABLE.search(value):
            what = f"the text {value!r:.80} has a NUL or half of a character; no file can hold it"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
        if node.tag == "tag:yaml.org,2002:int" and len(value) > MAX_DIGITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"an integer of {len(value):,} digits", node.start_mark
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.in_secret = id(node) in self.secrets  # PyYAML calls it outside of construct_object
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value
            if not isinstance(key, str) or key_node.tag not in (
                "tag:yaml.org,2002:str",
                "tag:yaml.org,2002:merge",
            ):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a text; write it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice; keep one", key_node.start_mark
                )
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
        _yaml_class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), _first
        )


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is not YAML, too large, nested too deeply, or a key occurs twice; the error names
            `where` (a file, a variable) and the line. It quotes nothing of the value of a secret key.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"has more than {MAX_CHARACTERS:,} characters", where=where, remedy="Give a file of settings"
        )
    loader, remedy = None, "Fix the YAML there"
    try:
        loader = _Loader(text, SECRET_KEY.search(where) is not None)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        where, problem = f"{where}{line}", str(error.problem)
        if "'\\t'" in problem:
            problem, remedy = "there is a tab where YAML has spaces", "Replace tabs by spaces"
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Characters that YAML forbids, a number too large for Python, or a value that does not fit its tag.
        problem = f"this is not YAML: {error}"
    # Outside of the handlers, because the tracebacks of PyYAML's errors quote lines.
    if loader and loader.in_secret:
        raise ConfigError(
            "the value of a secret is not YAML", where=where, remedy="Write it in single quotes"
        )
    raise ConfigError(problem, where=where, remedy=remedy)


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
