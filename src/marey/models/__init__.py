"""Layers with parameters: the video transformer family, projector, rotary positions, attention."""
