"""Measurements of this engine and of its peers, each beside the physical floor: ``python -m benchmarks --help``."""
