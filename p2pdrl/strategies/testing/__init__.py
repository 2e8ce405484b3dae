"""A swarm in one process: strategies over an in-memory network, with learners that descend a bowl.

| module | holds |
|---|---|
| `swarm` | `FakeSwarm`: what a strategy asks of its node, and what it told |
| `learner` | `FakeLearner`: a learner as a coroutine |
| `stages` | `FakeStages`: the same learner as one rank of a pipeline |
| `pipes` | `FakePipes`: pipes between such learners, over an in-memory network |
| `simulator` | `SimNode` and `SimSwarm`: real strategies on both, over an in-memory network |
"""
