from __future__ import annotations

import pytest

from p2pdrl.membership.parameters import MembershipConfig


def test_formulas_of_the_lan() -> None:
    lan = MembershipConfig.lan()
    assert lan.suspicion_min_s(8) == 4.0
    assert lan.suspicion_min_s(100) == 8.0
    assert lan.suspicion_max_s(100) == 48.0
    assert [lan.transmissions(n) for n in (1, 8, 9, 10, 99, 100)] == [4, 4, 4, 8, 8, 12]
    assert [lan.sync_every_s(n) for n in (1, 32, 33, 64, 65)] == [30.0, 30.0, 60.0, 60.0, 90.0]


def test_the_wan_is_slower_everywhere() -> None:
    lan, wan = MembershipConfig.lan(), MembershipConfig.wan()
    assert wan.suspicion_min_s(8) == pytest.approx(30.0)
    assert wan.probe_timeout_s > lan.probe_timeout_s
    assert wan.suspicion_confirmations == 4
