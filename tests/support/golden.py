"""The golden folder, for tests of other implementations: tests/format/golden, made by `tools/run vectors golden`.

It has a source and its plan, what relayout makes of them for two ranks in both layouts, a root of three steps that
begin with the source, a delta between folders in the layout `whole`, a signed root that a training has gone on with for
a while, and golden.json: dtype, shape and SHA-256 of each tensor of each rank, which numpy cuts here by rules of its
own.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file
from support.signing import make_keys

import relayout
from relayout.format.steps_index import step_name
from relayout.train.repository import StepRepository

FOLDER = Path(__file__).parents[1] / "format" / "golden"
SOURCE, PLAN, LIST = FOLDER / "source", FOLDER / "plan.toml", FOLDER / "golden.json"
LAYOUTS = ("ranks", "whole")
STEPS, TRAINED, WHOLE_DELTA = FOLDER / "steps", FOLDER / "trained", FOLDER / "whole-delta"
PUBLIC_KEY, POLICY = FOLDER / "trained.pub", FOLDER / "trained.toml"
"""The key of whoever signed the steps of `TRAINED`, and a policy that names it."""
NUM_RANKS, ALIGNMENT, NUM_STEPS = 2, 512, 3
TRAINED_STEPS = range(1, 9)
KEPT_STEPS = range(4, 9)
"""The steps of `TRAINED` that its index has."""
CONFIG = '{"model_type":"golden","num_attention_heads":4,"num_key_value_heads":2,"vocab_size":20}\n'
PLAN_TEXT = """\
[sizes]
heads = "num_attention_heads"
kv_heads = "num_key_value_heads"

[cut]
"embed.weight" = { dim = 0, by = "vocabulary" }
"layers.*.qkv_proj.weight" = { dim = 0, by = ["heads", "kv_heads", "kv_heads"] }
"layers.*.o_proj.weight" = { dim = 1, by = "heads" }
"layers.*.{gate.bias,scale}" = "whole"
"norm.weight" = "whole"
"""
ROWS = {
    # Padded to 64 tokens, of which rank 0 has the first 32.
    "embed.weight": ([range(20)], []),
    # Its share of q, of k and of v.
    "layers.0.qkv_proj.weight": (
        [range(8), range(16, 20), range(24, 28)],
        [range(8, 16), range(20, 24), range(28, 32)],
    ),
}
COLUMNS = {"layers.0.o_proj.weight": ([range(8)], [range(8, 16)])}
DTYPES = {"float16": "F16", "float64": "F64", "float32": "F32", "int8": "I8", "uint8": "U8"}

Array = npt.NDArray[Any]


def source_arrays() -> dict[str, Array]:
    """The source's tensors: bytes depend on the position, and differ from tensor to tensor."""
    made: dict[str, tuple[Any, tuple[int, ...]]] = {
        "embed.weight": (np.float16, (20, 8)),
        "layers.0.gate.bias": (np.int8, (3,)),
        "layers.0.o_proj.weight": (np.float32, (8, 16)),
        "layers.0.qkv_proj.weight": (np.float16, (32, 8)),
        "layers.0.scale": (np.float32, ()),
        "layers.1.gate.bias": (np.int8, (3,)),
        "norm.weight": (np.uint8, (5,)),
    }
    return {
        name: (np.arange(np.prod(shape, dtype=int)) % 61 + seed).astype(dtype).reshape(shape)
        for seed, (name, (dtype, shape)) in enumerate(made.items(), 1)
    }


def step_arrays(step: int) -> dict[str, Array]:
    """The tensors of a step: those of the source, of which each later step has changed every seventh element."""
    arrays = source_arrays()
    for later in range(2, step + 1):
        for array in arrays.values():
            array.reshape(-1)[later::7] += 1
    return arrays


def trained_arrays(step: int) -> dict[str, Array]:
    """The tensors of a step of `TRAINED`: files of more than one chunk, elements of 1, 2 and 8 bytes."""
    arrays = {
        "layers.0.o_proj.weight": np.arange(128, dtype=np.float64).reshape(8, 16),
        "layers.0.qkv_proj.weight": np.zeros((32, 35_000), np.float16),
        "norm.weight": np.arange(5, dtype=np.uint8),
    }
    proj, qkv, norm = arrays.values()
    for later in range(2, step + 1):
        if later in (2, 3):
            qkv[:, later::7] += 1
        elif later == 4:  # Far apart, in slices of rank 0 alone.
            qkv[:8, ::1_000] += 1
        elif later == 5:  # More than a quarter of the first chunk, and all of what both ranks hold.
            qkv[:4] -= 1
            norm += 3
        elif later == 7:
            qkv[31, 34_999] = 1
        elif later == 8:  # Elements of 8 bytes.
            proj[::3, 1::5] *= -2
    return arrays


def slice_array(name: str, array: Array, rank: int) -> Array:
    """What a rank holds."""
    for axis, cuts in enumerate((ROWS, COLUMNS)):
        if name in cuts:
            indices = [index for part in cuts[name][rank] for index in part]
            array = np.take(array, np.array(indices, int), axis)
    return array


def write_source(folder: Path) -> None:
    """The source checkpoint."""
    folder.mkdir(exist_ok=True)
    save_file(source_arrays(), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(CONFIG)
    (folder / "config.json").chmod(0o644)


def convert(source: Path, out: Path, layout: str) -> None:
    """The conversion that a layout's folder is of."""
    # Not the default, so that a change of that changes no golden byte.
    relayout.convert(source, out, tp=NUM_RANKS, align=ALIGNMENT, plan=PLAN, layout=layout, max_part_nbytes=48 * 10**9)


def publish(root: Path) -> None:
    """The steps: a folder, and two deltas."""
    publisher = relayout.Publisher(root, config=SOURCE, plan=PLAN, tp=NUM_RANKS, align=ALIGNMENT)
    for step in range(1, NUM_STEPS + 1):
        publisher.publish({name: torch.from_numpy(array) for name, array in step_arrays(step).items()}, step)


def publish_trained(root: Path, work: Path) -> None:
    """The signed root: what its first steps were is retired, another publisher was killed before it wrote anything.

    Step 5 has another config.json, step 6 changes nothing, steps 4 and 7 have folders.
    """
    keys, config = make_keys(work, "trained"), work / "config"
    config.mkdir()
    (config / "config.json").write_text(CONFIG)
    publisher = relayout.Publisher(
        root,
        config=config,
        plan=PLAN,
        tp=NUM_RANKS,
        align=ALIGNMENT,
        key=keys.key,
        full_every=3,
        keep=5,
        keep_seconds=0,
    )
    for step in TRAINED_STEPS:
        if step == 5:
            (config / "config.json").write_text(CONFIG.replace("golden", "trained"))
        publisher.publish({name: torch.from_numpy(array) for name, array in trained_arrays(step).items()}, step)
    index = StepRepository.at(root).move(lambda index: index.announced([step_name("delta", 9, "0badcafe")], 1, 600))
    for one in index.retired:  # As a publisher that was killed while it deleted leaves them.
        shutil.rmtree(root / one.name)
    (root / ".steps.json.relayout-lock").unlink()  # Of writers only.
    shutil.copyfile(keys.public, PUBLIC_KEY)
    POLICY.write_text(f'[[signer]]\npublic_key = "{PUBLIC_KEY.name}"\n')


def make_whole_delta(work: Path) -> None:
    """What changes from the golden folder in the layout `whole` to that of step 2."""
    (work / "source").mkdir()
    save_file(step_arrays(2), work / "source" / "model.safetensors", {"format": "pt"})
    (work / "source" / "config.json").write_text(CONFIG)
    (work / "source" / "config.json").chmod(0o644)
    convert(work / "source", work / "whole", "whole")
    relayout.delta(FOLDER / "whole", work / "whole", WHOLE_DELTA)


def listed() -> dict[str, Any]:
    """What golden.json has."""
    return {
        "num_ranks": NUM_RANKS,
        "layouts": list(LAYOUTS),
        "ranks": _ranks(source_arrays()),
        "source": {
            name: row(DTYPES[array.dtype.name], list(array.shape), array.tobytes())
            for name, array in source_arrays().items()
        },
        "steps": {str(step): _ranks(step_arrays(step)) for step in range(1, NUM_STEPS + 1)},
        "trained": {str(step): _ranks(trained_arrays(step)) for step in KEPT_STEPS},
    }


def _ranks(arrays: dict[str, Array]) -> list[dict[str, Any]]:
    """What each rank holds of tensors."""
    return [
        {
            name: row(DTYPES[array.dtype.name], list(part.shape), part.tobytes())
            for name, array in arrays.items()
            for part in [slice_array(name, array, rank)]
        }
        for rank in range(NUM_RANKS)
    ]


def row(dtype: str, shape: list[int], blob: bytes) -> dict[str, Any]:
    """What golden.json says of a tensor."""
    return {"dtype": dtype, "shape": shape, "sha256": hashlib.sha256(blob).hexdigest()}


def read_list() -> dict[str, Any]:
    """golden.json."""
    found: dict[str, Any] = json.loads(LIST.read_text())
    return found
