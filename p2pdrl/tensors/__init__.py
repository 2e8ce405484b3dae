"""tensors package."""
