"""What a transport says of connections that break, hang and lose."""

from __future__ import annotations

import contextlib

import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.http_transport import HttpTransport

from .conftest import CLIENT, KEY

WAIT_S = 10.0


@pytest.mark.parametrize(
    ("fault", "error"),
    [("cut", PeerUnreachableError), ("hang", PeerTimeoutError), ("lose", PeerTimeoutError)],
)
async def test_a_node_s_transport_sees_the_right_failure(served, fault, error):
    caller = HttpTransport(CLIENT.node_id, "default", CLIENT.tls([KEY]), clock=SystemClock())
    await caller.start()
    try:
        async with FaultProxy(served.address) as proxy:

            async def call(deadline_s=WAIT_S):
                target = served.transport.node_id
                answer = await caller.call(proxy.address, target, "take", b"m", deadline_s=deadline_s)
                assert answer.sender == target

            await call()
            if fault == "lose":
                proxy.down.lost = True
            else:
                getattr(proxy, fault)()
            with pytest.raises(error):
                await call(0.3)
            proxy.heal()
            with contextlib.suppress(PeerUnreachableError):
                await call()  # a kept connection may be found broken, once
            await call()
    finally:
        await caller.close()
