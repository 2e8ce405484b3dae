"""The HTTP headers of a request and of its answer: how they are written, parsed, signed and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from p2pdrl.clock import Clock
from p2pdrl.errors import WireError
from p2pdrl.ids import PROTOCOL_VERSION, is_node_id
from p2pdrl.transport.auth import SwarmKeys, format_time, is_nonce, new_nonce, parse_time

__all__ = ["CONTENT_TYPE", "NO_TARGET", "AnswerHead", "Credentials", "RequestHead"]

CONTENT_TYPE = "application/x-p2pdrl"
NO_TARGET = "-"
"""Target of a caller that doesn't know who lives at the address."""

_PROTOCOL = "P2PDRL-Protocol"
_SENDER = "P2PDRL-Sender"
_TARGET = "P2PDRL-Target"
_SWARM = "P2PDRL-Swarm"
_META = "P2PDRL-Meta-Length"
_VECTOR = "P2PDRL-Vector-Length"
_TIME = "P2PDRL-Time"
_NONCE = "P2PDRL-Nonce"
_MAC = "P2PDRL-Mac"

_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}")
_VERSION = re.compile(r"[1-9][0-9]{0,5}")
_SWARM_ID = re.compile(r"[0-9a-zA-Z_.-]{1,64}")
_HEX_MAC_OR_NONE = re.compile(r"([0-9a-f]{64})?")


def _word(headers: Mapping[str, str], name: str, good: Callable[[str], object]) -> str:
    text = headers.get(name, "")
    if not good(text):
        raise WireError(f"{name} is missing or malformed")
    return text


def _length(headers: Mapping[str, str], name: str) -> int:
    return int(_word(headers, name, _LENGTH.fullmatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What a request says before its body.

    Attributes:
        path: as in the request line.
        sender: node id of the caller.
        target: node id of the callee, or `NO_TARGET`.
        time: wall time of sending, as `auth.format_time` writes it.
        nonce: 32 hex digits, fresh for each request.
        method: POST for a call or a pipe, GET to open a stream.
        mac: 64 hex digits; empty without a swarm key.
    """

    path: str
    sender: str
    target: str
    swarm: str
    meta_nbytes: int
    vector_nbytes: int
    time: str
    nonce: str
    method: str = "POST"
    protocol: int = PROTOCOL_VERSION
    mac: str = ""

    def _signed(self) -> tuple[str, ...]:
        lengths = (str(self.meta_nbytes), str(self.vector_nbytes))
        who = (self.sender, self.target, self.swarm)
        return ("request", self.method, self.path, str(self.protocol), *who, *lengths, self.time, self.nonce)

    def sign(self, keys: SwarmKeys) -> RequestHead:
        """Return the head with its MAC."""
        return replace(self, mac=keys.header_mac(*self._signed()))

    def authentic(self, keys: SwarmKeys) -> bool:
        """Tell whether a holder of the swarm key wrote this head."""
        return keys.header_good(self.mac, *self._signed())

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP headers, Content-Type included."""
        headers = {
            "Content-Type": CONTENT_TYPE,
            _PROTOCOL: str(self.protocol),
            _SENDER: self.sender,
            _TARGET: self.target,
            _SWARM: self.swarm,
            _META: str(self.meta_nbytes),
            _VECTOR: str(self.vector_nbytes),
            _TIME: self.time,
            _NONCE: self.nonce,
        }
        return {**headers, _MAC: self.mac} if self.mac else headers

    @classmethod
    def from_headers(cls, path: str, headers: Mapping[str, str], method: str = "POST") -> RequestHead:
        """Parse the headers of a request.

        Raises:
            WireError: one is missing or malformed.
        """
        return cls(
            path=path,
            method=method,
            protocol=int(_word(headers, _PROTOCOL, _VERSION.fullmatch)),
            sender=_word(headers, _SENDER, is_node_id),
            target=_word(headers, _TARGET, lambda text: text == NO_TARGET or is_node_id(text)),
            swarm=_word(headers, _SWARM, _SWARM_ID.fullmatch),
            meta_nbytes=_length(headers, _META),
            vector_nbytes=_length(headers, _VECTOR),
            time=_word(headers, _TIME, lambda text: parse_time(text) is not None),
            nonce=_word(headers, _NONCE, is_nonce),
            mac=_word(headers, _MAC, _HEX_MAC_OR_NONE.fullmatch),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What an answer says before its body; its MAC covers the request's nonce too.

    Attributes:
        sender: node id of the callee.
        nonce: 32 hex digits, fresh for each answer.
        mac: 64 hex digits; empty without a swarm key.
    """

    sender: str
    meta_nbytes: int
    vector_nbytes: int
    nonce: str
    mac: str = ""

    @classmethod
    def answering(
        cls,
        request: RequestHead,
        sender: str,
        keys: SwarmKeys,
        *,
        meta_nbytes: int = 0,
        vector_nbytes: int = 0,
    ) -> AnswerHead:
        """Return the head of a new answer to ``request``, signed."""
        head = cls(sender=sender, meta_nbytes=meta_nbytes, vector_nbytes=vector_nbytes, nonce=new_nonce())
        return head.sign(keys, request.nonce)

    def _signed(self, request_nonce: str) -> tuple[str, ...]:
        lengths = (str(self.meta_nbytes), str(self.vector_nbytes))
        return ("answer", request_nonce, self.sender, *lengths, self.nonce)

    def sign(self, keys: SwarmKeys, request_nonce: str) -> AnswerHead:
        """Return the head with its MAC, bound to the request with ``request_nonce``."""
        return replace(self, mac=keys.header_mac(*self._signed(request_nonce)))

    def authentic(self, keys: SwarmKeys, request_nonce: str) -> bool:
        """Tell whether a key holder wrote this as the answer to ``request_nonce``."""
        return keys.header_good(self.mac, *self._signed(request_nonce))

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP headers, Content-Type included."""
        headers = {
            "Content-Type": CONTENT_TYPE,
            _SENDER: self.sender,
            _META: str(self.meta_nbytes),
            _VECTOR: str(self.vector_nbytes),
            _NONCE: self.nonce,
        }
        return {**headers, _MAC: self.mac} if self.mac else headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> AnswerHead:
        """Parse the headers of an answer.

        Raises:
            WireError: one is missing or malformed.
        """
        return cls(
            sender=_word(headers, _SENDER, is_node_id),
            meta_nbytes=_length(headers, _META),
            vector_nbytes=_length(headers, _VECTOR),
            nonce=_word(headers, _NONCE, is_nonce),
            mac=_word(headers, _MAC, _HEX_MAC_OR_NONE.fullmatch),
        )


class Credentials:
    """Signs this node's requests, and checks the answers to them.

    Args:
        node_id: our id, told to peers.
        swarm_id: told to peers.
        keys: the swarm's keys.
        clock: wall time for the stamps.
    """

    def __init__(self, node_id: str, swarm_id: str, keys: SwarmKeys, clock: Clock) -> None:
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._clock = clock
        self.keys = keys

    def head(
        self,
        path: str,
        target_id: str | None,
        *,
        method: str = "POST",
        meta_nbytes: int = 0,
        vector_nbytes: int = 0,
    ) -> RequestHead:
        """Return the head of a new request; ``target_id`` is who must answer, None when unknown."""
        head = RequestHead(
            path=path,
            method=method,
            sender=self._node_id,
            target=target_id if target_id is not None else NO_TARGET,
            swarm=self._swarm_id,
            meta_nbytes=meta_nbytes,
            vector_nbytes=vector_nbytes,
            time=format_time(self._clock.wall()),
            nonce=new_nonce(),
        )
        return head.sign(self.keys)

    def check(self, answer: AnswerHead, request: RequestHead) -> None:
        """Make sure that an answer is to our request, and of the node that it was for.

        Raises:
            WireError: it isn't.
        """
        if not answer.authentic(self.keys, request.nonce):
            raise WireError("the answer isn't signed with this swarm's key")
        if request.target not in (NO_TARGET, answer.sender):
            raise WireError(f"node {answer.sender} answered in place of {request.target}")
