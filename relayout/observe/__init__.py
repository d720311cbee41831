"""Plans observed from an engine: the engine's classes load probes; the elements that reach parameters form slices."""
