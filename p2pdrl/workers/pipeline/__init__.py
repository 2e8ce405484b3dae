"""A learner as one rank of a pipeline over several peers."""
