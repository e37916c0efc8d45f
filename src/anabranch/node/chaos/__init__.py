"""Faults on purpose: a local swarm whose processes are killed, frozen and replaced while it trains."""
