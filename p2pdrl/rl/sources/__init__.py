"""Where a learner's batches come from, one source each.

``source`` says what every source is; ``inline`` steps environments in the learner's own process, ``rows``
draws from a data set. `workers.actor_source` reads what actor processes make.
"""
