"""``python -m marey``."""

from marey.cli import main

main()
