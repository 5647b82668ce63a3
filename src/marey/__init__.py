"""Marey pretrains video models, and can account for exactly what was run."""

__version__ = "0.1.0"
