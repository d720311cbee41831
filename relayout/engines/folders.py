"""Where an engine's weights are: how they were converted, and who loads them, relayout or the engine by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from relayout.checkpoint.converted import check_lengths, check_present, find_manifest, read_record
from relayout.checkpoint.trust import TrustedStore, policy_of, trusted
from relayout.errors import FormatError, PlanError
from relayout.storage.stores import Kind, Store, find_input, scheme_of

if TYPE_CHECKING:
    from relayout.format.index import Manifest

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""The shape of each whole tensor of a model, by its name."""

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
_OF_ANOTHER_RANK = "model-rank-1-part-0.safetensors"
"""A file that only folders converted for several ranks have."""


@dataclass(frozen=True, slots=True)
class Folder:
    """How a checkpoint folder was converted."""

    num_ranks: int
    """The tensor-parallel degree."""
    expert_parallel: bool
    """Whether experts are owned whole."""


@dataclass(frozen=True)
class WeightsPlace:
    """Where an engine's weights are: looked at, and under a policy proven, once, when something is first asked of it.

    Each load makes a place, and hands it on to all that decide something about the load.
    """

    source: str
    """A folder or URL; see `source_url`."""
    is_asked_for: bool = True
    """Whether a person has told the engine to load by relayout."""

    @cached_property
    def is_ours(self) -> bool:
        """Whether relayout loads this, and not the engine alone: it was asked for, or this is a converted folder.

        Under a policy the engine's own loader never takes over.

        Raises:
            FormatError, PlanError, OSError: as `find_folder`, `check_policy`.
        """
        if policy_of(None) is None:
            return self.is_asked_for or (Path(self.source).is_dir() and self.folder is not None)
        self.check_policy()
        return True

    def check_policy(self) -> None:
        """Check that what is here is signed as the policy (RELAYOUT_TRUST) says, if there is one.

        Raises:
            FormatError, PlanError, OSError: it is not; or the policy cannot be read.
        """
        if policy_of(None) is not None:
            if scheme_of(self.source) == "hf":
                refuse_unproven(self.source, "is on the hub, where the engine finds it by itself")
            assert self.folder is not None  # Only a converted folder can be signed.

    @property
    def folder(self) -> Folder | None:
        """How this was converted; None: it was not. What is on the hub by its id is the engine's to find."""
        return None if scheme_of(self.source) == "hf" else self._content.folder

    @property
    def has_engines_loader(self) -> bool:
        """Whether engines read a plain checkpoint here by their own loaders: a local folder, or one on the hub."""
        return scheme_of(self.source) in (None, "hf")

    def shapes(self, rank: int, num_ranks: int) -> Shapes | None:
        """The shapes of the weights, all that the rank reads of a converted folder being here.

        Returns:
            None: they are not known, as of a plain checkpoint that is remote or in another form than safetensors.

        Raises:
            FormatError: a file is missing or damaged.
            PlanError: there is no such folder, or it lacks ranks.
        """
        if scheme_of(self.source) == "hf":
            return None
        store, manifest = self._content.store, self._content.manifest
        if manifest is not None:
            needed = [rank] if manifest.num_ranks == num_ranks else range(manifest.num_ranks)
            check_present(store, manifest, needed)
            check_lengths(store, manifest, needed)
            record = read_record(store, manifest)
            return {name: tuple(shape) for name, shape in zip(record.names, record.shapes, strict=True)}
        if scheme_of(self.source) is not None:
            return None
        from relayout.checkpoint.source import read_source

        try:
            return {tensor.name: tensor.shape for tensor in read_source(store).tensors}
        except PlanError:
            return None

    @cached_property
    def _content(self) -> _Content:
        return _look_at(self.source, "--load-format auto")


@dataclass(frozen=True, slots=True)
class _Content:
    """What was found at a place."""

    store: Store
    """The store of the folder. It proves what is read from it, if there is a policy."""
    manifest: Manifest | None
    """The manifest; None: a plain checkpoint."""

    @property
    def folder(self) -> Folder | None:
        """How it was converted."""
        return None if self.manifest is None else Folder(self.manifest.num_ranks, self.manifest.expert_parallel)


def find_folder(path: str, engine: str) -> Folder | None:
    """How the checkpoint in a folder was converted; None for a plain one.

    Args:
        path: a folder, or the URL of a store.
        engine: how to ask the engine for its own way to load, for messages.

    Raises:
        FormatError: relayout.json is damaged, or missing from what was a converted folder; or RELAYOUT_TRUST wants a
            signature that is missing, or not of all that is there.
        PlanError: there is no such folder.
    """
    return _look_at(path, engine).folder


def _look_at(path: str, engine: str) -> _Content:
    """Find a checkpoint, and prove its side files if there is a policy. Arguments and errors as of `find_folder`."""
    try:
        store = trusted(find_input(path), None)
        manifest = find_manifest(store)
        if isinstance(store, TrustedStore):
            store.prove_side_files()  # The engine reads them itself.
        if manifest is not None:
            return _Content(store, manifest)
        reason = None if store.kind() is Kind.FOLDER else store.not_found_message()
    except PlanError as error:  # Of a store or the hub.
        if policy_of(None) is not None:
            raise
        reason = error.what
    if reason is not None:
        raise PlanError(
            f"is not a folder: {reason}. Download the model, run `relayout convert FOLDER --tp N` and serve its output;"
            f" or load with {engine}",
            path=path,
            code="missing",
        )
    if store.stat(_OF_ANOTHER_RANK) is not None:  # Engines would take its slices for whole tensors.
        what = "is missing beside rank files: the copy of the folder is incomplete"
        raise FormatError(what, path=store.location("relayout.json"), code="missing")
    return _Content(store, None)


def source_url(model: str, revision: str | None) -> str:
    """The folder or URL of a model as engines name it: a folder, a URL, or the id of a repository on the hub."""
    if not _REPOSITORY.fullmatch(model) or Path(model).exists():
        return model
    return f"hf://{model}" + (f"@{revision}" if revision else "")


def check_same_model(had: Shapes | None, path: str, new: Shapes | None) -> None:
    """Check that weights are for the model that an engine has loaded, so that an update writes all of it.

    Proof: its loaders take tensors by names and shapes, and with these they have written every parameter before.

    Raises:
        PlanError: they are not.
    """
    if had is None or new is None:
        return
    if differing := [name for name in sorted({*had, *new}) if had.get(name) != new.get(name)]:
        what = (
            f"is not for the model that the engine has: {len(differing)} tensors have another shape, are missing, or"
            " are there in addition"
        )
        raise PlanError(what, path=path, tensor=differing[0], code="mismatch")


def refuse_unproven(path: str | None, what: str) -> None:
    """Refuse what an engine would load by itself, if there is a policy, since nothing would prove it.

    Raises:
        PlanError, OSError: there is one; or as `policy_of`.
    """
    policy = policy_of(None)
    if policy is not None:
        instead = "serve a folder of `relayout convert --digest sha256` and `relayout sign`"
        what = f"{what}: the policy {policy.path} (RELAYOUT_TRUST) wants all weights proven; {instead}"
        raise PlanError(what, path=path, code="unsupported")
