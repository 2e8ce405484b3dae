"""Gossip among peers, asynchronously: AD-PSGD, stochastic gradient push, GALA."""
