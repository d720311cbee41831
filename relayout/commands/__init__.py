"""One command each, callable from Python: inspect, verify, restore."""
