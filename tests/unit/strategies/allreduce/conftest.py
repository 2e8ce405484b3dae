"""Rounds with an owner for each piece, or with one for all."""

from __future__ import annotations

import pytest

from p2pdrl.strategies.allreduce import reduce_scatter


@pytest.fixture(params=[1, pytest.param(1 << 16, marks=pytest.mark.slow)], ids=["all-own", "one-owns"])
def owners(request, monkeypatch):
    """Short vectors have one owner; cut as long ones are, all members own a piece."""
    monkeypatch.setattr(reduce_scatter, "LEAST_PIECE", request.param)
