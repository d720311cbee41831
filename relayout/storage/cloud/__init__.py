"""Stores over the network: object stores, web servers, the Hugging Face hub."""
