"""A device budget as the driver counts it, on a device that the test counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.activations.models import Stack, losses_of, make, tokens
from tests.activations.test_headroom import Training
from tests.activations.test_sharded import shard_stack
from unbounded.activations import promise as module
from unbounded.activations.headroom import Headroom
from unbounded.activations.promise import DevicePromise, describe_batch, explain_shortage
from unbounded.errors import BudgetError
from unbounded.tiers.driver import (
    KERNEL_BYTES,
    MOST_CONTEXT_BYTES,
    NEXT_KERNEL_BYTES,
    USUAL_CONTEXT_BYTES,
    DriverCount,
    page_table_bytes,
    resident_bytes,
)

GIB = 2**30


class Gpu:
    """A device with a driver and an allocator."""

    def __init__(self, total: int = 80 * GIB, context: int = GIB // 2, foreign: int = 0) -> None:
        self.total, self.context, self.foreign = total, context, foreign
        self.reserved = self.allocated = 0
        self.cap: int | None = None
        self.num_freed = 0

    def count(self) -> DriverCount:
        return DriverCount(
            lambda: (self.total - self.context - self.foreign - self.reserved, self.total), lambda: self.reserved
        )

    def set_cap(self, num_bytes: int | None) -> None:
        self.cap = num_bytes

    def allocated_bytes(self) -> int:
        return self.allocated

    def free_cached(self) -> None:
        self.reserved, self.num_freed = self.allocated, self.num_freed + 1


def promise(gpu: Gpu, budget: int = 24 * GIB) -> DevicePromise:
    made = DevicePromise(budget, gpu.count(), gpu)
    made.keep()
    return made


def test_what_other_processes_take_is_not_ours() -> None:
    assert Gpu().count().context_bytes() == GIB // 2
    shared = Gpu(foreign=20 * GIB)
    count = shared.count()
    assert count.context_bytes() == USUAL_CONTEXT_BYTES
    shared.context += GIB // 4  # kernels are loaded
    shared.reserved = 5 * GIB
    assert count.context_bytes() == USUAL_CONTEXT_BYTES + GIB // 4
    assert count.taken_bytes() == 5 * GIB + USUAL_CONTEXT_BYTES + GIB // 4
    shared.foreign += 30 * GIB  # another one came
    assert count.context_bytes() == MOST_CONTEXT_BYTES


def test_the_allocator_has_what_the_context_leaves() -> None:
    gpu = Gpu()
    kept = promise(gpu)
    assert gpu.cap == kept.cap_bytes == 24 * GIB - GIB // 2 - KERNEL_BYTES
    gpu.context += 64 * 2**20
    kept.begin((torch.empty(2, 3),), {})
    assert gpu.cap == 24 * GIB - GIB // 2 - KERNEL_BYTES  # kernels that were expected are there now
    gpu.context += GIB - 64 * 2**20
    kept.begin((torch.empty(2, 3),), {})
    assert gpu.cap == 24 * GIB - 3 * GIB // 2 - NEXT_KERNEL_BYTES
    for _ in range(module.NUM_FIRST):
        kept.begin((), {})
    assert gpu.cap == 24 * GIB - 3 * GIB // 2 - module.MARGIN_BYTES


def test_a_second_model_does_not_wait_for_kernels_that_are_there() -> None:
    gpu = Gpu()
    before = gpu.count()
    gpu.context += GIB
    count = DriverCount(before._read, before._reserved, before.first_bytes)
    assert count.coming_bytes() == NEXT_KERNEL_BYTES
    assert gpu.count().coming_bytes() == KERNEL_BYTES


def test_cached_memory_is_given_back_where_the_driver_counts_too_much() -> None:
    gpu = Gpu()
    kept = promise(gpu)
    gpu.reserved, gpu.allocated = 23 * GIB, 12 * GIB
    kept.begin((), {})
    assert gpu.num_freed == 0
    gpu.context += 2 * GIB
    kept.begin((), {})
    assert (gpu.num_freed, gpu.reserved) == (1, 12 * GIB)


def test_budgets_of_several_models_add_up_and_end_with_them() -> None:
    gpu = Gpu()
    first, second = promise(gpu), promise(gpu, 8 * GIB)
    assert gpu.cap == first.cap_bytes + second.cap_bytes
    end = second.attach(model := torch.nn.Linear(1, 1), lambda: 0)
    model(torch.ones(1, 1))
    assert second.batch == "[1, 1]"
    end()
    assert not model._forward_pre_hooks
    assert gpu.cap == first.cap_bytes
    del first
    assert gpu.cap is None


def test_a_budget_below_the_context_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(BudgetError, match=r"device_bytes is 600.0 MiB, but the GPU's context .* takes 512.0 MiB"):
        promise(Gpu(), 600 * 2**20)


@pytest.mark.parametrize(("states", "largest"), [(3 * GIB, "activations"), (18 * GIB, "states and gathered weights")])
def test_a_batch_that_does_not_fit_is_named_with_what_takes_the_most(states: int, largest: str) -> None:
    gpu = Gpu()
    kept = promise(gpu)
    kept.states = lambda: states
    kept.begin((), {"input_ids": torch.empty(2, 8192), "labels": torch.empty(2, 8192), "use_cache": False})
    gpu.allocated = 20 * GIB
    with pytest.raises(BudgetError) as caught:
        explain_shortage(5 * GIB)
    text = str(caught.value)
    assert text.startswith(
        "the device is out of memory. The batch (input_ids [2, 8192], labels [2, 8192]) does not fit"
    )
    assert "into device_bytes=24.0 GiB: 5.0 GiB more are needed" in text
    assert f"The most is taken by {largest}" in text
    assert "The states are as they were: run fewer tokens at once" in text
    assert "device_bytes to 28.3 GiB or more" in text
    assert isinstance(caught.value, (MemoryError, torch.OutOfMemoryError))


def test_without_a_promise_torch_says_what_it_always_says() -> None:
    module._promises.clear()
    explain_shortage(5 * GIB)


def test_batches_are_described_by_their_shapes() -> None:
    batch: Any = {"images": [torch.empty(3, 4), torch.empty(5)], "flag": True}
    assert describe_batch((torch.empty(2), "x"), batch) == "[2], str, images [3, 4] and [5]"


def test_the_limit_of_blocks_follows_the_cap() -> None:
    limits = iter([8 * GIB, 8 * GIB, 2**20])
    training = Training(states=0, limit=0, num_blocks=4, kept=24 * 2**20, tail=0)
    training.headroom = Headroom(training.device, 0, 4, renew_limit=lambda: next(limits))
    assert training.step() == Counter(keep=4)
    assert training.step()["keep"] == 0


def test_a_batch_that_did_not_fit_leaves_more_free_and_smaller_ones_do_not() -> None:
    training = Training(states=0, limit=400 * 2**20, num_blocks=4, kept=24 * 2**20, tail=2**20)
    training.step()
    assert training.step() == Counter(keep=4)
    for _ in range(6):
        training.headroom.note_shortage()
    assert training.step()["keep"] < 4
    training.headroom._short_from = 2**21
    assert training.step() == Counter(keep=4)


def test_what_the_host_counts_is_the_resident_set_and_its_tables() -> None:
    before = resident_bytes()
    assert before > 2**20
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert resident_bytes() - before > 48 * 2**20
    assert page_table_bytes(100 * GIB) == 200 * 2**20
    del held


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_training_goes_on_with_a_smaller_batch_and_the_states_it_had(where: str) -> None:
    plain = make(Stack)
    expected = losses_of(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model, optimizer = shard_stack(make(Stack), weights="host", activations="recompute")
    kept = promise(Gpu())
    end = kept.attach(model, lambda: 0)

    def allocate(_: Any, args: Any) -> None:
        if len(args[0]) > 2 and (torch._C._current_graph_task_id() != -1) is (where == "backward"):
            explain_shortage(GIB)

    model.blocks[2].register_forward_pre_hook(allocate)
    with pytest.raises(BudgetError, match=r"The batch \(\[8, 5\]\) does not fit into device_bytes=24.0 GiB"):
        model(tokens(rows=8)).backward()
    optimizer.zero_grad()
    assert losses_of(model, optimizer) == expected
    end()
