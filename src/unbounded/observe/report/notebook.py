"""The display of a run in a notebook: one output that is replaced as the run proceeds."""

from __future__ import annotations

import sys
import time
from html import escape
from typing import Any

from unbounded.observe.progress import Step
from unbounded.observe.report.page import Report

_EVERY_SECONDS = 1.0


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, which shows HTML."""
    shell = sys.modules.get("IPython")
    get_ipython = getattr(shell, "get_ipython", None)
    return get_ipython is not None and type(get_ipython()).__name__ == "ZMQInteractiveShell"


class Notebook:
    """Shows a run as its report does, at most once per second and after its last step."""

    def __init__(self) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        self._html = HTML
        self._steps: list[dict[str, Any]] = []
        self._said: list[str] = []
        self._num_steps = 0
        self._drawn_at = 0.0
        self._output: Any = display(HTML("<p>beginning</p>"), display_id=True)

    def show(self, step: Step) -> None:
        """See `Progress.show`."""
        self._num_steps = step.num_steps
        self._steps.append(
            {
                "step": step.step,
                "loss": step.loss,
                "grad_norm": step.norm,
                "lr": step.lr,
                "epoch": step.epoch,
                "seconds": step.seconds,
                "tokens_per_second": step.tokens_per_second,
                "tflops": step.tflops,
                "memory": {name: tier.used_bytes for name, tier in step.tiers.items()},
                "budget": {
                    name: tier.budget_bytes for name, tier in step.tiers.items() if tier.budget_bytes is not None
                },
            }
        )
        if time.monotonic() - self._drawn_at > _EVERY_SECONDS or step.step == step.num_steps:
            self._draw()

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        self._said.append(text)
        self._draw()

    def close(self) -> None:
        """Leave the last picture."""
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        report = Report("training", {"steps": self._num_steps}, self._steps)
        said = "".join(f"<p>{escape(text)}</p>" for text in self._said[-6:])
        self._output.update(self._html(report._repr_html_() + said))
