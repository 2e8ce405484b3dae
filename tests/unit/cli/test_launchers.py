"""Nodes that torchrun, srun or mpirun start."""

from __future__ import annotations

import pytest

from p2pdrl.cli.launchers import Launch, find_launch, hosts_of
from p2pdrl.errors import UsageError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[01-02,9]"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (TORCHRUN, Launch("torchrun", 5, 8, "rank-5", ("gpu1:7700",), "0.0.0.0:7701")),
        (
            TORCHRUN | {"LOCAL_WORLD_SIZE": "8"},
            Launch("torchrun", 5, 8, "rank-5", ("127.0.0.1:7700",), "127.0.0.1:7701"),
        ),
        (
            TORCHRUN | {"MASTER_ADDR": "fe80::1"},
            Launch("torchrun", 5, 8, "rank-5", ("[fe80::1]:7700",), "0.0.0.0:7701"),
        ),
        (TORCHRUN | SLURM, Launch("torchrun", 5, 8, "rank-5", ("gpu1:7700",), "0.0.0.0:7701")),
        (
            SLURM,
            Launch("Slurm", 2, 3, "rank-2", ("gpu01:7700", "gpu02:7700", "gpu9:7700"), "0.0.0.0:7700"),
        ),
        (
            SLURM | {"SLURM_JOB_NODELIST": "gpu7", "SLURM_LOCALID": "2"},
            Launch("Slurm", 2, 3, "rank-2", ("127.0.0.1:7700",), "127.0.0.1:7702"),
        ),
        (OPEN_MPI, Launch("MPI", 1, 2, "rank-1", ("127.0.0.1:7700",), "127.0.0.1:7701")),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a"},
            Launch("MPI", 1, 2, "rank-1", ("a:7700",), "0.0.0.0:7701"),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("MPI", 1, 2, "rank-1", (), "0.0.0.0:7700")),
        ({}, None),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
    ],
)
def test_what_launchers_tell(environ: dict[str, str], launch: Launch | None) -> None:
    assert find_launch(environ) == launch


def test_what_launchers_never_tell() -> None:
    with pytest.raises(UsageError, match="SLURM_PROCID='x' is no number"):
        find_launch(SLURM | {"SLURM_PROCID": "x"})
    for bad in ("gpu[1-", "gpu[1-3", "gpu[a]", "gpu[1-99999]", "gpu[-3]"):
        with pytest.raises(UsageError, match="can't be read"):
            list(hosts_of(bad))


def test_node_lists() -> None:
    assert list(hosts_of("a,b[1-2]c[08-10],d")) == [
        "a", "b1c08", "b1c09", "b1c10", "b2c08", "b2c09", "b2c10", "d",
    ]  # fmt: skip
    assert list(hosts_of("")) == []
    assert len(list(hosts_of("n[0-4095][0-4095]"))) == 4096


@pytest.fixture
def started(p2pdrl, monkeypatch):
    """Run ``p2pdrl node`` up to where the daemon would start; returns its result and its configuration."""

    def start(environ, *arguments):
        seen = []
        monkeypatch.setattr(
            "p2pdrl.node.daemon.run", lambda resolved, invite: seen.append(resolved.config.node) or 0
        )
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return p2pdrl("node", *arguments), seen[0] if seen else None

    return start


def test_a_node_takes_from_its_launcher_what_nobody_has_given(started):
    result, node = started(TORCHRUN)
    assert (node.name, list(node.peers), node.listen) == ("rank-5", ["gpu1:7700"], "0.0.0.0:7701")
    assert (
        "torchrun started this node as rank 5 of 8: it listens at 0.0.0.0:7701 and joins gpu1:7700"
        in result.stderr
    )
    _, node = started(TORCHRUN, "--peers", "x:1", "--name", "me")
    assert (node.name, list(node.peers), node.listen) == ("me", ["x:1"], "0.0.0.0:7701")
    result, node = started(TORCHRUN, "--peers", "x:1", "--listen", "127.0.0.1:5")
    assert (node.name, list(node.peers), node.listen) == (None, ["x:1"], "127.0.0.1:5")
    assert "torchrun" not in result.stderr


def test_mpi_that_tells_nothing_of_rank_0(started):
    result, node = started({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert result.exit_code == 2
    assert "MPI doesn't tell where rank 0 runs: set MASTER_ADDR, or give --peers" in result.stderr
    assert node is None
