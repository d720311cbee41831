"""Rights that a process of a test may not have."""

from __future__ import annotations

import ctypes
import os

_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH, _PR_CAPBSET_DROP = 1, 2, 24


def drop_superuser_rights() -> None:
    """Let the next program run as this user, but with no right to pass over permission bits."""
    if os.getuid() == 0:
        for capability in (_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH):
            if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                raise OSError("prctl refused")
