"""What the commands do beside training: reward models, generation, export, training again on a recording."""
