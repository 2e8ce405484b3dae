"""Real nodes on networks of their own: namespaces that a virtual switch connects. Wants root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

PACE = ["--set", "node.learner.max_updates_per_s=4", "--set", "task.stop.env_steps=0"]


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Networks:
    """Machines ``m0``, ``m1``, … at 10.77.0.1, .2, …; `node` starts a node on one of them."""

    def __init__(self, folder, count):
        self.folder = folder
        self.tag = f"p{os.getpid() % 10000}"
        self.processes = []
        self.key = folder / "key"
        subprocess.run([sys.executable, "-m", "p2pdrl", "keygen", self.key], check=True, capture_output=True)
        self.names = [f"{self.tag}m{i}" for i in range(count)]
        self.switch = f"{self.tag}sw"

    def build(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "name", "bridge0", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            pair = ("type", "veth", "peer", "name", f"port{number}", "netns", self.switch)
            ip("-n", name, "link", "add", "name", "eth0", *pair)
            ip("-n", self.switch, "link", "set", f"port{number}", "master", "bridge0", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def start(self, machine, *arguments):
        command = ["ip", "netns", "exec", self.names[machine], sys.executable, "-m", "p2pdrl", "node"]
        command += ["--name", f"m{machine}", "--data-dir", str(self.folder / f"m{machine}")]
        command += ["--listen", "0.0.0.0:7700", "--swarm-key-file", str(self.key), *arguments]
        with (self.folder / f"m{machine}.log").open("ab") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))

    def told(self, machine, kind):
        text = (self.folder / f"m{machine}.log").read_text(errors="replace")
        events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [event for event in events if event.get("kind") == kind]

    def peers(self, machine):
        command = [
            "ip",
            "netns",
            "exec",
            self.names[machine],
            sys.executable,
            "-m",
            "p2pdrl",
            "peers",
            "--json",
        ]
        command += ["--data-dir", str(self.folder / f"m{machine}")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return {row["name"]: row for row in json.loads(done.stdout)} if done.stdout.startswith("[") else {}

    def ask(self, machine, *words):
        """Run a command on a machine."""
        command = ["ip", "netns", "exec", self.names[machine], sys.executable, "-m", "p2pdrl", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        for name in (*self.names, self.switch):
            ip("netns", "del", name, check=False)


@pytest.fixture
def networks(tmp_path):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces want root and iproute2")
    made = Networks(tmp_path, 3)
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(f"this machine has no network namespaces: {error.stderr}")
    yield made
    made.close()


def test_a_node_whose_machine_gets_another_address_tells_the_others(networks, wait_until):
    networks.start(0, *PACE)
    for machine in (1, 2):
        networks.start(machine, "--peers", "10.77.0.1:7700")
    wait_until(lambda: len(networks.peers(0)) == 3, 60, "all three are there")
    wait_until(lambda: networks.told(1, "training"), 60, "it trains")

    name = networks.names[1]
    ip("-n", name, "addr", "del", "10.77.0.2/24", "dev", "eth0")
    ip("-n", name, "addr", "add", "10.77.0.99/24", "dev", "eth0")
    began_s = time.monotonic()
    for machine in (0, 2):
        wait_until(
            lambda machine=machine: networks.peers(machine)["m1"]["address"] == "10.77.0.99:7700",
            30,
            "the others know the new address",
        )
    print(f"known to both after {time.monotonic() - began_s:.1f} s")
    wait_until(lambda: networks.peers(0)["m1"]["state"] == "alive", 10, "it is alive")
    assert networks.told(1, "moved")
    for machine in (0, 2):
        assert not [event for event in networks.told(machine, "dead") if "m1" in str(event)]


def test_commands_reach_another_machine_by_the_swarms_key(networks, wait_until, tmp_path):
    """Over TLS: neither the key nor what is told can be read on the way, and no other key will do."""
    networks.start(0, *PACE)
    wait_until(lambda: networks.told(0, "training"), 60, "it trains")
    other = tmp_path / "other.key"
    networks.ask(1, "keygen", str(other))
    there = ["status", "--api", "10.77.0.1:7700"]
    good = networks.ask(1, *there, "--json", "--swarm-key-file", str(networks.key))
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["name"] == "m0"
    for wrong in (["--swarm-key-file", str(other)], []):
        refused = networks.ask(1, *there, *wrong)
        assert refused.returncode == 2, refused.stderr
        assert "doesn't let us in" in refused.stderr
        assert refused.stderr.count("\n") == 1


def drop_what_comes_in(networks, machine):
    """As a router does: connections from outside aren't answered, those from inside work."""
    rules = (
        "add table inet router",
        "add chain inet router input { type filter hook input priority 0; policy accept; }",
        'add rule inet router input iifname "eth0" ct state new tcp flags syn drop',
    )
    for rule in rules:
        ip("netns", "exec", networks.names[machine], "nft", rule)


@pytest.mark.parametrize("seconds", [20, 600])
def test_a_machine_that_drops_what_comes_in_trains_and_is_never_dead(networks, wait_until, seconds):
    if shutil.which("nft") is None:
        pytest.skip("dropping connections wants nft")
    drop_what_comes_in(networks, 2)
    networks.start(0, *PACE, "--advertise", "10.77.0.1:7700")
    networks.start(1, *PACE, "--peers", "10.77.0.1:7700")
    for machine in (0, 1):
        wait_until(lambda machine=machine: networks.told(machine, "training"), 150, "it trains")
    networks.start(2, *PACE, "--peers", "10.77.0.1:7700")
    began_s = time.monotonic()
    wait_until(lambda: networks.told(2, "training"), 150, "it trains behind a router")
    for machine in range(3):
        wait_until(
            lambda machine=machine: set(networks.peers(machine)["m2"]["relays"]) == {"m0", "m1"},
            30,
            f"m{machine} shows it",
        )
    shown = networks.ask(0, "peers", "--data-dir", str(networks.folder / "m0")).stdout
    assert "outbound-only" in shown
    assert "gets no answer" in networks.told(2, "outbound-only")[0]["event"]

    def exchanges():
        status = ["status", "--json", "--data-dir", str(networks.folder / "m2")]
        return json.loads(networks.ask(2, *status).stdout)["exchanges"]

    before = exchanges()
    time.sleep(max(0.0, seconds - (time.monotonic() - began_s)))
    after = exchanges()
    print(f"exchanges of m2 in {seconds} s: {before} -> {after}")
    for word in ("ok", "answered"):
        assert after.get(word, 0) > before.get(word, 0), (word, before, after)
    about = [e for m in (0, 1) for e in networks.told(m, "member-suspect") if "m2" in e["event"]]
    print(f"suspicions of m2: {len(about)}")
    for machine in (0, 1):
        dead = [event for event in networks.told(machine, "member-dead") if "m2" in event["event"]]
        assert not dead, dead
    assert not networks.told(2, "member-dead")
