"""The production loop on a virtual clock, with modelled engines, environments, trainer and faults."""
