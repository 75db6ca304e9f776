"""Faults, traffic, history and guarantees: the suite that kills everything, from outside. See README.md."""
