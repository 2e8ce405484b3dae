"""One process of `bench_averaging.py` for hivemind; started by it, told what to do in lines of JSON.

Runs under an interpreter that has hivemind (1.1.x), torch and numpy, and knows nothing of p2pdrl. Linux only,
as it reads the CPU clocks of hivemind's own processes.

Usage: python hivemind_worker.py RANK RANKS FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.p2p import P2P

MEET_S = 20.0  # a group that has not formed by then is a failure
REDUCE_S = 30.0  # so is an all-reduce that is not done by then
COMMAND_S = 60  # whatever hangs in hivemind is interrupted after this
END_S = 12  # when our input has ended, so long for an orderly end
POLL_S = 0.002
MAX_ERROR = 1e-4
TENSOR = 1 << 20  # floats; several tensors, as of a model, take hivemind less time than one
PART_BYTES = (1 << 19, 1 << 20)  # the first is hivemind's default
SEARCHING = (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they started."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return children + [below for child in children for below in descendants(child)]


class Peer:
    """One peer: its DHT process, its daemon p2pd, and an averager process for every size.

    Args:
        rank: which of the peers this is.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._dht: hivemind.DHT | None = None
        self._averager: Any = None  # DecentralizedAverager
        self._step: Any = None  # its StepControl
        self._start: tuple[torch.Tensor, ...] = ()
        self._pids: list[int] = []

    def open(self, maddrs: list[str]) -> dict[str, Any]:
        """Begin a DHT, or join the one at ``maddrs``; nothing leaves loopback."""
        self._dht = hivemind.DHT(
            start=True,
            initial_peers=maddrs,
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            auto_nat=False,
            nat_port_map=False,
            use_relay=False,
        )
        return {"maddrs": [str(maddr) for maddr in self._dht.get_visible_maddrs()]}

    def prepare(self, size: int, name: str) -> dict[str, Any]:
        """Set up the averager of ``size`` floats; the one before ends."""
        self._forget()
        self._start = torch.randn(size, generator=torch.Generator().manual_seed(0)).split(TENSOR)
        self._averager = DecentralizedAverager(
            [part.clone() for part in self._start],
            self._dht,
            start=True,
            prefix=name,
            target_group_size=self._ranks,
            min_group_size=self._ranks,
            min_matchmaking_time=2.0,  # a full group does not wait for it
            request_timeout=1.0,
            part_size_bytes=min(max(size // self._ranks, PART_BYTES[0]), PART_BYTES[1]),
            allreduce_timeout=REDUCE_S,
            allow_state_sharing=False,
            declare_state_period=3600.0,
        )
        self._pids = [os.getpid(), *descendants(os.getpid())]
        return {}

    def meet(self) -> dict[str, Any]:
        """Form the group of the next round, which then waits for its trigger."""
        with self._averager.get_tensors() as tensors:
            for tensor, start in zip(tensors, self._start, strict=True):
                torch.add(start, self._rank, out=tensor)
        wall_s, cpu_s = time.perf_counter(), self._cpu_s()
        self._step = self._averager.step(
            timeout=MEET_S, allow_retries=False, require_trigger=True, wait=False
        )
        while self._step.stage in SEARCHING and time.perf_counter() - wall_s < MEET_S:
            time.sleep(POLL_S)
        answer: dict[str, Any] = {
            "wall_s": time.perf_counter() - wall_s,
            "cpu_s": self._cpu_s() - cpu_s,
        }
        if self._step.done() or answer["wall_s"] >= MEET_S:  # the stage alone does not tell
            answer["failed"] = "no group in time"
        return answer

    def round(self) -> dict[str, Any]:
        """Average in the group that has formed, then check the average."""
        wall_s, cpu_s = time.perf_counter(), self._cpu_s()
        self._step.allow_allreduce()
        group = self._step.result(REDUCE_S)
        answer = {"wall_s": time.perf_counter() - wall_s, "cpu_s": self._cpu_s() - cpu_s}
        if not self._error() <= MAX_ERROR:  # where hivemind lost a part it keeps ours, and reports success
            answer["failed"] = f"part of the average is missing at rank {self._rank}"
        elif len(group) != self._ranks:
            answer["failed"] = f"a group of {len(group)}"
        return answer

    def close(self) -> None:
        """End the averager, then the DHT, which ends p2pd."""
        self._forget()
        if self._dht is not None:
            self._dht.shutdown()

    def _error(self) -> float:
        """Return how far an element is from the average at most."""
        middle = (self._ranks - 1) / 2
        with self._averager.get_tensors() as tensors:
            return max(
                float((tensor - start - middle).abs_().max())
                for tensor, start in zip(tensors, self._start, strict=True)
            )

    def _forget(self) -> None:
        if self._averager is not None:
            self._step = None
            self._averager.shutdown()
            self._averager = None

    def _cpu_s(self) -> float:
        """Return the CPU seconds of all our processes so far, to the nanosecond."""
        try:
            return sum(time.clock_gettime((~pid << 3) | 2) for pid in self._pids)  # clock_getcpuclockid(3)
        except OSError as error:
            raise ChildProcessError("a process of hivemind's ended") from error


def late(_number: int, _frame: FrameType | None) -> NoReturn:
    """Interrupt what takes too long."""
    raise TimeoutError("hung")


def main() -> None:
    """Serve until the parent closes our input, then end with all that we started."""
    torch.set_num_threads(1)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{sys.argv[3]}/hivemind-"  # noqa: SLF001  # it leaves some of them behind
    signal.signal(signal.SIGALRM, late)
    peer = Peer(int(sys.argv[1]), int(sys.argv[2]))
    try:
        for line in sys.stdin:
            words = json.loads(line)
            signal.alarm(COMMAND_S)
            try:
                answer = getattr(peer, words.pop("do"))(**words)
            except Exception as error:  # noqa: BLE001  # any failure of hivemind's is the round's
                answer = {"failed": f"{type(error).__name__}: {error}"}
            signal.alarm(0)
            print(json.dumps(answer), flush=True)
    finally:
        signal.alarm(END_S)
        with suppress(Exception):
            peer.close()
        signal.alarm(0)
        if os.getpgrp() == os.getpid():  # p2pd outlives a DHT process that had to be killed
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main()
