"""How many tokens survive the drop: needed by the plan, so it lives where no torch is imported."""


def kept_count(tokens: int, drop_rate: float) -> int:
    """``max(1, round(tokens * (1 - drop_rate)))``."""
    return max(1, round(tokens * (1 - drop_rate)))
