"""What a launcher's environment says, and what it must not leave out."""

from __future__ import annotations

import pytest

from unbounded.errors import PlanError
from unbounded.launcher import Launch, first_node, read_launch, read_local, read_numbers

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[003-006,9],login1",
}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}])
def test_a_process_of_its_own_joins_nobody(environment: dict[str, str]) -> None:
    assert read_launch(environment) is None


def test_torchruns_environment_is_read() -> None:
    assert read_launch(TORCHRUN) == Launch("torchrun", 1, 4, 1, None, "node0", 29500)
    assert read_launch({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}).local_size == 2  # type: ignore[union-attr]


def test_tasks_that_srun_started_meet_on_their_first_node() -> None:
    launch = read_launch(SLURM)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank) == ("Slurm", 5, 8, 1)
    assert launch.local_size is None
    assert read_numbers({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,4(x11)"}).local_size == 4
    assert launch.address == "gpu003"
    assert 20000 <= launch.port < 32000
    assert launch.port == read_launch({**SLURM, "SLURM_PROCID": "0"}).port  # type: ignore[union-attr]
    assert launch.port != read_launch({**SLURM, "SLURM_JOB_ID": "4712"}).port  # type: ignore[union-attr]


def test_a_job_that_has_begun_is_not_asked_for_its_numbers_again() -> None:
    """Lightning takes WORLD_SIZE away between two fits and leaves RANK."""
    assert read_local({"RANK": "1", "LOCAL_RANK": "1"}) == (1, None)
    assert read_local({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4"}) == (1, 4)


def test_mpiruns_ranks_are_known() -> None:
    environment = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    launch = read_launch(environment)
    assert launch is not None
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank) == ("Open MPI", 2, 3, None)
    assert read_numbers({**environment, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}).local_size == 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node1,node2", "node1"), ("a[01-04]", "a01"), ("a[7,9]-ib,b", "a7-ib"), ("", "")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but it must be a whole number of at least 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but it must be"),
        ({"WORLD_SIZE": "-3"}, "WORLD_SIZE is '-3', but it must be"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4. Number the ranks from 0 to 3"),
        ({"RANK": ""}, "RANK is '', but it must be"),
        ({"RANK": None}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x', but it must be"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0', but it must be"),
        ({"MASTER_ADDR": None}, "one of 4 processes that torchrun started, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": None}, "one of 4 processes that torchrun started, but MASTER_PORT is not set"),
        ({"MASTER_PORT": "123456"}, "MASTER_PORT is '123456', but it must be"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(changed: dict[str, str | None], message: str) -> None:
    environment = {key: value for key, value in {**TORCHRUN, **changed}.items() if value is not None}
    with pytest.raises(PlanError) as caught:
        read_launch(environment)
    assert message in str(caught.value)
