"""Rollout engines in other processes."""
