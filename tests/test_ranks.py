"""The pool of ranks itself: results, failures, deaths and hangs, and that it goes on after each."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError


def total(rank: int, world_size: int, offset: int) -> tuple[int, int]:
    value = torch.tensor([rank + offset])
    if world_size > 1:
        dist.all_reduce(value)
    return os.getpid(), int(value)


def is_initialized(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def fail_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"deliberate failure of rank {rank}")
    dist.barrier()


def die_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), 11)
    dist.barrier()


def hang_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        time.sleep(1000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_returns_its_result(ranks: Any, world_size: int) -> None:
    results = ranks(world_size, total, 10)
    assert [value for _, value in results] == [sum(range(world_size)) + 10 * world_size] * world_size


def test_ranks_are_reused_from_case_to_case(ranks: Any) -> None:
    before = [pid for pid, _ in ranks(3, total, 0)]
    assert [pid for pid, _ in ranks(3, total, 1)] == before


def test_one_rank_has_no_process_group(ranks: Any) -> None:
    assert ranks(1, is_initialized) == [False]
    assert ranks(2, is_initialized) == [True, True]


def test_an_exception_comes_back_with_its_rank_and_traceback(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*in fail_on.*ValueError: deliberate failure of rank 1"):
        ranks(3, fail_on, 1)
    assert ranks(2, is_initialized) == [True, True]


def test_a_rank_that_dies_is_reported_with_its_signal(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed:\nthe process died with exit code -11.*in die_on"):
        ranks(2, die_on, 0)
    assert ranks(2, is_initialized) == [True, True]


def test_a_rank_that_hangs_is_killed_and_its_stacks_shown(ranks: Any) -> None:
    ranks(1, is_initialized)  # it has begun: only the case itself takes time
    with pytest.raises(RankError, match=r"(?s)rank 0 did not end within 5 s; its stacks:.*in hang_on"):
        ranks(1, hang_on, 0, timeout=5.0)
    assert ranks(2, is_initialized) == [True, True]


def see_gpus(rank: int, world_size: int) -> int:
    return torch.cuda.device_count()


def test_tests_that_are_not_for_a_gpu_see_none(ranks: Any) -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert ranks(2, see_gpus) == [0, 0]
