"""Run a swarm on a Ray cluster: a node on each of its machines, also on those that come later.

    pip install 'p2pdrl[ray]'                                    # on all machines
    python scripts/on_ray.py --address auto --config lunarlander
    python scripts/on_ray.py --address auto --machines 4 --cpus 8 --gpus 1 -- --config pong --actors 8

Ray only starts the nodes, and says which machines there are; among themselves nodes talk as ever, with a
key made for this run. A machine that Ray loses takes its node along and no more; one that joins the cluster
gets a node, which joins the swarm. Ends when the swarm is done: exit code 0 when each node that ended did so
well. What comes after ``--`` goes to ``p2pdrl node``. A line a node goes to standard error every few seconds,
the end as JSON to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

LOOK_EVERY_S = 2.0
TELL_EVERY_S = 10.0
CALL_S = 30.0
GRACE_S = 25.0


class Host:
    """Runs on one machine, in a process of Ray's: starts its node and looks after it."""

    def __init__(self, name: str, key: bytes, arguments: list[str]) -> None:
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="p2pdrl-ray-", ignore_cleanup_errors=True)
        self._key = Path(self._folder.name) / "swarm.key"
        self._key.touch(mode=0o600)
        self._key.write_bytes(key)
        self._ip = ray.util.get_node_ip_address()
        self._name, self._arguments = name, arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def start(self, peers: list[str]) -> str:
        """Start the node; return its address."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        self._address = f"{self._ip}:{port}"
        command = [sys.executable, "-m", "p2pdrl", "node", "--name", self._name]
        command += ["--listen", f"0.0.0.0:{port}", "--advertise", self._address]
        command += ["--data-dir", f"{self._folder.name}/node", "--swarm-key-file", str(self._key)]
        command += ["--parent-pid", str(os.getpid())]  # Ray may kill us any time: no node outlives that
        command += [*(f"--peers={peer}" for peer in peers), *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return self._address

    def status(self) -> dict[str, Any]:
        """How it does; ``exit_code`` once it has ended."""
        from p2pdrl.api.client import NodeClient
        from p2pdrl.errors import P2PDRLError
        from p2pdrl.transport.protocol import Address

        code = None if self._process is None else self._process.poll()
        if code is not None:
            return {"exit_code": code}
        local = Address("127.0.0.1", Address.parse(self._address).port)
        try:
            status = NodeClient(local, data_dir=f"{self._folder.name}/node", timeout_s=2.0).status()
        except P2PDRLError as error:
            return {"state": "starting", "error": str(error)}
        wanted = ("state", "env_steps", "swarm_env_steps", "mean_return", "evaluation", "stop", "healthy")
        return {key: status.get(key) for key in wanted}

    def leave(self) -> None:
        """Have the node leave, and wait for that."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


class Cluster:
    """All machines of a Ray cluster that have, or are to have, a node of the swarm."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._key = b64encode(secrets.token_bytes(32)) + b"\n"
        self._hosts: dict[str, Any] = {}
        """Ray's handle of each host, by the id of its machine."""
        self.addresses: dict[str, str] = {}
        self.status: dict[str, dict[str, Any]] = {}

    def follow(self) -> None:
        """Start nodes on machines that have none, and forget machines that Ray has lost."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        alive = [machine["NodeID"] for machine in ray.nodes() if machine["Alive"]]
        for lost in self._hosts.keys() - set(alive):
            del self._hosts[lost]
            self.status.pop(lost, None)
            self.addresses.pop(lost, None)
        for machine in alive:
            full = self._arguments.machines and len(self._hosts) >= self._arguments.machines
            if machine in self._hosts or full:
                continue
            remote = ray.remote(Host).options(
                num_cpus=self._arguments.cpus,
                num_gpus=self._arguments.gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False),
            )
            host = remote.remote(f"ray-{machine[:8]}", self._key, self._arguments.node)
            try:
                address = ray.get(host.start.remote(list(self.addresses.values())[:4]), timeout=CALL_S)
            except ray.exceptions.GetTimeoutError:
                tell(f"machine {machine[:8]} has no room for {self._arguments.cpus} CPUs now; tried again")
                ray.kill(host)
                continue
            except ray.exceptions.RayError as error:
                tell(f"machine {machine[:8]}: {str(error).splitlines()[0]}")
                continue
            self._hosts[machine], self.addresses[machine] = host, address
            tell(f"machine {machine[:8]}: its node is at {address}")

    def ask(self) -> None:
        """Refresh the status of each node; a machine that doesn't answer keeps its last."""
        import ray

        asked = {machine: host.status.remote() for machine, host in self._hosts.items()}
        for machine, answer in asked.items():
            try:
                self.status[machine] = ray.get(answer, timeout=CALL_S)
            except ray.exceptions.RayError:
                self.status.setdefault(machine, {"state": "unreachable"})

    def leave(self) -> None:
        """Have all nodes leave."""
        import ray

        ray.wait(
            [host.leave.remote() for host in self._hosts.values()],
            num_returns=max(1, len(self._hosts)),
            timeout=GRACE_S + 5.0,
        )

    @property
    def done(self) -> bool:
        """Whether there are nodes, and all have ended."""
        return bool(self.status) and all("exit_code" in one for one in self.status.values())


def tell(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def line(address: str, status: dict[str, Any]) -> str:
    """One node in a line."""
    if "exit_code" in status:
        return f"{address}  ended with {status['exit_code']}"
    evaluated = (status.get("evaluation") or {}).get("mean")
    words = [address, str(status.get("state"))]
    words += [f"{status['swarm_env_steps']:,} steps of all"] if status.get("swarm_env_steps") else []
    words += [f"evaluated at {evaluated:.4g}"] if evaluated is not None else []
    return "  ".join(words)


def main() -> int:
    """Start nodes, follow them, and tell how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", help="of the cluster, or `auto`; without it Ray starts one here")
    parser.add_argument("--machines", type=int, default=0, help="at most so many; 0 for all")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each machine that Ray reserves")
    parser.add_argument("--gpus", type=float, default=0.0)
    parser.add_argument("--config", action="append", default=[], help="preset or file, as of `p2pdrl node`")
    parser.add_argument("node", nargs="*", help="after --: further options of `p2pdrl node`")
    arguments = parser.parse_args()
    arguments.node = [*(f"--config={name}" for name in arguments.config), *arguments.node]
    try:
        import ray
    except ImportError:
        tell("Ray isn't installed: pip install 'p2pdrl[ray]'")
        return 2
    ray.init(address=arguments.address, log_to_driver=False)
    cluster, told_s = Cluster(arguments), 0.0
    try:
        while not cluster.done:
            cluster.follow()
            cluster.ask()
            if time.monotonic() - told_s >= TELL_EVERY_S:
                told_s = time.monotonic()
                for machine, status in cluster.status.items():
                    tell(line(cluster.addresses.get(machine, machine[:8]), status))
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        tell("leaving")
        cluster.leave()
        cluster.ask()
        return 130
    finally:
        print(json.dumps({cluster.addresses.get(m, m): s for m, s in cluster.status.items()}, indent=2))
        ray.shutdown()
    return 0 if all(status["exit_code"] == 0 for status in cluster.status.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
