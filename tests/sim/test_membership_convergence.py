"""Any mix of kills, restarts, stops, partitions and leaves ends in one view once the network is whole."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pdrl.testing.membership_simulator import SimulatedSwarm

N = 5
NODES = st.integers(1, N - 1)  # node 0 stays, so that there is always somebody to join


class Turmoil(RuleBasedStateMachine):
    """Faults in any order; at the end the network heals and everybody must agree."""

    @initialize(seed=st.integers(0, 10_000), loss=st.sampled_from([0.0, 0.1]))
    def begin(self, seed: int, loss: float) -> None:
        self.swarm = SimulatedSwarm(N, seed=seed, loss=loss)
        self.swarm.run(2.0)

    @rule(seconds=st.floats(0.01, 30.0))
    def wait(self, seconds: float) -> None:
        self.swarm.run(seconds)

    @rule(number=NODES)
    def kill(self, number: int) -> None:
        if self.swarm.nodes[number].running:
            self.swarm.kill(number)

    @rule(number=NODES, moves=st.booleans())
    def restart(self, number: int, moves: bool) -> None:
        self.swarm.run(0.01)
        if not self.swarm.nodes[number].running:
            address = f"10.99.{number}.{int(self.swarm.now * 10) % 250}:7600" if moves else None
            self.swarm.restart(number, through=0, address=address)

    @rule(number=NODES)
    def pause(self, number: int) -> None:
        if self.swarm.nodes[number].running:
            self.swarm.pause(number)

    @rule(number=NODES)
    def resume(self, number: int) -> None:
        if self.swarm.nodes[number].paused:
            self.swarm.resume(number)

    @rule(number=NODES)
    def leave(self, number: int) -> None:
        node = self.swarm.nodes[number]
        if node.running and not node.paused:
            self.swarm.leave(number)
            self.swarm.run(1.1)

    @rule(split=st.integers(1, N - 1))
    def partition(self, split: int) -> None:
        self.swarm.partition(range(split), range(split, N))

    @rule()
    def heal(self) -> None:
        self.swarm.heal()

    @precondition(lambda self: hasattr(self, "swarm"))
    @invariant()
    def incarnations_never_fall(self) -> None:
        for node in self.swarm.nodes:
            own = node.core.me.incarnation
            for other in self.swarm.nodes:
                view = other.core.member(node.signer.node_id, self.swarm.now)
                assert view is None or view.incarnation <= own

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        swarm = self.swarm
        swarm.heal()
        swarm.loss = 0.0
        for node in swarm.nodes:
            if node.paused:
                swarm.resume(node.number)
        assert swarm.seconds_until(swarm.converged, 150.0, every_s=1.0) is not None, [
            [swarm.state(node.number, other) for other in range(N)] for node in swarm.nodes if node.running
        ]


TestTurmoil = Turmoil.TestCase
TestTurmoil.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
