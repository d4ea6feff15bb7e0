"""Proxy runs that make a law of one's own, and what moved."""
