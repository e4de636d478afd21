"""Each room of the package has a level; a module imports only from its own room and from rooms on lower
levels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import NamedTuple

import pytest

from tests.helpers import REPOSITORY

LEVELS = [
    ["redaction", "variables", "names"],
    ["errors", "console"],
    ["artifacts", "sandbox", "records", "tensor_checks"],
    ["config"],
    ["models", "rewards"],
    ["diffusion", "tasks"],
    ["data", "planning"],
    ["training", "generation"],
    ["supervised", "convert", "preference", "rl", "evaluation", "serving"],
    ["losses", "auto_classes"],
    ["migration"],
    ["unmask"],
    ["demo"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
WITHOUT_TORCH = {"rewards", "sandbox", "tasks"}
TORCH = {"accelerate", "datasets", "peft", "torch", "transformers"}


class Imported(NamedTuple):
    module: str
    late: bool
    """Inside a function."""


def module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


SOURCES = {
    module_name(path.relative_to(REPOSITORY).as_posix()): (
        ast.parse(path.read_text(encoding="utf-8")),
        path.name == "__init__.py",
    )
    for path in sorted((REPOSITORY / "unmask").rglob("*.py"))
}


def room(module: str) -> str:
    """`unmask.models.load` is in models; the public names of the package itself are a room too."""
    return module.split(".")[1] if "." in module else module


def imports(tree: ast.AST, package: str, known: set[str], late: bool = False) -> Iterator[Imported]:
    """Everything that a module imports, also for type checking only. Relative imports are resolved from
    `package`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Imported(alias.name, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Imported(f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base, late)
        else:
            if isinstance(node, ast.Call) and (name := imported_by_call(node)):
                yield Imported(name, late)
            yield from imports(
                node, package, known, late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            )


def imported_by_call(call: ast.Call) -> str | None:
    """The module that `import_module("...")` or `__import__("...")` names."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    name = call.args[0] if call.args else None
    named = function in ("import_module", "__import__") and isinstance(name, ast.Constant)
    return str(name.value) if named else None


IMPORTS = {
    module: set(imports(tree, module if is_package else module.rpartition(".")[0], set(SOURCES)))
    for module, (tree, is_package) in SOURCES.items()
}


METHODS = {
    "unmask.auto_classes": {"unmask.models.adapters", "unmask.models.load", "unmask.generation.token_ids"},
    "unmask.models.diffusion_lm": {
        "unmask.models.adapters",
        "unmask.models.load",
        "unmask.generation.token_ids",
    },
}
"""Modules that import what is built on them, or takes long, in methods that users of transformers expect of
a model."""
for _module, _names in METHODS.items():
    IMPORTS[_module] -= {Imported(name, late=True) for name in _names}


def own(module: str) -> bool:
    return module.split(".")[0] == "unmask"


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import torch.nn
from ..models import load
from . import text_config
if TYPE_CHECKING:
    import peft
def late():
    from unmask.config.run import RunConfig
    importlib.import_module("unmask.rl")
    return __import__("peft.tuners")
"""
    found = set(
        imports(
            ast.parse(source),
            "unmask.training",
            {"unmask.models.load", "unmask.training.text_config", "unmask.config.run"},
        )
    )
    assert found == {
        Imported("torch.nn", False),
        Imported("peft", False),
        Imported("unmask.models.load", False),
        Imported("unmask.training.text_config", False),
        Imported("unmask.config.run", True),
        Imported("unmask.rl", True),
        Imported("peft.tuners", True),
    }


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_from_its_room_and_from_levels_below(module: str) -> None:
    here = room(module)
    wrong = [
        name
        for name, _ in IMPORTS[module]
        if own(name) and room(name) != here and LEVEL[room(name)] >= LEVEL[here]
    ]
    assert not wrong, f"{module} imports {wrong}; the levels are {LEVELS}"


def test_no_import_cycles() -> None:
    graph = {
        module: {name for name, _ in found if own(name) and name != module}
        for module, found in IMPORTS.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_own_modules_are_imported_inside_functions_by_the_command_line_and_the_lazy_package_only() -> None:
    late = {
        module: name
        for module, found in IMPORTS.items()
        for name, late in found
        if late and own(name) and room(module) not in ("cli", "unmask")
    }
    assert not late


@pytest.mark.parametrize("module", [module for module in SOURCES if room(module) in WITHOUT_TORCH])
def test_rewards_sandbox_and_tasks_never_reach_torch(module: str) -> None:
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [found.module for found in IMPORTS.get(name, ())]
    assert not {name for name in reached if name.split(".")[0] in TORCH}
