"""Versions of the weights: what is published, and who holds it."""
