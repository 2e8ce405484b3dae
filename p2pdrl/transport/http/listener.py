"""The node's one port: binds it, keeps strangers out, and closes it in good order.

listener = Listener(transport.limits, clock, transport.counters)
address = await listener.listen(app, "127.0.0.1", 7700, port_is_default=True, has_key=False)
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from p2pdrl.clock import Clock
from p2pdrl.errors import UsageError
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.http.watchdog import Watchdog, is_loopback
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address

__all__ = ["Listener"]

_PORTS_TRIED = 100
_log = logging.getLogger("p2pdrl.transport.http")


def _is_our_trouble(record: logging.LogRecord) -> bool:
    """Leave out the trace that aiohttp logs for each malformed request: anybody could fill the disk."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log.addFilter(_is_our_trouble)


class Listener:
    """Serves one application on one port.

    Args:
        limits: deadlines and caps of connections.
        clock: monotonic time for them.
        counters: refused and dropped connections are counted here.
    """

    def __init__(self, limits: TransportLimits, clock: Clock, counters: TrafficCounters) -> None:
        self._limits = limits
        self._watchdog = Watchdog(limits, clock, counters)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._watchdog)

    async def listen(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        port_is_default: bool = False,
        has_key: bool = False,
        insecure: bool = False,
    ) -> Address:
        """Bind, and serve ``app`` until `close`.

        Args:
            app: what to serve; nothing can be added to it afterwards.
            host: name or IP of one of this machine's interfaces.
            port: TCP port; 0 takes any free one.
            port_is_default: nobody asked for this port, so that a taken one is passed over
                for the next free one.
            has_key: requests of peers are signed.
            insecure: listen beyond loopback without a key all the same.

        Returns:
            The address that was bound, with ``host`` as given.

        Raises:
            UsageError: the port is taken or not allowed, the host isn't of this machine, or
                the address is reachable for others and there is no key.
        """
        bind_ip, family = await _resolve(host)
        if not is_loopback(bind_ip) and not has_key and not insecure:
            raise UsageError(
                f"{host} can be reached from other machines and there is no swarm key: make one with "
                "`p2pdrl keygen FILE` and give it to every node, listen on 127.0.0.1, or add --insecure"
            )
        sock = _bind(bind_ip, family, host, port, _PORTS_TRIED if port_is_default and port else 1)
        try:
            await self._serve(app, sock)
        except BaseException:
            sock.close()
            raise
        return Address(host, int(sock.getsockname()[1]))

    async def _serve(self, app: web.Application, sock: socket.socket) -> None:
        limits = self._limits
        app.middlewares.insert(0, self._watchdog.middleware)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_log,
            keepalive_timeout=limits.keepalive_s,
            lingering_time=limits.lingering_s,
            shutdown_timeout=limits.shutdown_grace_s,
            read_bufsize=limits.read_buffer_bytes,
            auto_decompress=False,
        )
        await self._runner.setup()
        make = self._runner.server
        if make is None:
            raise RuntimeError("aiohttp's runner has no server after its setup")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._watchdog.factory(make), sock=sock, backlog=256)
        self._watchdog.start()

    async def close(self) -> None:
        """Take no more connections, let running handlers end for a moment, close the rest."""
        self._watchdog.stop()
        server, self._server = self._server, None
        runner, self._runner = self._runner, None
        if server is not None:
            server.close()
        if runner is not None:
            await runner.cleanup()
        if server is not None:
            await server.wait_closed()


async def _resolve(host: str) -> tuple[str, socket.AddressFamily]:
    """Return the IP to bind for ``host``, IPv4 when there is a choice."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"can't listen on {host!r}: the name can't be resolved ({error})") from error
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(where[0]), family


def _bind(ip: str, family: socket.AddressFamily, host: str, port: int, tries: int) -> socket.socket:
    """Return a socket bound to the first free port of ``tries``, starting at ``port``."""
    for candidate in range(port, min(port + tries, 65536)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((ip, candidate))
            sock.listen(256)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno == errno.EACCES:
                raise UsageError(f"port {port} isn't allowed to this user: take one above 1023") from error
            raise UsageError(f"can't listen on {host}:{port}: {error.strerror}") from error
        sock.setblocking(False)
        return sock
    if tries > 1:
        raise UsageError(
            f"the ports {port}-{port + tries - 1} of {host} are all taken: choose one by --listen"
        )
    raise UsageError(
        f"port {port} of {host} is taken, maybe by another node: stop that one, or choose another by --listen"
    )
