"""Environments and tools."""
