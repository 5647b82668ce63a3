"""What holds for every test."""

from __future__ import annotations

import signal

# A test run that a shell started in the background ignores SIGINT, and so would every process the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
