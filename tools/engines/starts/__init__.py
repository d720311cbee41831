"""Starts of a real vLLM: how long they take, what is read, what is said of damaged folders, which tokens come."""
