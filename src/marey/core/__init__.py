"""What every room may use: keyed randomness, user errors, atomic files, progress."""
