"""Plans observed from an engine: its own classes load probes, and what reaches a parameter is what the rank holds."""
