"""Many turns: environments, tools, token-exact chat and the episode that ties them together."""
