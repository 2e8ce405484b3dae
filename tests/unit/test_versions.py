from __future__ import annotations

import pytest

from p2pdrl.versions import ProtocolRange, refuse_protocol


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("6", ProtocolRange(6, 6)),
        ("6-7", ProtocolRange(6, 7)),
        ("7-6", None),
        ("0-7", None),
        ("6-", None),
        ("", None),
        ("6-7-8", None),
        ("1234567", None),
        ("٣", None),
    ],
)
def test_ranges_are_read(text: str, spoken: ProtocolRange | None) -> None:
    assert ProtocolRange.parse(text) == spoken
    if spoken is not None:
        assert spoken.wire == text


@pytest.mark.parametrize(
    ("one", "two", "common"), [((6, 7), (7, 8), 7), ((6, 9), (7, 8), 8), ((6, 6), (7, 8), None)]
)
def test_the_newest_that_two_speak(one: tuple[int, int], two: tuple[int, int], common: int | None) -> None:
    assert ProtocolRange(*one).common(ProtocolRange(*two)) == common
    assert ProtocolRange(*two).common(ProtocolRange(*one)) == common


def test_a_refusal_says_who_has_to_be_upgraded() -> None:
    old, new = ProtocolRange(5, 5), ProtocolRange(7, 8)
    assert refuse_protocol(new, old) == (
        "this node speaks protocol 7–8, that one 5: install a newer p2pdrl where that one runs"
    )
    assert str(refuse_protocol(old, new)).endswith("where this node runs")
    assert refuse_protocol(new, ProtocolRange(8, 9)) is None
