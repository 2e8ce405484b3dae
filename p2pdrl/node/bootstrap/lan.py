"""Finds other nodes of the swarm on the local network by multicast DNS, and lets them find this one.

What is announced is an address, a port and a fingerprint that follows from the swarm's id by a hash, so it
tells strangers nothing of the key. What is found is no more than an address to try, as if a person had
written it behind ``--peers``: whoever answers there has to prove itself like anybody else. Wants the extra
``lan`` (python-zeroconf).
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Callable
from typing import Any

from p2pdrl.errors import UsageError
from p2pdrl.membership.records import refuse_address
from p2pdrl.node.events import EventLog
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.protocol import Address
from p2pdrl.versions import SPOKEN, ProtocolRange

__all__ = ["LOOK_FIRST_S", "LanDiscovery", "fingerprint", "may_join"]

SERVICE = "_p2pdrl._tcp.local."
LOOK_FIRST_S = 4.0
"""A node looks for others so long before it founds a swarm."""
TELL_S = 5.0
"""Found addresses are told again so often, until they are members."""
MAX_FOUND = 32
ASK_MS = 3000


def fingerprint(swarm_id: str, task_hash: str = "") -> str:
    """Return what nodes that may join each other announce.

    Args:
        swarm_id: of the swarm's key, or of its name.
        task_hash: of swarms without a key, which have no other secret: their task; empty for any.
    """
    return hashlib.sha256(f"p2pdrl lan\0{swarm_id}".encode()).hexdigest()[:24] + task_hash[:8]


class LanDiscovery:
    """One node's.

    Args:
        node_id: its id.
        mark: its `fingerprint`; looked at whenever it is announced.
        address: where others reach it; likewise.
        heard_of: told each address that is found, again and again.
        events: told what is found first.

    Attributes:
        found: set once there is one.
    """

    def __init__(
        self,
        node_id: str,
        mark: Callable[[], str],
        address: Callable[[], Address],
        heard_of: Callable[[Address], None],
        events: EventLog,
    ) -> None:
        self.found = asyncio.Event()
        self._name = f"{node_id[:16]}.{SERVICE}"
        self._mark, self._address = mark, address
        self._heard_of = heard_of
        self._events = events
        self._known: dict[str, Address] = {}
        self._asking: set[asyncio.Task[None]] = set()

    @staticmethod
    def require() -> None:
        """See that the extra is installed.

        Raises:
            UsageError: it isn't.
        """
        try:
            import zeroconf  # noqa: F401
        except ImportError:
            raise UsageError(
                "finding nodes on the local network wants the extra: pip install 'p2pdrl[lan]', or name a "
                "node with --peers HOST:PORT"
            ) from None

    async def run(self) -> None:
        """Announce and look, for ever; a network that can't do it is told once."""
        from zeroconf import InterfaceChoice
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        local = is_loopback(self._address().host)
        interfaces: Any = ["127.0.0.1"] if local else InterfaceChoice.All
        try:
            zeroconf = AsyncZeroconf(interfaces=interfaces)
        except OSError as error:
            self._cannot(error)
            await asyncio.Event().wait()
            return
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[self._changed])
        told: tuple[Address, str] | None = None
        info: Any = None
        try:
            while True:
                now = self._address(), self._mark()
                if now != told and (made := self._service(*now)) is not None:
                    try:
                        announce = (
                            zeroconf.async_register_service if told is None else zeroconf.async_update_service
                        )
                        await (await announce(made))
                        info, told = made, now
                    except Exception as error:  # noqa: BLE001 - the library has several for a name that is taken
                        self._cannot(error)
                for address in self._known.values():
                    self._heard_of(address)
                await asyncio.sleep(TELL_S)
        finally:
            for task in self._asking:
                task.cancel()
            if info is not None:
                await (await zeroconf.async_unregister_service(info))
            await browser.async_cancel()
            await zeroconf.async_close()

    def _cannot(self, error: Exception) -> None:
        self._events.remind("lan", f"can't use multicast DNS on this network: {error}"[:300])

    def _service(self, address: Address, mark: str) -> Any:
        from zeroconf import ServiceInfo

        try:
            ip = ipaddress.ip_address(address.host)
        except ValueError:
            return None  # a name says where to look by itself
        return ServiceInfo(
            SERVICE,
            self._name,
            addresses=[ip.packed],
            port=address.port,
            properties={"swarm": mark, "protocol": str(SPOKEN.oldest), "protocols": SPOKEN.wire},
            server=f"{self._name.partition('.')[0]}.local.",
        )

    def _changed(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        """Called by the library, in this event loop."""
        if name == self._name:
            return
        if state_change.name == "Removed":
            self._known.pop(name, None)
        elif len(self._asking) < MAX_FOUND:
            task = asyncio.get_running_loop().create_task(self._ask(zeroconf, service_type, name), name="lan")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Any, service_type: str, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(service_type, name)
        if not await info.async_request(zeroconf, ASK_MS):
            return
        found = {
            key: (value or b"").decode("ascii", "replace")
            for key in ("swarm", "protocol", "protocols")
            for value in [info.properties.get(key.encode())]
        }
        spoken = ProtocolRange.parse(found["protocols"] or found["protocol"])
        if spoken is None or SPOKEN.common(spoken) is None or not may_join(self._mark(), found["swarm"]):
            return
        for ip in info.parsed_addresses()[:4]:
            address = Address(ip, info.port or 0)
            near = ipaddress.ip_address(str(ip)).is_private
            if near and refuse_address(str(address), self._address().host) is None:
                self._found(name, address)
                return

    def _found(self, name: str, address: Address) -> None:
        if len(self._known) >= MAX_FOUND and name not in self._known:
            return
        if self._known.get(name) != address:
            self._events.emit("lan", f"found a node of this swarm at {address}", address=str(address))
        self._known[name] = address
        self._heard_of(address)
        self.found.set()


def may_join(ours: str, theirs: str) -> bool:
    """Whether two fingerprints are of one swarm, and neither names another task than the other."""
    short = min(len(ours), len(theirs))
    return short >= len(fingerprint("")) and ours[:short] == theirs[:short]
