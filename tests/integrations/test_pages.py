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
from tests.parallel import models
from tests.parallel.comparing import optimizer_of, without_dropout
from tests.ranks import HANG_SECONDS
from tests.train.corpora import save_tokenizer
from unbounded.cli import VERBS

PRELOAD_IN_RANKS = ("transformers.modeling_utils",)
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


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


class Stack(torch.nn.Module):
    """A model whose layers have the names that the page on parallelism gives styles to."""

    def __init__(self) -> None:
        super().__init__()
        layers = {"up": torch.nn.Linear(4, 8), "down": torch.nn.Linear(8, 4)}
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0]["down"](self.blocks[0]["up"](x).relu())


def run_parallelism(rank: int, size: int) -> list[tuple[float, float]]:
    """For each code block, the first loss, and that of plain PyTorch."""
    found, batch = [], models.batch("gpt2", 0, rows=8)
    for code in blocks_of("parallelism.md"):
        model = without_dropout(models.build("gpt2"))
        wanted, optimizer = float(model(**batch).loss), optimizer_of(model)
        names: dict[str, Any] = {"unbounded": unbounded, "model": model, "optimizer": optimizer, "loader": [batch]}
        exec(compile(code, "parallelism.md", "exec"), names)
        if "loss" not in names:
            torch.manual_seed(1)
            stack, ones = Stack(), torch.ones(1, 4)
            wanted = float(stack(ones).sum())
            names["loss"] = unbounded.shard(stack, None, names["plan"])[0](ones).sum()
        found.append((float(names["loss"]), wanted))
    return found


def test_the_code_of_the_page_on_parallelism_runs_on_two_ranks(ranks: Any) -> None:
    pytest.importorskip("transformers")
    for found in ranks(2, run_parallelism):
        assert len(found) == 3
        for loss, wanted in found:
            assert loss == pytest.approx(wanted, rel=1e-5)


def test_the_code_of_the_pages_on_planning_and_checkpoints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8))
    names: dict[str, Any] = {"unbounded": unbounded, "model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    for page in ("planner.md", "design/checkpoints.md"):
        (code,) = blocks_of(page)
        exec(compile(code, page, "exec"), names)
        names["scheduler"] = torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: 1.0)
    assert "weights" in capsys.readouterr().out  # the table
    names["handle"].wait()
    assert names["extra"] == {"scheduler": names["scheduler"].state_dict(), "position": 123}
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"step-100", "step-200"}


def test_the_code_of_the_page_on_fine_tuning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    for folder in ("models/my-model", "models/my-model-tuned"):
        models.build("llama").save_pretrained(folder)
        save_tokenizer(tmp_path / folder)
    read, make, again = blocks_of("fine-tuning.md")
    names: dict[str, Any] = {"unbounded": unbounded, "torch": torch, "peft": peft, "__name__": "page"}
    names["AutoModelForCausalLM"] = transformers.AutoModelForCausalLM
    for code in (make, read, again):
        exec(compile(code, "fine-tuning.md", "exec"), names)
    assert type(names["model"]).__name__ == "LlamaForCausalLM"


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


def anchors_of(page: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere() -> None:
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            target = page.parent / link if link else page
            assert link.startswith("http") or target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}#{anchor}"


def test_every_field_every_verb_and_every_function_has_a_line() -> None:
    fields, verbs, names = ((DOCS / "reference" / f"{page}.md").read_text() for page in ("plan", "commands", "python"))
    assert [f.name for f in dataclasses.fields(unbounded.Plan) if f"`{f.name}`" not in fields] == []
    assert [verb for verb in VERBS if f"`unbounded {verb}" not in verbs] == []
    public = [name for name in unbounded.__all__ if not name.startswith("_")]
    assert [name for name in public if not re.search(rf"`unbounded\.{name}\b", names)] == []


def test_no_framework_is_imported_with_the_package() -> None:
    code = (
        "import sys, unbounded, unbounded.deepspeed; unbounded.shard; "
        "names = ('transformers', 'accelerate', 'lightning', 'peft', 'ray', 'deepspeed'); "
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=True,
        env=dict(os.environ),
    )
    assert done.stdout.strip() == "[]"
