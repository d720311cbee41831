"""Loaders load the same bytes, each into memory of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench import peers
from support.models import as_integers, expected_slice, read_tensors

from relayout.benchmark.loaders import LOADERS, Loader, LoadJob
from relayout.benchmark.run import Folders

REGISTRY = "relayout.benchmark.loaders"
PEERS = LOADERS | {name: peers.LOADERS[name] for name in ("load_file_pread", "threads", "map_populate")}
IN_PROCESS = [
    name
    for name, loader in PEERS.items()
    if "cpu" in loader.devices and loader.package not in ("fastsafetensors", "runai-model-streamer")
]


@pytest.mark.parametrize(("rank", "tp"), [(3, 4), (0, 1)])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_loader_gives_the_slices_of_a_rank_in_memory_of_their_own(
    folders: Folders, llama: Path, name: str, rank: int, tp: int
) -> None:
    whole = read_tensors(llama)
    tensors = PEERS[name].load(LoadJob(REGISTRY, name, str(folders.source), str(folders.converted), tp, rank, 1, 2**30))
    assert tensors.keys() == whole.keys()
    for tensor_name, tensor in tensors.items():
        assert tensor.is_contiguous()
        expected = expected_slice(tensor_name, whole[tensor_name], rank, tp)
        np.testing.assert_array_equal(as_integers(tensor), expected, err_msg=tensor_name)


@pytest.mark.parametrize("name", ["get_slice", "load_file"])
def test_slices_of_several_ranges_are_joined_in_their_order(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    fused = torch.arange(24 * 8, dtype=torch.int16).reshape(24, 8)
    folder = tmp_path / "phi3"
    folder.mkdir()
    save_file({"model.layers.0.self_attn.qkv_proj.weight": fused}, folder / "model.safetensors")
    config = {"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    [tensor] = LOADERS[name].load(LoadJob(REGISTRY, name, str(folder), "", 2, 1, 1, 2**30)).values()
    # q, k and v of 8 rows each; of each the second half.
    rows = [*range(4, 8), *range(12, 16), *range(20, 24)]
    np.testing.assert_array_equal(tensor.numpy(), fused.numpy()[rows])


def test_a_loader_that_is_not_installed_is_named_with_what_installs_it() -> None:
    absent = Loader(lambda job: {}, "x", "x", "a-package", ("no_such_module_of_any_kind",))
    assert absent.absence() == "not installed (pip install a-package)"
    assert replace(absent, modules=(), needs=lambda: False).absence() == "not in the installed version"
