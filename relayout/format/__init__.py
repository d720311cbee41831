"""Bytes to values and back, pure: safetensors headers, manifest, rank tables, source record."""
