"""Strom's thresholded updates, to everybody, each exactly once."""
