"""The training side of nodes on an in-memory network, for the tests beside this one."""

from __future__ import annotations

import random

import numpy as np

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import LearnerConfig, LimitsConfig, NodeConfig
from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.config.task import StopConfig, TaskConfig
from p2pdrl.node.state import state_transfer
from p2pdrl.node.training import Training
from p2pdrl.strategies.gossip import adpsgd
from p2pdrl.transport.protocol import Address
from p2pdrl.workers.protocol import Report

from .signing import node_id, tracker_of

GOSSIP = AdpsgdConfig(compression="none", min_interval_s=0.0, deadline_s=1.0)
CONFIG = NodeConfig(
    learner=LearnerConfig(restart_min_s=0.01), limits=LimitsConfig(strikes=2, quarantine_s=60.0)
)


class Peer:
    """A node's training, on a board of its own."""

    def __init__(self, network, number, events, config=CONFIG, *, keyed=False) -> None:
        self.id = node_id(number)
        self.events = events
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.peers: dict[str, Address] = {}
        self.speeds: dict[str, float] = {}
        self.seen: list[str] = []
        self.progress_tracker = tracker_of(number)
        self.training = Training(
            me=self.id,
            task=TaskConfig(strategy=GOSSIP, stop=StopConfig(window=5)),
            config=config,
            seed=number,
            transport=self.transport,
            clock=SystemClock(),
            events=events,
            progress_tracker=self.progress_tracker,
            rng=random.Random(number),
            alive=lambda: self.peers,
            donors=lambda: list(self.peers.items()),
            observed=lambda outcome, seconds: self.seen.append(outcome),
            speeds=lambda: self.speeds,
            keyed=keyed,
        )

    async def start(self, board=None, lineage="aa" * 8) -> None:
        if board is not None:
            self.training.supervisor.board = board
            self.training.supervisor.spec = board.spec
            self.training.enter(lineage)
        await self.transport.start()
        self.transport.serve(state_transfer.ROUTE, self.training.state_server.answer)
        self.transport.serve(adpsgd.ROUTE, self.training.mode.answer, max_vector_bytes=1 << 20)

    def now(self) -> list[float]:
        out = np.empty(self.training.spec.layout.size, np.float32)
        self.training.board.now(out)
        return out.tolist()

    def reports(self, updates: int) -> None:
        self.training.supervisor.reported(Report(0, updates, 10 * updates, updates, [], {}))
