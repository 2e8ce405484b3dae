"""Training from Python: ``p2pdrl.train`` starts a node as a child process and hands out a `Run`.

The node is the ordinary daemon, with an asyncio loop and signal handlers of its own, so nothing here minds
what else runs in the caller's process: a notebook's loop, threads, other signal handlers. It ends with the
`Run`: by `Run.stop`, at the end of a ``with``, when the `Run` is forgotten, when the interpreter exits. Where
the process is killed, the node sees that its parent is gone and leaves the swarm by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from p2pdrl.api.checkpoints import checkpoint_to_start_from
from p2pdrl.config.environments import imports_of, require_runnable
from p2pdrl.config.loader import Resolved, resolve
from p2pdrl.errors import (
    DaemonUnreachableError,
    P2PDRLError,
    StorageError,
    UnhealthyError,
    UsageError,
    WorkerError,
)
from p2pdrl.library.client import Client, EvaluationRow, NodeStatus, told
from p2pdrl.library.names import env_entry, is_registered, network_entry, search_path
from p2pdrl.library.node_process import NodeProcess, reserved_ports
from p2pdrl.transport.protocol import Address

if TYPE_CHECKING:
    from p2pdrl.library.policy import TrainedPolicy

__all__ = ["Curve", "Run", "train"]

FIRST_PORT = 7700
ASK_S = 0.1
GRACE_S = 12.0
"""A node that was asked to leave is gone after ten seconds, whatever hangs; then it is killed."""

TRAINED = frozenset({"training", "paused", "stopping", "stopped"})
"""States of a node that trains, or has trained; in others it is on its way there."""

Configuration = str | Path | Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """The swarm's evaluations, oldest first: arrays of one length.

    Attributes:
        env_steps: of the whole swarm when each began, int64.
        mean_return: of its episodes' returns (raw rewards, undiscounted), float64.
        std_return: of the returns, float64.
        episodes: that were played, int64.
    """

    env_steps: npt.NDArray[np.int64]
    mean_return: npt.NDArray[np.float64]
    std_return: npt.NDArray[np.float64]
    episodes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.env_steps)


class Run:
    """A node that trains, in a child process of this one; made by `train`.

    Iterating gives its status about every ``interval_s`` seconds until the swarm is done, the last status
    included. All that asks the node raises ``WorkerError``, or ``UsageError`` where the configuration is to
    blame, with the node's own words when it has failed.

    Attributes:
        interval_s: between two status of an iteration.
        address: ``HOST:PORT`` of the node's API, which further nodes take as ``peers``.
        data_dir: identity, checkpoints and account of the node; a temporary one goes with the `Run`.
        log: file of all that the node writes.
        client: the node, for all that `Run` doesn't do.
    """

    def __init__(
        self,
        process: NodeProcess,
        port: contextlib.ExitStack,
        folder: contextlib.ExitStack,
        interval_s: float,
    ) -> None:
        self.interval_s = interval_s
        self.address = str(process.address)
        self.data_dir = process.folder
        self.log = process.log
        self.client = Client(self.address)
        self._process = process
        # the last one that is made is the first to be called when the interpreter exits
        weakref.finalize(self, folder.close)
        self._end = weakref.finalize(self, _end, process.process, port, os.getpid())

    def __repr__(self) -> str:
        state = "running" if self.running else f"ended with {self._process.exit_code}"
        return f"<p2pdrl.Run {self.address}, {state}>"

    @property
    def running(self) -> bool:
        """Whether the node's process is there."""
        return self._process.exit_code is None

    def status(self) -> NodeStatus:
        """Return the node's present status, or its last one when it has ended.

        Raises:
            WorkerError: it has failed, or was killed.
            DaemonUnreachableError: it runs and doesn't answer.
        """
        if self.running:
            try:
                return self.client.status()
            except DaemonUnreachableError:
                if not self._has_ended(GRACE_S):  # or it was just ending
                    raise
        summary = self._account()
        return told(summary["status"], NodeStatus)

    def __iter__(self) -> Iterator[NodeStatus]:
        """Yield the status until the swarm is done or the node has ended."""
        while True:
            status = self.status()
            yield status
            if not self.running or status.state == "stopped":
                return
            self._has_ended(self.interval_s)

    def wait(self, timeout: float | None = None) -> NodeStatus:
        """Wait until the swarm is done, and return the last status.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it isn't done by then. It goes on.
            WorkerError: the node has failed.
        """
        end_s = None if timeout is None else time.monotonic() + timeout
        while self.running:
            if self._account_of_end():
                break
            if end_s is not None and time.monotonic() >= end_s:
                raise TimeoutError(f"the swarm isn't done after {timeout:g} s")
            left_s = self.interval_s if end_s is None else min(self.interval_s, end_s - time.monotonic())
            self._has_ended(max(left_s, 0.0))
        return self.status()

    def _account_of_end(self) -> bool:
        """Whether a node that stays up when the swarm is done (``node.keep_running``) says that it is."""
        try:
            return self.client.status().state == "stopped"
        except P2PDRLError:
            return False

    def policy(self, *, best: bool = False, device: str = "cpu") -> TrainedPolicy:
        """Return the node's present policy, or when it has ended that of its last checkpoint.

        Args:
            best: the one that was evaluated best so far.
            device: ``cpu``, ``cuda`` …

        Raises:
            CheckpointError: there is none yet.
        """
        from p2pdrl.library.policy import load

        source: str | Path = self.data_dir if best or not self.running else self.address
        return load(source, best=best, device=device, allow_import=True, data_dir=self.data_dir)

    def curve(self) -> Curve:
        """Return the swarm's evaluations so far, as arrays."""
        if self.running:
            try:
                return _curve(self.client.evaluations())
            except DaemonUnreachableError:
                if not self._has_ended(GRACE_S):  # or it was just ending
                    raise
        rows = self._account().get("evaluations") or []
        return _curve([told(row, EvaluationRow) for row in rows])

    def stop(self) -> None:
        """Have the node leave the swarm and end, and wait for that; what it trained stays in `data_dir`.

        A swarm of several nodes goes on without it.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _has_ended(self, wait_s: float) -> bool:
        """Whether the process ends within so many seconds."""
        try:
            self._process.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _account(self) -> dict[str, Any]:
        """Return the summary of a node that has ended.

        Raises:
            WorkerError: it failed; UsageError where its configuration is to blame.
        """
        code = self._process.exit_code
        summary = self._process.summary()
        if code == 0 and summary is not None:
            return summary
        raise _failure(self._process, code)


def train(
    config: Configuration | Sequence[Configuration] | None = None,
    *,
    peers: Sequence[str] | str = (),
    data_dir: str | Path | None = None,
    swarm_key_file: str | Path | None = None,
    name: str = "node",
    start_from: str | Path | None = None,
    interval_s: float = 1.0,
    start_timeout_s: float = 120.0,
    **overrides: Any,
) -> Run:
    """Start a node on this machine, and return when it trains.

    It listens on a free port of loopback, unless ``node__listen`` says otherwise.

    Args:
        config: a preset's name, a TOML file, a dictionary as such a file holds, or several of them, of which
            later ones count over earlier ones. None takes the task from ``peers``, or the default one.
        peers: ``HOST:PORT`` of members of the swarm to join; none founds a swarm.
        data_dir: folder for identity, checkpoints and log, from which a later run goes on; None takes a
            temporary one, which goes with the `Run`.
        swarm_key_file: the swarm's key, which nodes on several machines need.
        name: what people call the node.
        start_from: a checkpoint whose parameters and normalisation it begins with, where it founds a swarm: a
            file, a node's data folder, or ``HOST:PORT`` of a running node (docs/tuning.md).
        interval_s: between two status when the `Run` is iterated.
        start_timeout_s: longest wait until it trains.
        overrides: single keys of the configuration, two underscores for each dot:
            ``task__env__num_envs=16``, ``node__actors__count=2``.

    Raises:
        ConfigError: the configuration can't be read or can't run here; nothing was started.
        UsageError: there is no checkpoint to start from; nothing was started.
        WorkerError: the node ended as it started, in its own words; UsageError where the caller can mend it.
        UnhealthyError: it doesn't train in time.

    Examples:
        >>> with train("cartpole") as run:  # doctest: +SKIP
        ...     for status in run:
        ...         print(status.swarm_env_steps, status.mean_return)
    """
    files, given = _sources(config)
    given |= _flat({key.replace("__", "."): value for key, value in overrides.items()})
    given |= {"node.swarm_key_file": str(swarm_key_file)} if swarm_key_file is not None else {}
    _require_usable(given)
    named, entries = _with_entries(given)
    address, listen = _addresses(named.pop("node.listen", None))
    resolved = resolve(files=files, flags=named, environ=os.environ)
    if (entry := env_entry(resolved.config.task.env.id)) is not None:  # a file names it
        named["task.env.id"] = entry
        entries.append(entry)
        resolved = resolve(files=files, flags=named, environ=os.environ)
    named |= _permissions(resolved, entries)
    resolved = resolve(files=files, flags=named, environ=os.environ)
    require_runnable(resolved.config.task, resolved.config)
    arguments = [part for file in files for part in ("--config", file)]
    arguments += [part for key, value in named.items() for part in ("--set", f"{key}={_as_text(key, value)}")]
    for peer in [peers] if isinstance(peers, str) else peers:
        arguments += ["--peers", peer]
    if start_from is not None:
        checkpoint_to_start_from(str(start_from), resolved.config.node.swarm_key_file)
        arguments += ["--from", str(start_from)]
    arguments += ["--leave-with", str(os.getpid())]
    environ = os.environ | {"PYTHONPATH": _python_path(entries)}
    with contextlib.ExitStack() as kept, contextlib.ExitStack() as claim:
        folder = _folder(data_dir, kept)
        if address.port == 0:
            (port,) = claim.enter_context(reserved_ports(1, FIRST_PORT))
            address, listen = Address(address.host, port), Address(listen.host, port)
        process = NodeProcess.start(
            address, folder, folder / "node.log", arguments, name=name, listen=listen, environ=environ
        )
        run = Run(process, claim.pop_all(), kept.pop_all(), interval_s)
    try:
        _until_it_trains(run, process, start_timeout_s)
    except BaseException:
        run.stop()
        raise
    return run


def _require_usable(named: Mapping[str, Any]) -> None:
    """Check that each key has a value, and that none stands for an argument of `train`."""
    for key, value in named.items():
        if value is None:
            raise UsageError(f"{key} = None says nothing: leave it out for its default")
    for argument in ("data_dir", "name", "peers", "start_from"):
        key = f"node.{argument}"
        if key in named:
            raise UsageError(f"{key}: give it as {argument}=")


def _addresses(listen: Any) -> tuple[Address, Address]:
    """Return where the node is asked, and where it listens; port 0 stands for any that is free."""
    if listen is None:
        return Address("127.0.0.1", 0), Address("127.0.0.1", 0)
    found = Address.parse(str(listen), default_port=0)
    return Address("127.0.0.1" if found.host in ("0.0.0.0", "::") else found.host, found.port), found  # noqa: S104


def _sources(config: Configuration | Sequence[Configuration] | None) -> tuple[list[str], dict[str, Any]]:
    """Return files and presets, and single keys."""
    if config is None:
        return [], {}
    parts = [config] if isinstance(config, str | Path | Mapping) else list(config)
    files = [str(part) for part in parts if not isinstance(part, Mapping)]
    given: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, Mapping):
            given |= _flat(part)
    return files, given


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a nested table as single keys with dots."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{before}{key}"
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) and value else {path: _plain(value)}
    return found


def _plain(value: Any) -> Any:
    """Return a value as a configuration file would hold it."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value) if isinstance(value, Path) else value


def _with_entries(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return keys with what registered names stand for, and what these are."""
    found, entries = dict(given), []
    env, network = given.get("task.env.id"), given.get("task.network.own")
    if isinstance(env, str) and (entry := env_entry(env)) is not None:
        found["task.env.id"] = entry
        entries.append(entry)
    if isinstance(network, str) and (entry := network_entry(network)) is not None:
        found |= {"task.network.own": entry, "task.network.kind": "own"}
        entries.append(entry)
    return found, entries


def _permissions(resolved: Resolved, entries: list[str]) -> dict[str, Any]:
    """Allow the node to import what this process has registered, and nothing else."""
    entries += [entry for entry in imports_of(resolved.config.task).values() if is_registered(entry)]
    if not entries:
        return {}
    return {"node.imports": sorted({*resolved.config.node.imports, *entries})}


def _as_text(key: str, value: Any) -> str:
    """Return a value as TOML."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{key} = {value!r}: a configuration holds numbers, texts and lists of them"
        ) from error


def _python_path(entries: Sequence[str]) -> str:
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*search_path(list(entries)), *([before] if before else [])])


def _folder(data_dir: str | Path | None, stack: contextlib.ExitStack) -> Path:
    if data_dir is None:
        found = tempfile.mkdtemp(prefix="p2pdrl-run-")
        stack.callback(shutil.rmtree, found, ignore_errors=True)
        return Path(found)
    folder = Path(data_dir).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"can't make the data folder {folder}: {error.strerror}") from None
    return folder


def _until_it_trains(run: Run, process: NodeProcess, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while run.running:
        try:
            state = run.client.status().state
        except DaemonUnreachableError:
            state = "starting"
        if state in TRAINED:
            return
        if time.monotonic() > end_s:
            raise UnhealthyError(
                f"the node doesn't train after {timeout_s:g} s; it said: {process.last_words()}"
            )
        time.sleep(ASK_S)
    if process.exit_code:
        raise _failure(process, process.exit_code)


def _failure(process: NodeProcess, code: int | None) -> P2PDRLError:
    """Return the error of a node that has ended by itself."""
    words = process.last_words()
    if code == 2:
        return UsageError(words)
    if code is not None and code < 0:
        return WorkerError(f"the node was ended by {signal.Signals(-code).name}; it had said: {words}")
    return WorkerError(f"the node ended with {code}: {words}")


def _end(process: subprocess.Popen[bytes], port: contextlib.ExitStack, owner: int) -> None:
    """Have the node leave and end; then let go of its port."""
    if os.getpid() != owner:  # a fork of the process that started it
        return
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    port.close()


def _curve(rows: Sequence[EvaluationRow]) -> Curve:
    return Curve(
        np.array([row.env_steps for row in rows], np.int64),
        np.array([row.mean for row in rows], np.float64),
        np.array([row.std for row in rows], np.float64),
        np.array([row.episodes for row in rows], np.int64),
    )
