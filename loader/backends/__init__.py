"""How bytes get into memory: direct, buffered, mapped, pinned, gds."""
