"""Asks the router, by UPnP, to pass this node's port on to it, so that others can dial it from outside.

The mapping is a lease, renewed while the node runs and taken back when it leaves. A router that can't or
won't is an event: the node is called through relays then (`node.reachability`). Wants the extra ``nat``
(async-upnp-client).
"""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from p2pdrl.errors import UsageError
from p2pdrl.node.events import EventLog
from p2pdrl.transport.protocol import Address

__all__ = ["PortMapping", "find_gateway"]

LEASE_S = 3600
RENEW_S = 1200.0
AGAIN_S = 300.0
"""After a failure."""
SEARCH_S = 4
WITHIN_S = 10.0
TAKE_BACK_S = 2.0


async def find_gateway() -> str | None:
    """Return where a router on this network describes itself; None when none answers.

    Only a private address is taken: whoever answers the search could name any.
    """
    from async_upnp_client.profiles.igd import IgdDevice

    for found in await IgdDevice.async_search(timeout=SEARCH_S):
        location = str(found.get("location", ""))
        try:
            near = ipaddress.ip_address(urlsplit(location).hostname or "").is_private
        except ValueError:
            continue
        if near:
            return location
    return None


class PortMapping:
    """One node's.

    Args:
        address: where the node is on its own network; an IP.
        moved: told where others can dial it from outside; None when they can't any more.
        events: told what came of it.
        find: where the router describes itself.
    """

    def __init__(
        self,
        address: Callable[[], Address],
        moved: Callable[[Address | None], None],
        events: EventLog,
        find: Callable[[], Awaitable[str | None]] = find_gateway,
    ) -> None:
        self._address = address
        self._moved = moved
        self._events = events
        self._find = find
        self._told: Address | None = None

    @staticmethod
    def require() -> None:
        """See that the extra is installed.

        Raises:
            UsageError: it isn't.
        """
        try:
            import async_upnp_client  # noqa: F401
        except ImportError:
            raise UsageError(
                "node.port_mapping wants the extra: pip install 'p2pdrl[nat]', or set it to false: a node "
                "that can't be dialled is called through relays"
            ) from None

    async def run(self) -> None:
        """Keep the port mapped, for ever; take it back in the end."""
        gateway: Any = None
        mapped: Address | None = None
        try:
            while True:
                try:
                    async with asyncio.timeout(SEARCH_S + WITHIN_S):
                        gateway = gateway or await self._gateway()
                        mapped = self._address()
                        external = await self._map(gateway, mapped)
                except Exception as error:  # noqa: BLE001 - the library's, aiohttp's, and what routers answer
                    self._failed(error)
                    if gateway is not None and mapped is not None:
                        await self._take_back(gateway, mapped)
                    gateway = None
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._mapped(external)
                await asyncio.sleep(RENEW_S)
        finally:
            if gateway is not None and mapped is not None:
                await self._take_back(gateway, mapped)

    async def _gateway(self) -> Any:
        from async_upnp_client.aiohttp import AiohttpRequester
        from async_upnp_client.client_factory import UpnpFactory
        from async_upnp_client.profiles.igd import IgdDevice

        location = await self._find()
        if location is None:
            raise ConnectionError("no router that speaks UPnP answers")
        device = await UpnpFactory(AiohttpRequester(timeout=5)).async_create_device(location)
        return IgdDevice(device, None)

    async def _map(self, gateway: Any, address: Address) -> Address:
        """Map our port; return where that is outside."""
        await gateway.async_add_port_mapping(
            remote_host=ipaddress.IPv4Address("0.0.0.0"),  # noqa: S104 - UPnP's word for anybody
            external_port=address.port,
            protocol="TCP",
            internal_port=address.port,
            internal_client=ipaddress.IPv4Address(address.host),
            enabled=True,
            description="p2pdrl",
            lease_duration=dt.timedelta(seconds=LEASE_S),
        )
        outside = ipaddress.ip_address(str(await gateway.async_get_external_ip_address()))
        if not outside.is_global:
            raise ConnectionError(f"the router is behind another one itself, its address is {outside}")
        return Address(str(outside), address.port)

    def _mapped(self, external: Address) -> None:
        if external != self._told:
            text = f"the router passes {external} on to this node, and is asked again in {RENEW_S / 60:g} min"
            self._events.emit("port-mapping", text, address=str(external))
            self._told = external
            self._moved(external)

    def _failed(self, error: Exception) -> None:
        why = str(error) or type(error).__name__
        text = (
            f"the router can't be asked to pass this node's port on: {why[:200]}; others call it through "
            "relays. Forward the port by hand for a direct connection, and start the node with --advertise"
        )
        self._events.remind("port-mapping", text)
        if self._told is not None:
            self._told = None
            self._moved(None)

    async def _take_back(self, gateway: Any, address: Address) -> None:
        try:
            async with asyncio.timeout(TAKE_BACK_S):
                await gateway.async_delete_port_mapping(
                    remote_host=ipaddress.IPv4Address("0.0.0.0"),  # noqa: S104 - as above
                    external_port=address.port,
                    protocol="TCP",
                )
        except Exception as error:  # noqa: BLE001 - as above
            text = f"the mapping of its port couldn't be taken back, and ends within the hour: {error}"
            self._events.emit("port-mapping", text[:300])
