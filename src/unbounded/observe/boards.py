"""Metrics for other tools: TensorBoard's event files, and Weights & Biases. Imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from unbounded.errors import PlanError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


class Board(Protocol):
    """Takes the numbers of a step."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of the earlier run for steps that will be done again are hidden.
        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)  # type: ignore[no-untyped-call]

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Board.write`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """See `Board.close`."""
        self._writer.close()  # type: ignore[no-untyped-call]


class WeightsAndBiases:
    """A wandb run, controlled by wandb's own environment variables: WANDB_PROJECT, WANDB_MODE=offline, WANDB_RUN_ID."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(dir=str(folder), name=folder.name, config=dict(settings), resume="allow")
        # Our own step count: a resumed run repeats steps, which wandb's count would drop.
        self._run.define_metric("train_step")
        self._run.define_metric("*", step_metric="train_step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Board.write`."""
        self._run.log({"train_step": step, **numbers})

    def close(self) -> None:
        """See `Board.close`."""
        self._run.finish()


def check_boards(names: Sequence[str]) -> None:
    """Raises if a board's package is missing, before any work is done."""
    for name in names:
        if find_spec(_PACKAGES[name]) is None:
            raise PlanError(f'--report-to {name} needs the package "{name}". Install it: pip install {name}.')


def open_boards(names: Sequence[str], folder: Path, *, after_step: int, settings: Mapping[str, Any]) -> list[Board]:
    """The boards named; events of steps after `after_step` are about to be written again."""
    made: list[Board] = []
    for name in dict.fromkeys(names):
        made.append(
            TensorBoard(folder, after_step=after_step) if name == "tensorboard" else WeightsAndBiases(folder, settings)
        )
    return made
