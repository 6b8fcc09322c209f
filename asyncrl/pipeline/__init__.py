"""The loop: from prompts to published weights, and everything around one run."""
