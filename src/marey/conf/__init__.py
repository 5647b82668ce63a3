"""Hydra configuration: the encoder (config.yaml, the default), its recipes and its data."""
