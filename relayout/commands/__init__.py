"""Commands that can also be called from Python, such as inspect, verify and restore; one module for each."""
