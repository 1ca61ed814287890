"""What a person sees while training: a live panel on a terminal, plain lines elsewhere, nothing on other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from unbounded.observe.amounts import show_bytes, show_seconds

_WIDTH = 24  # width of bars, so that the panel fits 80 columns


@dataclass(frozen=True)
class Tier:
    """Bytes in use of a tier, its budget if it has one, and how many of those bytes are activations."""

    used_bytes: int
    budget_bytes: int | None
    activation_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """The state of a run after a step."""

    step: int
    num_steps: int
    loss: float
    tokens_per_second: float
    tflops: float
    seconds_left: float
    norm: float = 0.0
    lr: float = 0.0
    epoch: float = 0.0
    seconds: float = 0.0
    peak_tflops: float | None = None
    tiers: dict[str, Tier] = field(default_factory=dict)
    lanes: dict[str, float] = field(default_factory=dict)  # busy seconds of each lane in a second

    @property
    def speed(self) -> str:
        """Tokens and operations per second."""
        return f"{self.tokens_per_second:,.0f} tokens/s  {self.tflops:.3g} TFLOP/s"

    @property
    def pace(self) -> str:
        """Seconds per step, and the share of the device's peak that is reached, if the peak is known."""
        share = f", {self.tflops / self.peak_tflops:.0%} of peak" if self.peak_tflops else ""
        return f"{self.seconds:.3g} s per step{share}"

    @property
    def optimization(self) -> str:
        """The gradient norm, the learning rate, and how far into the data the run is."""
        return f"norm {self.norm:.3g}  lr {self.lr:.3g}  epoch {self.epoch:.2f}"

    @property
    def busiest_lane(self) -> str:
        """The lane that ran most of the time, and its share."""
        if not self.lanes:
            return ""
        lane = max(self.lanes, key=lambda name: self.lanes[name])
        return f"{lane} {min(self.lanes[lane], 1.0):.0%}"


class Progress(Protocol):
    """Shows steps and says sentences."""

    def show(self, step: Step) -> None:
        """A step is over."""

    def say(self, text: str) -> None:
        """Something happened that is worth a line."""

    def close(self) -> None:
        """The run is over."""


class Silence:
    """For the ranks that do not speak."""

    def show(self, step: Step) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """One line every `every` steps, and for the first and the last."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._is_new = True

    def show(self, step: Step) -> None:
        """See `Progress.show`."""
        if self._is_new or step.step % self._every == 0 or step.step == step.num_steps:
            print(describe(step), flush=True)
        self._is_new = False

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        print(text, flush=True)

    def close(self) -> None:
        """Nothing is held."""


def describe(step: Step) -> str:
    """A step in one line."""
    tiers = " ".join(f"{name} {show_bytes(tier.used_bytes)}" for name, tier in step.tiers.items() if tier.used_bytes)
    parts = [
        f"step {step.step}/{step.num_steps}",
        f"loss {step.loss:.4f}",
        step.optimization,
        step.pace,
        step.speed,
        tiers,
        step.busiest_lane,
        f"{show_seconds(step.seconds_left)} left",
    ]
    return "  ".join(part for part in parts if part)


class Panel:
    """The live panel: progress, losses as a line of bars, memory of each tier against its budget."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._losses: list[float] = []
        self._live.start()

    def show(self, step: Step) -> None:
        """See `Progress.show`."""
        self._losses.append(step.loss)
        self._live.update(render(step, self._losses))

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last panel on the screen."""
        self._live.stop()


def render(step: Step, losses: list[float]) -> Any:
    """The panel of a step as a rich renderable."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    share = step.step / max(step.num_steps, 1)
    left = f"{show_seconds(step.seconds_left)} left, {step.pace}"
    table.add_row(Text(f"step {step.step}/{step.num_steps}", "bold"), draw_bar(share), left)
    table.add_row(f"loss {step.loss:.4f}", sparkline(losses), step.optimization)
    table.add_row("speed", f"busiest: {step.busiest_lane}" if step.lanes else "", step.speed)
    for name, tier in step.tiers.items():
        budget = tier.budget_bytes
        of = f" of {show_bytes(budget)}" if budget else ""
        table.add_row(name, draw_bar(tier.used_bytes / budget) if budget else "", f"{show_bytes(tier.used_bytes)}{of}")
    return table


def draw_bar(share: float, width: int = _WIDTH) -> str:
    """A bar that needs no colour: full blocks for what is done, shaded ones for the rest."""
    done = round(min(max(share, 0.0), 1.0) * width)
    return "█" * done + "░" * (width - done)


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """The values as a line of bars, the newest on the right, each bar the mean of its stretch."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars = "▁▂▃▄▅▆▇█"
    return "".join(bars[int((mean - low) / (high - low) * 7.999)] if high > low else bars[0] for mean in means)
