"""Several processes: as torchrun says it, or as Slurm does."""

import pytest

from tempera.runtime.distributed import first_node, slurm_environment, started_as_main

STEP = {
    "SLURM_JOB_ID": "41000", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "16", "SLURM_PROCID": "9", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip


def test_a_task_of_a_slurm_step_is_a_rank() -> None:
    assert slurm_environment(STEP) == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "21000",
    }
    assert slurm_environment({**STEP, "MASTER_PORT": "7"}).get("MASTER_PORT") is None


def test_a_process_knows_its_part_before_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert started_as_main()
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert not started_as_main()
    monkeypatch.setenv("RANK", "0")
    assert started_as_main()


def test_one_process_stays_one() -> None:
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"}
    for environment in ({}, batch, {**STEP, "RANK": "0"}, {**STEP, **one}):
        assert slurm_environment(environment) == {}
    assert slurm_environment({**batch, "SLURM_STEP_ID": "0"})["WORLD_SIZE"] == "16"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],big1", "gpu07"),
        ("gpu[12,15]", "gpu12"),
        ("a1,a2", "a1"),
        ("rack[1-2]-node", "rack1-node"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
