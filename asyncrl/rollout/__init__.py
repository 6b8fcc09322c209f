"""Generation: trajectories, the worker that makes them, and the pool of its replicas."""
