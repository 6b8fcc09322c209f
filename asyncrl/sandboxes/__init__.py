"""Sandboxes for untrusted programs: the contract, its backends, and a pool of them."""
