"""What each kind of run adds to the one trainer: its data, its objective, its numbers."""
