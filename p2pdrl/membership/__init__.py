"""Who is in the swarm: SWIM with Lifeguard, as a core without I/O and a service around it.

| module | holds |
|---|---|
| `parameters` | every constant, with its formula |
| `identity`, `records`, `messages` | keys; signed records and their bounds; the wire |
| `suspicion`, `broadcasts`, `state`, `records` | one noun of the papers each |
| `state`, `state`, `state`, `state`, `state` | the parts of the core |
| `events`, `state` | inputs, effects and views; `Membership`, the core itself |
| `swarm_records` | settings of the whole swarm, last writer wins |
| `known_members`, `state`, `joining`, `service` | running it on a network |
| `testing.membership_simulator` | running many of it on a manual clock |

The daemon uses `state.open_core` and `service.MembershipService`; nothing here imports api,
strategies or workers.
"""
