"""Signed folders: stock model_signing accepts them, and with a policy nothing else is handed out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import as_integers, expected_slice, read_tensors
from support.signing import Keys, make_keys, stock_accepts

import relayout


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def signed(llama: Path, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For two ranks, of several files each; signed by `keys.key`."""
    folder = tmp_path_factory.mktemp("signed") / "model"
    relayout.convert(llama, folder, tp=2, digest="sha256", max_part_nbytes=300_000)
    relayout.sign(folder, key=keys.key)
    return folder


def test_a_signed_folder_is_loaded_and_stock_verify_accepts_it(signed: Path, llama: Path, keys: Keys) -> None:
    whole = read_tensors(llama)
    for rank in range(2):
        loaded = relayout.load(signed, rank, trust=keys.policy)
        assert loaded.keys() == whole.keys()
        for name, tensor in loaded.items():
            assert np.array_equal(as_integers(tensor), expected_slice(name, whole[name], rank, 2)), name
    assert stock_accepts(signed, keys)
