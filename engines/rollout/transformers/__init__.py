"""The embedded rollout engine: continuous batching over a transformers model in this process."""
