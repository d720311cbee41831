"""`relayout.safe_open` beside the stock `safetensors.safe_open`: the source's tensors, out of the ranks' files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support.conversions import OF_EACH_KIND, Conversions, grouped, reference_tensors
from support.loader_fixtures import MEASURE, child, nothing_left_behind, skip_unless_drives_are_counted, write_model
from support.models import as_integers
from support.profile import IS_LONG

import relayout
from relayout.core.arguments import collapse_numbers
from relayout.errors import FormatError, PlanError
from relayout.loader.backends.base import Options
from relayout.loader.view import CheckpointView

Tensors = dict[str, torch.Tensor]


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """The same dtype, shape and bits."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    np.testing.assert_array_equal(as_integers(found), as_integers(expected), err_msg=str(what))


def a_box(shape: torch.Size) -> Any:
    """An index of a tensor of that shape: what lies in its middle."""
    return tuple(slice(size // 3, size - size // 4) for size in shape)


@pytest.mark.parametrize("name", grouped(OF_EACH_KIND))
def test_a_tensor_of_each_kind_is_the_sources_and_so_are_slices(name: str, conversions: Conversions) -> None:
    source = reference_tensors(conversions.source(name))
    one_of_each = {collapse_numbers(key): key for key in source}
    with relayout.safe_open(conversions.at(name, conversions.largest(name))) as opened:
        assert set(opened.keys()) == source.keys()
        assert len(opened.keys()) == len(source)
        for key in one_of_each.values():
            assert_same(opened.get_tensor(key), source[key], key)
            index = a_box(source[key].shape)
            assert_same(opened.get_slice(key)[index], source[key][index], (key, index))


@pytest.mark.parametrize("name", grouped(["qwen3_moe", "gpt_oss_mxfp4", "deepseek_v3", "gptq_4bit_moe"]))
def test_experts_are_found_with_the_ranks_that_own_them(name: str, conversions: Conversions) -> None:
    source = reference_tensors(conversions.source(name))
    with relayout.safe_open(conversions.at(name, 2, experts=True)) as opened:
        assert set(opened.keys()) == source.keys()
        experts = [key for key in source if ".experts." in key]
        for key in experts[::3]:
            index = a_box(source[key].shape)
            assert_same(opened.get_slice(key)[index], source[key][index], (key, index))
        assert_same(opened.get_tensor(experts[-1]), source[experts[-1]], experts[-1])


@pytest.mark.parametrize("name", grouped(["llama", "gptq_4bit", "fp8_blocks_moe", "gpt2_hub", "gpt_neox"]))
def test_names_shapes_dtypes_and_metadata_are_those_of_the_stock_reader(name: str, conversions: Conversions) -> None:
    names = []
    with relayout.safe_open(conversions.at(name, 4), framework="pt", device="cpu") as opened:
        for file in sorted(conversions.source(name).glob("*.safetensors")):
            with safe_open(file, framework="pt", device="cpu") as stock:
                names += stock.offset_keys()
                assert opened.metadata() == stock.metadata() == {"format": "pt"}
                for key in stock.keys():  # noqa: SIM118
                    mine, theirs = opened.get_slice(key), stock.get_slice(key)
                    assert (mine.get_shape(), mine.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        assert opened.keys() == opened.offset_keys() == names


def test_metadata_is_what_all_files_say(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    tensor = torch.arange(12.0).reshape(3, 4)
    both = {"format": "pt", "author": "someone"}
    save_file({"one": tensor}, source / "a.safetensors", {**both, "number": "1"})
    save_file({"two": tensor}, source / "b.safetensors", {**both, "number": "2", "more": "x"})
    relayout.convert(source, tmp_path / "out")
    assert relayout.safe_open(tmp_path / "out").metadata() == both
    save_file({"two": tensor}, source / "b.safetensors")
    relayout.convert(source, tmp_path / "none")
    assert relayout.safe_open(tmp_path / "none").metadata() is None


def test_scalars_vectors_and_odd_types_are_those_of_the_stock_reader(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.tensor(-2.5),
        "vector": torch.arange(5, dtype=torch.int16),
        "empty": torch.zeros(0, 3),
        "thin": torch.zeros(3, 0, 2, dtype=torch.bool),
        "wide": torch.randint(2**40, (2, 3, 5, 7)),
        "complex": torch.randn(3, 3, dtype=torch.complex64),
        "byte": torch.randint(255, (9, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "four": torch.randint(255, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "unsigned": torch.tensor([2**63 + 5], dtype=torch.uint64),
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    for tp in (1, 3):
        relayout.convert(tmp_path / "source", tmp_path / str(tp), tp=tp, unmatched="replicate")
        with relayout.safe_open(tmp_path / str(tp)) as opened:
            assert set(opened.keys()) == tensors.keys()
            for name, tensor in reference_tensors(tmp_path / "source").items():
                for found in (opened.get_tensor(name), opened.get_slice(name)[...], opened.get_slice(name)[()]):
                    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
                    assert bytes(found.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
            assert opened.get_slice("wide")[1, 1:, -2, ::3].tolist() == tensors["wide"][1, 1:, -2, ::3].tolist()
            assert opened.get_slice("empty")[:, 1].shape == (0,)
            assert opened.get_slice("thin")[1:, :, 1].shape == (2, 0)
            with pytest.raises(IndexError):
                opened.get_slice("scalar")[0]


# As arrays of numpy.


@pytest.mark.parametrize("framework", ["np", "numpy"])
def test_arrays_of_numpy_are_those_of_the_stock_reader(framework: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.tensor(-2.5, dtype=torch.float64),
        "half": torch.randn(6, 5).half(),
        "empty": torch.zeros(0, 3),
        "thin": torch.zeros(3, 0, 2, dtype=torch.bool),
        "true": torch.randint(2, (6, 2)).bool(),
        "wide": torch.randint(2**40, (4, 3, 5, 7)),
        "complex": torch.randn(6, 3, dtype=torch.complex64),
        **{
            str(dtype): torch.randint(100, (6, 4)).to(dtype)
            for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.uint64)
        },
    }
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    relayout.convert(tmp_path / "source", tmp_path / "out", tp=3, unmatched="replicate")
    for folder in ("source", "out"):
        with (
            safe_open(tmp_path / "source" / "model.safetensors", framework=framework) as stock,
            relayout.safe_open(tmp_path / folder, framework, None, backend="pread") as opened,
        ):
            expected, found = stock.get_tensors(), opened.get_tensors()
            assert found.keys() == expected.keys() == tensors.keys()
            for name, array in expected.items():
                index = a_box(array.shape)
                for one, other in (
                    (found[name], array),
                    (opened.get_tensor(name), array),
                    (opened.get_slice(name)[index], array[index] if array.ndim else array),
                ):
                    assert type(one) is np.ndarray
                    assert (one.dtype, one.shape) == (other.dtype, other.shape), name
                    np.testing.assert_array_equal(one, other, err_msg=name)
            assert opened.get_slice("wide")[1, 1:, -2, ::3].tolist() == tensors["wide"][1, 1:, -2, ::3].tolist()


READ_NARROW = """
import json, sys
import relayout
from safetensors import safe_open

said = []
for opened in (safe_open(sys.argv[1] + "/model.safetensors", "np"), relayout.safe_open(sys.argv[1], "np")):
    said.append(opened.get_tensor("norm").tolist())
    calls = [lambda: opened.get_tensor("brain"), lambda: opened.get_tensor("eight"), opened.get_tensors]
    for call in [*calls, lambda: opened.get_slice("brain")[:2]]:
        try:
            said.append(str(call()))
        except (TypeError, AttributeError, relayout.PlanError) as error:
            said.append([type(error).__name__, str(error)])
print(json.dumps(said))
"""


def test_dtypes_that_numpy_lacks_are_refused_as_the_stock_reader_does(tmp_path: Path) -> None:
    """In a process of its own: another package may have registered them here."""
    narrow = {"brain": torch.bfloat16, "eight": torch.float8_e4m3fn}
    tensors = {name: torch.arange(12.0).reshape(4, 3).to(dtype) for name, dtype in narrow.items()}
    save_file({**tensors, "norm": torch.arange(3.0)}, tmp_path / "model.safetensors")
    norm, *stock = [0.0, 1.0, 2.0], ["TypeError", "data type 'bfloat16' not understood"]
    eight = ["AttributeError", "module 'numpy' has no attribute 'float8_e4m3fn'"]
    text = "tensor '{}': numpy has no dtype for {}: import ml_dtypes (or jax) first, or use framework 'pt'"
    brain, other = (["PlanError", text.format(*each)] for each in (("brain", "BF16"), ("eight", "F8_E4M3")))
    said = child(READ_NARROW, tmp_path)
    assert said[:5] == [norm, *stock, eight, *stock, *stock]
    assert said[5:] == [norm, brain, other, brain, brain]


# Slices.


def index_of(size: int) -> st.SearchStrategy[Any]:
    """What torch takes along an axis."""
    place = st.none() | st.integers(-size - 2, size + 2)
    pieces = st.builds(slice, place, place, st.none() | st.integers(1, size + 2))
    return st.one_of(pieces, *([st.integers(-size, size - 1)] if size else []))


@st.composite
def indices(draw: st.DrawFn, shape: torch.Size) -> Any:
    """An index of a tensor: for all axes, or the first ones, or the last ones, or with `...` between."""
    given = [draw(index_of(size)) for size in shape]
    num_first = draw(st.integers(0, len(given)))
    num_last = draw(st.integers(0, len(given) - num_first))
    first, last = given[:num_first], given[len(given) - num_last :]
    if num_first == 1 and draw(st.booleans()):
        return first[0]
    return (*first, ..., *last) if num_last or draw(st.booleans()) else tuple(first)


SLICED = ["llama", "phi3", "gpt2_hub", "gpt_oss_mxfp4", "qwen3_next"]


@pytest.mark.parametrize("name", grouped(SLICED))
def test_any_slice_is_what_torch_selects(name: str, conversions: Conversions) -> None:
    source = reference_tensors(conversions.source(name))
    by_shape = {(len(tensor.shape), tuple(tensor.shape)): key for key, tensor in source.items()}
    opened = relayout.safe_open(conversions.at(name, 8))

    @given(st.data())
    @settings(max_examples=400 if IS_LONG else 15)
    def check(data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(by_shape.values())))
        index = data.draw(indices(source[key].shape))
        assert_same(opened.get_slice(key)[index], source[key][index], (key, index))

    check()


ODD: list[Any] = [
    np.s_[np.int64(3)],
    np.s_[np.int64(3) : np.int64(9)],
    np.s_[torch.tensor(2) : torch.tensor(5)],
    np.s_[None, 4:6],
    np.s_[4:6, None],
    np.s_[..., None],
    np.s_[[1, 5, 3]],
    np.s_[:, [5, 0]],
    np.s_[torch.tensor([7, 2])],
    np.s_[[1, 5], [5, 0]],
    np.s_[True],
    np.s_[False],
    (),
    np.s_[0:0, 5:3],
    np.s_[10**20 :],
    np.s_[: -(10**20)],
    *(128, -129, (0, 128), (0, -129), (0, 0, 0), (..., 128), np.s_[::-1], np.s_[:, ::0], "rows", 1.5),
]
"""What torch takes, and what it refuses."""


@pytest.mark.parametrize("index", ODD, ids=str)
@pytest.mark.parametrize("kind", ["q_proj", "o_proj"])
def test_whatever_else_torch_takes_is_taken_and_what_it_refuses_is_refused(
    index: Any, kind: str, conversions: Conversions
) -> None:
    key = f"model.layers.1.self_attn.{kind}.weight"
    whole = reference_tensors(conversions.source("llama"))[key]
    part = relayout.safe_open(conversions.at("llama", 8)).get_slice(key)
    try:
        expected = whole[index]
    except (IndexError, ValueError, TypeError) as error:
        with pytest.raises(type(error)):
            part[index]
    else:
        assert_same(part[index], expected, index)


@pytest.fixture(params=["up_proj", "down_proj"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, torch.Tensor]:
    """A tensor of numbers of 4 bits, cut along axis 0 or 1, to be read in part, and its bytes."""
    key = f"model.layers.0.mlp.{request.param}.weight"
    source = write_model(tmp_path / "source", {key: (torch.float4_e2m1fn_x2, (16, 8))})
    relayout.convert(source, tmp_path / "out", tp=4)
    part = relayout.safe_open(tmp_path / "out").get_slice(key)
    assert part.get_shape() == [16, 16]
    return part, reference_tensors(source)[key].view(torch.uint8)


def test_rows_of_numbers_of_4_bits_are_read_in_part(packed: tuple[Any, torch.Tensor]) -> None:
    part, whole = packed
    for index in (np.s_[2:6], np.s_[3], np.s_[-1], np.s_[1:9:3], np.s_[...], np.s_[:, :], np.s_[5:7, ...], np.s_[4:4]):
        found = part[index]
        assert found.dtype == torch.float4_e2m1fn_x2
        assert torch.equal(found.contiguous().view(torch.uint8), whole[index]), index


def test_columns_of_numbers_of_4_bits_of_which_torch_has_two_in_one_are_refused(
    packed: tuple[Any, torch.Tensor],
) -> None:
    for index in (np.s_[:, 2:6], np.s_[:, 4:], np.s_[3, 8:12], np.s_[..., :4], np.s_[:, 1], np.s_[:, ::2], np.s_[None]):
        with pytest.raises(
            PlanError, match=r"_proj\.weight': torch stores F4 in pairs, which cannot be sliced along the last dim"
        ):
            packed[0][index]


# In place of safetensors.


@pytest.fixture
def opened(conversions: Conversions) -> CheckpointView:
    return relayout.safe_open(conversions.at("llama", 4))


def test_by_positional_arguments_and_by_text(conversions: Conversions, opened: CheckpointView) -> None:
    other = relayout.safe_open(str(conversions.at("llama", 4)), "pt", torch.device("cpu"))
    assert_same(other.get_tensor("model.norm.weight"), opened.get_tensor("model.norm.weight"), "norm")


def test_it_is_of_one_rank_of_one(conversions: Conversions) -> None:
    opened = relayout.safe_open(conversions.at("llama", 2))
    assert (opened.rank, opened.num_ranks) == (0, 1)


def test_tensors_are_on_the_device_that_is_named(conversions: Conversions, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = conversions.at("llama", 2)
    with relayout.safe_open(converted) as whole:
        assert whole.get_tensor("lm_head.weight").device.type == "cpu"
    # Else "meta" is refused: of the devices that need no driver, only this one is not the host's memory.
    monkeypatch.setattr(Options, "kind", "a device")
    with relayout.safe_open(converted, device="meta") as whole:
        assert whole.get_tensor("lm_head.weight").device.type == "meta"


def test_each_tensor_has_memory_of_its_own_and_stays(conversions: Conversions, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(conversions.at("llama", 4), tmp_path / "copy"))
    expected = reference_tensors(conversions.source("llama"))["lm_head.weight"]
    with nothing_left_behind():
        with relayout.safe_open(folder) as file:
            first, second = (file.get_tensor("lm_head.weight") for _ in range(2))
            first.zero_()
        shutil.rmtree(folder)
        assert_same(second, expected, "second")


def test_what_is_not_there_is_named(conversions: Conversions, opened: CheckpointView, tmp_path: Path) -> None:
    for call in (opened.get_tensor, opened.get_slice):
        with pytest.raises(PlanError, match=r"llama-tp4: has no tensor 'model\.nothing'"):
            call("model.nothing")
    with pytest.raises(PlanError, match=r"nothing: no such file or folder$"):
        relayout.safe_open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    for path, code, says in (
        (Path(opened.path) / "config.json", "invalid", "neither a folder nor a .safetensors file"),
        (tmp_path / "empty", "missing", "contains no safetensors file"),
    ):
        with pytest.raises(PlanError, match=f"{path.name}: {says}") as caught:
            relayout.safe_open(path)
        assert (caught.value.code, str(caught.value.path)) == (code, str(path))
    with pytest.raises(PlanError, match=r"^framework 'tf', expected 'pt' or 'np'$"):
        relayout.safe_open(opened.path, framework="tf")
    with pytest.raises(PlanError, match=r"^backend 'direct', expected 'mmap' or 'pread'"):
        relayout.safe_open(opened.path, backend="direct")
    with pytest.raises(PlanError, match=r"^device 'meta': its tensors have no memory to load into$"):
        relayout.safe_open(opened.path, "np", "meta")
    with pytest.raises(PlanError, match=r"device 'cuda:77'"):
        relayout.safe_open(opened.path, device="cuda:77")


def test_a_missing_file_matters_for_what_lies_in_it_only(conversions: Conversions, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(conversions.at("llama", 4), tmp_path / "copy"))
    (folder / "model-rank-2-part-0.safetensors").unlink()
    expected = reference_tensors(conversions.source("llama"))
    with relayout.safe_open(folder) as file:
        key = "model.layers.0.self_attn.q_proj.weight"
        assert_same(file.get_tensor("model.norm.weight"), expected["model.norm.weight"], "norm")
        assert_same(file.get_slice(key)[:64], expected[key][:64], "rows")
        with pytest.raises((FormatError, OSError), match="model-rank-2-part-0"):
            file.get_slice(key)[60:65]


# What is read.

READ = """
folder = sys.argv[1]
keys = {kind: f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("up", "down")}
whole = relayout.safe_open(folder)
for key in keys.values():  # What is imported, and the sidecar of all ranks, is read once.
    whole.get_slice(key)[::1024]
forget(folder)
found = {}
for what in ("up[1000:1100]", "up[2040:2060]", "up[7]", "down[1000:1100]", "down[:, 3100:3200]"):
    before = drive_nbytes()
    part = eval(what, {}, {kind: whole.get_slice(key) for kind, key in keys.items()})
    found[what] = [drive_nbytes() - before, part.nbytes, int(part.view(torch.int16).sum())]
print(json.dumps(found))
"""


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    """Rows of one rank, of two; columns of a few rows from every rank; of few columns the rank's own, gaps included."""
    sizes = {
        "model.layers.0.mlp.up_proj.weight": (torch.bfloat16, (8192, 2048)),
        "model.layers.0.mlp.down_proj.weight": (torch.bfloat16, (2048, 8192)),
    }
    source = write_model(tmp_path / "source", sizes)
    relayout.convert(source, tmp_path / "out", tp=8)
    whole = {key.split(".")[4].removesuffix("_proj"): tensor for key, tensor in reference_tensors(source).items()}
    found = child(MEASURE + READ, tmp_path / "out")
    for what, (_, nbytes, total) in found.items():
        expected = eval(what, {}, whole)
        assert (nbytes, total) == (expected.nbytes, int(expected.view(torch.int16).sum())), what
    skip_unless_drives_are_counted(sum(read for read, _, _ in found.values()))
    blocks = {"up[1000:1100]": 2, "up[2040:2060]": 3, "up[7]": 1, "down[1000:1100]": 16}
    for what, number in blocks.items():
        read, nbytes, _ = found[what]
        assert nbytes <= read <= nbytes + number * 4096, what
    assert found["down[:, 3100:3200]"][0] <= whole["down"].nbytes / 8 + 2 * 4096


def test_the_sidecar_is_all_that_opening_reads(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", {"model.layers.0.mlp.up_proj.weight": (torch.bfloat16, (64, 64))})
    relayout.convert(source, tmp_path / "out", tp=8)
    for file in (tmp_path / "out").glob("*.safetensors"):
        file.unlink()
    for file in (tmp_path / "out").glob("relayout.rank-*"):
        file.unlink()
    with relayout.safe_open(tmp_path / "out") as file:
        assert file.keys() == ["model.layers.0.mlp.up_proj.weight"]
        assert file.get_slice(file.keys()[0]).get_shape() == [64, 64]
        assert json.loads((tmp_path / "out" / "relayout.json").read_text())["num_ranks"] == 8
