"""Configuration: the schema in two halves (task, node), its sources, and where each value came from."""
