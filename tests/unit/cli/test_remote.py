"""``p2pdrl swarm up --hosts`` with an ``ssh`` that runs everything here, in a home folder for each host."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import p2pdrl as package
from p2pdrl.api.keyfile import write_swarm_key
from p2pdrl.cli.remote import RemoteFleet, Ssh, parse_hosts
from p2pdrl.errors import UsageError
from p2pdrl.transport.protocol import Address

FAKE_SSH = """#!{python}
import json, os, pathlib, subprocess, sys
words = sys.argv[1:]
cut = words.index("--")
options, target, remote = words[:cut], words[cut + 1], words[cut + 2:]
plan = json.loads(os.environ["FAKE_PLAN"])
host = target.rpartition("@")[2]
what = plan.get(host, "")
if "-G" in options:
    print("user somebody\\nhostname " + plan.get("address of " + host, host + ".lan"))
    sys.exit(0)
home = pathlib.Path(os.environ["FAKE_HOMES"], host)
home.mkdir(exist_ok=True)
with (home / "asked").open("a") as asked:
    asked.write(json.dumps(words) + "\\n")
if what == "down":
    print("ssh: connect to host " + host + " port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
if what == "no key":
    print("Host key verification failed.", file=sys.stderr)
    sys.exit(255)
path = "/usr/bin:/bin" if what == "without" else os.environ["FAKE_BIN"] + ":/usr/bin:/bin"
environ = dict(os.environ, HOME=str(home), PATH=path, FAKE_HOST=host)
if "-L" in options:
    environ["FAKE_PORT"] = options[options.index("-L") + 1].split(":")[1]
assert len(remote) == 1, "ssh joins words, and the host's shell splits them"
sys.exit(subprocess.run(["/bin/sh", "-c", remote[0]], cwd=home, env=environ).returncode)
"""

FAKE_PROGRAM = """#!{python}
import json, os, pathlib, signal, stat, sys, threading
plan = json.loads(os.environ["FAKE_PLAN"])
what = plan.get(os.environ["FAKE_HOST"], "")
if sys.argv[1] == "--version":
    print("p2pdrl " + (what.removeprefix("release ") if what.startswith("release ") else {release!r}))
    sys.exit(0)
home = pathlib.Path(os.environ["HOME"])
key = pathlib.Path("swarm.key")
told = {{"argv": sys.argv[1:], "key": key.read_text(), "cwd": os.getcwd()}}
told["mode"] = stat.S_IMODE(key.stat().st_mode)
told["files"] = {{path.name: path.read_text() for path in pathlib.Path().glob("*.toml")}}
(home / "told").write_text(json.dumps(told))
if what == "taken":
    print("p2pdrl: port 7700 is taken", file=sys.stderr)
    sys.exit(2)
sys.path.insert(0, {root!r})
import p2pdrl.testing.fake_node as testing
from p2pdrl.api.keyfile import read_swarm_keys
name = sys.argv[sys.argv.index("--name") + 1]
node = testing.FakeNode(name, swarm_key=read_swarm_keys(key).good(0.0)[0])
node.state["members"] = {{"alive": 1 if what == "alone" else 2}}
over = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=over.set).start())
real = testing.web.TCPSite
testing.web.TCPSite = lambda runner, h, p: real(runner, h, int(os.environ["FAKE_PORT"]))
data = pathlib.Path(sys.argv[sys.argv.index("--data-dir") + 1])
data.mkdir(parents=True)
with testing.ServedNode(node):
    (home / "up").write_text(str(os.getpid()))
    over.wait(None if plan.get("stays") else 1.5)
status = node.status() | {{"mean_return": 477.5, "pid": 1}}
(data / "summary.json").write_text(json.dumps({{"status": status}}))
print("the node says goodbye", file=sys.stderr)
sys.exit(5 if what == "fails" else 0)
"""


@pytest.fixture
def hosts(monkeypatch, tmp_path):
    """Put the fakes on the path; returns a function that sets what each host does."""
    homes, programs = tmp_path / "homes", tmp_path / "programs"
    for folder in (homes, programs, tmp_path / "bin"):
        folder.mkdir()
    given = {
        "python": sys.executable,
        "release": package.__version__,
        "root": str(Path(package.__file__).parents[1]),
    }
    for path, text in ((tmp_path / "bin" / "ssh", FAKE_SSH), (programs / "p2pdrl", FAKE_PROGRAM)):
        path.write_text(
            text.format(**given) if path.name == "p2pdrl" else text.replace("{python}", sys.executable)
        )
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_HOMES", str(homes))
    monkeypatch.setenv("FAKE_BIN", str(programs))
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def plan(**hosts: object) -> Path:
        monkeypatch.setenv(
            "FAKE_PLAN", json.dumps({name.replace("_of_", " of "): what for name, what in hosts.items()})
        )
        return homes

    plan()
    return plan


def told(homes: Path, host: str) -> dict:
    return json.loads((homes / host / "told").read_text())


def test_a_node_on_each_host_which_leaves_nothing(p2pdrl, hosts, tmp_path):
    homes = hosts()
    (tmp_path / "own.toml").write_text("[task.env]\nnum_envs = 3\n")
    result = p2pdrl(
        "swarm", "up", "--hosts", "alpha,me@beta:2222", "--config", "cartpole",
        "--config", str(tmp_path / "own.toml"), "--set", "task.seed=5", "--log-level", "debug", "--json",
        "--data-root", str(tmp_path / "here"),
        "--ssh-option", "IdentityFile=/k",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [(node["name"], node["exit_code"]) for node in document["nodes"]] == [("alpha", 0), ("beta", 0)]
    assert document["nodes"][0]["mean_return"] == 477.5
    key = (tmp_path / "here" / "swarm.key").read_text()
    for host in ("alpha", "beta"):
        node = told(homes, host)
        assert node["key"] == key
        assert node["mode"] == stat.S_IRUSR | stat.S_IWUSR
        assert node["files"] == {"config-1.toml": "[task.env]\nnum_envs = 3\n"}
        argv = " ".join(node["argv"])
        assert f"--listen 0.0.0.0:7700 --advertise {host}.lan:7700 --swarm-key-file swarm.key" in argv
        assert "--config cartpole --config config-1.toml --set task.seed=5 --log-level debug" in argv
        assert "--peers alpha.lan:7700 --peers beta.lan:7700" in argv
        assert not Path(node["cwd"]).exists(), "what is on a host is temporary"
        assert "goodbye" in (tmp_path / "here" / f"{host}.log").read_text()
        asked = (homes / host / "asked").read_text()
        assert key.split()[0] not in asked
        assert "IdentityFile=/k" in asked
    assert '"-p", "2222"' in (homes / "beta" / "asked").read_text()
    assert '"me@beta"' in (homes / "beta" / "asked").read_text()


def test_hosts_that_are_one_machine_get_ports_of_their_own(p2pdrl, hosts):
    homes = hosts(address_of_a="127.0.0.1", address_of_b="localhost")
    assert p2pdrl("swarm", "up", "--hosts", "a", "--hosts", "b", "--base-port", "7800").exit_code == 0
    for host, listen, advertised in (("a", 7800, "127.0.0.1:7800"), ("b", 7801, "localhost:7801")):
        argv = " ".join(told(homes, host)["argv"])
        assert f"--listen 127.0.0.1:{listen} --advertise {advertised} " in argv


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (
            {"b": "down"},
            "b can't be reached by ssh (ssh: connect to host b port 22: Connection refused): see that",
        ),
        (
            {"b": "no key"},
            "(Host key verification failed.): see that `ssh b true` works without asking anything",
        ),
        ({"b": "without"}, "b has no 'p2pdrl' for commands that ssh runs"),
        (
            {"b": "release 0.0.9"},
            f"b has p2pdrl 0.0.9, this machine {package.__version__}: install the same on all",
        ),
        ({"a": "down", "b": "without"}, "Connection refused"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(p2pdrl, hosts, plan, why):
    homes = hosts(**plan)
    result = p2pdrl("swarm", "up", "--hosts", "a,b")
    assert result.exit_code == 1
    assert why in result.stderr
    assert not (homes / "a" / "told").exists()
    if len(plan) == 2:
        assert "b has no 'p2pdrl'" in result.stderr, "all of it at once"


def test_another_release_is_taken_if_somebody_says_so(p2pdrl, hosts):
    hosts(b="release 0.0.9")
    assert p2pdrl("swarm", "up", "--hosts", "a,b", "--any-release").exit_code == 0


def test_a_port_that_is_taken(p2pdrl, hosts):
    hosts(b="taken", stays=True)
    result = p2pdrl("swarm", "up", "--hosts", "a,b")
    assert result.exit_code == 2, "as the node did"
    assert "b with 2); b said: port 7700 is taken" in result.stderr


def test_hosts_that_dont_find_each_other_are_waited_for_so_long(p2pdrl, hosts):
    homes = hosts(b="alone", stays=True)
    result = p2pdrl("swarm", "up", "--hosts", "a,b", "--within", "1s")
    assert result.exit_code == 1
    assert "aren't one swarm after 1 s" in result.stderr
    assert all(gone(homes, host) for host in "ab")


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ([{"members": {"alive": 2}, "lineage": "x"}, {}], "b doesn't answer"),
        (
            [{"members": {"alive": 2}, "lineage": "x"}, {"members": {"alive": 1}, "lineage": "x"}],
            "b sees 1 of 2",
        ),
        (
            [{"members": {"alive": 2}, "lineage": "x"}, {"members": {"alive": 2}, "lineage": "y"}],
            "several swarms",
        ),
        ([{"members": {"alive": 2}, "lineage": "x"}, {"members": {"alive": 2}, "lineage": "x"}], ""),
    ],
)
def test_why_hosts_arent_one_swarm(tmp_path, statuses, why):
    hosts = [replace(host, address=Address(host.name, 7700)) for host in parse_hosts(["a,b"])]
    fleet = RemoteFleet(
        tmp_path, [1, 2], [], hosts=hosts, ssh=Ssh(), files={}, swarm_key=b"", detach=True, within_s=60.0
    )
    fleet.members = [
        SimpleNamespace(name=name, status=status) for name, status in zip("ab", statuses, strict=True)
    ]
    assert fleet.trouble(59.0) == ""
    said = fleet.trouble(60.0)
    assert fleet.may_detach is not bool(why)
    assert (f"after 60 s ({why})" in said) if why else not said


def gone(homes: Path, host: str) -> bool:
    try:
        os.kill(int((homes / host / "up").read_text()), 0)
    except (ProcessLookupError, FileNotFoundError):
        return True
    return False


def test_detached_nodes_stay_until_they_are_ended(p2pdrl, hosts, tmp_path):
    homes = hosts(stays=True)
    write_swarm_key(tmp_path / "swarm.key")
    up = ("swarm", "up", "--hosts", "a,b", "--swarm-key-file", str(tmp_path / "swarm.key"))
    result = p2pdrl(*up, "--detach")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.split() == ["a", "a.lan:7700", "b", "b.lan:7700"]
    assert "p2pdrl swarm down --hosts a,b" in result.stderr
    assert not any(gone(homes, host) for host in "ab")
    again = p2pdrl(*up)
    assert again.exit_code == 1
    assert "a said: a node of an earlier run is still there: p2pdrl swarm down --hosts a" in again.stderr
    assert not any(gone(homes, host) for host in "ab")
    down = p2pdrl("swarm", "down", "--hosts", "a,b", "--json")
    assert [(row["host"], row["nodes"]) for row in json.loads(down.stdout)] == [("a", ["a"]), ("b", ["b"])]
    end = time.monotonic() + 10
    while not all(gone(homes, host) for host in "ab"):
        assert time.monotonic() < end
    assert not [*homes.rglob("swarm.key")]
    assert p2pdrl("swarm", "down", "--hosts", "a").stdout == "a: no node runs there\n"
    hosts(b="down")
    failed = p2pdrl("swarm", "down", "--hosts", "a,b")
    assert failed.exit_code == 1
    assert "not ended on b" in failed.stderr


def test_where_p2pdrl_is_on_the_hosts(p2pdrl, hosts, tmp_path):
    homes = hosts(a="without")
    (homes / "a").mkdir()
    (homes / "a" / "venv").symlink_to(tmp_path / "programs")
    result = p2pdrl("swarm", "up", "--hosts", "a", "--remote-command", "venv/p2pdrl", "--within", "60s")
    assert result.exit_code == 0, result.stderr
    assert told(homes, "a")["argv"][0] == "node"
    missing = p2pdrl("swarm", "up", "--hosts", "a", "--python", "/nowhere/python")
    assert "a has no '/nowhere/python -m p2pdrl'" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "or where: --hosts a,b"),
        (("2", "--hosts", "a"), "or where: --hosts a,b"),
        (("--hosts", ","), "--hosts names no host"),
        (("--hosts", "-oProxyCommand=x"), "is no host"),
        (("--hosts", "a b"), "is no host"),
        (("--hosts", "a:0"), "is no host"),
        (("--hosts", "a", "--detach"), "--detach wants --swarm-key-file or --data-root"),
        (("--hosts", "a", "--python", "p", "--remote-command", "c"), "give one"),
        (("--hosts", "a", "--config", "there-is-none.toml"), "there-is-none.toml"),
    ],
)
def test_what_makes_no_sense(p2pdrl, hosts, arguments, why):
    result = p2pdrl("swarm", "up", *arguments)
    assert result.exit_code == 2
    assert why in result.stderr


def test_hosts_are_read():
    read = [
        (host.target, host.ssh_port, host.name)
        for host in parse_hosts(["a,b", "me@c.lan:2222,[fe80::1],b:23"])
    ]
    assert read == [
        ("a", None, "a"), ("b", None, "b"), ("me@c.lan", 2222, "c.lan"), ("[fe80::1]", None, "fe80--1"),
        ("b", 23, "b~2"),
    ]  # fmt: skip
    for bad in ("a;b", "$(x)", "-x", "me@", "a:b:c", "ä"):
        with pytest.raises(UsageError, match="is no host"):
            parse_hosts([bad])


def test_without_ssh(p2pdrl, hosts, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = p2pdrl("swarm", "up", "--hosts", "a")
    assert result.exit_code == 1
    assert "there is no ssh on this machine's PATH" in result.stderr
