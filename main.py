"""``python main.py key=value ...`` is ``marey train key=value ...``."""

from marey.cli import train

if __name__ == "__main__":
    train()
