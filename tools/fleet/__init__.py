"""Simulates how a fleet of nodes gets a model: what leaves the storage, and when the first and the last rank is ready.

`tools/run fleet document`, `chart` and `loopback` need simpy, which is in the extra `bench`.
"""
