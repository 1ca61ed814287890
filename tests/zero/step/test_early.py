"""Updates inside the backward: the same bits as updates after it, whatever happens between backward and step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import unbounded
from tests.ranks import HANG_SECONDS
from tests.zero.drafting import drafting
from tests.zero.training import Batch, Task, TinyGPT, assert_parity, shard, train_both
from unbounded.checkpoint.save.readers import Readers
from unbounded.native.kernels import UpdatePart
from unbounded.sharding.running import sharded
from unbounded.tiers import lane
from unbounded.tiers.lane import Handle
from unbounded.tiers.room import TierRoom
from unbounded.zero.gradients.gradient_value import GradientValue
from unbounded.zero.parameters.writes import Writes
from unbounded.zero.step.early import drafts
from unbounded.zero.step.early.drafts import Draft, Drafts
from unbounded.zero.step.early.in_backward import InBackward
from unbounded.zero.step.early.pace import Pace, _Share
from unbounded.zero.step.relocation import Relocation
from unbounded.zero.step.update_pass import Piece, UpdatePass

STEPS = 6
HOST = {"weights": "host", "gradients": "host", "optimizer": "host"}


class Training:
    """One sharded model, and what a loop does with it; programs override a part of the step."""

    num_backwards = 1
    optimizer_of: Callable[..., torch.optim.Optimizer] = staticmethod(
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    )

    def __init__(self, rank: int, plan: dict[str, Any], folder: Path) -> None:
        torch.manual_seed(3)
        self.rank, self.folder = rank, folder
        model = TinyGPT()
        self.model, self.optimizer = shard(model, self.optimizer_of(model.parameters()), {**HOST, **plan})

    def run(self) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            for micro in range(self.backwards_in(step)):
                self.optimizer.scale(self.model.loss(Batch(step, micro, self.rank).tokens())).backward()
            self.between(step)
            self.optimizer.step()
            self.after(step)
            self.optimizer.zero_grad()
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def backwards_in(self, step: int) -> int:
        return self.num_backwards

    def between(self, step: int) -> None:
        """After the backwards, before the step."""

    def after(self, step: int) -> None:
        """After the step, before gradients go."""


class Plain(Training):
    pass


class Drained(Training):
    """Every draft that was asked for is written before the step, however busy the machine is."""

    def between(self, step: int) -> None:
        self.optimizer.updates.lanes.direct.drain()


class Accumulated(Training):
    num_backwards = 3


class Unclipped(Training):
    def between(self, step: int) -> None:
        self.optimizer.clip_grad_norm_(1e6)


class ClippedLater(Training):
    """Two steps in which nothing is clipped, then some that are all clipped."""

    optimizer_of = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))

    def between(self, step: int) -> None:
        self.optimizer.clip_grad_norm_(1e6 if step < 3 else 1e-3)


class TorchClipped(ClippedLater):
    def between(self, step: int) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1e6 if step < 3 else 1e-3)


class Scheduled(Training):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7)

    def after(self, step: int) -> None:
        self.schedule.step()


class LateRate(Training):
    """The learning rate changes between the backward and the step."""

    def between(self, step: int) -> None:
        if step == 3:
            self.optimizer.param_groups[0]["lr"] = 0.3


class UnlikeSteps(Training):
    """A backward that was taken for the last one was not the last."""

    def backwards_in(self, step: int) -> int:
        return 2 if step == 3 else 1


class LeftOut(Training):
    """Gradients that no step uses; afterwards only those of the next backward count."""

    def between(self, step: int) -> None:
        if step == 3:
            self.optimizer.zero_grad()
            self.model.loss(Batch(99, 0, self.rank).tokens()).backward()


class WrittenWeights(Training):
    def between(self, step: int) -> None:
        if step == 3:
            with unbounded.full_params(self.model):
                for parameter in self.model.parameters():
                    parameter.mul_(0.5)


class Raised(Training):
    """An exception between a backward and its step, and another backward that breaks off."""

    def between(self, step: int) -> None:
        if step != 3:
            return
        handle = self.model.blocks[0].register_full_backward_hook(self._break)
        loss = self.model.loss(Batch(50, 0, self.rank).tokens())
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        self.optimizer.zero_grad()
        self.model.loss(Batch(51, 0, self.rank).tokens()).backward()

    def _break(self, *_: Any) -> None:
        raise ZeroDivisionError


class SavedBetween(Training):
    """A checkpoint is saved with gradients that no step has used. Training goes on, then again from the checkpoint."""

    def between(self, step: int) -> None:
        if step in (3, 5):
            path = self.folder / f"{type(self).__name__}{step}"
            unbounded.save(path, self.model, self.optimizer, wait=step == 3)
            if step == 3:
                self.optimizer.param_groups[0]["lr"] = 7.0  # the checkpoint's comes back
                self.optimizer.zero_grad()
                unbounded.load(path, self.model, self.optimizer)

    def after(self, step: int) -> None:
        if step == 5:
            self.late = {name: value.clone() for name, value in self.model.state_dict().items()}

    def run(self) -> dict[str, torch.Tensor]:
        super().run()
        unbounded.load(self.folder / f"{type(self).__name__}5", self.model, self.optimizer)
        self.optimizer.step()  # with the gradients that were saved
        again = {name: value.clone() for name, value in self.model.state_dict().items()}
        assert all(torch.equal(value, self.late[name]) for name, value in again.items())
        return again


class GivenUp(Training):
    """The host's memory is needed for something else while drafts are written."""

    def between(self, step: int) -> None:
        if step == 4:
            sharded(self.model).tiers.make_spare(2**62)


class GivenUpDuringASave(GivenUp):
    """The arrays that go are what a save in the background reads."""

    def between(self, step: int) -> None:
        super().between(step)
        if step == 3:
            unbounded.save(self.folder / f"{type(self).__name__}", self.model, self.optimizer, wait=False)


TAKEN = (Plain, Accumulated, Unclipped, Scheduled)
REFUSED = (ClippedLater, TorchClipped, LateRate, UnlikeSteps, WrittenWeights, SavedBetween)
GIVEN_UP = (GivenUp, GivenUpDuringASave)
PROGRAMS = (*TAKEN, *REFUSED, *GIVEN_UP, LeftOut)
BF16, OTHERS = {"precision": "bf16"}, ({"precision": "fp32"}, {"precision": "bf16", "optimizer_format": "compact"})
Cases = tuple[tuple[type[Training], dict[str, Any]], ...]


def run_programs(rank: int, world_size: int, cases: Cases, folder: str) -> list[tuple[str, bool, int, int, int]]:
    """Whether each program ends in the same bits with drafts and without, and what became of its drafts."""
    found = []
    for program, precision in cases:
        late = program(rank, {**precision, "early_units": 0}, Path(folder)).run()
        for states in (True, False):
            with drafting(states=states):
                training = program(rank, {**precision, "early_units": 99}, Path(folder))
                drafts = training.optimizer.updates.drafts
                assert {draft.has_states for draft in drafts.of.values()} == {states}
                early = training.run()
            same = all(torch.equal(value, late[name]) for name, value in early.items())
            early_units = training.optimizer.plan.early_units
            found.append((program.__name__, same, drafts.outlook.num_taken, drafts.outlook.num_refused, early_units))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_units_updated_inside_the_backward_end_in_the_same_bits(ranks: Any, tmp_path: Path, world_size: int) -> None:
    cases = [(program, BF16) for program in PROGRAMS]
    if world_size == 1:  # a backward that breaks off on every rank ends the job's collectives
        cases += [(Raised, BF16), *[(program, other) for program in (Plain, ClippedLater) for other in OTHERS]]
    for results in ranks(world_size, run_programs, tuple(cases), str(tmp_path)):
        for name, same, num_taken, num_refused, num_units in results:
            assert same, name
            is_given_up = name in [program.__name__ for program in GIVEN_UP]
            assert num_units == (0 if is_given_up else 6), name  # blocks, embedding, head, and what is left
            assert num_taken > 0, name
            if name in [program.__name__ for program in REFUSED]:
                assert num_refused > 0, name
            elif name in [program.__name__ for program in TAKEN]:
                assert num_refused == 0, name


class Clipped(Task):
    steps = 6
    accumulate = 2
    max_norm = 1.0  # only some steps are clipped


class InParts(Training):
    """No drafts. Notes what the update lane does of each unit, and when its next gradient may land."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.log: list[tuple[str, str]] = []

    def note(self, patch: pytest.MonkeyPatch) -> None:
        update, finish = UpdatePass._update, GradientValue._finish_reading
        names = {id(unit.gradient): unit.name for unit in sharded(self.model).engine.units}

        def noted_update(steps: UpdatePass, piece: Piece) -> None:
            update(steps, piece)
            self.log.append((piece.part.name, piece.unit.name))

        def noted_finish(value: GradientValue) -> None:
            waits = value.reading is not None
            finish(value)
            if waits:
                self.log.append(("may land", names[id(value)]))

        patch.setattr(UpdatePass, "_update", noted_update)
        patch.setattr(GradientValue, "_finish_reading", noted_finish)


def test_moments_follow_all_weights_the_last_unit_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafts, "num_split", lambda _: 4)
    training = InParts(0, {**BF16, "early_units": 0}, Path())
    training.note(monkeypatch)
    for step in range(2):
        training.model.loss(Batch(step, 0, 0).tokens()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.optimizer.wait()
    first = [name for part, name in training.log if part == "WEIGHTS"][:4]
    updates = [entry for entry in training.log if entry[0] != "may land"]
    whole = [name for part, name in updates[:6] if part == "WHOLE"]
    assert len(whole) == 2
    assert updates[:6] == [*(("WEIGHTS", name) for name in first), *(("WHOLE", name) for name in whole)]
    assert updates[6:10] == [("MOMENTS", name) for name in reversed(first)]
    assert updates[10:] == updates[:10]
    for name in first:  # a gradient waits for the moments that are still to be made from the one before
        landed = training.log.index(("may land", name))
        assert training.log.index(("MOMENTS", name)) < landed


def test_the_pace_hears_how_long_gradients_have_waited_for_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drafts, "num_split", lambda _: 99)
    training = Training(0, {**BF16, "early_units": 0}, Path())
    units, may_update, late = training.optimizer.engine.units, threading.Event(), []
    update, wait, begin_step = UpdatePass._update, lane.wait, Pace.begin_step

    def held_update(steps: UpdatePass, piece: Piece) -> None:
        assert piece.part is not UpdatePart.MOMENTS or may_update.wait(HANG_SECONDS)
        update(steps, piece)

    def releasing_wait(event: threading.Event) -> None:
        if any(unit.states_written and event is unit.states_written._launched for unit in units):
            may_update.set()
        wait(event)

    def noted_begin_step(pace: Pace, now: float, num_updates: int, late_seconds: float, *, is_drafted: bool) -> None:
        late.append(late_seconds)
        begin_step(pace, now, num_updates, late_seconds, is_drafted=is_drafted)

    monkeypatch.setattr(UpdatePass, "_update", held_update)
    monkeypatch.setattr(lane, "wait", releasing_wait)
    monkeypatch.setattr(Pace, "begin_step", noted_begin_step)
    for step in range(2):
        training.model.loss(Batch(step, 0, 0).tokens()).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.optimizer.wait()
    assert late[0] == 0
    assert late[1] > 0


def run_in_parts(rank: int, world_size: int, folder: str) -> list[tuple[str, bool]]:
    """Whether programs without drafts end in the same bits if all units are updated in two parts, or some."""
    found = []
    for program, precision in (*[(program, BF16) for program in (Plain, *REFUSED)], (Plain, {"precision": "fp32"})):
        whole = program(rank, {**precision, "early_units": 0}, Path(folder)).run()
        for count in (99, 3):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Drafts, "num_split", lambda _, count=count: count)
                training = program(rank, {**precision, "early_units": 0}, Path(folder))
                parts = training.run()
            found.append((program.__name__, all(torch.equal(value, whole[name]) for name, value in parts.items())))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_in_two_parts_end_in_the_same_bits(ranks: Any, tmp_path: Path, world_size: int) -> None:
    for results in ranks(world_size, run_in_parts, str(tmp_path)):
        assert [name for name, is_same in results if not is_same] == []


class Coupled(Training):
    """Moments that depend on the weights."""

    optimizer_of = staticmethod(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1))


@pytest.mark.parametrize(
    ("program", "plan", "has_parts"),
    [
        (Plain, BF16, True),
        (ClippedLater, BF16, True),  # SGD with momentum and without decay
        (Coupled, BF16, False),
        (Plain, {"precision": "bf16", "optimizer_format": "compact"}, False),
        (Plain, {**BF16, "gradients": "none"}, False),  # the backward waits for all of an update
        (Plain, {**BF16, "optimizer": "disk"}, False),
    ],
)
def test_only_updates_that_can_be_are_in_two_parts(
    program: type[Training], plan: dict[str, Any], has_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, update = [], UpdatePass._update

    def noted(steps: UpdatePass, piece: Piece) -> None:
        parts.append(piece.part)
        update(steps, piece)

    monkeypatch.setattr(UpdatePass, "_update", noted)
    monkeypatch.setattr(Drafts, "num_split", lambda _: 99)
    training = program(0, {**plan, "disk_path": str(tmp_path)}, tmp_path)
    training.run()
    training.optimizer.wait()
    assert set(parts) == ({UpdatePart.WEIGHTS, UpdatePart.MOMENTS} if has_parts else {UpdatePart.WHOLE})


def test_training_with_drafts_is_that_of_torch(ranks: Any) -> None:
    for world_size in (1, 2):
        assert_parity(ranks(world_size, train_both, Clipped(), {**HOST, "early_units": 99}))


def train_one_scaled(rank: int, early_units: int) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = TinyGPT()
    plan = {**HOST, "precision": "fp16", "loss_scale": 8.0, "early_units": early_units}
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan)
    for step in range(8):
        loss = model.loss(Batch(step, 0, rank).tokens())
        optimizer.scale(loss * (1e9 if step == 4 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    outlook = optimizer.updates.drafts.outlook
    return model.state_dict(), optimizer.skipped_steps, outlook.num_taken, outlook.num_refused


def train_scaled(rank: int, world_size: int) -> list[Any]:
    """fp16 with a loss scale that overflows in its fourth step, with drafts and without."""
    found: list[Any] = []
    for early_units, states in ((99, True), (99, False), (0, True)):
        with drafting(states=states):
            found.append(train_one_scaled(rank, early_units))
    return found


def test_an_overflow_takes_no_draft(ranks: Any) -> None:
    for world_size in (1, 2):
        for *drafted, (late, *_) in ranks(world_size, train_scaled):
            for early, skipped, num_taken, _ in drafted:
                assert skipped == 1
                assert num_taken > 0
                assert all(torch.equal(value, late[name]) for name, value in early.items())


def test_a_unit_is_updated_while_the_backward_of_others_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(0, {"early_units": 99}, Path())
    written, plain_write = threading.Event(), Draft.write

    def write(draft: Draft, *arguments: Any) -> bool:
        done = plain_write(draft, *arguments)
        if done and draft.unit.name == "blocks.2":
            written.set()
        return done

    monkeypatch.setattr(Draft, "write", write)
    waited: list[bool] = []
    for step in range(3):
        written.clear()
        loss = training.model.loss(Batch(step, 0, 0).tokens())
        if step == 2:
            training.model.blocks[0].register_full_backward_hook(lambda *_: waited.append(written.wait(HANG_SECONDS)))
            loss = training.model.loss(Batch(step, 0, 0).tokens())
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.optimizer.wait()
    assert waited == [True]


class WritesInForward(Training):
    """A module scales its own weight in each forward; updates of states alone are held back until then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.may_update = threading.Event()
        self.model.blocks[1].up.register_forward_pre_hook(self._write)

    @torch.no_grad()
    def _write(self, module: nn.Module, _: Any) -> None:
        module.weight.mul_(0.99)  # type: ignore[operator]

    def between(self, step: int) -> None:
        self.may_update.clear()

    def hold_updates(self, patch: pytest.MonkeyPatch) -> None:
        update, wait, store = UpdatePass._update, Handle.wait, Writes._store

        def late_update(steps: UpdatePass, piece: Piece) -> None:
            if piece.old_weights is not None:
                assert self.may_update.wait(HANG_SECONDS)
            update(steps, piece)

        def ending_wait(handle: Handle) -> Any:
            if not handle.launched():
                self.may_update.set()
            return wait(handle)

        def ending_store(*arguments: Any) -> None:
            store(*arguments)
            self.may_update.set()

        patch.setattr(UpdatePass, "_update", late_update)
        patch.setattr(Handle, "wait", ending_wait)
        patch.setattr(Writes, "_store", ending_store)


def test_a_write_inside_a_forward_follows_the_update_of_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    late = WritesInForward(0, {**BF16, "early_units": 0}, Path()).run()
    with drafting(states=False):
        training = WritesInForward(0, {**BF16, "early_units": 99}, Path())
        training.hold_updates(monkeypatch)
        early = training.run()
    training.optimizer.wait()
    assert training.optimizer.updates.drafts.outlook.num_taken > 0
    assert all(torch.equal(value, late[name]) for name, value in early.items())


def test_a_save_outlives_an_update_of_states_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    may_read, begin, update = threading.Event(), Readers.begin, UpdatePass._update

    def late_begin(readers: Readers, chunk: Any) -> None:
        assert may_read.wait(HANG_SECONDS)
        begin(readers, chunk)

    def failing_update(steps: UpdatePass, piece: Piece) -> None:
        if piece.old_weights is not None:
            raise ZeroDivisionError
        update(steps, piece)

    with drafting(states=False):
        training = Training(0, {**BF16, "early_units": 99}, tmp_path)
        training.run()
        before = {name: value.clone() for name, value in training.model.state_dict().items()}
        with monkeypatch.context() as patch:
            patch.setattr(Readers, "begin", late_begin)
            patch.setattr(UpdatePass, "_update", failing_update)
            saving = unbounded.save(tmp_path / "saved", training.model, training.optimizer, wait=False)
            training.model.loss(Batch(7, 0, 0).tokens()).backward()
            training.optimizer.updates.lanes.direct.drain()  # all drafts are written
            training.optimizer.step()
            with pytest.raises(ZeroDivisionError):
                training.optimizer.wait()
            training.optimizer.zero_grad()
            training.model.loss(Batch(8, 0, 0).tokens()).backward()  # drafts that no step will use
            training.optimizer.updates.lanes.direct.drain()
            may_read.set()
            saving.wait()
    unbounded.load(tmp_path / "saved", training.model, training.optimizer)
    assert all(torch.equal(value, before[name]) for name, value in training.model.state_dict().items())


class SimulatedHost:
    """A loop in which an update takes 35 ms, a draft of weights as long, and each of an update's two parts 24 ms.

    A forward waits for the units without a draft; a step is as long as that and the backward, or as the lane's work.
    With `slower`, each draft and each unit in two parts makes the backward longer by that. Moments that together take
    longer than `in_time` are waited for.
    """

    def __init__(
        self,
        forward: float,
        backward: float,
        *,
        slower: float = 0.0,
        num_units: int = 30,
        splits: bool = False,
        in_time: float = 2.0,
    ) -> None:
        self.forward, self.backward, self.slower, self.num_units = forward, backward, slower, num_units
        self.in_time, self.late = in_time, 0.0
        counts = {InBackward.ALL: 2, InBackward.WEIGHTS: 2 * num_units // 3, InBackward.MOMENTS: int(splits)}
        self.pace, self.now = Pace(counts), 0.0
        self.split: list[int] = []

    def run(self, num_steps: int, *, pause: float = 0.0, is_drafted: bool = True) -> list[int]:
        """How many drafts of each kind each step's backward has; the first step comes after a pause."""
        counts = []
        for step in range(num_steps):
            self.pace.begin_step(self.now, self.num_units, self.late, is_drafted=is_drafted)
            num_all = 2 if is_drafted and self.pace.allows(InBackward.ALL, 0) else 0
            num_weights = sum(
                is_drafted and self.pace.allows(InBackward.WEIGHTS, asked) for asked in range(self.num_units)
            )
            num_split = min(self.pace.num_split(is_drafted=is_drafted), self.num_units - num_all - num_weights)
            lane = 0.035 * (self.num_units + num_weights) + 0.013 * num_split
            waiting = 0.035 * (self.num_units - num_all - num_weights) + self.forward * num_weights / self.num_units
            waiting -= 0.011 * num_split
            self.pace.work(lane)
            self.late = max(0.0, 0.024 * num_split - self.in_time)
            backward = self.backward + self.slower * (num_all + num_weights + num_split) + self.late
            self.split.append(num_split)
            self.now += max(max(self.forward, waiting) + backward, lane + 0.01) + pause * (step == 0)
            counts.append(num_all + num_weights)
        return counts


def test_new_weights_alone_are_drafted_while_the_lane_has_time() -> None:
    long = SimulatedHost(0.35, 1.1).run(16)
    assert set(long[12:]) <= {15, 16, 17, 18}  # 2 and 15: the lane is busy for 45 units, 1.58 s of 1.63
    short = SimulatedHost(0.1, 0.3).run(16)
    assert set(short[12:]) <= {3, 4, 5, 6}  # 2 and 3: 33 units, 1.16 s of 1.25
    assert set(SimulatedHost(0.02, 0.0).run(16)) == {2}
    assert set(SimulatedHost(0.35, 5.0).run(16)[12:]) == {22}  # all of them


def test_a_pause_of_the_loop_is_soon_forgotten() -> None:
    host = SimulatedHost(0.1, 0.3)
    before = host.run(60)[40:]  # after the first comparison
    after = host.run(60, pause=100.0)
    assert max(after[:3]) <= max(before) + 4
    assert set(after[15:]) <= set(before)


def test_drafts_with_which_steps_are_longer_are_left_out() -> None:
    host = SimulatedHost(0.1, 0.3, slower=0.05)  # more than the 35 ms that a draft saves
    assert max(host.run(16)) > 2
    assert host.run(30)[12:] == [0] * 18
    host.slower = 0.0  # they would pay now, which the next comparison finds
    assert host.run(250)[-1] > 2
    cheap_copies = SimulatedHost(0.1, 0.3, slower=0.02)
    assert cheap_copies.run(60)[-1] > 0
    long = SimulatedHost(0.35, 1.1).run(600)
    assert long.count(0) == 14  # two comparisons so far, six steps each and one between
    assert min(long[400:]) > 2


def test_steps_without_a_guess_are_not_part_of_a_comparison() -> None:
    host = SimulatedHost(0.1, 0.3, slower=0.05)
    host.run(12)
    kinds = host.pace.kinds(is_drafted=True)
    host.run(100, is_drafted=False)
    assert host.pace.kinds(is_drafted=True) == kinds
    assert InBackward.ALL in kinds


def test_units_are_updated_in_two_parts_while_the_lane_has_time() -> None:
    # In the second loop the lane is busy for 1.18 s of 1.24.
    for forward, backward, expected in ((0.35, 1.1, 30), (0.1, 0.3, 10), (0.02, 0.0, 0)):
        clipping = SimulatedHost(forward, backward, splits=True)
        clipping.run(16, is_drafted=False)
        assert set(clipping.split[12:]) == {expected}
    drafting = SimulatedHost(0.35, 5.0, splits=True)
    assert drafting.run(15)[-1] == 22  # drafts first, which save more
    assert drafting.split[-1] == 8


def test_no_more_units_are_in_two_parts_than_have_their_moments_in_time() -> None:
    host = SimulatedHost(0.35, 1.1, splits=True, in_time=0.4)  # the last of 16 units
    host.run(16, is_drafted=False)
    assert host.split[:7] == [0, 8, 16, 24, 20, 18, 17]  # 24: 0.18 s too late; 17: 8 ms
    assert set(host.split[6:]) == {17}
    host.in_time = 2.0
    host.run(200, is_drafted=False)
    assert host.split[-1] == 30


def test_parts_with_which_steps_are_longer_are_left_out() -> None:
    host = SimulatedHost(0.1, 0.3, splits=True, slower=0.02)  # more than the 11 ms that a part saves
    host.run(16, is_drafted=False)
    assert max(host.split) > 0
    host.run(16, is_drafted=False)
    assert host.split[-5:] == [0] * 5


def test_drafts_stay_within_the_budget_and_the_plan_says_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "first", 99)  # not as many as there happens to be time for
    monkeypatch.setattr(_Share, "adapt", lambda *_: None)
    counts = {}
    for budget in ("34MiB", "128MiB"):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
        plan = {**HOST, "host_bytes": budget, "early_units": 99}
        model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), plan)
        for _ in range(4):
            model(torch.randn(2, 512)).square().mean().backward()
            optimizer.updates.lanes.direct.drain()  # all drafts are written
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        use = optimizer.memory()["host"]
        assert use.used_bytes <= use.budget_bytes
        counts[budget] = optimizer.plan.early_units
        assert (optimizer.updates.drafts.outlook.num_taken > 0) == (counts[budget] > 0)
    assert 0 < counts["34MiB"] < counts["128MiB"] == 4


def test_drafts_leave_half_of_what_the_machine_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Drained(0, {"early_units": 99}, Path())
    sizes = [draft.num_bytes for draft in training.optimizer.updates.drafts.of.values()]
    monkeypatch.setattr(drafts, "available_bytes", lambda: 2 * min(sizes))
    training.run()
    taken = training.optimizer.updates.drafts.outlook.num_taken
    assert 0 < taken <= STEPS * sizes.count(min(sizes)) < STEPS * len(sizes)


def test_drafts_give_way_to_activations_and_to_states_that_move() -> None:
    for need in ("activations", "states"):
        training = Drained(0, {"early_units": 99, "host_bytes": "64MiB"}, Path())
        training.run()
        state = sharded(training.model)
        drafted, held = training.optimizer.updates.drafts.num_bytes, state.tiers.held_host_bytes()
        used, spare = training.optimizer.memory()["host"].used_bytes, state.tiers.spare_host_bytes()
        assert drafted > 0
        assert TierRoom(state.tiers).spare_bytes(spare) == spare  # there is enough, so nothing goes
        assert not Relocation(state.engine, state.tiers, state.bounce, training.optimizer.updates.drafts.hold).units_on(
            "host"
        )
        if need == "activations":
            assert TierRoom(state.tiers).spare_bytes(spare + drafted) == spare + drafted
        else:
            with state.tiers.planned_on_host(spare + drafted):
                pass
            state.tiers.shrink(host_bytes=spare + drafted, store=None)
        assert state.tiers.held_host_bytes() == held - drafted
        assert training.optimizer.memory()["host"].used_bytes == used - drafted
        assert training.optimizer.plan.early_units == 0


def test_drafts_give_way_to_the_states_of_a_unit_that_was_frozen() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    model[0].requires_grad_(False)
    plan = {**HOST, "host_bytes": "64MiB", "early_units": 99}
    model, optimizer = shard(model, torch.optim.AdamW(model.parameters()), plan)
    tiers = sharded(model).tiers
    tiers.budgets["host"] = tiers.held_host_bytes()  # nothing is left, but for what drafts have
    model[0].requires_grad_(True)
    for _ in range(3):
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {tier for _, tier in optimizer.plan.optimizer} == {"host"}
    assert optimizer.plan.early_units == 0


def test_the_host_updates_weights_only_after_all_that_was_queued_before_the_step() -> None:
    """On a GPU a forward between backward and step leaves copies of the weights queued."""
    updates, waited = Training(0, {}, Path()).optimizer.updates, []
    event = SimpleNamespace(synchronize=lambda: waited.append("synchronize"))
    for used in (updates.lanes.direct, updates.lanes.buffered):
        updates._run_in(used, [], event)
    assert waited == ["synchronize"] * 2


def test_a_draft_that_gets_no_memory_leaves_none_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Training(0, {"early_units": 0}, Path()).run()
    training, failed = Drained(0, {"early_units": 99}, Path()), []
    tiers = sharded(training.model).tiers
    plain = tiers.allocate

    def allocate(*arguments: Any, pin: bool = False, **others: Any) -> Any:
        if threading.current_thread().name == "unbounded-update" and not pin:  # after the weights
            failed.append(pin)
            raise MemoryError
        return plain(*arguments, pin=pin, **others)

    monkeypatch.setattr(tiers, "allocate", allocate)
    early = training.run()
    training.optimizer.updates.lanes.direct.drain()
    assert failed
    assert all(torch.equal(value, late[name]) for name, value in early.items())
    assert training.optimizer.updates.drafts.outlook.num_taken == 0
    again = Training(0, {"early_units": 0}, Path())
    again.run()
    assert training.optimizer.memory()["host"].used_bytes == again.optimizer.memory()["host"].used_bytes
