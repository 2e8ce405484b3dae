"""A running node, wherever it is, steered from Python: ``p2pdrl.Client``.

It is `api.client.NodeClient`, which the command line uses, with types. The documents are the API's; what a
node of another release doesn't tell is None or empty here, and all that it tells is in ``document``.

Shape suffixes: N observations, A one action's own dimensions.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.atomic import storage_error
from p2pdrl.config import mode as modes
from p2pdrl.errors import DaemonUnreachableError, UsageError
from p2pdrl.library.commands import Target, command_swarm
from p2pdrl.node.settings import MODE, PAUSE, ModeSetting, PauseSetting

__all__ = [
    "Client",
    "EvaluationRow",
    "ModeMember",
    "ModeStatus",
    "NodeEvent",
    "NodeStatus",
    "PeerStatus",
    "told",
]

Array = npt.NDArray[Any]
S = TypeVar("S", bound="_Told")

CHECKPOINT_S = 60.0


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells.

    Attributes:
        document: all of it, as JSON types.
    """

    document: dict[str, Any] = {}


class EvaluationRow(_Told, frozen=True, kw_only=True):
    """Episodes that one node played with the policy that it held."""

    env_steps: int = 0
    """Of the whole swarm when it began."""
    policy_version: int = 0
    episodes: int = 0
    mean: float = 0.0
    """Of the returns: raw rewards, undiscounted."""
    std: float = 0.0
    """Of the returns."""
    length: float = 0.0
    """Mean steps of an episode."""
    seconds: float = 0.0
    """That the episodes took."""
    name: str = ""
    """Of the node."""


class StopStatus(_Told, frozen=True, kw_only=True):
    """When the swarm ends."""

    reached: bool = False
    reason: str | None = None
    """Why it has ended."""
    mean_return: float | None = None
    """The goal, in two evaluations in a row; None for no such goal."""


class NodeStatus(_Told, frozen=True, kw_only=True):
    """A node, and the swarm as it sees it."""

    name: str
    id: str
    address: str
    pid: int
    state: str
    """``starting``, ``training``, ``paused``, ``stopped`` …"""
    version: str = ""
    mode: str = ""
    """How the swarm agrees: ``gossip``, ``allreduce`` …"""
    members: dict[str, int] = {}
    """How many members are ``alive``, ``suspect``, ``dead``, ``left``."""
    env_steps: int = 0
    """Of this node."""
    swarm_env_steps: int = 0
    """Of all nodes together."""
    steps_per_s: float = 0.0
    swarm_steps_per_s: float = 0.0
    updates: int = 0
    """Of this node's learner."""
    policy_version: int = 0
    episodes: int = 0
    mean_return: float | None = None
    """Of the last training episodes, sampled actions; None before the first."""
    evaluation: EvaluationRow | None = None
    """The swarm's newest; None before the first."""
    stop: StopStatus = StopStatus()
    healthy: bool = True
    reasons: list[str] = []
    """Why it isn't healthy, in plain words."""
    uptime_s: float = 0.0
    data_dir: str = ""

    @property
    def done(self) -> bool:
        """Whether the swarm has reached its end."""
        return self.stop.reached


class PeerStatus(_Told, frozen=True, kw_only=True):
    """A member of the swarm, as the node sees it."""

    name: str
    id: str
    address: str
    state: str
    """``alive``, ``suspect``, ``dead`` or ``left``."""
    is_self: bool = msgspec.field(name="self", default=False)
    """Whether it is the node that was asked."""
    roles: list[str] = []
    """``actor``, ``learner`` …"""
    trains: bool | None = None
    healthy: bool = True
    reasons: list[str] = []
    env_steps: int | None = None
    steps_per_s: float | None = None
    mean_return: float | None = None
    policy_version: int | None = None
    rtt_s: float | None = None
    """Of a request to it, in seconds."""


class NodeEvent(_Told, frozen=True, kw_only=True):
    """Something that happened on the node."""

    seq: int
    """Grows by one with each."""
    time: float
    """Seconds since the Unix epoch."""
    kind: str
    text: str = ""


class ModeMember(_Told, frozen=True, kw_only=True):
    """A member, and whether it follows the swarm's mode."""

    name: str
    state: str = ""
    protocol: str = ""
    role: str = ""
    follows: bool = False


class ModeStatus(_Told, frozen=True, kw_only=True):
    """How the swarm agrees."""

    mode: str | None = None
    """None while the node starts."""
    protocol: str | None = None
    """The strategy: ``adpsgd``, ``grad_average`` …"""
    options: dict[str, Any] = {}
    """Of the strategy, where they aren't the defaults."""
    epoch: int = 0
    """The mode's generation."""
    error: str | None = None
    members: list[ModeMember] = []


class Client:
    """One running node, asked and steered synchronously.

    A node on this machine says by itself where its token is; one on another machine wants its swarm's key.
    Neither is ever sent.

    Args:
        address: ``HOST:PORT``.
        token: the node's local token, 64 hex digits; else that in ``P2PDRL_TOKEN``.
        data_dir: the node's data folder, where its token is.
        swarm_key_file: the swarm's key.
        operator_file: an operator's key, which signs what is for the whole swarm where that has operators;
            else the one beside the swarm's key.
        timeout_s: longest wait for a connection, and for each piece of an answer.

    Raises:
        UsageError: a bad address, key file or token.

    All methods raise ``DaemonUnreachableError`` where no node answers, ``UsageError`` where it doesn't let us
    in or takes no such thing, and ``P2PDRLError`` where it refuses for another reason, in its own words.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        data_dir: str | Path | None = None,
        swarm_key_file: str | Path | None = None,
        operator_file: str | Path | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        def text(file: str | Path | None) -> str | None:
            return None if file is None else str(file)

        self._target = Target(address, text(swarm_key_file), text(data_dir), text(operator_file), token)
        self._node = self._target.client(timeout_s)
        self._patient = self._target.client(max(timeout_s, CHECKPOINT_S))
        self._takes: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<p2pdrl.Client {self.address}>"

    @property
    def address(self) -> str:
        """``HOST:PORT``."""
        return str(self._node.address)

    def status(self) -> NodeStatus:
        """Return the node's state and the swarm's."""
        return told(self._node.status(), NodeStatus)

    def peers(self) -> list[PeerStatus]:
        """Return every member that the node knows, itself first."""
        return [told(row, PeerStatus) for row in self._node.peers()]

    def evaluations(self) -> list[EvaluationRow]:
        """Return the swarm's learning curve, oldest first."""
        found = self._node.get("/v1/evaluations")
        return [told(row, EvaluationRow) for row in (found if isinstance(found, list) else [])]

    def events(self, *, follow: bool = False, since: int = 0) -> Iterator[NodeEvent]:
        """Yield what happened on the node, as far as it remembers, oldest first.

        Args:
            follow: go on with new events as they come, until the node ends (``DaemonUnreachableError``).
            since: leave out events up to this number.
        """
        past = self._node.past_events(since)
        last = past[-1]["seq"] if past else since
        for event in itertools.chain(past, self._node.coming_events(last) if follow else ()):
            yield told(event, NodeEvent)

    def mode(self) -> ModeStatus:
        """Return how the swarm agrees, and who follows that."""
        return told(self._node.get("/v1/mode"), ModeStatus)

    def set_mode(self, mode: str, *, wait_s: float = 60.0, **options: Any) -> ModeStatus:
        """Change how the whole swarm agrees, while it trains.

        Args:
            mode: ``gossip``, ``server-sync``, ``server-async``, ``allreduce``, ``pipeline`` or ``local``.
            wait_s: longest wait until all members follow, in seconds; 0 doesn't wait.
            options: ``protocol`` picks the strategy, all others are options of it.

        Returns:
            the mode, after all follow.

        Raises:
            ConfigError: there is no such mode or option.
            P2PDRLError: somebody doesn't follow in time, or another proposal won.
        """
        sets = [f"{key}={_option(value)}" for key, value in options.items()]
        strategy = modes.strategy_from(mode, sets)
        words = modes.mode_words(strategy)
        query = urlencode([("mode", mode), *(("set", one) for one in sets)])
        record = command_swarm(
            self._target,
            self._node,
            f"/v1/mode?{query}",
            lambda _records, _by: (MODE, ModeSetting.of(strategy)),
        )
        if wait_s:
            self._node.wait_for_mode(words, (record.get("epoch"), record.get("proposer")), wait_s)
        return self.mode()

    def pause(self, *, swarm: bool = False) -> None:
        """Stop training, on this node or in the whole swarm; membership goes on."""
        self._hold("pause", paused=True, swarm=swarm)

    def resume(self, *, swarm: bool = False) -> None:
        """Train again after a pause."""
        self._hold("resume", paused=False, swarm=swarm)

    def _hold(self, word: str, *, paused: bool, swarm: bool) -> None:
        if not swarm:
            self._node.post(f"/v1/{word}?scope=node")
            return
        path = f"/v1/{word}?scope=swarm"
        command_swarm(self._target, self._node, path, lambda _records, _by: (PAUSE, PauseSetting(paused)))

    def roles(self) -> dict[str, list[str]]:
        """Return what each living member does, by its name: ``actor``, ``learner``, ``replay``, ``server``.

        Of several members of one name it tells one; `peers` tells all.
        """
        return {peer.name: peer.roles for peer in self.peers() if peer.state == "alive"}

    def set_roles(self, *roles: str, wait_s: float = 60.0) -> None:
        """Give this node other roles; what it has trained stays.

        Args:
            roles: ``actor``, ``learner``, ``replay``, ``server``.
            wait_s: longest wait until it works in them, in seconds; 0 doesn't wait.

        Raises:
            UsageError: it can't have them.
            UnhealthyError: it doesn't work in them in time.
        """
        if not roles:
            raise UsageError("name at least one role: actor, learner, replay or server")
        self._node.post("/v1/roles?" + urlencode([("role", name) for name in roles]))
        if wait_s:
            self._node.wait_for_roles(roles, wait_s)

    def checkpoint(self, path: str | Path | None = None) -> Path:
        """Save the present policy with all that is needed to go on from it.

        Args:
            path: a file on this machine; None has the node write to its own disk.

        Returns:
            the file; without ``path`` where it is on the node's machine.

        Raises:
            StorageError: a disk doesn't take it.
        """
        if path is None:
            return Path(str(self._patient.post("/v1/checkpoint").get("path")))
        target = Path(path).expanduser()
        try:
            with tempfile.NamedTemporaryFile(
                dir=target.parent, prefix=f".{target.name}.", delete=False
            ) as file:
                beside = Path(file.name)
                try:
                    self._patient.download("/v1/checkpoint", file)
                except BaseException:
                    beside.unlink(missing_ok=True)
                    raise
            beside.replace(target)
        except OSError as error:
            raise storage_error("write the checkpoint", target, error) from error
        return target

    def leave(self, *, wait_s: float = 30.0) -> None:
        """Make the node leave the swarm and end.

        Args:
            wait_s: longest wait until it has, in seconds; 0 doesn't wait.

        Raises:
            UnhealthyError: it is still there.
        """
        pid = self._node.status().get("pid")
        self._node.post("/v1/leave")
        if wait_s:
            self._node.wait_for_end(pid, wait_s)

    def act(self, obs: Any, *, mask: Any = None, deterministic: bool = False) -> Array:
        """Return actions of the node's newest policy, as the environment takes them.

        Args:
            obs: one observation, or N with a leading dimension; of Dict observations a dictionary of arrays.
                The node acts on up to as many at once as ``GET /v1/act`` says.
            mask: true for each action that is allowed, where the environment tells that in its ``info``.
            deterministic: take the likeliest action; otherwise it is sampled.

        Raises:
            UsageError: the observations aren't what the policy takes; the message says what is.
            P2PDRLError: the policy remembers, so that it can't be asked.
        """
        takes = self._takes = self._takes or self._patient.get("/v1/act")
        wanted = takes["observations"]
        if wanted.get("binary"):
            return self._act_binary(np.asarray(obs), wanted, deterministic=deterministic)
        rows, single = _as_rows(obs, wanted)
        body: dict[str, Any] = {"observations": rows, "greedy": deterministic}
        if mask is not None:
            allowed = np.asarray(mask)
            body["mask"] = [allowed.tolist()] if single else allowed.tolist()
        data, _ = self._patient.ask("/v1/act", msgspec.json.encode(body), "application/json")
        actions: Array = np.array(msgspec.json.decode(data)["actions"], takes["actions"]["dtype"])
        return actions[0] if single else actions

    def _act_binary(self, obs: Array, wanted: Mapping[str, Any], *, deterministic: bool) -> Array:
        shape, dtype = tuple(wanted["shape"]), np.dtype(wanted["dtype"])
        single = obs.shape == shape
        if not single and obs.shape[1:] != shape:
            raise UsageError(
                f"observations are {dtype} of shape {list(shape)}, with or without a batch dimension; "
                f"they are of shape {list(obs.shape)}"
            )
        cast = obs.astype(dtype)
        if dtype.kind != "f" and not np.array_equal(cast, obs):
            raise UsageError(f"observations are {dtype}: some numbers aren't")
        rows = 1 if single else len(obs)
        query = urlencode({"rows": rows, "greedy": int(deterministic)})
        data = cast.astype(dtype.newbyteorder("<"), copy=False).tobytes()
        answer, headers = self._patient.ask(f"/v1/act?{query}", data, "application/octet-stream")
        told = headers.get("P2PDRL-Action-Shape", "")
        each = tuple(int(length) for length in told.split(",") if length)
        found = np.frombuffer(answer, np.dtype(headers["P2PDRL-Action-Dtype"]).newbyteorder("<"))
        actions: Array = found.reshape(each if each[:1] == (rows,) else (rows, *each))
        actions = actions.astype(actions.dtype.newbyteorder("="))
        return actions[0] if single else actions


def told(document: object, kind: type[S]) -> S:
    """Return a document of a node as what it is.

    Raises:
        DaemonUnreachableError: it isn't that.
    """
    found = document if isinstance(document, dict) else {}
    try:
        return msgspec.convert({**found, "document": found}, kind)
    except msgspec.ValidationError as error:
        raise DaemonUnreachableError(
            f"the node is of another release: what it tells as its {kind.__name__} can't be read ({error})"
        ) from None


def _option(value: object) -> str:
    """Return a value as the command line would be given it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_rows(obs: Any, wanted: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Return a list of observations in JSON types, and whether there was one without a batch dimension."""
    entries = wanted.get("entries")
    if entries is None:
        given = np.asarray(obs)
        single = list(given.shape) == list(wanted["shape"])
        return ([given.tolist()] if single else given.tolist()), single
    if isinstance(obs, list) and obs and isinstance(obs[0], Mapping | tuple):
        return [_nested(one) for one in obs], False
    first = entries[0]
    leaf = np.asarray(_leaf(obs, first["path"]))
    shape = tuple(first["shape"])
    single = leaf.shape in (shape, shape[:-1] if shape[-1:] == (1,) else shape)
    if single:
        return [_nested(obs)], True
    if not leaf.ndim:
        raise UsageError(
            f"{first['path']} of observations must be {first['is']}, with or without a batch dimension"
        )
    return [_nested(obs, row) for row in range(len(leaf))], False


def _leaf(obs: Any, path: list[str | int]) -> Any:
    try:
        for key in path:
            obs = obs[key]
    except (KeyError, IndexError, TypeError):
        raise UsageError(f"an observation has no {'.'.join(map(str, path))}") from None
    return obs


def _nested(obs: Any, row: int | None = None) -> Any:
    """Return an observation, or one row of a batch, in JSON types."""
    if isinstance(obs, Mapping):
        return {key: _nested(value, row) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return [_nested(value, row) for value in obs]
    values = np.asarray(obs)
    try:
        return (values if row is None else values[row]).tolist()
    except IndexError:
        raise UsageError("entries of observations are batches of different lengths") from None
