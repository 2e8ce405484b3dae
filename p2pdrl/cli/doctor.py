"""The checks of ``p2pdrl doctor``: each looks at one thing and says what to do when it isn't good."""

from __future__ import annotations

import http.client
import os
import resource
import secrets
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

import click
import msgspec

from p2pdrl.api.client import NodeClient, parse_api
from p2pdrl.api.keyfile import SwarmKeys, read_swarm_keys
from p2pdrl.cli.formats import byte_size, clean
from p2pdrl.cli.options import json_option, split_addresses
from p2pdrl.cli.tables import Column, Listing, show
from p2pdrl.errors import DaemonUnreachableError, P2PDRLError, UnhealthyError, UsageError
from p2pdrl.telemetry.progress import ProgressLine
from p2pdrl.transport.protocol import Address
from p2pdrl.versions import SPOKEN, ProtocolRange, refuse_protocol

__all__ = ["Check", "checks_table", "doctor", "machine_checks", "membership_checks", "peer_checks"]

_PROBE_BYTES = 64 << 20
_LITTLE_MEMORY_BYTES = 1 << 30
_LITTLE_DISK_BYTES = 1 << 30
_FEW_FILES = 1024
_SKEW_WARN_S, _SKEW_FAIL_S = 10.0, 55.0
"""Signed requests count for 60 s around our clock; an answer's date has whole seconds."""


class Check(msgspec.Struct, frozen=True):
    """The outcome of one check.

    Attributes:
        result: ``fail`` keeps a node from running or joining; ``warn`` may hurt.
        advice: what to do; empty when all is well.
    """

    name: str
    result: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def machine_checks(data_dir: str | None, listen: str) -> list[Check]:
    """Check this machine for a node with this data folder (None: the user's default) and address."""
    return [
        _python(),
        _torch(),
        _processors(),
        _memory(),
        _shared_memory(),
        _data_folder(data_dir),
        _open_files(),
        _port(listen),
        _gpu(),
    ]


def membership_checks(folder: Path, wall_s: float) -> tuple[list[Check], ssl.SSLContext | None]:
    """Check what a node that was invited holds, if this folder is one's, and how it shows that to peers."""
    try:
        if not (folder / "membership.json").exists():
            return [], None
    except OSError:
        return [], None  # as the check of the data folder says
    from p2pdrl.membership.identity import Identity
    from p2pdrl.node.bootstrap.invited import read_membership

    name, advice = "membership", "ask for another invite: p2pdrl node --join LINE"
    try:
        member = read_membership(folder)
        if member is None:
            return [], None
        tls = Identity.load_or_create(folder).tls(member.credentials)
    except (P2PDRLError, OSError, ValueError) as error:
        return [Check(name, "fail", str(error), advice)], None
    found = f"of swarm {member.grant.swarm}, by invite"
    if member.roles is not None:
        found += f", as {' and '.join(sorted(member.roles))} alone"
    if member.until_s is None:
        return [Check(name, "ok", found)], tls.client
    found += f", until {time.strftime('%Y-%m-%d %H:%M', time.localtime(member.until_s))}"
    if wall_s >= member.until_s:
        return [Check(name, "fail", found, advice)], tls.client
    return [Check(name, "ok", found)], tls.client


def peer_checks(
    address: str,
    swarm_keys: SwarmKeys | None,
    timeout_s: float = 5.0,
    *,
    listen: str | None = None,
    member: ssl.SSLContext | None = None,
) -> list[Check]:
    """Check one peer: reachable, same protocol, same swarm, same time; and whether it can dial us back.

    Args:
        listen: where this machine listens, or will; None tries no dial-back.
        member: shows our certificate, where we were invited and hold no key.
    """
    where = parse_api(address)
    shown = None if swarm_keys is None else swarm_keys.good(time.time())[0]
    client = NodeClient(where, swarm_key=shown, timeout_s=timeout_s)
    name = f"peer {where}"
    try:
        health = client.health()
    except DaemonUnreachableError as error:
        return [
            Check(
                name,
                "fail",
                str(error).partition(": ")[0],
                "start it, mend the address, or open the port in the firewall",
            )
        ]
    theirs = ProtocolRange.parse(str(health.get("protocols") or health.get("protocol")))
    checks = [Check(name, "ok", "answers")]
    reason = "it tells no protocol" if theirs is None else refuse_protocol(SPOKEN, theirs)
    if reason is not None:
        found, _, todo = reason.partition(": ")
        checks.append(Check(f"{name} protocol", "fail", found, todo or "look what runs there"))
    if swarm_keys is None and member is not None:
        return [*checks, _clock(name, client), _certified(name, where, member, timeout_s)]
    checks += [_clock(name, client), _swarm(name, client, swarm_keys)]
    return checks if listen is None else [*checks, _dialled_back(name, client, listen)]


def _python() -> Check:
    found = f"{sys.version.split()[0]} on {sys.platform}"
    if sys.platform == "win32":
        return Check(
            "python", "fail", found, "use Linux, macOS or WSL: nodes share memory by file descriptors"
        )
    return Check("python", "ok", found)


def _torch() -> Check:
    try:
        return Check("torch", "ok", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return Check(
            "torch", "fail", "not installed", "pip install torch (see constraints.txt for a tried version)"
        )


def _processors() -> Check:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{usable} usable, load {load:.1f}"
    if load > 2 * usable:
        return Check(
            "processors", "warn", found, "the machine is busy: a node that lags may be taken for dead"
        )
    return Check("processors", "ok", found)


def _memory() -> Check:
    import psutil

    free = psutil.virtual_memory().available
    found = f"{byte_size(free)} available"
    if free < _LITTLE_MEMORY_BYTES:
        return Check(
            "memory", "warn", found, "a node with its learner wants about 500 MB: end something else"
        )
    return Check("memory", "ok", found)


def _shared_memory() -> Check:
    """What the board between daemon and learner needs: an anonymous file, really written."""
    how = "memfd" if hasattr(os, "memfd_create") else "unlinked file"
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("p2pdrl-doctor")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        try:
            os.posix_fallocate(descriptor, 0, _PROBE_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        advice = "raise the container's memory limit (a board takes 8 bytes per parameter)"
        return Check("shared memory", "fail", f"{how}: {error.strerror}", advice)
    return Check("shared memory", "ok", f"{how}, {byte_size(_PROBE_BYTES)} could be had")


def _root() -> Path:
    """Where the data folders of this user's nodes are."""
    import platformdirs

    return Path(os.environ.get("P2PDRL_DATA_ROOT") or platformdirs.user_data_dir("p2pdrl"))


def _data_folder(data_dir: str | None) -> Check:
    folder = _root() if data_dir is None else Path(data_dir).expanduser()
    try:
        there = next(path for path in [folder, *folder.absolute().parents] if path.exists())
        with tempfile.NamedTemporaryFile(dir=there) as file:
            file.write(b"p2pdrl")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(there).free
    except OSError as error:
        advice = "name another folder with --data-dir, or mend its permissions"
        return Check("data folder", "fail", f"{folder}: {error.strerror}", advice)
    if free < _LITTLE_DISK_BYTES:
        return Check(
            "data folder", "warn", f"{folder}: {byte_size(free)} free", "checkpoints may not fit: free space"
        )
    return Check("data folder", "ok", f"{folder}, {byte_size(free)} free")


def _open_files() -> Check:
    """How many files and connections a node may have open: it raises the soft limit by itself."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= _FEW_FILES:
        return Check("open files", "ok", "no limit" if most == resource.RLIM_INFINITY else f"{most} allowed")
    advice = (
        f"raise the limit (ulimit -Hn {_FEW_FILES}, or LimitNOFILE of systemd), or take fewer connections"
    )
    return Check("open files", "warn", f"{most} allowed, fewer than a node's 512 connections want", advice)


def _port(listen: str) -> Check:
    where = parse_api(listen)
    try:
        family, kind, _, _, address = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        advice = "name an address of this machine: 127.0.0.1 for itself, 0.0.0.0 for all"
        return Check("port", "fail", f"{where}: {(error.strerror or str(error)).lower()}", advice)
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if _is_node(where):
            return Check("port", "ok", f"a node listens at {where}; another takes the next free port")
        advice = "a node takes the next free port by itself, unless --listen names this one"
        return Check("port", "warn", f"{where}: {(error.strerror or str(error)).lower()}", advice)
    return Check("port", "ok", f"{where} is free")


def _is_node(where: Address) -> bool:
    """Whether a node of ours answers there."""
    try:
        return "protocol" in NodeClient(where, timeout_s=2.0).health()
    except P2PDRLError:
        return False


def _gpu() -> Check:
    """Asks the driver's own tool: importing torch for this would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("gpu", "ok", "none seen; learners run on the CPU")
    try:
        # The full path of the tool and constants: nothing goes through a shell.
        done = subprocess.run(  # noqa: S603
            [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("gpu", "warn", f"nvidia-smi: {error}", "mend the driver, or run with --device cpu")
    names = [clean(line, 60) for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not names:
        return Check("gpu", "warn", "nvidia-smi finds none", "mend the driver, or run with --device cpu")
    return Check("gpu", "ok", "; ".join(names[:8]))


def _clock(name: str, client: NodeClient) -> Check:
    """The peer's clock against ours, from the date of its answer."""
    began_s = time.time()
    date = client.date()
    try:
        theirs_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return Check(f"{name} clock", "warn", "tells no time", "look at both clocks by hand")
    # The date is cut to whole seconds: on average it is half a second behind.
    skew_s = theirs_s + 0.5 - (began_s + time.time()) / 2
    found = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} ours"
    if abs(skew_s) < _SKEW_WARN_S:
        return Check(f"{name} clock", "ok", found)
    advice = "set both clocks by NTP: requests older than 60 s are refused"
    return Check(f"{name} clock", "fail" if abs(skew_s) > _SKEW_FAIL_S else "warn", found, advice)


def _swarm(name: str, client: NodeClient, swarm_keys: SwarmKeys | None) -> Check:
    """Whether its swarm's key is ours."""
    name = f"{name} swarm"
    try:
        status = client.status()
    except UsageError:
        if swarm_keys is None:
            return Check(name, "fail", "has a swarm key", "give the same key with --swarm-key-file")
        return Check(
            name, "fail", "refuses our swarm key", "copy its key file, or name the right one; see clock"
        )
    except P2PDRLError as error:
        return Check(name, "fail", str(error), "look at that node's log")
    swarm_id = clean(status.get("swarm_id"), 16)
    if swarm_keys is not None and swarm_id != swarm_keys.swarm_id:
        return Check(name, "fail", f"{swarm_id} isn't our key's swarm", "start both with one swarm key")
    if swarm_keys is None:
        return Check(name, "ok", f"{swarm_id}, without a key")
    return Check(name, "ok", f"{swarm_id}, our key")


def _certified(name: str, where: Address, member: ssl.SSLContext, timeout_s: float) -> Check:
    """Whether the peer takes our certificate, and we its."""
    name, advice = f"{name} swarm", "has it our swarm, or was its key replaced? ask for another invite"
    connection = http.client.HTTPSConnection(where.host, where.port, timeout=timeout_s, context=member)
    try:
        connection.request("GET", "/healthz")
        connection.getresponse().read()
    except ssl.SSLCertVerificationError:
        return Check(name, "fail", "is no member of our swarm", advice)
    except (OSError, http.client.HTTPException) as error:
        return Check(name, "fail", f"doesn't take our certificate ({str(error)[:100]})", advice)
    finally:
        connection.close()
    return Check(name, "ok", "takes our certificate, and shows one of our swarm")


_HEARS_S = 5.0


def _dialled_back(name: str, client: NodeClient, listen: str) -> Check:
    """Whether the peer can connect to where a node will listen here; where one does, what that knows."""
    from p2pdrl.transport.dial import is_loopback

    name = f"{name} dials back"
    where = parse_api(listen)
    nonce = secrets.token_hex(16)
    try:
        listening = _listening(where)
    except OSError:
        return _of_running_node(name, where)
    with listening, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(_hears, listening, nonce)
        try:
            told = client.post(f"/v1/dial-back?port={listening.getsockname()[1]}&nonce={nonce}")
        except P2PDRLError as error:
            listening.shutdown(socket.SHUT_RDWR)
            return Check(name, "warn", f"wasn't tried: {error}", "see the checks of its swarm and clock")
        if told.get("connected") is not True:
            listening.shutdown(socket.SHUT_RDWR)
        if heard.result() and told.get("connected") is True:
            return Check(name, "ok", f"reaches port {where.port} of this machine")
        loopback = is_loopback(where.host) and not is_loopback(client.address.host)
    if loopback:
        advice = "let the node listen for others: --listen 0.0.0.0:7700, with the swarm's key"
        return Check(name, "warn", f"can't reach {where}, which is loopback", advice)
    why = clean(told.get("why") or "the connection came to somebody else", 200)
    return Check(name, "warn", why, _MENDS_REACH.format(port=where.port))


_MENDS_REACH = (
    "a node works all the same: it is called through relays. For a direct connection forward port {port} "
    "of the router to this machine (node.port_mapping asks it to), or open it in the firewall"
)


def _listening(where: Address) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(8)
    except OSError:
        sock.close()
        raise
    return sock


def _hears(listening: socket.socket, nonce: str) -> bool:
    """Whether somebody connects and says ``nonce``."""
    from p2pdrl.transport.dial import DIALED_BACK

    wanted = DIALED_BACK + nonce.encode() + b"\n"
    end_s = time.monotonic() + _HEARS_S
    try:
        while (left_s := end_s - time.monotonic()) > 0:
            listening.settimeout(left_s)
            sock, _ = listening.accept()
            with sock:
                sock.settimeout(1.0)
                heard = b""
                while len(heard) < len(wanted) and (more := sock.recv(len(wanted) - len(heard))):
                    heard += more
                if heard == wanted:
                    return True
    except OSError:
        pass  # nobody came
    return False


def _of_running_node(name: str, where: Address) -> Check:
    """What the node that listens there knows of how others reach it."""
    try:
        reach = NodeClient(where).status().get("reach")
    except P2PDRLError:
        reach = None
    if not isinstance(reach, dict):
        return Check(
            name, "warn", f"wasn't tried: {where} is taken", "stop what listens there, and ask again"
        )
    if reach.get("state") == "outbound-only":
        relays = ", ".join(clean(relay, 64) for relay in reach.get("relays") or []) or "no relay"
        why = clean(reach.get("why"), 200)
        found = f"the node that runs here is outbound-only, called through {relays}: {why}"
        return Check(name, "warn", found, _MENDS_REACH.format(port=where.port))
    if reach.get("state") == "direct":
        return Check(name, "ok", "others can dial the node that runs here")
    return Check(name, "ok", "a node runs here, and nobody has tried to dial it yet")


def _operators(keys: SwarmKeys) -> Check:
    """Whether anybody in particular commands the swarm."""
    if not keys.operators:
        advice = "name one: `p2pdrl key rotate FILE --add-operator KEY:NAME`"
        return Check("operators", "warn", "none: whoever holds the key may command the swarm", advice)
    return Check("operators", "ok", ", ".join(operator.words for operator in keys.operators))


_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


def checks_table(checks: Sequence[Check]) -> Listing:
    """One line per check, and one for what is to be done."""
    from rich.text import Text

    rows: list[tuple[str | Text, str, str]] = []
    for check in checks:
        rows.append((Text(check.result, _STYLE[check.result]), check.name, check.found))
        if check.advice:
            rows.append(("", "", f"→ {check.advice}"))
    name, found = Column("check", least=24, wraps="short"), Column("found", least=30, wraps="fold")
    return Listing([Column("result"), name, found], rows, headers=False)


@click.command()
@click.option(
    "--peers", multiple=True, metavar="HOST:PORT[,…]", help="Peers that must be reachable. Repeatable."
)
@click.option(
    "--listen",
    default="127.0.0.1:7700",
    show_default=True,
    metavar="HOST:PORT",
    help="Where a node will listen.",
)
@click.option("--data-dir", metavar="FOLDER", help="Data folder that a node will use.")
@click.option(
    "--swarm-key-file",
    envvar="P2PDRL_SWARM_KEY_FILE",
    metavar="FILE",
    help="The swarm's key, to compare with the peers'.  [env: P2PDRL_SWARM_KEY_FILE]",
)
@json_option
def doctor(
    *, peers: tuple[str, ...], listen: str, data_dir: str | None, swarm_key_file: str | None, as_json: bool
) -> None:
    """Check this machine, and the way to the peers.

    They are asked to dial this machine, too.

    Each line says ok, warn or fail, and what to do. The exit code is 4 if anything fails.
    """  # fmt: skip
    keys = read_swarm_keys(swarm_key_file) if swarm_key_file else None
    addresses = split_addresses(peers)
    for address in addresses:
        parse_api(address)  # a bad one fails before anything is looked at
    folder = _root() / "node-1" if data_dir is None else Path(data_dir).expanduser()
    invited, member = membership_checks(folder, time.time()) if keys is None else ([], None)
    checks = [*machine_checks(data_dir, listen), *invited]
    if keys is not None:
        checks.append(_operators(keys))
    with ProgressLine() as progress:
        if addresses:
            progress.part("asking the peers")
        for done, address in enumerate(addresses):
            checks += peer_checks(address, keys, listen=listen, member=member)
            progress.at(done + 1, len(addresses))
    failed = sum(check.result == "fail" for check in checks)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"ok": not failed, "checks": checks}), indent=2))
    else:
        show(checks_table(checks))
    if failed:
        raise UnhealthyError(f"{failed} of {len(checks)} checks failed")
