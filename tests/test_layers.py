"""The import arrows of the package: they point downwards, siblings do not know each other, importing costs nothing."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest

import unbounded

ROOT = Path(unbounded.__file__).parent
LAYERS = {
    "cli": 6,
    "train": 6,
    "hf": 6,
    "lightning": 6,
    "deepspeed": 6,
    "sharding": 5,
    "planning": 5,
    "checkpoint": 5,
    "weights": 4,
    "machine": 4,
    "zero": 3,
    "activations": 3,
    "parallel": 3,
    "tiers": 2,
    "optim": 2,
    "ranks": 2,
    "compiled": 2,
    "native": 1,
}
"""Higher may import lower. Those of one layer do not import each other, except the front ends of the first line."""

LEAVES = {"planner", "observe"}
"""Import nothing of the package but the ground; anyone may import them."""

GROUND = {
    "errors",
    "paths",
    "process",
    "launcher",
    "version",
    "deferred_tensor",
    "own_hook",
    "held_interrupts",
    "calls",
}
TOGETHER = {("cli", "train"), ("checkpoint", "sharding"), ("planning", "sharding")}
"""Pairs of one layer of which the first may import the second."""


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


@cache
def imports_of(path: Path) -> set[str]:
    """Every `unbounded...` module that a file names: at its top, inside functions, and for annotations alone."""
    package = ["unbounded", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
            found.update(name if module == "unbounded" or _is_module(name) else module for name in names)
    return {name for name in found if name.startswith("unbounded.") and name != "unbounded.__version__"}


def _is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def is_allowed(source: str, target: str) -> bool:
    if target in GROUND or source == target:
        return True
    if target in LEAVES:
        return source not in LEAVES
    if source in LEAVES or target not in LAYERS:
        return False
    return LAYERS[source] > LAYERS[target] or (source, target) in TOGETHER


def files() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.stem in LAYERS]


def test_import_arrows_point_downwards() -> None:
    wrong = []
    for path in files():
        relative = path.relative_to(ROOT)
        source = relative.parts[0].removesuffix(".py")
        for module in imports_of(path):
            if not is_allowed(source, _home(part_of(module))):
                wrong.append(f"{relative} imports {module}")
    assert not wrong


def test_every_import_names_something_that_exists() -> None:
    """Also inside functions, for annotations and on a GPU, where a renamed one would go unnoticed until it is used."""
    folders = [ROOT, *(ROOT.parent.parent / name for name in ("tests", "benchmarks"))]
    wrong = []
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{path}: {name}" for name in named if name.startswith("unbounded.") and not _exists(name)]
    assert not wrong


@pytest.mark.parametrize("package", ["unbounded", "unbounded.train", "unbounded.hf"])
def test_no_public_name_is_also_a_module(package: str) -> None:
    """The module would take its place as soon as anything imports it."""
    assert [name for name in import_module(package)._HOMES if _is_module(f"{package}.{name}")] == []


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name that its module mentions."""
    module, _, last = name.rpartition(".")
    path = ROOT.parent.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    is_mentioned = source.exists() and re.search(rf"\b{re.escape(last)}\b", source.read_text()) is not None
    return _is_module(name) or last == "*" or is_mentioned


def _home(name: str) -> str:
    """The part of the package that `unbounded.name` is in: for a public function, that of its module."""
    home = unbounded._HOMES.get(name)
    return part_of(home) if home else name


def module_of(path: Path) -> str:
    names = ["unbounded", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {module_of(path): imports_of(path) for path in files()}
    graph = {name: {target for target in targets if target in graph} - {name} for name, targets in graph.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_rooms_of_every_folder_have_an_order() -> None:
    """A room is a file, or a folder with all that is in it: where one imports another, nothing there imports it back.

    Packages themselves (`__init__.py`) hand names on and are no rooms.
    """
    modules = {module_of(path): path for path in files() if path.name != "__init__.py"}
    folders = {".".join(name.split(".")[:depth]) for name in modules for depth in range(1, name.count(".") + 1)}
    wrong = []
    for folder in sorted(folders):
        inside = {name: _room(folder, name) for name in modules if name.startswith(f"{folder}.")}
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, room in inside.items():
            for target in imports_of(modules[name]):
                if target in inside and inside[target] != room:
                    reasons.setdefault((room, inside[target]), []).append(f"{name} imports {target}")
        graph: dict[str, set[str]] = {}
        for room, target in reasons:
            graph.setdefault(room, set()).add(target)
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:  # each is imported by the next
            wrong += [reason for target, room in pairwise(error.args[1]) for reason in reasons[room, target]]
    assert not wrong


def _room(folder: str, module: str) -> str:
    return module.removeprefix(f"{folder}.").split(".")[0]


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert parts - {"__init__", "__main__"} == set(LAYERS) | LEAVES | GROUND


def test_no_module_hides_a_public_function() -> None:
    modules = {path.stem for path in ROOT.iterdir()}
    assert not modules & {name for name in unbounded._HOMES if name.islower()}


@pytest.mark.parametrize("module", ["unbounded", "unbounded.errors"])
def test_importing_the_package_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'rich', 'transformers') if m in sys.modules])"
    assert _python(code) == "[]"


def test_importing_the_engine_does_not_initialise_cuda_nor_start_threads() -> None:
    code = (
        "import unbounded, threading; unbounded.shard; import torch; "
        "print(torch.cuda.is_initialized(), threading.active_count())"
    )
    assert _python(code) == "False 1"


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
