"""Weights that change in a live engine: where they lie in memory, and updates of vLLM and SGLang."""
