"""``p2pdrl doctor``: each check, and the exit code."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import time
from importlib import metadata
from pathlib import Path

import pytest

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import read_swarm_keys, write_swarm_key
from p2pdrl.cli import doctor
from p2pdrl.testing.fake_node import FakeNode, ServedNode
from p2pdrl.versions import ProtocolRange


def machine(name: str, data_dir: str | None = None, listen: str = "127.0.0.1:47946") -> doctor.Check:
    """One of the checks of this machine."""
    return next(check for check in doctor.machine_checks(data_dir, listen) if check.name == name)


def results(found):
    return {check.name: check.result for check in found}


def test_this_machine_is_checked(p2pdrl, tmp_path):
    result = p2pdrl("doctor", "--json", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0")
    assert result.exit_code == 2  # port 0 is no port to ask for
    result = p2pdrl("doctor", "--json", "--data-dir", str(tmp_path))
    document = json.loads(result.stdout)
    assert {"python", "torch", "memory", "shared memory", "data folder", "port", "gpu"} <= {
        check["name"] for check in document["checks"]
    }
    assert document["ok"] is (result.exit_code == 0)


def test_a_taken_port_is_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = machine("port", listen="{}:{}".format(*server.getsockname()))
    assert check.result == "warn"
    assert check.advice


def test_a_port_where_a_node_runs_is_fine():
    with ServedNode(FakeNode()) as served:
        check = machine("port", listen=served.address)
    assert (check.result, check.advice) == ("ok", "")
    assert f"a node listens at {served.address}" in check.found


def test_a_data_folder_that_cant_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("")
    assert machine("data folder", str(tmp_path / "file" / "x")).result == "fail"
    assert machine("data folder", str(tmp_path / "new" / "x")).result == "ok"
    assert not (tmp_path / "new").exists()


def test_a_data_folder_that_cant_be_read_fails(p2pdrl, tmp_path, monkeypatch):
    """Modes don't hold for root, so the system's answer is given by the test."""
    real = Path.exists

    def exists(path, **options):
        if tmp_path in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(Path, "exists", exists)
    assert doctor.membership_checks(tmp_path, 0.0) == ([], None)
    result = p2pdrl("doctor", "--json", "--data-dir", str(tmp_path / "x"))
    assert result.exit_code == 4
    (check,) = [one for one in json.loads(result.stdout)["checks"] if one["name"] == "data folder"]
    assert (check["result"], check["found"]) == ("fail", f"{tmp_path / 'x'}: Permission denied")


def test_missing_torch_fails(monkeypatch):
    def missing(_name):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    assert machine("torch").result == "fail"


def test_a_busy_machine_warns(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (10_000.0, 0, 0))
    assert machine("processors").result == "warn"


@pytest.mark.parametrize(
    ("code", "out", "expected"), [(0, r"H200, 143771 MiB\n", "ok"), (9, "", "warn"), (0, "", "warn")]
)
def test_gpus_are_counted_by_the_drivers_tool(monkeypatch, tmp_path, code, out, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{out}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine("gpu").result == expected


def test_a_good_peer(served):
    assert set(results(doctor.peer_checks(served.address, None)).values()) == {"ok"}


def test_an_unreachable_peer_fails_the_command(p2pdrl, free_address):
    result = p2pdrl("doctor", "--peers", free_address)
    assert result.exit_code == 4
    assert free_address in result.stdout
    assert "→" in result.stdout


def test_swarm_keys_are_compared(tmp_path):
    for name in ["ours", "theirs"]:
        write_swarm_key(tmp_path / name)
    ours, theirs = read_swarm_keys(tmp_path / "ours"), read_swarm_keys(tmp_path / "theirs")
    node = FakeNode(swarm_key=theirs.good(0.0)[0])
    node.state["swarm_id"] = theirs.swarm_id
    with ServedNode(node) as served:
        name = f"peer {served.address} swarm"
        assert results(doctor.peer_checks(served.address, theirs))[name] == "ok"
        assert results(doctor.peer_checks(served.address, ours))[name] == "fail"
        assert results(doctor.peer_checks(served.address, None))[name] == "fail"
        node.swarm_keys = ()
        assert results(doctor.peer_checks(served.address, ours))[name] == "fail"


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        ("Tue, 14 Nov 2023 22:13:20 GMT", "ok"), ("Tue, 14 Nov 2023 22:13:50 GMT", "warn"),
        ("Tue, 14 Nov 2023 22:10:00 GMT", "fail"), ("", "warn"), ("soon", "warn"),
    ],
)  # fmt: skip
def test_clocks_are_compared(served, monkeypatch, date, expected):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.5)
    monkeypatch.setattr(NodeClient, "date", lambda _: date)
    assert results(doctor.peer_checks(served.address, None))[f"peer {served.address} clock"] == expected


def test_another_protocol_fails(served, monkeypatch):
    monkeypatch.setattr(doctor, "SPOKEN", ProtocolRange(98, 99))
    assert results(doctor.peer_checks(served.address, None))[f"peer {served.address} protocol"] == "fail"


def dialled_back(served, listen):
    found = doctor.peer_checks(served.address, None, listen=listen)
    return next(check for check in found if check.name.endswith("dials back"))


def test_a_peer_dials_the_port_where_a_node_will_listen(free_address, tmp_path):
    with ServedNode(FakeNode()) as served:
        assert "wasn't tried" in dialled_back(served, free_address).found  # without its token
    (tmp_path / "token").write_text("7" * 64)
    with ServedNode(FakeNode(data_dir=str(tmp_path))) as served:
        check = dialled_back(served, free_address)
        assert (check.result, check.advice) == ("ok", "")
        served.node.dialled_why = "a connection to 203.0.113.9:7700 gets no answer"
        check = dialled_back(served, free_address)
        assert check.result == "warn"
        assert "gets no answer" in check.found
        assert "through relays" in check.advice
        assert f"forward port {free_address.rpartition(':')[2]}" in check.advice


def test_a_node_that_runs_tells_how_it_is_reached():
    with ServedNode(FakeNode("here")) as here, ServedNode(FakeNode()) as peer:
        here.node.state["reach"] = {"state": "outbound-only", "why": "it is refused", "relays": ["n1", "n2"]}
        check = dialled_back(peer, here.address)
        assert check.result == "warn"
        assert "outbound-only, called through n1, n2: it is refused" in check.found
        here.node.state["reach"] = {"state": "direct"}
        assert dialled_back(peer, here.address).result == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken, ServedNode(FakeNode()) as peer:
        check = dialled_back(peer, "{}:{}".format(*taken.getsockname()))
        assert check.result == "warn"
        assert "taken" in check.found


def test_few_open_files_are_a_warning(monkeypatch):
    assert machine("open files").result == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    check = machine("open files")
    assert check.result == "warn"
    assert "ulimit" in check.advice
