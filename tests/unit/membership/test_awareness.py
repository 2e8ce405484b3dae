from __future__ import annotations

from p2pdrl.membership.suspicion import Awareness


def test_it_stays_within_its_bounds_and_scales() -> None:
    awareness = Awareness(7)
    awareness.add(-1)
    assert awareness.score == 0
    assert awareness.scale(0.5) == 0.5
    awareness.add(3)
    assert awareness.scale(0.5) == 2.0
    awareness.add(99)
    assert awareness.score == 7
    awareness.add(-1)
    assert awareness.score == 6
