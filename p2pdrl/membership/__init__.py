"""Who is in the swarm: SWIM with Lifeguard, as a core without I/O and a service around it.

| module | holds |
|---|---|
| `state` | the core: view, gossip, suspicion, failure detector, anti-entropy; `Membership` drives it |
| `suspicion`, `broadcasts`, `swarm_records` | timers and local health; the queue of records; swarm settings |
| `parameters` | every constant, with its formula |
| `events` | the core's inputs, effects and views |
| `identity`, `records`, `messages` | keys; signed records and their bounds; the wire |
| `known_members`, `joining`, `service` | running the core on a network |

The daemon uses `state.open_core` and `service.MembershipService`; `testing.membership_simulator` runs many
cores on a manual clock. Nothing here imports api, strategies or workers.
"""
