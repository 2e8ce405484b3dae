"""The swarm key's file: 32 random bytes as one line of base64, readable by its owner only.

``p2pdrl keygen`` writes it; the daemon and every command with ``--swarm-key-file`` read it. While a key is
replaced (``p2pdrl key rotate``) it holds two:

    NEW from=1790000000 swarm=0e27fcf7e5231f75        taken at once, shown from then on
    OLD until=1790003600                              shown until then, taken until this

so the file can be copied from machine to machine meanwhile, in any order. The first line names the swarm's
root operators, who may command it, by their public keys: ``operator=HEX:NAME``, once for each. What they sign
with is in files of their own, which stay with them:

    PRIVATE name=alice
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdrl.atomic import write_atomic, write_new
from p2pdrl.errors import UsageError
from p2pdrl.ids import swarm_id_from_key
from p2pdrl.membership.operators import MAX_OPERATORS, Operator, find_operators, operator_name

if TYPE_CHECKING:
    from p2pdrl.membership.identity import Identity

__all__ = [
    "KEY_BYTES",
    "OperatorKey",
    "SwarmKeys",
    "TimedKey",
    "read_operator_key",
    "read_swarm_keys",
    "rotate_swarm_key",
    "write_operator_key",
    "write_swarm_key",
]

KEY_BYTES = 32
"""Length of a swarm key."""

_LONGEST_FILE = 4096


def write_swarm_key(path: Path, operators: Sequence[Operator] = ()) -> None:
    """Make a new key and write it to ``path`` with mode 0600.

    Args:
        operators: who may command the swarm; without any, everybody who holds the key.

    Raises:
        UsageError: the file exists already, or can't be made.
        StorageError: it can't be written, and isn't there.
    """
    _write_new(
        path, " ".join([base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode(), *_facts(operators)])
    )


@dataclass(frozen=True, slots=True)
class OperatorKey:
    """What an operator signs with, and the name that goes with it."""

    signer: Identity
    name: str

    @property
    def public(self) -> Operator:
        """What others know of it."""
        return Operator(self.signer.public_key, self.name)


def write_operator_key(path: Path, name: str) -> OperatorKey:
    """Make an operator's key and write it to ``path`` with mode 0600.

    Raises:
        UsageError: the file exists already, or can't be made; the name can't be one.
        StorageError: it can't be written, and isn't there.
    """
    if operator_name(name) is None:
        raise UsageError(
            f"{name[:40]!r} can't be an operator's name: take up to 32 letters, digits, `.`, `_` and `-`"
        )
    from p2pdrl.membership.identity import Identity

    private = secrets.token_bytes(KEY_BYTES)
    _write_new(path, f"{base64.b64encode(private).decode()} name={name}")
    return OperatorKey(Identity(private), name)


def read_operator_key(path: str | Path) -> OperatorKey:
    """Read an operator's key, refusing a file that other users of the machine can read.

    Raises:
        UsageError: no such file, open to others, or not an operator's key.
    """
    from p2pdrl.membership.identity import Identity

    path = Path(path).expanduser()
    text = _read_secret(path, "operator key", "`p2pdrl keygen --operator-only`")
    word, _, name = text.strip().partition(" name=")
    try:
        private = base64.b64decode(word, validate=True)
    except ValueError:
        private = b""
    if len(private) != KEY_BYTES or operator_name(name) is None:
        raise UsageError(
            f"{path} isn't an operator key: it is the file beside the swarm key whose name ends in .operator"
        )
    return OperatorKey(Identity(private), name)


def _facts(operators: Sequence[Operator]) -> list[str]:
    return [f"operator={operator.public_key.hex()}:{operator.name}" for operator in operators]


def _write_new(path: Path, line: str) -> None:
    try:
        write_new(path, f"{line}\n".encode(), 0o600, "write the key to")
    except FileExistsError:
        raise UsageError(
            f"{path} exists already, and a key is never overwritten: name another file"
        ) from None
    except OSError as error:
        raise UsageError(
            f"can't write the key to {path}: {error.strerror}; name a file in a folder of yours"
        ) from None


def rotate_swarm_key(
    path: Path,
    overlap_s: float,
    wall_s: float,
    *,
    add: Sequence[Operator] = (),
    remove: Sequence[str] = (),
) -> SwarmKeys:
    """Put a new key into ``path``, beside the one that is shown now. Its operators stay.

    Args:
        path: a key file.
        overlap_s: how long the old key is shown yet, so that the file can be copied to every machine; and
            how long it is taken after that.
        wall_s: wall time.
        add: more root operators.
        remove: names of root operators, or the first four digits or more of their ids, who are none from now
            on.

    Raises:
        UsageError: no such file, not a key file, a rotation is under way already, or it can't be written; or
            nobody is called so.
    """
    keys = read_swarm_keys(path)
    if len(keys.good(wall_s)) > 1:
        raise UsageError(f"{path} is being rotated already: wait until {_iso(keys.settled_s)}")
    old = keys.good(wall_s)[0]
    new = secrets.token_bytes(KEY_BYTES)
    operators = _changed(keys.operators, add, remove)
    made = SwarmKeys(
        keys.swarm_id,
        (TimedKey(new, from_s=wall_s + overlap_s), TimedKey(old, until_s=wall_s + 2 * overlap_s)),
        operators,
    )
    facts = [f"from={made.keys[0].from_s:.0f}", f"swarm={keys.swarm_id}", *_facts(operators)]
    lines = [
        " ".join([base64.b64encode(new).decode(), *facts]),
        f"{base64.b64encode(old).decode()} until={made.keys[1].until_s:.0f}",
    ]
    try:
        write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UsageError(
            f"can't write the key to {path}: {error.strerror}; name a file in a folder of yours"
        ) from None
    return made


def _changed(
    operators: Sequence[Operator], add: Sequence[Operator], remove: Sequence[str]
) -> tuple[Operator, ...]:
    kept = list(operators)
    for word in remove:
        found = find_operators(word, kept)
        if len(found) != 1:
            known = ", ".join(f"{operator.name} ({operator.id[:8]})" for operator in operators) or "none"
            raise UsageError(f"{word!r} names {len(found)} of the key's root operators, which are: {known}")
        kept.remove(found[0])
    for operator in add:
        if all(operator.public_key != held.public_key for held in kept):
            kept.append(operator)
    if len(kept) > MAX_OPERATORS:
        raise UsageError(f"a key names {MAX_OPERATORS} root operators at most, not {len(kept)}")
    if operators and not kept:
        raise UsageError("the last root operator stays, or everybody could command: add another one first")
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class TimedKey:
    """One key, and from when on it is shown, and until when it is taken; wall times."""

    key: bytes = field(repr=False)
    from_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class SwarmKeys:
    """All keys of a swarm, newest first.

    Attributes:
        swarm_id: stays the same while keys come and go.
        operators: the roots, who may command the swarm; without any, everybody who holds the key.
    """

    swarm_id: str
    keys: tuple[TimedKey, ...]
    operators: tuple[Operator, ...] = ()

    def good(self, wall_s: float) -> tuple[bytes, ...]:
        """The keys that are taken at ``wall_s``, the one that we show first."""
        taken = [key for key in self.keys if wall_s < key.until_s] or [self.keys[0]]
        shown = next((key for key in taken if wall_s >= key.from_s), taken[-1])
        return (shown.key, *(key.key for key in taken if key is not shown))

    @property
    def settled_s(self) -> float:
        """When the last of the old keys is refused; 0 where there are none."""
        return max((key.until_s for key in self.keys if math.isfinite(key.until_s)), default=0.0)


def read_swarm_keys(path: str | Path) -> SwarmKeys:
    """Read a key file, refusing one that other users of the machine can read.

    Raises:
        UsageError: no such file, open to others, or not a key.
    """
    path = Path(path).expanduser()
    text = _read_secret(path, "swarm key", f"`p2pdrl keygen {path}`")
    try:
        return _parse(text)
    except ValueError:
        raise UsageError(
            f"{path} isn't a swarm key: copy the swarm's file again, or make one with `p2pdrl keygen FILE`"
        ) from None


def _read_secret(path: Path, what: str, how: str) -> str:
    """Read a file that nobody else may read; what isn't ASCII comes out as no key."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_LONGEST_FILE)
    except FileNotFoundError:
        raise UsageError(f"no {what} at {path}: make one with {how}") from None
    except OSError as error:
        raise UsageError(f"can't read the {what} {path}: {error.strerror}") from None
    if _open_to_others(status):
        raise UsageError(f"other users can read the {what} {path}: run `chmod 600 {path}`")
    return data.decode("ascii", "replace")


def _parse(text: str) -> SwarmKeys:
    """Read lines of a key in base64 and ``from=``, ``until=`` (wall times), ``swarm=``, ``operator=``."""
    swarm_id, keys = "", []
    operators: list[Operator] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        word, *facts = line.split()
        operators += [_operator(fact) for fact in facts if fact.startswith("operator=")]
        named = dict(fact.split("=", 1) for fact in facts if not fact.startswith("operator="))
        key = base64.b64decode(word, validate=True)
        if len(key) != KEY_BYTES or named.keys() - {"from", "until", "swarm"}:
            raise ValueError(line)
        until_s = float(named["until"]) if "until" in named else math.inf
        keys.append(TimedKey(key, float(named.get("from", 0.0)), until_s))
        swarm_id = swarm_id or named.get("swarm", "")
    if not keys or len(operators) > MAX_OPERATORS:
        raise ValueError(text)
    return SwarmKeys(swarm_id or swarm_id_from_key(keys[0].key), tuple(keys), tuple(operators))


def _operator(fact: str) -> Operator:
    public, _, name = fact.removeprefix("operator=").partition(":")
    operator = Operator(bytes.fromhex(public), name or "root")
    if len(operator.public_key) != KEY_BYTES or operator_name(operator.name) is None:
        raise ValueError(fact)
    return operator


def _iso(wall_s: float) -> str:
    return dt.datetime.fromtimestamp(wall_s, dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _open_to_others(status: os.stat_result) -> bool:
    """Nobody but the owner may read it, except through a group when somebody else gave it to us.

    Kubernetes mounts secrets as root's with group access (``fsGroup``).
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o007
    return bool(status.st_mode & forbidden)
