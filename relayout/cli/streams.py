"""Standard streams that nobody reads."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def abandon(stream: TextIO | None) -> None:
    """Let all that is still written to it, also by Python at its end, go nowhere."""
    with suppress(OSError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
