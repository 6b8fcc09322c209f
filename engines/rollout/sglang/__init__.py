"""The rollout engine on SGLang."""
