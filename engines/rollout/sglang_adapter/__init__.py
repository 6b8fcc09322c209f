"""What the rollout engine on SGLang is made of."""
