"""The import arrows of the package: they point downwards, siblings do not know each other, importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import unbounded

ROOT = Path(unbounded.__file__).parent
LAYERS = {
    "cli": 5,
    "train": 5,
    "integrations": 5,
    "sharding": 4,
    "checkpoint": 4,
    "zero": 3,
    "memory": 3,
    "parallel": 3,
    "tiers": 2,
    "optim": 2,
    "native": 1,
}
"""Higher may import lower. Those of one layer do not import each other, except the front ends of the first line."""

LEAVES = {"planner", "observe"}
"""Import nothing of the package but the ground; anyone may import them."""

GROUND = {"errors"}
TOGETHER = {("cli", "train"), ("integrations", "train"), ("cli", "integrations"), ("checkpoint", "sharding")}
"""Pairs of one layer of which the first may import the second."""


def part_of(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def imports_of(path: Path) -> set[str]:
    """Every `unbounded...` module that a file imports, also inside functions."""
    package = ["unbounded", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.add(module)
            if module == "unbounded":
                found.update(f"unbounded.{alias.name}" for alias in node.names)
    return {name for name in found if name.startswith("unbounded.")}


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
            if part_of(module) and not is_allowed(source, _home(part_of(module))):
                wrong.append(f"{relative} imports {module}")
    assert not wrong


def _home(name: str) -> str:
    """The part of the package behind `unbounded.name`: a public function stands for the module it lives in."""
    home = unbounded._HOMES.get(name)
    return part_of(home) if home else name


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
