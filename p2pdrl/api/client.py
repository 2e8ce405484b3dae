"""Talks to one node's API, synchronously, for commands, scripts and `library.client`.

Uses `http.client` alone: importing aiohttp would take longer than most commands do. Every failure
becomes one of the package's errors, so that commands hold no error handling of their own.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from p2pdrl.errors import DaemonUnreachableError, P2PDRLError, StorageError, UnhealthyError, UsageError
from p2pdrl.transport.dial import is_own
from p2pdrl.transport.protocol import DEFAULT_PORT, Address

if TYPE_CHECKING:
    from p2pdrl.api.keyfile import OperatorKey

__all__ = ["NO_ROUTE", "NodeClient", "parse_api", "read_token", "token_from_environment"]

NO_ROUTE = "no such route"
"""Reason of a node's 404 where there is no such path; any other is about what the request named."""

_LARGEST_JSON_BYTES = 64 << 20
_LARGEST_ANSWER_BYTES = 1 << 30
_PIECE_BYTES = 1 << 20
_PAUSE_S = 0.2
_SILENCE_S = 40.0
"""Of a stream of events: the node sends a comment every 15 s; two in a row may be lost to a slow link."""
_TOKEN = re.compile(r"[0-9a-f]{64}")
_HEALTH, _TARGET, _ASKS = "/healthz", "/v1/target", "/v1/act"


def parse_api(text: str) -> Address:
    """Read HOST[:PORT] (IPv6 in brackets); ``http://`` in front and ``/`` behind are forgiven.

    Raises:
        UsageError: it isn't an address, or its port is 0.
    """
    address = Address.parse(text.strip().removeprefix("http://").rstrip("/"), default_port=DEFAULT_PORT)
    if address.port == 0:
        raise UsageError(f"{text[:80]!r} has no good port: write HOST:PORT with a port of 1-65535")
    return address


def read_token(data_dir: str | Path) -> str | None:
    """The local token of the node whose data folder this is, if we may read it."""
    try:
        token = (Path(data_dir).expanduser() / "token").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return token if _TOKEN.fullmatch(token) else None


def _is_this_machine(host: str) -> bool:
    return host.lower() == "localhost" or is_own(host)


class _Asked(NamedTuple):
    """One request."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]


class NodeClient:
    """One node's API.

    Requests that need it are signed with the node's local token or with the swarm key; neither is
    ever sent. A token that isn't given is looked for in the node's ``data_dir``, else where a node on this
    machine says it is.

    Args:
        operator: signs changes that we ask for by the swarm's key, where the swarm has operators.
        timeout_s: longest wait for the connection, and for each further piece of the answer.
    """

    def __init__(
        self,
        address: Address,
        *,
        swarm_key: bytes | None = None,
        data_dir: str | None = None,
        token: str | None = None,
        operator: OperatorKey | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.address = address
        self._swarm_key = swarm_key
        self._data_dir = data_dir
        self._token = token
        self._operator = operator
        self._timeout_s = timeout_s
        self._target: tuple[bytes, str] | None = None
        """The key with which the node has proven itself, and the target that it proved."""

    @property
    def on_this_machine(self) -> bool:
        """Whether the node is asked at an address of this machine's."""
        return _is_this_machine(self.address.host)

    @classmethod
    def at(
        cls,
        address: str,
        *,
        swarm_key_file: str | Path | None = None,
        data_dir: str | Path | None = None,
        token: str | None = None,
        operator: OperatorKey | None = None,
        timeout_s: float = 5.0,
    ) -> NodeClient:
        """Make a client of what people name: an address, a key file, a data folder.

        A token that isn't given may be in ``P2PDRL_TOKEN``.

        Raises:
            UsageError: a bad address, key file or token.
        """
        swarm_key = None
        if swarm_key_file is not None:
            from p2pdrl.api.keyfile import read_swarm_keys

            swarm_key = read_swarm_keys(swarm_key_file).good(time.time())[0]
        return cls(
            parse_api(address),
            swarm_key=swarm_key,
            data_dir=None if data_dir is None else str(data_dir),
            token=token_from_environment() if token is None else token,
            operator=operator,
            timeout_s=timeout_s,
        )

    def status(self) -> dict[str, Any]:
        """The node's ``/v1/status``."""
        return self._dict(self.get("/v1/status"))

    def peers(self) -> list[dict[str, Any]]:
        """The node's ``/v1/peers``."""
        found = self.get("/v1/peers")
        if not isinstance(found, list):
            raise self._stranger()
        return [self._dict(peer) for peer in found]

    def health(self) -> dict[str, Any]:
        """The node's ``/healthz``, also when it is unwell."""
        return self._dict(self.get(_HEALTH, unwell_is_fine=True))

    def date(self) -> str:
        """The ``Date`` of an answer: the node's wall clock in whole seconds; empty if it tells none."""
        with self._open("GET", _HEALTH, unwell_is_fine=True) as response:
            response.read(_LARGEST_JSON_BYTES)
            return response.headers.get("Date", "")

    def get(self, path: str, *, unwell_is_fine: bool = False) -> Any:
        """GET a JSON document.

        Raises:
            DaemonUnreachableError: nobody answers, or it isn't a node.
            UsageError: it wants credentials that we don't have, or doesn't take what we ask.
            P2PDRLError: it refuses for another reason.
        """
        with self._open("GET", path, unwell_is_fine=unwell_is_fine) as response:
            return self._json(response)

    def post(self, path: str, body: bytes | None = None) -> dict[str, Any]:
        """POST, with a body only where that is signed by itself; errors as for `get`."""
        with self._open("POST", path, body=body) as response:
            return self._dict(self._json(response))

    def download(
        self, path: str, out: IO[bytes], told: Callable[[int, int], None] = lambda _done, _total: None
    ) -> int:
        """GET a file in pieces and return its length in bytes; errors as for `get`.

        Args:
            told: called with the bytes that have come, and their whole number where that is known.
        """
        with self._open("GET", path) as response:
            expected, length = response.length, 0
            while piece := response.read(_PIECE_BYTES):
                length += _write(out, piece)
                told(length, expected or length)
            if expected is not None and length != expected:
                raise DaemonUnreachableError(f"the node at {self.address} broke off after {length} bytes")
            return length

    def ask(self, path: str, body: bytes, content_type: str) -> tuple[bytes, http.client.HTTPMessage]:
        """POST a body to a route that changes nothing; return the answer's body and headers.

        Errors as for `get`.
        """
        headers = {"Content-Type": content_type, "Content-Length": str(len(body))}
        with self._open("POST", path, body=body, headers=headers) as response:
            return response.read(_LARGEST_ANSWER_BYTES), response.headers

    def past_events(self, since: int = 0) -> list[dict[str, Any]]:
        """The node's events after number ``since``, as far as it remembers them, oldest first."""
        return _events(self.get(f"/v1/events?follow=0&since={since}"))

    def coming_events(self, since: int) -> Iterator[dict[str, Any]]:
        """Yield the node's events after number ``since`` as they come.

        Raises:
            DaemonUnreachableError: the node ends, or the connection does.
        """
        for line in self.lines(f"/v1/events?since={since}", silence_s=_SILENCE_S):
            if line.startswith(b"data: "):
                yield from _events([json.loads(line[6:])])
        raise DaemonUnreachableError(f"the node at {self.address} ended the stream of events")

    def wait_for_mode(
        self,
        words: str,
        record: tuple[Any, Any],
        wait_s: float,
        told: Callable[[int, int], None] | None = None,
    ) -> None:
        """Ask until every member follows a record of the mode.

        Args:
            words: the mode, for messages.
            record: its epoch and proposer.
            told: called with how many members follow and how many there are, whenever that changes.

        Raises:
            P2PDRLError: another record won, or somebody doesn't follow in time.
        """
        deadline = time.monotonic() + wait_s
        before = (-1, -1)
        while True:
            document = self._dict(self.get("/v1/mode"))
            _check_in_force(document.get("record") or {}, record)
            members = [member for member in document.get("members") or [] if isinstance(member, dict)]
            late = [_why_not(member, record[0]) for member in members if not member.get("follows")]
            counts = (len(members) - len(late), len(members))
            if told is not None and counts != before:
                told(*counts)
            before = counts
            if members and not late:
                return
            if time.monotonic() + _PAUSE_S > deadline:
                why = "; ".join(late[:20] or ["nobody is heard of"])
                raise P2PDRLError(f"after {wait_s:g} s not everybody is in mode {words}: {why}")
            time.sleep(_PAUSE_S)

    def wait_for_roles(self, roles: Sequence[str], wait_s: float) -> None:
        """Ask until the node works in these roles.

        Raises:
            UnhealthyError: it doesn't in time, or has ended.
        """
        deadline = time.monotonic() + wait_s
        while True:
            time.sleep(_PAUSE_S)
            try:
                status = self.status()
                own = next((row for row in self.peers() if row.get("self")), {})
            except DaemonUnreachableError as error:
                raise UnhealthyError(f"the node ended when its roles changed: {error}") from error
            state = status.get("state")
            if sorted(own.get("roles") or []) == sorted(roles) and state in ("training", "paused"):
                return
            if time.monotonic() > deadline:
                raise UnhealthyError(
                    f"the node isn't at work in its new roles after {wait_s:g} s: it is {state}"
                )

    def wait_for_end(self, pid: object, wait_s: float) -> None:
        """Ask until the process ``pid`` doesn't answer any more.

        Raises:
            UnhealthyError: it still does.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                if self.status().get("pid") != pid:
                    return
            except DaemonUnreachableError:
                return
            if time.monotonic() > deadline:
                raise UnhealthyError(f"the node at {self.address} is still there after {wait_s:g} s")
            time.sleep(_PAUSE_S)

    def lines(self, path: str, *, silence_s: float) -> Iterator[bytes]:
        """GET a stream and yield its lines until it ends; ``silence_s`` bounds the wait for each."""
        with self._open("GET", path, timeout_s=silence_s) as response:
            while line := response.readline():
                yield line.rstrip(b"\r\n")

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        *,
        unwell_is_fine: bool = False,
        timeout_s: float | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request, with credentials where they are needed, and hand out the good answer.

        A POST changes the node, but for one that only asks for actions.
        """
        connection = self._connection(path, timeout_s or self._timeout_s)
        asked = _Asked(method, path, body, headers or {})
        try:
            changes = method != "GET" and not path.startswith(_ASKS)
            key = self._key_for_changes() if changes else self._swarm_key or self._known_token()
            if path == _HEALTH or path.startswith(_TARGET):
                key = None  # open to everybody
            response = self._send(connection, asked, key)
            if response.status == 401 and key is None and (key := self._token_nearby()) is not None:
                response.read()
                connection.close()
                response = self._send(connection, asked, key)
            if response.status >= 300 and not (unwell_is_fine and response.status == 503):
                raise self._refusal(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _connection(self, path: str, timeout_s: float) -> http.client.HTTPConnection:
        """Over TLS where others could listen and we hold the swarm's key, by which the node proves itself.

        Its health is asked of nodes whose key isn't ours, too.
        """
        host, port = self.address.host, self.address.port
        if self._swarm_key is None or path == _HEALTH or _is_this_machine(host):
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        from p2pdrl.transport.tls import client_context

        context = client_context([self._swarm_key])
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _send(
        self, connection: http.client.HTTPConnection, asked: _Asked, key: bytes | None
    ) -> http.client.HTTPResponse:
        signed = _signature(key, asked.method, asked.path, self._target_for(key)) if key else {}
        changes = asked.method == "POST" and not asked.path.startswith(_ASKS)
        if self._operator is not None and changes and key is not None and key == self._swarm_key:
            from p2pdrl.transport.auth import OPERATOR_HEADER, operator_payload

            signer = self._operator.signer
            signature = signer.sign(operator_payload(signed["P2PDRL-Mac"]))
            signed[OPERATOR_HEADER] = f"{signer.public_key.hex()}.{signature.hex()}"
        connection.request(asked.method, asked.path, body=asked.body, headers={**asked.headers, **signed})
        return connection.getresponse()

    def _target_for(self, key: bytes) -> str:
        """Ask the node for its id and run, which our signatures name, so that they mean nothing elsewhere.

        Raises:
            UsageError: it doesn't prove that it holds ``key``.
        """
        from p2pdrl.transport.auth import new_nonce, target_proven

        if self._target is not None and self._target[0] == key:
            return self._target[1]
        nonce = new_nonce()
        asked = NodeClient(self.address, swarm_key=self._swarm_key, timeout_s=self._timeout_s)
        said = self._dict(asked.get(f"{_TARGET}?nonce={nonce}"))
        target, proofs = said.get("target"), said.get("proofs")
        if not isinstance(target, str) or not isinstance(proofs, list):
            raise self._stranger()
        if not any(target_proven(key, target, nonce, str(proof)) for proof in proofs[:4]):
            raise self._shut(
                "it doesn't prove that it has our key or token; a node that was invited takes its token alone"
            )
        self._target = key, target
        return target

    def page(self) -> str:
        """The address of the node's page; behind a ``#`` the node's token, if we have it.

        Raises:
            UsageError: there is no token in the data folder that was given.
        """
        token = self._known_token() or self._token_nearby()
        return f"http://{self.address}/" + (f"#token={token.decode()}" if token else "")

    def _key_for_changes(self) -> bytes | None:
        return self._known_token() or self._swarm_key or self._token_nearby()

    def _known_token(self) -> bytes | None:
        if self._token is None and self._data_dir is not None:
            self._token = read_token(self._data_dir)
            if self._token is None:
                raise UsageError(f"no token to be read in {self._data_dir}: is it the node's data folder?")
        return self._token.encode() if self._token else None

    def _token_nearby(self) -> bytes | None:
        """The token of a node on this machine, which tells its data folder to local callers."""
        if not _is_this_machine(self.address.host):
            return None
        folder = NodeClient(self.address, timeout_s=self._timeout_s).health().get("data_dir")
        token = read_token(folder) if isinstance(folder, str) else None
        return token.encode() if token else None

    def _json(self, response: http.client.HTTPResponse) -> Any:
        data = response.read(_LARGEST_JSON_BYTES)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._stranger() from None

    def _dict(self, content: object) -> dict[str, Any]:
        if not isinstance(content, dict):
            raise self._stranger()
        return content

    def _refusal(self, response: http.client.HTTPResponse) -> P2PDRLError:
        data = response.read(4096)
        try:
            answer = json.loads(data)
            reason = answer["error"]
        except (ValueError, RecursionError, KeyError, TypeError):
            answer, reason = None, data.decode("utf-8", "replace") or response.reason
        line = "".join(c if c.isprintable() else " " for c in " ".join(str(reason).split()))[:500]
        if response.status == 404 and (answer != {"error": reason} or reason == NO_ROUTE):
            return self._stranger()
        if response.status == 401:
            return self._shut(line)
        if response.status == 400:
            return UsageError(f"the node at {self.address} refuses: {line}")
        return P2PDRLError(f"the node at {self.address} refuses: {line}")

    def _shut(self, why: str) -> UsageError:
        return UsageError(
            f"the node at {self.address} doesn't let us in ({why}); try --data-dir FOLDER for a node "
            "of yours, --swarm-key-file FILE for any node of your swarm"
        )

    def _stranger(self) -> DaemonUnreachableError:
        return DaemonUnreachableError(
            f"what answers at {self.address} isn't a p2pdrl node: name another address with --api HOST:PORT"
        )

    def _unreachable(self, error: Exception) -> P2PDRLError:
        if getattr(error, "verify_code", 0):  # of ssl.SSLCertVerificationError
            return self._shut("it doesn't prove that it has our swarm key")
        if isinstance(error, http.client.HTTPException) and not isinstance(error, ConnectionError):
            return self._stranger()
        if isinstance(error, TimeoutError):
            return DaemonUnreachableError(
                f"the node at {self.address} doesn't answer within {self._timeout_s:g} s: is the machine up, "
                "and the port open?"
            )
        why = getattr(error, "strerror", None) or str(error)
        return DaemonUnreachableError(
            f"no node answers at {self.address} ({why.lower()}): start one with `p2pdrl node`, "
            "or name its address with --api HOST:PORT or P2PDRL_API"
        )


def _events(content: object) -> list[dict[str, Any]]:
    if not isinstance(content, list):
        return []
    return [event for event in content if isinstance(event, dict) and isinstance(event.get("seq"), int)]


def _check_in_force(found: dict[str, Any], record: tuple[Any, Any]) -> None:
    if (found.get("epoch"), found.get("proposer")) == record:
        return
    what, protocol = _plain(found.get("mode") or "?", 40), _plain(found.get("protocol") or "", 40)
    what += f": {protocol}" if protocol and protocol.replace("_", "-") != what else ""
    raise P2PDRLError(
        f"another mode was proposed at the same time and counts: {what} by "
        f"{_plain(found.get('proposer_name', '?'), 64)} (epoch {_plain(found.get('epoch'), 20)}); look with "
        "`p2pdrl mode show`, then set yours again"
    )


def _why_not(member: dict[str, Any], epoch: object) -> str:
    name = _plain(member.get("name", "?"), 64)
    if member.get("state") == "unheard":
        return f"{name} hasn't been heard of"
    if member.get("epoch") == epoch:
        return f"{name} can't run it (see its `p2pdrl status`)"
    return f"{name} is at epoch {_plain(member.get('epoch'), 20)}"


def _plain(text: object, longest: int) -> str:
    """Return text from elsewhere in one line that can be printed."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:longest])


def _write(out: IO[bytes], piece: bytes) -> int:
    """An error of our disk isn't an error of the connection."""
    try:
        return out.write(piece)
    except OSError as error:
        raise StorageError(f"can't store what the node sends: {error.strerror}") from error


def _signature(key: bytes, method: str, path: str, target: str) -> dict[str, str]:
    """Headers that prove to ``target`` that we hold ``key``, without showing it."""
    from p2pdrl.transport.auth import format_time, new_nonce, sign_api

    wall_s, nonce = time.time(), new_nonce()
    return {
        "P2PDRL-Time": format_time(wall_s),
        "P2PDRL-Nonce": nonce,
        "P2PDRL-Mac": sign_api(key, method, path, wall_s, nonce, target=target),
    }


def token_from_environment() -> str | None:
    """The token in ``P2PDRL_TOKEN``, for containers whose data folder can't be read from outside.

    Raises:
        UsageError: it isn't a token.
    """
    token = os.environ.get("P2PDRL_TOKEN", "").strip() or None
    if token is not None and not _TOKEN.fullmatch(token):
        raise UsageError(
            "P2PDRL_TOKEN isn't a token: 64 hex digits, from the file `token` in the data folder"
        )
    return token
