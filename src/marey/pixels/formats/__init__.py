"""Ways in which people keep videos, one module each: see ``pixels.sourceformat``."""
