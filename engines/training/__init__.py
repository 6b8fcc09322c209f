"""Training engines, and where small models come from."""
