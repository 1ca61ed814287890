"""What newcomers rely on: small folders, names that occur once, attributes with one owner, and a map that is right."""

from __future__ import annotations

import ast
import ctypes
import re
from collections import Counter, defaultdict, namedtuple
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import unbounded
from tests.test_layers import files, imports_of, module_of

PACKAGE = Path(unbounded.__file__).parent
REPOSITORY = Path(__file__).parent.parent
MAP = REPOSITORY / "docs" / "map.md"
MAX_FILES = 12
SAME_NAMES = {"plan.py"}
"""Basenames that occur twice: a command's file is named after its verb, and `unbounded plan` shows a `planner.plan`."""


Sources = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def sources() -> Sources:
    """Everything in every file of the package, parsed once."""
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("top", ["src/unbounded", "tests", "native", "benchmarks", "docs", "examples"])
def test_no_folder_has_more_than_twelve_files(top: str) -> None:
    paths = [path.relative_to(REPOSITORY) for path in (REPOSITORY / top).rglob("*") if path.is_file()]
    written = [path for path in paths if path.suffix != ".so" and not {"__init__.py", "__pycache__"} & {*path.parts}]
    counts = Counter(path.parent for path in written)
    assert counts
    assert {str(folder): count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_no_two_files_of_the_package_have_the_same_name() -> None:
    counts = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert {name for name, count in counts.items() if count > 1} == SAME_NAMES


def test_no_two_classes_of_the_package_have_the_same_name(sources: Sources) -> None:
    """A leading underscore does not tell two names apart."""
    homes = defaultdict(list)
    for path, nodes in sources.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


# Who may set an attribute of a unit, of its gradient and of the engine, beside these themselves: one place each.
OWNERS_OF_A_UNIT = {
    "zero/passes/gathering.py": {"state", "reading", "fetching", "delivery", "claims"},
    "zero/step/updates.py": {"weights_ready", "states_written", "steps"},
    "zero/parameters/writes.py": {"num_writes"},
    "zero/engine.py": {"engine"},
    "zero/setup/initial.py": {"weights", "states"},
    "zero/setup/assembly.py": {
        *("views", "gradient", "owned", "resident", "streamed", "is_packed", "homes", "rank", "factors"),
        *("rule", "rule_if_trained"),
    },
}


OWNERS_OF_A_GRADIENT = {
    "zero/reduction/reduction.py": {"adding"},
    "zero/step/updates.py": {"reading"},
    "zero/unit.py": {"layout"},
    "zero/setup/thawing.py": {"is_kept", "counted"},
}
OWNERS_OF_THE_ENGINE = {"deepspeed/initialization.py": {"training_dataloader"}}  # of another engine


@pytest.mark.parametrize(
    ("name", "owners"),
    [("unit", OWNERS_OF_A_UNIT), ("gradient", OWNERS_OF_A_GRADIENT), ("engine", OWNERS_OF_THE_ENGINE)],
)
def test_every_attribute_has_one_owner(sources: Sources, name: str, owners: dict[str, set[str]]) -> None:
    found = defaultdict(set)
    for path, nodes in sources.items():
        for node in nodes:
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node.value).split(".")[-1] in (name, f"_{name}"):
                found[str(path.relative_to(PACKAGE))].add(node.attr)
    assert found == owners


def test_no_part_of_the_package_reaches_into_privates_of_another(sources: Sources) -> None:
    """Names that begin with one underscore, and are not torch's or Python's own, stay inside the part that has them."""
    others = {*dir(nn.Module()), *dir(torch.Tensor), *dir(namedtuple("Any", ())), *vars(ctypes.CDLL(None))}
    owned, used = defaultdict(set), defaultdict(set)
    for path, nodes in sources.items():
        part = path.relative_to(PACKAGE).parts[0]
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                owned[node.name].add(part)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owned[node.attr].add(part)
            elif isinstance(node, ast.Attribute):
                names = [node.attr]
            for name in names:
                if re.match(r"_[a-z]", name) and name not in others and not name.endswith("_"):
                    used[name].add((part, f"{path.relative_to(PACKAGE)}:{node.lineno}"))
    reached = [(name, place) for name in used for part, place in used[name] if owned[name] and part not in owned[name]]
    assert not reached


MAKERS = {
    *("torch.arange", "torch.as_tensor", "torch.asarray", "torch.empty", "torch.empty_strided", "torch.eye"),
    *("torch.full", "torch.linspace", "torch.ones", "torch.rand", "torch.randint", "torch.randn", "torch.randperm"),
    *("torch.scalar_tensor", "torch.tensor", "torch.zeros"),
}
PROGRAMS = {"cli", "machine", "train"}
"""Parts that run by themselves, or measure what torch does as it is set up."""


def test_every_new_tensor_says_its_dtype_and_device(sources: Sources) -> None:
    """Users set torch's defaults for their own code: a checkpoint read into bf16 would lose bits without a word."""
    silent = []
    for path, nodes in sources.items():
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS:
                named = {keyword.arg for keyword in node.keywords}
                silent += [f"{path.relative_to(PACKAGE)}:{node.lineno}"] * (not {"dtype", "device"} <= named)
    assert [place for place in silent if place.split("/")[0] not in PROGRAMS] == []


def test_the_numbers_of_ranks_are_read_in_one_place() -> None:
    named = re.compile(r"[\"'](?:LOCAL_)?(?:RANK|WORLD_SIZE)[\"']")
    owners = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if named.search(path.read_text())}
    assert owners == {"launcher.py"}


def test_every_file_that_the_map_names_exists() -> None:
    rows = [row for row in MAP.read_text().splitlines() if row.startswith("| ") and not row.startswith("| the change")]
    assert len(rows) >= 10
    missing = []
    for row in rows:
        folder, named = Path(), re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", row)
        assert named, row
        for name in named:
            found = [place for place in (PACKAGE / name, REPOSITORY / name, folder / name) if place.exists()]
            if found:  # a name alone is in the folder of the one before it
                folder = found[0] if found[0].is_dir() else found[0].parent
            else:
                missing.append(name)
    assert not missing


def test_the_walk_of_a_parameter_goes_down_all_the_way() -> None:
    """Every file on it is imported by the one before, directly or through others, and none leads back up."""
    walk = re.findall(r"^[0-9]+\. `([\w./]+)`", MAP.read_text(), re.MULTILINE)
    assert len(walk) >= 8
    graph = {module_of(path): imports_of(path) for path in files()}
    names = [module_of(PACKAGE / name) for name in walk]
    for above, below in pairwise(names):
        assert below in _reachable(graph, above)
        assert above not in _reachable(graph, below)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found, waiting = set(), [start]
    while waiting:
        new = graph.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
