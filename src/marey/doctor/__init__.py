"""``marey doctor``: what would fail on this machine, with this data, in this run. A caller of the rooms, as cli is."""
