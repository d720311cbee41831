"""One command each, callable from Python: inspect, verify, restore. Imports all of the above."""
