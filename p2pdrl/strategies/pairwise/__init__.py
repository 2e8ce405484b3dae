"""AD-PSGD: two nodes average at a time, asynchronously."""
