"""The pages run as they are written, and name every field and every verb."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unbounded
from tests.integrations.launched import launched
from unbounded.cli import VERBS

DOCS = Path(__file__).parents[2] / "docs"
NEEDS = {"lightning.md": "lightning", "trainer.md": "transformers"}
PAGES = sorted([*(DOCS / "integrations").glob("*.md"), *(DOCS / "reference").glob("*.md")])


WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(NEEDS.get(page.name, "torch")) is None:
        pytest.skip(f"needs {NEEDS[page.name]}")
    monkeypatch.chdir(tmp_path)
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)):
        with launched(0, 1):
            exec(compile(code, f"{page.name}, block {number}", "exec"), {"__name__": "page"})


class Model(torch.nn.Module):
    """What the README calls AnyModel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.layer(x).square().mean())


def test_the_loop_of_the_readme_trains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), flags=re.DOTALL)
    losses = []
    for num_batches in (1, 9):
        torch.manual_seed(0)
        names: dict[str, Any] = {"AnyModel": Model, "loader": [{"x": torch.ones(2, 3)}] * num_batches}
        exec(compile(code, "README.md", "exec"), names)
        losses.append(float(names["loss"]))
    assert losses[1] < losses[0]


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_field_and_every_verb_has_a_line() -> None:
    fields, verbs = (DOCS / "reference" / "plan.md").read_text(), (DOCS / "reference" / "commands.md").read_text()
    assert [f.name for f in dataclasses.fields(unbounded.Plan) if f"`{f.name}`" not in fields] == []
    assert [verb for verb in VERBS if f"`unbounded {verb}" not in verbs] == []


def test_no_framework_is_imported_with_the_package() -> None:
    code = (
        "import sys, unbounded, unbounded.deepspeed; unbounded.shard; "
        "names = ('transformers', 'accelerate', 'lightning', 'peft', 'ray', 'deepspeed'); "
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"
