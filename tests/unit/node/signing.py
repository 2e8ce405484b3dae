"""Nodes that sign what they say of themselves, for nothing: nobody forges here."""

from __future__ import annotations

import msgspec

from p2pdrl.node.accounting.facts import FactSigner
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.accounting.report_table import PeerReport, ReportRow
from p2pdrl.testing.membership_simulator import FreeSigner, trust

__all__ = ["counted", "node_id", "said", "signer_of", "tracker_of"]


def node_id(number: int) -> str:
    return FreeSigner(number).node_id


NUMBERS = {node_id(number): number for number in range(400)}


def signer_of(number: int) -> FactSigner:
    return FactSigner(FreeSigner(number), "swarm", trust)


def tracker_of(number: int, boot: int = 1) -> ProgressTracker:
    return ProgressTracker(signer_of(number), boot)


def counted(tracker: ProgressTracker):
    """What a node tells of counts, newly signed."""
    tracker.sign()
    return tracker.counts()


def said(report: PeerReport, age_s: float = 0.0) -> ReportRow:
    """A report as it travels, signed by the node that it is of."""
    signed = signer_of(NUMBERS[report.id]).sign("report", "", msgspec.msgpack.encode(report))
    return ReportRow(age_s, signed)
