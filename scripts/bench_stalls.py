"""How long survivors stand still when a peer is killed, or stopped, in the middle of a round.

Real nodes on loopback train a regression of 10 million parameters whose updates take 20 ms. Their update
counts are read every 20 ms; printed is the longest time without an update on any survivor, in the seconds
before the fault and after it, for gossip and for exact averaging, for ``kill -9`` and for ``SIGSTOP``.
Others' figures on such a machine: moolib 1.6 to 2.3 s, torchft 5 to 10 s, hivemind 0.7 s to never.

    python scripts/bench_stalls.py --repeats 3
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import threading
import time

from support.local_swarm import LocalSwarm, Node

STRATEGIES = {
    "gossip": ["name=adpsgd"],
    "exact gradients": ["name=grad_average"],
    "exact parameters": ["name=param_average", "every_updates=4"],
}
FAULTS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
BEFORE_S, AFTER_S = 4.0, 10.0


class Watcher(threading.Thread):
    """Notes when a node's count of updates grows.

    Args:
        node: whom to watch.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._over = threading.Event()
        self.times_s: list[float] = []

    def run(self) -> None:
        """Poll until `finish`."""
        last = -1
        while not self._over.wait(0.02):
            updates = self._node.status().get("updates", last)
            if updates != last:
                last = updates
                self.times_s.append(time.monotonic())

    def finish(self) -> None:
        """End it."""
        self._over.set()
        self.join(10)

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """Longest time without news between two moments."""
        inside = [at for at in self.times_s if begin_s <= at <= end_s]
        marks = [begin_s, *inside, end_s]
        return max(later - sooner for sooner, later in itertools.pairwise(marks))


def measure(strategy: str, fault: str, parameters: int) -> tuple[float, float]:
    """Return the longest stall of any survivor, before and after the fault."""
    words = ["task.algorithm.name=regression", "task.algorithm.min_update_s=0.02"]
    words += [f"task.algorithm.features={parameters}", "task.algorithm.rows=4", "task.algorithm.batch_size=1"]
    words += ["task.algorithm.learning_rate=1e-9"]  # with so many features more diverges
    words += [f"task.strategy.{word}" for word in STRATEGIES[strategy]]
    with LocalSwarm(4, [f"--set={word}" for word in words]) as swarm:
        swarm.ready()
        time.sleep(3.0)
        survivors = swarm.nodes[:3]
        watchers = [Watcher(node) for node in survivors]
        for watcher in watchers:
            watcher.start()
        time.sleep(BEFORE_S)
        fault_s = time.monotonic()
        swarm.nodes[3].process.send_signal(FAULTS[fault])
        time.sleep(AFTER_S)
        end_s = time.monotonic()
        for watcher in watchers:
            watcher.finish()
        before = max(watcher.longest_s(fault_s - BEFORE_S + 0.5, fault_s) for watcher in watchers)
        after = max(watcher.longest_s(fault_s, end_s) for watcher in watchers)
        return before, after


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for strategy in arguments.strategies:
        for fault in FAULTS:
            stalls = [measure(strategy, fault, arguments.parameters) for _ in range(arguments.repeats)]
            before, after = (max(values) for values in zip(*stalls, strict=True))
            rows.append({"strategy": strategy, "fault": fault, "before_s": before, "after_s": after})
            if not arguments.json:
                print(f"{strategy:17} {fault:8} longest stall before {before:5.2f} s, after {after:5.2f} s")
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
