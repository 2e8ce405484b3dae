"""How a node is reached, and how a whole swarm is commanded: for the command line and `library.client`.

The node that is asked never sees an operator's key. A command takes the swarm's records from it, checks their
signatures as a node would, signs the next one here, and gives that to the node to be passed on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pdrl.errors import P2PDRLError, UsageError, WireError

if TYPE_CHECKING:
    from p2pdrl.api.client import NodeClient
    from p2pdrl.api.keyfile import OperatorKey, SwarmKeys
    from p2pdrl.membership.swarm_records import SwarmRecords

__all__ = ["Setting", "Target", "command_swarm", "sign_record", "signing_operator", "told_records"]


@dataclass(frozen=True, slots=True)
class Target:
    """The node that a command talks to, as people name it."""

    api: str
    key_file: str | None
    data_dir: str | None
    operator_file: str | None = None
    token: str | None = None

    def client(self, timeout_s: float = 5.0) -> NodeClient:
        """Make the client.

        Raises:
            UsageError: a bad address, key file or token.
        """
        from p2pdrl.api.client import NodeClient

        operator = None if self.key_file is None else self.operator()
        return NodeClient.at(
            self.api,
            swarm_key_file=self.key_file,
            data_dir=self.data_dir,
            token=self.token,
            operator=operator,
            timeout_s=timeout_s,
        )

    def keys(self) -> SwarmKeys | None:
        """The swarm's key, if a file of it is named.

        Raises:
            UsageError: a bad file.
        """
        from p2pdrl.api.keyfile import read_swarm_keys

        return None if self.key_file is None else read_swarm_keys(self.key_file)

    @property
    def operator_path(self) -> Path | None:
        """Where an operator's key is looked for: as named, else beside the swarm's key."""
        if self.operator_file is not None:
            return Path(self.operator_file).expanduser()
        return None if self.key_file is None else Path(f"{self.key_file}.operator").expanduser()

    def operator(self) -> OperatorKey | None:
        """The operator's key; None where there is none.

        Raises:
            UsageError: a bad file, or the one that was named isn't there.
        """
        from p2pdrl.api.keyfile import read_operator_key

        path = self.operator_path
        if path is None or (self.operator_file is None and not path.exists()):
            return None
        return read_operator_key(path)


Setting = Callable[["SwarmRecords", str], tuple[str, Any]]
"""``(records, who signs, in words)`` → key and value of the record that is to be written."""


def command_swarm(target: Target, client: NodeClient, path: str, setting: Setting) -> dict[str, Any]:
    """Change something of the whole swarm; return ``epoch`` and ``proposer`` of the record that says so.

    Args:
        path: what is posted where the swarm has no operators: the node signs then.
        setting: what an operator signs otherwise.

    Raises:
        P2PDRLError: the operator's key isn't there, or isn't one of this swarm; what the node tells can't be
            believed; or it refuses.
    """
    records = told_records(target, client)
    if not records.roots:
        return client.post(path)
    operator = signing_operator(target, client, records)
    key, value = setting(records, operator.public.words)
    return sign_record(client, records, operator, key, value)


def sign_record(
    client: NodeClient, records: SwarmRecords, operator: OperatorKey, key: str, value: Any
) -> dict[str, Any]:
    """Sign a record and give it to the node; return its ``epoch`` and ``proposer``."""
    import msgspec

    try:
        record = records.compose(key, value, operator.signer, time.time())
    except ValueError as error:
        raise P2PDRLError(f"that is more than a record holds: {error}") from error
    return client.post("/v1/records", msgspec.msgpack.encode(record))


def told_records(target: Target, client: NodeClient) -> SwarmRecords:
    """What the node knows, checked by our own copy of the swarm's key where we have one."""
    from p2pdrl.membership.identity import verify
    from p2pdrl.membership.swarm_records import records_told

    keys = target.keys()
    try:
        records = records_told(client.get("/v1/records"), () if keys is None else keys.operators, verify)
    except (ValueError, WireError) as error:
        raise P2PDRLError(f"what the node at {client.address} tells can't be believed: {error}") from error
    if keys is not None and records.swarm_id != keys.swarm_id:
        raise UsageError(
            f"the node at {client.address} is of swarm {records.swarm_id[:20]}, the key file's is "
            f"{keys.swarm_id}"
        )
    return records


def signing_operator(target: Target, client: NodeClient, records: SwarmRecords) -> OperatorKey:
    """The key to sign with: as named, else beside the swarm's key, of which a node of this machine tells.

    Raises:
        P2PDRLError: there is none, or it is of nobody who may.
    """
    if target.operator_path is None and client.on_this_machine:
        beside = client.get("/v1/config")["node"].get("swarm_key_file")
        target = dataclasses.replace(target, key_file=beside if isinstance(beside, str) else None)
    found = target.operator()
    names = ", ".join(operator.words for operator in records.operators)
    if found is None:
        where = target.operator_path
        looked = "name it with --operator FILE or P2PDRL_OPERATOR"
        if where is not None:
            looked = f"none is at {where}, where it is looked for; {looked}"
        raise P2PDRLError(f"only operators command this swarm ({names}), and their key is missing: {looked}")
    if records.operator(found.public.id) is None:
        raise P2PDRLError(
            f"{target.operator_path} is the key of {found.public.words}, who is no operator of this swarm; "
            f"its are: {names}"
        )
    return found
