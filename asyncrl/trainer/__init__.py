"""The training loop and everything around one run."""
