"""Where a learner's batches come from, one source each.

``source`` says what every source is; ``inline`` steps environments in the learner's own process, ``rows`` draws
from a data set. Sources that do input and output (`workers.actor_source`) live with the processes they talk to.
"""
