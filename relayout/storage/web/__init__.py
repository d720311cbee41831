"""Stores on the web: web servers and the Hugging Face hub, which are read-only, and OCI registries."""
