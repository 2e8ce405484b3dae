"""One agreed, numbered list of members for strategies that need one: `service` runs `core`, which is pure."""
