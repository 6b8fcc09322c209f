"""The replay buffer: groups from admission until they are trained on."""
