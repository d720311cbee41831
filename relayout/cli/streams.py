"""Standard streams whose reader is gone."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TextIO


def abandon(stream: TextIO | None) -> None:
    """Redirect the stream to /dev/null, so that later writes, also those at interpreter exit, do not fail."""
    with suppress(OSError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
