"""What a long run is at: a line on stderr for each step, as it begins."""

import sys
import time


class Progress:
    """Call it with a step; it writes the seconds since its making before it. Lines, not a spinner: a log keeps them."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def __call__(self, step: str) -> None:
        print(f"{time.monotonic() - self.begin:7.1f} s  {step}", file=sys.stderr, flush=True)


def quiet(step: str) -> None:
    """For a caller who does not want to know."""
