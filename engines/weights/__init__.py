"""Weight transports."""
