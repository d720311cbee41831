"""Stores that are only read: web servers, and the Hugging Face hub."""
