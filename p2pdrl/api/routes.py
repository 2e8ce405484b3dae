"""The routes of the HTTP API, mounted on the application that also serves the peers.

| route | access | answer |
|---|---|---|
| ``GET /`` | open | the page |
| ``GET /healthz`` ``/readyz`` | open | 200 or 503, ``{"ok", "reasons"}``; strangers get no reasons |
| ``GET /v1/target`` | open | ``?nonce=…``; whom to sign requests for: ``{"target", "proofs"}``, see `auth` |
| ``GET /metrics`` | metrics | Prometheus text |
| ``GET /v1/status`` ``/v1/peers`` ``/v1/config`` | read | JSON |
| ``GET /v1/mode`` ``/v1/rounds`` ``/v1/evaluations`` ``/v1/history`` | read | JSON |
| ``GET /v1/records`` | read | JSON; the swarm's records as they are signed, and its operators |
| ``POST /v1/records`` | read | a record that an operator has signed, as it is on the wire |
| ``GET /v1/pipeline/trace`` | read | Chrome's trace format; ``?seconds=2``, up to 60 |
| ``GET /v1/events`` | read | event stream; ``?follow=0`` a JSON list; ``?since=N`` |
| ``GET /v1/checkpoint`` | read | safetensors file |
| ``GET /v1/act`` | read | what the policy takes and gives, see `act` |
| ``POST /v1/act`` | read | observations, as JSON or binary; actions of the newest policy, see `act` |
| ``POST /v1/checkpoint`` | change | ``{"path"}`` |
| ``POST /v1/pause`` ``/v1/resume`` | change | ``?scope=node`` or ``swarm`` |
| ``POST /v1/mode`` | change | ``?mode=MODE&set=KEY=VALUE&…``; ``{"epoch", "proposer"}``, or 400 and why not |
| ``POST /v1/stop`` | change | ``?set=KEY=VALUE&…``, the swarm's stop condition |
| ``POST /v1/halt`` | change | ``?reason=TEXT``; the training ends everywhere |
| ``POST /v1/ban`` ``/v1/unban`` | change | ``?node=ID&reason=TEXT`` |
| ``POST /v1/roles`` | change | ``?role=actor&role=…``; this node's from now on, or 400 and why not |
| ``POST /v1/dial-back`` | ask | ``?port=N&nonce=HEX``; whether we can connect to that port of the asker |
| ``POST /v1/leave`` | change | 202; the node leaves and ends |
| ``/v1/invites`` and below | | see `invites` |

Where the swarm has operators, what concerns all of it is answered 403 but for ``POST /v1/records``: operators
sign by themselves, and the node carries that. Called once by the daemon. Host and Origin are checked before,
by the transport's middleware.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from aiohttp import web

from p2pdrl.api.act import ActHandlers
from p2pdrl.api.answers import ApiRefusal, Handler, answers_errors, json_answer
from p2pdrl.api.auth import Access, AccessGuard, from_this_machine
from p2pdrl.api.client import NO_ROUTE
from p2pdrl.api.invites import InviteHandlers
from p2pdrl.api.page import load_page
from p2pdrl.api.protocol import NodeView
from p2pdrl.api.sse import EventStreams
from p2pdrl.clock import Clock, SystemClock
from p2pdrl.telemetry.metrics import CONTENT_TYPE
from p2pdrl.transport.auth import is_nonce
from p2pdrl.versions import SPOKEN

__all__ = ["mount"]

_PIECE_BYTES = 1 << 20
"""aiohttp stalls its loop when it is handed one large buffer."""

_MAX_SETS = 64
_PORT = re.compile(r"[0-9]{1,5}")
_LONGEST_RECORD = 16_384
_LONGEST_TRACE_S = 60.0

_TAKE_BODIES = frozenset({"/v1/act", "/v1/records", "/v1/invites/redeem", "/v1/invites/renew"})

Route = tuple[str, str, Access, Handler]


def mount(app: web.Application, node: NodeView, clock: Clock | None = None) -> None:
    """Add every route of ``node``'s API to ``app``, which isn't started yet."""
    clock = clock or SystemClock()
    access_guard = AccessGuard(node, clock)
    streams = EventStreams(node.events())
    routes, acting = _Routes(node, access_guard), ActHandlers(node)
    invites = InviteHandlers(node, clock)
    table: list[Route] = [
        ("GET", "/", Access.OPEN, load_page().handle),
        ("GET", "/healthz", Access.OPEN, routes.healthz),
        ("GET", "/readyz", Access.OPEN, routes.readyz),
        ("GET", "/v1/target", Access.OPEN, access_guard.target),
        ("GET", "/metrics", Access.METRICS, routes.metrics),
        ("GET", "/v1/status", Access.READ, _shows(node.status)),
        ("GET", "/v1/peers", Access.READ, _shows(node.peers)),
        ("GET", "/v1/config", Access.READ, _shows(node.config)),
        ("GET", "/v1/mode", Access.READ, _shows(node.mode)),
        ("GET", "/v1/rounds", Access.READ, _shows(node.rounds)),
        ("GET", "/v1/evaluations", Access.READ, _shows(node.evaluations)),
        ("GET", "/v1/history", Access.READ, _shows(node.history)),
        ("GET", "/v1/records", Access.READ, _shows(node.records)),
        ("POST", "/v1/records", Access.READ, routes.submit),
        ("GET", "/v1/pipeline/trace", Access.READ, routes.trace),
        ("GET", "/v1/events", Access.READ, streams.handle),
        ("GET", "/v1/checkpoint", Access.READ, routes.export),
        ("GET", "/v1/act", Access.READ, acting.describe),
        ("POST", "/v1/act", Access.READ, acting.act),
        ("POST", "/v1/checkpoint", Access.CHANGE, routes.checkpoint),
        ("POST", "/v1/pause", Access.CHANGE, functools.partial(routes.pause, True)),
        ("POST", "/v1/resume", Access.CHANGE, functools.partial(routes.pause, False)),
        ("POST", "/v1/mode", Access.CHANGE, routes.mode),
        ("POST", "/v1/stop", Access.CHANGE, routes.stop),
        ("POST", "/v1/halt", Access.CHANGE, routes.halt),
        ("POST", "/v1/ban", Access.CHANGE, functools.partial(routes.ban, True)),
        ("POST", "/v1/unban", Access.CHANGE, functools.partial(routes.ban, False)),
        ("POST", "/v1/roles", Access.CHANGE, routes.roles),
        ("POST", "/v1/dial-back", Access.ASK, routes.dial_back),
        ("POST", "/v1/leave", Access.CHANGE, routes.leave),
        ("GET", "/v1/invites", Access.READ, invites.list),
        ("POST", "/v1/invites", Access.CHANGE, invites.create),
        ("POST", "/v1/invites/revoke", Access.CHANGE, invites.revoke),
        ("GET", "/v1/invites/authority", Access.OPEN, invites.authority),
        ("POST", "/v1/invites/redeem", Access.OPEN, invites.redeem),
        ("POST", "/v1/invites/renew", Access.OPEN, invites.renew),
    ]
    for method, path, access, handler in table:
        add = app.router.add_get if method == "GET" else app.router.add_post
        add(path, access_guard.guard(access, handler, takes_body=method == "POST" and path in _TAKE_BODIES))
    app.router.add_route("*", "/v1/{rest:.*}", answers_errors(_unknown(table)))
    app.on_shutdown.append(streams.close)


def _shows(read: Callable[[], object]) -> Handler:
    async def handle(_request: web.Request) -> web.Response:
        return json_answer(read())

    return handle


class _Routes:
    """Handlers of one node; those that change something answer ``{"ok": true, …}``."""

    def __init__(self, node: NodeView, access_guard: AccessGuard) -> None:
        self._node = node
        self._access_guard = access_guard

    async def healthz(self, request: web.Request) -> web.Response:
        ok, reasons = self._node.health()
        more = {"data_dir": self._node.data_dir} if from_this_machine(request) else {}
        return self._verdict(
            request, ok, reasons, {"protocol": SPOKEN.oldest, "protocols": SPOKEN.wire, **more}
        )

    async def readyz(self, request: web.Request) -> web.Response:
        ok, reasons = self._node.ready()
        return self._verdict(request, ok, reasons, {})

    def _verdict(
        self, request: web.Request, ok: bool, reasons: list[str], more: dict[str, object]
    ) -> web.Response:
        """For probes of an orchestrator, which have no credentials: the status says it."""
        why = {"reasons": reasons} if self._access_guard.tells_details(request) else {}
        return json_answer({"ok": ok, **why, **more}, status=200 if ok else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._node.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def trace(self, request: web.Request) -> web.Response:
        try:
            seconds = float(request.query.get("seconds", "2"))
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= _LONGEST_TRACE_S:
            raise ApiRefusal(400, f"seconds must be a number up to {_LONGEST_TRACE_S:g}, and not 0")
        return json_answer(await self._node.trace(seconds))

    async def export(self, request: web.Request) -> web.StreamResponse:
        """The current parameters as a file."""
        data = memoryview(await self._node.export())
        response = web.StreamResponse(
            headers={
                "Content-Type": "application/octet-stream",
                "Content-Disposition": 'attachment; filename="checkpoint.safetensors"',
                "X-Content-Type-Options": "nosniff",
            }
        )
        response.content_length = data.nbytes
        await response.prepare(request)
        for start in range(0, data.nbytes, _PIECE_BYTES):
            await response.write(data[start : start + _PIECE_BYTES])
        await response.write_eof()
        return response

    async def leave(self, _request: web.Request) -> web.Response:
        await self._node.leave()
        return json_answer({"ok": True, "state": "leaving"}, status=202)

    async def checkpoint(self, _request: web.Request) -> web.Response:
        return json_answer({"ok": True, "path": await self._node.checkpoint()})

    async def mode(self, request: web.Request) -> web.Response:
        """Everything is in the query: a signature covers it, as it does no body."""
        given = request.query
        if unknown := set(given) - {"mode", "set"}:
            raise ApiRefusal(400, f"this route takes mode and set, not {min(unknown)[:40]!r}")
        modes, sets = given.getall("mode", []), given.getall("set", [])
        if len(modes) != 1 or len(sets) > _MAX_SETS:
            raise ApiRefusal(400, f"this route takes one mode, and at most {_MAX_SETS} times set=KEY=VALUE")
        return json_answer({"ok": True, **await self._node.set_mode(modes[0], sets)})

    async def submit(self, request: web.Request) -> web.Response:
        """A record is signed itself, so its body needs no signature of the request."""
        length = request.content_length
        if length is None or length > _LONGEST_RECORD:
            raise ApiRefusal(413, f"this route takes one record of {_LONGEST_RECORD} bytes at most")
        return json_answer({"ok": True, **await self._node.submit(await request.read())})

    async def stop(self, request: web.Request) -> web.Response:
        """In the query, as a signature covers it."""
        if unknown := set(request.query) - {"set"}:
            raise ApiRefusal(400, f"this route takes set, not {min(unknown)[:40]!r}")
        sets = request.query.getall("set", [])
        if len(sets) > _MAX_SETS:
            raise ApiRefusal(400, f"this route takes at most {_MAX_SETS} times set=KEY=VALUE")
        return json_answer({"ok": True, **await self._node.set_stop(sets)})

    async def halt(self, request: web.Request) -> web.Response:
        """End the training everywhere."""
        return json_answer({"ok": True, **await self._node.halt(request.query.get("reason", ""))})

    async def ban(self, banned: bool, request: web.Request) -> web.Response:
        """Have all refuse a node, or take it again."""
        node, reason = (request.query.get(name, "") for name in ("node", "reason"))
        return json_answer({"ok": True, **await self._node.ban(node, reason=reason, banned=banned)})

    async def roles(self, request: web.Request) -> web.Response:
        """In the query, as a signature covers it."""
        if unknown := set(request.query) - {"role"}:
            raise ApiRefusal(400, f"this route takes role, not {min(unknown)[:40]!r}")
        roles = request.query.getall("role", [])
        if len(roles) > _MAX_SETS:
            raise ApiRefusal(400, f"this route takes at most {_MAX_SETS} roles")
        await self._node.set_roles(roles)
        return json_answer({"ok": True, "roles": roles}, status=202)

    async def dial_back(self, request: web.Request) -> web.Response:
        """Dial the address that the request came from, and no other."""
        given = request.query
        port, nonce = given.get("port", ""), given.get("nonce", "")
        good = _PORT.fullmatch(port) is not None and 1 <= int(port) <= 65535
        if set(given) != {"port", "nonce"} or not good or not is_nonce(nonce):
            raise ApiRefusal(400, "this route takes a port, and a nonce of 32 hex digits")
        return json_answer(await self._node.dial_back(request.remote or "", int(port), nonce))

    async def pause(self, paused: bool, request: web.Request) -> web.Response:
        scope = request.query.get("scope", "node")
        if scope not in {"node", "swarm"}:
            raise ApiRefusal(400, "scope must be node or swarm")
        await self._node.pause(paused=paused, swarm=scope == "swarm")
        return json_answer({"ok": True, "scope": scope})


def _unknown(table: list[Route]) -> Handler:
    """What isn't in the table: 404, or 405 when only the method is wrong."""

    async def handle(request: web.Request) -> web.StreamResponse:
        allowed = ", ".join(method for method, path, _, _ in table if path == request.path)
        if not allowed:
            raise ApiRefusal(404, NO_ROUTE)
        raise ApiRefusal(405, f"this route takes {allowed}", {"Allow": allowed})

    return handle
