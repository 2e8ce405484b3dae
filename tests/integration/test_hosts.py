"""``p2pdrl swarm up --hosts`` over a real sshd, which stands for two machines on loopback."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SSHD = shutil.which("sshd") or next(
    (p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if Path(p).exists()), None
)
PRESET = ("--config", "cartpole", "--set", "node.learner.step_delay_s=0.01")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Hosts:
    """Two names of this machine, and a command that reaches them."""

    def __init__(self, folder: Path, port: int, known_hosts: Path, key: Path) -> None:
        self.folder = folder
        self.both = f"{getpass.getuser()}@127.0.0.1:{port},localhost:{port}"
        self.options = [
            f"IdentityFile={key}", f"UserKnownHostsFile={known_hosts}", "IdentitiesOnly=yes",
            "StrictHostKeyChecking=yes", "AddressFamily=inet",
        ]  # fmt: skip
        self.called = f"env PYTHONPATH={ROOT} P2PDRL_DATA_ROOT={folder} {sys.executable} -m p2pdrl"

    def command(self, what: str, *arguments: str) -> list[str]:
        """``swarm up`` or ``swarm down`` of both."""
        options = [part for option in self.options for part in ("--ssh-option", option)]
        options += ["--remote-command", self.called, "--remote-dir", str(self.folder / "there")]
        command = [sys.executable, "-m", "p2pdrl", "swarm", what, "--hosts", self.both]
        return [*command, *options, *arguments]

    def nodes(self) -> list[psutil.Process]:
        """The nodes that run there."""
        folder = str(self.folder / "there")
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "node" in words and "-c" not in words and any(word.startswith(folder) for word in words):
                found.append(process)
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if SSHD is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("wants OpenSSH's sshd, ssh and ssh-keygen: apt-get install openssh-server")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {public}\n[localhost]:{port} {public}\n")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\nUsePAM no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nAllowTcpForwarding local\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    log = (folder / "log").open("wb")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 10
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end, "sshd doesn't listen"
            time.sleep(0.05)
        made = Hosts(tmp_path, port, folder / "known_hosts", folder / "user")
        probe = ["ssh", "-o", "BatchMode=yes", *(p for o in made.options for p in ("-o", o)), "-p", str(port)]
        done = subprocess.run([*probe, "localhost", "true"], capture_output=True, text=True, check=False)
        if server.poll() is not None or done.returncode:
            pytest.skip(f"no sshd can be run here: {(folder / 'log').read_text()[-300:]}{done.stderr}")
        yield made
    finally:
        for node in Hosts(tmp_path, port, folder, folder).nodes():
            node.kill()
        for child in psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []:
            child.kill()
        server.kill()
        server.wait()
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_hosts_become_one_swarm_and_leave_with_the_command(hosts, tmp_path, wait_until):
    names = ("127.0.0.1", "localhost")
    (tmp_path / "own.toml").write_text("[task.env]\nnum_envs = 3\n")
    port = free_port()
    arguments = ["--config", str(tmp_path / "own.toml"), "--base-port", str(port)]
    arguments += ["--data-root", str(tmp_path / "here")]
    with (tmp_path / "said").open("w+") as said, (tmp_path / "shown").open("w+") as shown:
        up = subprocess.Popen(hosts.command("up", *arguments, "--json"), stdout=said, stderr=shown)
        try:
            wait_until(
                lambda: "2 alive" in (tmp_path / "shown").read_text() or up.poll() is not None,
                100,
                "they are one swarm",
            )
            assert up.poll() is None, (tmp_path / "shown").read_text()
            key = (tmp_path / "here" / "swarm.key").read_text().split()[0]
            for name in names:
                there = tmp_path / "there" / name / "swarm.key"
                assert there.read_text().split()[0] == key
                assert there.stat().st_mode & 0o777 == 0o600
            every = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
            assert not [line for line in every if key in line]
            assert len(hosts.nodes()) == 2
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0, (tmp_path / "shown").read_text()
        finally:
            up.kill()
            up.wait()
    document = json.loads((tmp_path / "said").read_text())
    assert [node["exit_code"] for node in document["nodes"]] == [0, 0]
    assert {node["name"] for node in document["nodes"]} == {*names}
    own = (tmp_path / "own.toml").read_text()
    assert all((tmp_path / "there" / name / "config-0.toml").read_text() == own for name in names)
    assert not hosts.nodes()
    assert not list((tmp_path / "there").rglob("swarm.key"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_left_behind_on_purpose_is_ended_and_nothing_else(hosts, tmp_path, wait_until):
    port = free_port()
    arguments = ["--base-port", str(port), "--data-root", str(tmp_path / "here"), "--json"]
    detached = subprocess.run(
        hosts.command("up", "--detach", *arguments), capture_output=True, text=True, timeout=150, check=False
    )
    assert detached.returncode == 0, detached.stderr
    addresses = [node["address"] for node in json.loads(detached.stdout)["nodes"]]
    assert addresses == [f"127.0.0.1:{port}", f"localhost:{port + 1}"]
    assert len(hosts.nodes()) == 2
    again = subprocess.run(
        hosts.command("up", *arguments), capture_output=True, text=True, timeout=150, check=False
    )
    assert again.returncode == 1
    assert "a node of an earlier run is still there: p2pdrl swarm down --hosts" in again.stderr
    assert len(hosts.nodes()) == 2
    down = subprocess.run(
        hosts.command("down", "--json"), capture_output=True, text=True, timeout=150, check=False
    )
    assert down.returncode == 0, down.stderr
    ended = [sorted(row["nodes"]) for row in json.loads(down.stdout)]
    assert sorted(name for row in ended for name in row) == ["127.0.0.1", "localhost"]
    assert not hosts.nodes()
    assert "goodbye" in (tmp_path / "there" / "localhost" / "log").read_text()
    up = subprocess.Popen(
        hosts.command("up", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: len(hosts.nodes()) == 2, 60, "they run")
    finally:
        up.kill()
        up.wait()
    wait_until(lambda: not hosts.nodes(), 60, "no node outlives a command that was killed")
