"""What all tests share: the pool of ranks, and skipping what this machine cannot run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import warm
from tests.running.selection import left_out

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores; also for processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")  # for processes that tests start: see process.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--selected", action="store_true", help="a third of the cases of each test with many: see running/selection.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs unless their tests were asked for (`-m gpu`): the others compare with plain PyTorch on the CPU.

    The processes of pytest-xdist take over the folder of warm Pythons from the one that starts them.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not hasattr(config, "workerinput"):
        warm.prepare()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests for a GPU if none is seen; makes the fork server import what the chosen tests ask for."""
    from tests import ranks

    if config.option.selected:
        others = left_out(items)
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))

    for module in {getattr(item, "module", None) for item in items}:
        ranks.PRELOAD.extend(name for name in getattr(module, "PRELOAD_IN_RANKS", ()) if name not in ranks.PRELOAD)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported stays, so garbage collections look at what tests made and not at 100,000s of older objects."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Prints one line after everything else, which says whether all of it held."""
    gc.unfreeze()  # nanobind, which triton is built with, prints what is left when the process ends
    if not hasattr(config, "workerinput"):
        warm.finish()
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.collectonly or not reporter.stats:
        return
    from tests.running.conclusion import conclude, write_durations

    write_durations((report for reports in reporter.stats.values() for report in reports), config.rootpath)
    reporter.ensure_newline()
    reporter.write_line(conclude(reporter.stats, int(getattr(config, "exit_code", 0))))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.exit_code = exitstatus  # type: ignore[attr-defined]


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A process group that a test made in this process must not be found by the next one."""
    yield
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def _pool() -> Iterator[None]:
    from tests.ranks import close_ranks

    yield
    close_ranks()


@pytest.fixture
def ranks(_pool: None) -> Callable[..., list[Any]]:
    """`run_ranks(world_size, function, *arguments, timeout=600.0)` on the pool of ranks."""
    from tests.ranks import run_ranks

    return run_ranks
