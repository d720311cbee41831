"""All that is to be run on a machine with a GPU, in steps that a time limit can interrupt: tests, limits, benchmarks.

`tools/run gpu --out DIR` does what is not in DIR yet, and can be run again. On a machine without a network, with a
Python that has torch: `PYTHONPATH=.:tools:tests python3 -m gpu --out DIR --wheels DIR_OF_WHEELS`.
"""
