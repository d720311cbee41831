"""How bytes get into memory: direct, buffered, pinned, gds, cufile-compat."""
