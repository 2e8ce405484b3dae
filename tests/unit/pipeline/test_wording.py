"""Few digits, and a unit."""

from __future__ import annotations

import math

import pytest

from p2pdrl.pipeline.wording import in_bytes, in_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (2.5e-6, "2.5 µs"),
        (0.000_3, "0.30 ms"),
        (0.04, "40 ms"),
        (0.0999, "0.10 s"),
        (0.8, "0.80 s"),
        (1.94, "1.9 s"),
        (9.97, "10 s"),
        (1234.5, "1234 s"),
        (math.inf, "inf s"),
    ],
)
def test_seconds(seconds, text):
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (12, "12 bytes"),
        (620e3, "620 kB"),
        (34e6, "34.0 MB"),
        (999_700, "1.00 MB"),
        (5e12, "5000 GB"),
    ],
)
def test_bytes(size, text):
    assert in_bytes(size) == text
