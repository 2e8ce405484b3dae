"""Every exception the package raises on purpose, in one tree.

    P2PDRLError                     exit 1
    ├── UsageError                  exit 2   the person can mend it at the command line
    │   └── ConfigError             exit 2   a file, flag or variable holds a bad value
    ├── DaemonUnreachableError      exit 3   no node answers at the API address
    ├── UnhealthyError              exit 4   it answers, and says that it is unwell
    ├── TransportError              exit 1   talking to one peer failed: an event, not a bug
    │   ├── PeerUnreachableError             nothing listens there (fast evidence)
    │   ├── PeerTimeoutError                 no answer within the deadline (ambiguous)
    │   ├── PeerRefusedError                 it answered with a refusal (status, reason)
    │   └── WireError                        what arrived isn't what the protocol says
    ├── TensorError                 exit 1
    │   ├── LayoutMismatchError              names, shapes or dtypes differ
    │   └── PoisonedVectorError              NaN, infinity or a norm beyond the bound
    ├── MembershipError             exit 1
    │   └── JoinRefusedError        exit 2   wrong key, protocol version or task
    ├── StorageError                exit 1
    │   ├── DataDirLockedError      exit 2   another node uses the data folder
    │   ├── DataDirUnusableError    exit 2   there can be none, or we may not write there
    │   └── CheckpointError         exit 1   missing, truncated or of another layout
    ├── LimitError                  exit 1   the node is beyond a bound that its owner set
    └── WorkerError                 exit 1   a child process failed

A message says what happened, where, and what to try next. Foreign exceptions are mapped
to this tree once, in the module where they enter.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DaemonUnreachableError",
    "DataDirLockedError",
    "DataDirUnusableError",
    "JoinRefusedError",
    "LayoutMismatchError",
    "LimitError",
    "MembershipError",
    "P2PDRLError",
    "PeerRefusedError",
    "PeerTimeoutError",
    "PeerUnreachableError",
    "PoisonedVectorError",
    "StorageError",
    "TensorError",
    "TransportError",
    "UnhealthyError",
    "UsageError",
    "WireError",
    "WorkerError",
    "did_you_mean",
]


class P2PDRLError(Exception):
    """Root of the tree; ``exit_code`` is what the command line ends with."""

    exit_code = 1


class UsageError(P2PDRLError):
    """The person at the command line can mend it."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration source holds an unknown key or a bad value."""


class DaemonUnreachableError(P2PDRLError):
    """No node answers at the API address."""

    exit_code = 3


class UnhealthyError(P2PDRLError):
    """The node or swarm answers, and is unwell."""

    exit_code = 4


class TransportError(P2PDRLError):
    """Talking to one peer failed."""


class PeerUnreachableError(TransportError):
    """The connection was refused, couldn't be made, or broke before an answer.

    Attributes:
        sent: whether the peer may have got the request; False when there never was a connection.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class PeerTimeoutError(TransportError):
    """No complete answer arrived within the deadline."""


class PeerRefusedError(TransportError):
    """The peer answered with a refusal.

    Attributes:
        status: HTTP status code of the answer.
        reason: the peer's own words, bounded to 500 characters.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class WireError(TransportError):
    """Bytes on the wire break the protocol (lengths, MACs, encoding)."""


class TensorError(P2PDRLError):
    """A vector or its layout is unusable."""


class LayoutMismatchError(TensorError):
    """Two vectors don't have the same names, shapes and dtypes."""


class PoisonedVectorError(TensorError):
    """A vector holds NaN or infinity, or its norm is beyond the bound."""


class MembershipError(P2PDRLError):
    """A membership rule was broken."""


class JoinRefusedError(MembershipError):
    """The swarm doesn't take this node: another key, version or task."""

    exit_code = 2


class StorageError(P2PDRLError):
    """The data folder can't be used as asked."""


class DataDirLockedError(StorageError):
    """Another running node holds the data folder."""

    exit_code = 2


class DataDirUnusableError(StorageError):
    """There can be no data folder at that place, or we may not write there."""

    exit_code = 2


class CheckpointError(StorageError):
    """A checkpoint is missing, damaged or of another layout."""


class LimitError(P2PDRLError):
    """The node took more of its machine than its owner allows (``node.limits``)."""


class WorkerError(P2PDRLError):
    """A child process (learner) failed."""


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """``did you mean NAME?`` with the one of ``known`` that is spelled most alike; else ``otherwise``."""
    import difflib

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise
