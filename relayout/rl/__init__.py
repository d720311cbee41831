"""Hooks that trainers name in their configuration: one module for each of them, and nothing else imports it."""
