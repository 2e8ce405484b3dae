"""D-PSGD: synchronous rounds with the neighbours on a graph."""
