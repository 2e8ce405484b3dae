"""Where a learner's batches come from.

``source`` says what every source is; ``unrolls`` has environments in the learner's own process, and what
unrolls from actor processes are made of (`workers.actor_source` reads them); ``rows`` draws from a data set.
"""
