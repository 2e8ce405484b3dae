"""Reinforcement learning of one learner: no processes, no network, no clock.

In the order in which an observation passes through: ``envs`` (a batch of gymnasium copies), ``normalize``,
``networks`` → ``policy`` (with ``distributions``), ``rollout`` (unrolls), ``sources``, ``returns``
(advantages), ``algorithms``, which let ``gradients`` differentiate their ``objectives``; what comes out goes
through ``stepping`` to ``optimizers`` over ``flat`` (the policy as one vector). ``trainer`` puts them
together for the learner process: it asks one of ``sources`` for batches; ``registry`` builds what the task
asks for, also a regression on ``regression_data``, which has no environments. ``sequential``, with
``block_map`` and ``block_costs`` (with ``saved``, what autograd keeps), cuts a policy into blocks, which
``pipeline`` trains over several devices. ``evaluate`` plays episodes with a fixed policy.
"""
