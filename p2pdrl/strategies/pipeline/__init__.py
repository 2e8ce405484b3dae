"""Pipelines over the peers of a swarm: who holds which stage, formed anew whenever somebody comes or goes."""
