"""Tells systemd how this node does, by the protocol of sd_notify(3): for units of ``Type=notify``.

It hears when the node listens, what happened last (``systemctl status``), that the daemon's loop still turns
(``WatchdogSec=``), and when the node leaves.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from p2pdrl.node.events import EventLog

__all__ = ["ServiceManager"]

STATUS_EVERY_S = 5.0
_LONGEST_STATUS = 500


class ServiceManager:
    """The service manager that started this process.

    Args:
        address: of its socket; ``@`` begins one in Linux's abstract namespace. None when none started us:
            then nothing is told to anybody.
        watchdog_s: it restarts us when it hears nothing for so long; None when it doesn't watch.
    """

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        abstract = address is not None and address.startswith("@")
        self._address = f"\0{address[1:]}" if address is not None and abstract else address
        self._every_s = STATUS_EVERY_S if watchdog_s is None else min(STATUS_EVERY_S, watchdog_s / 3)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ServiceManager:
        """The one that ``environment`` tells of."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls(None)
        usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        watched = usec.isdigit() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(usec) / 1e6 if watched else None)

    def tell(self, **facts: str) -> None:
        """Send some of the protocol's variables; one that doesn't listen misses them."""
        if self._address is None:
            return
        content = "\n".join(f"{name}={value}" for name, value in facts.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            try:
                sender.sendto(content.encode(), self._address)
            except OSError:
                return

    async def run(self, events: EventLog) -> None:
        """Say that the node is up, and then what happened last and that the loop turns, until cancelled."""
        facts = {"READY": "1"}
        seq = 0
        while self._address is not None:
            if found := events.since(seq):
                seq = found[-1]["seq"]
                facts["STATUS"] = " ".join(found[-1]["text"].split())[:_LONGEST_STATUS]
            self.tell(**facts, WATCHDOG="1")
            await asyncio.sleep(self._every_s)
            facts = {}
