"""The plugins on the real engines, on a machine without a GPU. `tools/run engines --help`.

Each parameter of each rank is compared bit for bit, by the engine's own loader from the source and through relayout; a
whole model generates tokens both ways. Each engine gets an environment of its own: minutes, and gigabytes.
"""
