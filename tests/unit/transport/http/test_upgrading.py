"""Headers of answers to requests for another protocol."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.errors import WireError
from p2pdrl.transport.http.upgrade import read_header


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_wire_error(data: bytes) -> None:
    for raw in (data, b"HTTP/1.1 101 x\r\n" + data, data + b"\r\n\r\n"):
        try:
            status, _ = read_header(raw)
        except WireError:
            continue
        assert 100 <= status <= 599


def test_a_header_is_read() -> None:
    status, headers = read_header(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade:  p2pdrl \r\nX:\r\n\r\n")
    assert (status, headers["upgrade"], headers["x"]) == (101, "p2pdrl", "")
