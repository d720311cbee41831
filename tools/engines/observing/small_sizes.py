"""The numbers that small checkpoints are made with; `choose` others before `small_models` is imported."""

H, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCABULARY, EXPERTS, GROUPS = 256, 8, 4, 32, 512, 4, 1024, 8, 4


def choose(**numbers: int) -> None:
    """Take these instead."""
    assert numbers.keys() <= globals().keys()
    globals().update(numbers)
