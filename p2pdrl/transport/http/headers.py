"""The HTTP headers of a request between nodes and of its answer: how they are written, parsed and checked.

Where the swarm has a key TLS proves who sent them; see `tls`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from p2pdrl.errors import WireError
from p2pdrl.ids import is_node_id
from p2pdrl.versions import BEFORE_RANGES, SPOKEN, ProtocolRange

__all__ = [
    "CONTENT_TYPE",
    "NO_TARGET",
    "AnswerHead",
    "RequestHead",
    "check_answer",
    "spoken_header",
    "told_spoken",
]

CONTENT_TYPE = "application/x-p2pdrl"
NO_TARGET = "-"
"""Target of a caller that doesn't know who lives at the address."""

_PROTOCOL = "P2PDRL-Protocol"
_SPOKEN = "P2PDRL-Protocols"
_SENDER = "P2PDRL-Sender"
_TARGET = "P2PDRL-Target"
_SWARM = "P2PDRL-Swarm"
_META = "P2PDRL-Meta-Length"
_VECTOR = "P2PDRL-Vector-Length"
_OPEN = "P2PDRL-Unencrypted"

_LENGTH = re.compile(r"0|[1-9][0-9]{0,14}")
_VERSION = re.compile(r"[1-9][0-9]{0,5}")
_SWARM_ID = re.compile(r"[0-9a-zA-Z_.-]{1,64}")


def _word(headers: Mapping[str, str], name: str, good: Callable[[str], object]) -> str:
    text = headers.get(name, "")
    if not good(text):
        raise WireError(f"{name} is missing or malformed")
    return text


def _length(headers: Mapping[str, str], name: str) -> int:
    return int(_word(headers, name, _LENGTH.fullmatch))


def spoken_header(spoken: ProtocolRange) -> dict[str, str]:
    """The header that tells which protocols a node speaks, on requests and on all answers."""
    return {_SPOKEN: spoken.wire}


def told_spoken(headers: Mapping[str, str]) -> ProtocolRange | None:
    """The protocols that the sender says it speaks; None where it doesn't say, as before protocol 7."""
    return ProtocolRange.parse(headers.get(_SPOKEN, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What a request says before its body.

    Attributes:
        path: as in the request line.
        sender: node id of the caller.
        target: node id of the callee, or `NO_TARGET`.
        protocol: in which it is written.
        spoken: all that the caller speaks.
        hides: whether a stream or pipe that is asked for has to be encrypted.
    """

    path: str
    sender: str
    target: str
    swarm: str
    meta_nbytes: int
    vector_nbytes: int
    protocol: int = SPOKEN.oldest
    spoken: ProtocolRange = SPOKEN
    hides: bool = True

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP headers, Content-Type included."""
        headers = {
            "Content-Type": CONTENT_TYPE,
            _PROTOCOL: str(self.protocol),
            **spoken_header(self.spoken),
            _SENDER: self.sender,
            _TARGET: self.target,
            _SWARM: self.swarm,
            _META: str(self.meta_nbytes),
            _VECTOR: str(self.vector_nbytes),
        }
        return headers if self.hides else {**headers, _OPEN: "1"}

    @classmethod
    def from_headers(cls, path: str, headers: Mapping[str, str]) -> RequestHead:
        """Parse the headers of a request.

        Raises:
            WireError: one is missing or malformed.
        """
        protocol = int(_word(headers, _PROTOCOL, _VERSION.fullmatch))
        return cls(
            path=path,
            protocol=protocol,
            spoken=told_spoken(headers) or ProtocolRange(protocol, protocol),
            sender=_word(headers, _SENDER, is_node_id),
            target=_word(headers, _TARGET, lambda text: text == NO_TARGET or is_node_id(text)),
            swarm=_word(headers, _SWARM, _SWARM_ID.fullmatch),
            meta_nbytes=_length(headers, _META),
            vector_nbytes=_length(headers, _VECTOR),
            hides=headers.get(_OPEN) != "1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What an answer says before its body.

    Attributes:
        sender: node id of the callee.
        spoken: all that the callee speaks.
    """

    sender: str
    meta_nbytes: int
    vector_nbytes: int
    spoken: ProtocolRange = SPOKEN

    def to_headers(self) -> dict[str, str]:
        """Return the HTTP headers, Content-Type included."""
        return {
            "Content-Type": CONTENT_TYPE,
            **spoken_header(self.spoken),
            _SENDER: self.sender,
            _META: str(self.meta_nbytes),
            _VECTOR: str(self.vector_nbytes),
        }

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> AnswerHead:
        """Parse the headers of an answer.

        Raises:
            WireError: one is missing or malformed.
        """
        return cls(
            spoken=told_spoken(headers) or BEFORE_RANGES,
            sender=_word(headers, _SENDER, is_node_id),
            meta_nbytes=_length(headers, _META),
            vector_nbytes=_length(headers, _VECTOR),
        )


def check_answer(answer: AnswerHead, request: RequestHead, shown: str | None) -> None:
    """Make sure that an answer is of the node that the request was for.

    Args:
        shown: id on the certificate at the other end; None without TLS.

    Raises:
        WireError: it isn't.
    """
    if shown not in (None, answer.sender):
        raise WireError(f"node {shown} answered in the name of {answer.sender}")
    if request.target not in (NO_TARGET, answer.sender):
        raise WireError(f"node {answer.sender} answered in place of {request.target}")
