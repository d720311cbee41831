"""Which way a load would take, and what to do about errors."""
