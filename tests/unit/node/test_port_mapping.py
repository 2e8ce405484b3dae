"""A router that is asked by UPnP to pass a port on: a fake one, which speaks HTTP and SOAP on loopback."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import UsageError
from p2pdrl.node import port_mapping
from p2pdrl.node.events import EventLog
from p2pdrl.node.port_mapping import PortMapping
from p2pdrl.transport.protocol import Address

wants_extra = pytest.mark.skipif(
    importlib.util.find_spec("async_upnp_client") is None, reason="wants the extra nat (async-upnp-client)"
)
INSIDE = Address("192.168.1.5", 7700)
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"


def element(name: str, *content: str) -> str:
    return f"<{name}>{''.join(content)}</{name}>"


def device(kind: str, *content: str) -> str:
    full = f"urn:schemas-upnp-org:device:{kind}:1"
    told = [element("deviceType", full), element("friendlyName", kind), element("manufacturer", "m")]
    return element("device", *told, element("modelName", "m"), element("UDN", f"uuid:{kind}"), *content)


def action(name: str, *arguments: tuple[str, str, str]) -> str:
    listed = [
        element("argument", element("name", n), element("direction", d), element("relatedStateVariable", v))
        for n, d, v in arguments
    ]
    return element("action", element("name", name), element("argumentList", *listed))


PLACE = (
    ("NewRemoteHost", "in", "RemoteHost"), ("NewExternalPort", "in", "ExternalPort"),
    ("NewProtocol", "in", "PortMappingProtocol"),
)  # fmt: skip
REST = (
    ("NewInternalPort", "in", "InternalPort"), ("NewInternalClient", "in", "InternalClient"),
    ("NewEnabled", "in", "PortMappingEnabled"),
    ("NewPortMappingDescription", "in", "PortMappingDescription"),
    ("NewLeaseDuration", "in", "PortMappingLeaseDuration"),
)  # fmt: skip
TYPES = {
    "RemoteHost": "string", "ExternalPort": "ui2", "PortMappingProtocol": "string", "InternalPort": "ui2",
    "InternalClient": "string", "PortMappingEnabled": "boolean", "PortMappingDescription": "string",
    "PortMappingLeaseDuration": "ui4", "ExternalIPAddress": "string",
}  # fmt: skip


class Router:
    """Attributes: ``mapped`` holds ports with whom they lead to, ``asked`` counts; ``refuses`` says no."""

    def __init__(self) -> None:
        self.outside = "203.0.114.7"
        self.mapped: dict[str, str] = {}
        self.asked: list[str] = []
        self.refuses = False
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/root.xml", self.describe)
        app.router.add_get("/scpd.xml", self.service)
        app.router.add_post("/control", self.control)
        return app

    async def describe(self, _: web.Request) -> web.Response:
        service = element(
            "service", element("serviceType", SERVICE), element("serviceId", "urn:upnp-org:serviceId:WANIPC"),
            element("SCPDURL", "/scpd.xml"), element("controlURL", "/control"), element("eventSubURL", "/e"),
        )  # fmt: skip
        connection = device("WANConnectionDevice", element("serviceList", service))
        wan = device("WANDevice", element("deviceList", connection))
        root = device("InternetGatewayDevice", element("deviceList", wan))
        text = f'<root xmlns="urn:schemas-upnp-org:device-1-0">{root}</root>'
        return web.Response(text=text, content_type="text/xml")

    async def service(self, _: web.Request) -> web.Response:
        actions = [
            action("AddPortMapping", *PLACE, *REST), action("DeletePortMapping", *PLACE),
            action("GetExternalIPAddress", ("NewExternalIPAddress", "out", "ExternalIPAddress")),
        ]  # fmt: skip
        variables = [
            f'<stateVariable sendEvents="no">{element("name", n)}{element("dataType", t)}</stateVariable>'
            for n, t in TYPES.items()
        ]
        body = element("actionList", *actions) + element("serviceStateTable", *variables)
        return web.Response(
            text=f'<scpd xmlns="urn:schemas-upnp-org:service-1-0">{body}</scpd>', content_type="text/xml"
        )

    async def control(self, request: web.Request) -> web.Response:
        name = request.headers["SOAPAction"].strip('"').partition("#")[2]
        body = await request.text()
        said = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        self.asked.append(name)
        if self.refuses:
            return web.Response(status=500, text="no")
        told = ""
        if name == "AddPortMapping":
            self.mapped[said["NewExternalPort"]] = f"{said['NewInternalClient']}:{said['NewInternalPort']}"
        elif name == "DeletePortMapping":
            del self.mapped[said["NewExternalPort"]]
        else:
            told = element("NewExternalIPAddress", self.outside)
        answer = f'<u:{name}Response xmlns:u="{SERVICE}">{told}</u:{name}Response>'
        envelope = (
            '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
            's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
            f"{answer}</s:Body></s:Envelope>"
        )
        return web.Response(text=envelope, content_type="text/xml")


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    made = Router()
    runner = web.AppRunner(made.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/root.xml"
    yield made
    await runner.cleanup()


class Mapped:
    """A mapping that runs."""

    def __init__(self, router: Router | None) -> None:
        self.moves: list[Address | None] = []
        self.log = EventLog(50, SystemClock())

        async def find() -> str | None:
            return None if router is None else router.url

        self.mapping = PortMapping(lambda: INSIDE, self.moves.append, self.log, find)

    async def __aenter__(self) -> Mapped:
        self.task = asyncio.create_task(self.mapping.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled(), self.task.exception()

    async def until(self, condition) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError([event["text"] for event in self.log.since(0)])


@wants_extra
async def test_a_port_is_mapped_renewed_and_taken_back(router, monkeypatch):
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.05)
    outside = Address("203.0.114.7", 7700)
    async with Mapped(router) as mapped:
        await mapped.until(lambda: router.asked.count("AddPortMapping") > 2)
        assert router.mapped == {"7700": "192.168.1.5:7700"}
        assert mapped.moves == [outside]
        assert [event["kind"] for event in mapped.log.since(0)] == ["port-mapping"]
        router.outside = "203.0.114.8"  # the provider gives another
        await mapped.until(lambda: mapped.moves == [outside, Address("203.0.114.8", 7700)])
    assert router.mapped == {}


@wants_extra
@pytest.mark.parametrize("how", ["no router", "refuses", "behind another"])
async def test_what_doesn_t_work_is_told_in_words_and_goes_on(router, how):
    router.refuses = how == "refuses"
    if how == "behind another":
        router.outside = "10.0.0.7"
    async with Mapped(None if how == "no router" else router) as mapped:
        await mapped.until(lambda: mapped.log.since(0))
        event = mapped.log.since(0)[0]
        assert event["level"] == "warning"
        assert "through relays" in event["text"]
        assert mapped.moves == []


@wants_extra
async def test_a_router_that_stops_is_noticed(router, monkeypatch):
    monkeypatch.setattr(port_mapping, "RENEW_S", 0.05)
    async with Mapped(router) as mapped:
        await mapped.until(lambda: mapped.moves)
        router.refuses = True
        await mapped.until(lambda: mapped.moves == [Address("203.0.114.7", 7700), None])


def test_without_the_extra_a_person_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "async_upnp_client", None)
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[nat\]'"):
        PortMapping.require()
