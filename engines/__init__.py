"""Parts that compute: rollout and training engines, rewards, weight transports."""
