"""membership package."""
