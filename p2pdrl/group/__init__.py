"""One agreed, numbered list of members for strategies that need one: `service` runs the pure `agreement`."""
