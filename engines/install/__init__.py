"""Virtual environments for engines that cannot share one with the rest: recipes, installation and checks."""
