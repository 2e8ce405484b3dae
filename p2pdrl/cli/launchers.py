"""What torchrun, Slurm and MPI tell each process they start: enough to make their nodes one swarm.

| launcher | rank and count | on its machine | where the first is |
|---|---|---|---|
| torchrun | ``RANK``, ``WORLD_SIZE`` | ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` | ``MASTER_ADDR`` |
| Slurm's srun | ``SLURM_PROCID``, ``SLURM_NTASKS`` | ``SLURM_LOCALID`` | ``SLURM_JOB_NODELIST`` |
| Open MPI | ``OMPI_COMM_WORLD_RANK``, ``…_SIZE`` | ``…_LOCAL_RANK``, ``…_LOCAL_SIZE`` | ``MASTER_ADDR`` |
| MPICH, Intel MPI | ``PMI_RANK``, ``PMI_SIZE`` | ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS`` | ``MASTER_ADDR`` |

MPI itself tells no address of the first; one machine needs none. A node takes the base port plus its local
rank (``MASTER_PORT`` is the launcher's own). Whatever is given as an option, in a file or by a variable of
p2pdrl's counts before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from p2pdrl.errors import UsageError
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.protocol import DEFAULT_PORT

__all__ = ["Launch", "find_launch", "hosts_of"]

_FIRST = 4
"""Of Slurm's machines so many are named as peers: any of them may be up first."""
_MOST_HOSTS = 4096
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
    (
        "MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How a launcher has started this process.

    Attributes:
        launcher: its name.
        peers: addresses of nodes that are started first; empty where the launcher doesn't tell.
        listen: where this node listens: on loopback where all are on one machine.
    """

    launcher: str
    rank: int
    count: int
    name: str
    peers: tuple[str, ...]
    listen: str


def find_launch(environ: Mapping[str, str], base_port: int = DEFAULT_PORT) -> Launch | None:
    """Read the environment; None where no launcher has started several of us.

    Raises:
        UsageError: a launcher's variable holds what it never does.
    """
    for launcher, rank_key, count_key, local_key, local_count_key in _LAUNCHERS:
        if rank_key not in environ or count_key not in environ:
            continue
        if launcher == "torchrun" and not ("MASTER_ADDR" in environ and local_key in environ):
            continue  # others use such short names, too
        rank, count = _number(environ, rank_key), _number(environ, count_key)
        if count < 2:
            return None
        hosts = _first_hosts(launcher, environ)
        local = _number(environ, local_key) if local_key in environ else 0
        here = environ.get(local_count_key) == str(count) or all(map(_is_here, hosts or ("",)))
        if launcher == "Slurm":
            here = len(hosts) == 1
        if here:
            hosts = ("127.0.0.1",)
        return Launch(
            launcher,
            rank,
            count,
            f"rank-{rank}",
            tuple(f"{host}:{base_port}" for host in hosts),
            f"{'127.0.0.1' if here else '0.0.0.0'}:{base_port + local}",  # noqa: S104
        )
    return None


def _first_hosts(launcher: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    if launcher == "Slurm":
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
        return tuple(itertools.islice(hosts_of(nodes), _FIRST))
    master = environ.get("MASTER_ADDR", "")
    return (f"[{master}]" if ":" in master else master,) if master else ()


def _is_here(host: str) -> bool:
    return host == "localhost" or is_loopback(host.strip("[]"))


def _number(environ: Mapping[str, str], key: str) -> int:
    text = environ[key]
    if re.fullmatch(r"[0-9]{1,6}", text) is None:
        raise UsageError(f"{key}={text[:40]!r} is no number: unset it, or give --name, --listen and --peers")
    return int(text)


def hosts_of(nodelist: str) -> Iterator[str]:
    """The hosts of a Slurm node list: ``gpu[01-03,7],login`` are gpu01, gpu02, gpu03, gpu7 and login.

    Raises:
        UsageError: it isn't one.
    """
    left = _MOST_HOSTS
    if re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", nodelist) is None:
        raise UsageError(f"Slurm's node list {nodelist[:80]!r} can't be read: give --peers")
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist):
        pieces = re.split(r"\[([0-9,-]+)\]", part)
        if re.search(r"[\[\]]", "".join(pieces)):
            raise UsageError(f"Slurm's node list {nodelist[:80]!r} can't be read: give --peers")
        choices = [list(_range(piece)) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        for chosen in itertools.product(*choices):
            left -= 1
            if left < 0:
                return
            yield "".join(chosen)


def _range(text: str) -> Iterator[str]:
    for one in text.split(","):
        first, dash, last = one.partition("-")
        if not first or (dash and (not last or int(last) - int(first) >= _MOST_HOSTS)):
            raise UsageError(f"Slurm's node range [{text[:80]}] can't be read: give --peers")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))
