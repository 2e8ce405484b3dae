"""The processes of `bench_pipeline.py`: started, given their stages, connected, and asked for trials."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from p2pdrl.errors import ConfigError
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.protocol import Address
from pipeline_bench.ports import gloo_order, low_port
from support.proxies import Proxies
from support.worker_team import Team, Worker

__all__ = ["Held", "Network", "Outcome"]

SCRIPTS = Path(__file__).parents[1]
WORKER = "pipeline_bench.worker"


@dataclass(frozen=True)
class Outcome:
    """What a trial took.

    Attributes:
        wall_s: of one step: from the first rank's beginning to the end of the last rank's step.
        cpu_s: of one step, all ranks together.
        collect_s: what it took the first rank to fetch the parameters once, after the steps.
        bubble: share of a step that a rank neither computes nor steps, their mean; None where nobody says.
        norm: of the gradient.
        peak_bytes: most memory of each rank; where that was looked at.
        kept_bytes: most that autograd kept of each rank.
    """

    wall_s: float
    cpu_s: float
    collect_s: float
    bubble: float | None
    norm: float
    peak_bytes: tuple[int, ...] = ()
    kept_bytes: tuple[int, ...] = ()


class Network:
    """Proxies between the ranks, or none.

    Args:
        proxied: connections go through proxies, which do nothing at first.
    """

    def __init__(self, *, proxied: bool) -> None:
        self.proxied = proxied
        self._stack = ExitStack()
        self._proxies: list[Proxies] = []

    def proxies(self, targets: Sequence[int], ports: Sequence[int] = ()) -> list[int]:
        """Put a proxy before each port; return where they listen."""
        made = self._stack.enter_context(Proxies([Address("127.0.0.1", port) for port in targets], ports))
        self._proxies.append(made)
        return [address.port for address in made.addresses]

    def slow_down(self, bytes_per_s: float, delay_s: float) -> None:
        """Let every connection be like that from now on, each way."""

        def act(proxy: FaultProxy) -> None:
            for flow in (proxy.up, proxy.down):
                flow.bytes_per_s, flow.delay_s = bytes_per_s, delay_s

        for proxies in self._proxies:
            proxies.do(act)

    def close(self) -> None:
        """End all proxies."""
        self._stack.close()


def finding_us() -> dict[str, str]:
    """Return our environment, with the scripts' folder where Python looks for packages."""
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


class Held:
    """The processes of one contender.

    Args:
        kind: of contender: ``alone``, or one of `pipeline_bench.worker`'s pipelines.
        ranks: one process each.
    """

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind = kind
        command, environment = [sys.executable, "-P", "-m", WORKER, kind], finding_us()
        self._team = Team([Worker([*command, str(rank)], environment) for rank in range(ranks)])

    def make(self, model: dict[str, Any]) -> dict[str, Any]:
        """Let each process make the model; return what one says of it."""
        return self._team.ask(do="make", **model)[0]

    def hold(self, cuts: Sequence[int], schedule: str, most: int) -> None:
        """Give each rank its stages.

        Raises:
            ConfigError: the model can't be cut like this.
        """
        for answer in self._team.ask(do="hold", cuts=list(cuts), schedule=schedule, most=most):
            if "error" in answer:
                raise ConfigError(answer["error"])

    def meet(self, network: Network, *, key: bool) -> None:
        """Connect the ranks."""
        if self.kind == "stream":
            self._meet_by_pipes(network, key)
        else:
            self._meet_by_torch(network)

    def _meet_by_pipes(self, network: Network, key: bool) -> None:
        ports = self._ports(do="meet", key=key)
        self._team.ask(ports=network.proxies(ports) if network.proxied else ports)

    def _meet_by_torch(self, network: Network) -> None:
        """Ours finds a port for its store itself, and rank 0 says which."""
        first, *others = self._team.workers
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = 0 if self.kind == "torch" else int(free.getsockname()[1])
        first.say(do="meet", port=port, proxied=network.proxied)
        port = port or first.hear()["port"]
        for worker in others:
            worker.say(do="meet", port=port, proxied=network.proxied)
        if network.proxied:
            self._redirect(network)
        for worker in self._team.workers:
            worker.hear()

    def _redirect(self, network: Network) -> None:
        """Put proxies where ranks listen, and tell those who connect: see `pipeline_bench.redirected`."""
        heard = [worker.hear() for worker in self._team.workers]
        gloo: list[dict[int, int]] = [{} for _ in heard]
        links: list[dict[int, int]] = [{} for _ in heard]
        ports = [ranks["port"] for ranks in heard]
        for one, other in combinations(range(len(ports)), 2):
            greater = gloo_order(ports[one]) > gloo_order(ports[other])
            caller, called = (one, other) if greater else (other, one)
            (gloo[caller][called],) = network.proxies([ports[called]], [low_port()])
        for rank, ranks in enumerate(heard):
            if ranks["link"]:
                (links[rank + 1][rank],) = network.proxies([ranks["link"]])
        for worker, *instead in zip(self._team.workers, gloo, links, strict=True):
            worker.say(gloo=instead[0], links=instead[1])

    def _ports(self, **words: Any) -> list[int]:
        return [int(answer["port"]) for answer in self._team.ask(**words)]

    def prepare(self, **trial: Any) -> str:
        """Get ready for a kind of trial; return why there can be none, or nothing."""
        answers = self._team.ask(do="prepare", **trial)
        return next((answer["error"] for answer in answers if "error" in answer), "")

    def run(self, *, look: bool = False, **trial: Any) -> Outcome:
        """Run a trial."""
        self._team.ask(do="run", look=look, **trial)
        first = self._team.workers[0]
        first.say()
        ranks = [worker.hear() for worker in self._team.workers]
        busy_s = [rank["busy_s"] for rank in ranks if "busy_s" in rank]
        steps = trial["steps"]
        wall_s = max(rank["end_s"] for rank in ranks) - ranks[0]["begin_s"]
        return Outcome(
            wall_s=wall_s / steps,
            cpu_s=sum(rank["cpu_s"] for rank in ranks) / steps,
            collect_s=ranks[0].get("collect_s", 0.0),
            bubble=1.0 - sum(busy_s) / len(busy_s) / wall_s if busy_s else None,
            norm=ranks[0]["norms"][-1],
            peak_bytes=tuple(rank["peak_bytes"] for rank in ranks if look),
            kept_bytes=tuple(rank["kept_bytes"] for rank in ranks if look),
        )

    def costs(self, rows: int) -> list[list[Any]]:
        """Measure the blocks in the first process."""
        layers: list[list[Any]] = self._team.ask(do="costs", rows=rows)[0]["layers"]
        return layers

    def close(self, *, at_once: bool = False) -> None:
        """End the processes."""
        if at_once:
            self._team.kill()
        else:
            self._team.close()
