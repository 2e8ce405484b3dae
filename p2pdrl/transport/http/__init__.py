"""Calls over HTTP, one POST each, and the one port that they share with everything else."""
