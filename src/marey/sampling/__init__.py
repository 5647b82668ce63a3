"""Which sample comes next: keyed orders, positions, exposure."""
