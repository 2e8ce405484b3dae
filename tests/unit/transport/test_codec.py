"""Whatever bytes come, decoding gives the type or a WireError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.membership.messages import decode as decode_membership
from p2pdrl.node.bootstrap.joining import JoinInfo
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, StopSetting
from p2pdrl.node.state.state_transfer import StateHead, StateRequest
from p2pdrl.strategies.gossip.adpsgd import ExchangeHead
from p2pdrl.transport.codec import decode

KINDS = [
    ExchangeHead,
    StateHead,
    StateRequest,
    JoinInfo,
    ModeSetting,
    StopSetting,
    HaltSetting,
    PauseSetting,
]
HOSTILE = {
    "text that isn't UTF-8": b"\x81\xabexchange_id\xa1\xff",
    "key that isn't UTF-8": b"\x81\xa1\xff\x01",
    "nested under an unknown key": b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01",
    "nested": b"\x91" * 100_000,
    "nothing": b"",
    "reserved": b"\xc1",
    "over-declared": b"\xdf\xff\xff\xff\xff",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes(kind, data):
    with pytest.raises(WireError):
        decode(data, kind)


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_membership_messages(data):
    with pytest.raises(WireError):
        decode_membership(data)


@given(st.binary(max_size=200))
def test_any_bytes(data):
    for kind in KINDS:
        try:
            assert isinstance(decode(data, kind), kind)
        except WireError:
            continue


def test_what_was_encoded_comes_back():
    request = StateRequest("task", "layout", "sidecar")
    assert decode(msgspec.msgpack.encode(request), StateRequest) == request
