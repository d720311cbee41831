"""What an engine is told to load: how it was converted, and who loads it, relayout or the engine by itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from logging import Logger
from pathlib import Path

from relayout.checkpoint.converted import find_manifest
from relayout.checkpoint.trust import TrustedStore, policy_of, trusted
from relayout.errors import FormatError, PlanError
from relayout.storage.protocols import Kind
from relayout.storage.stores import find_input, scheme_of

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

    def check(
        self, path: str, num_ranks: int, logger: Logger, *, is_owned: bool, is_in_blocks: bool, options: str
    ) -> None:
        """Tell what makes a load at this degree slower.

        Args:
            path: of the folder.
            is_owned: whether the engine gives each expert to one rank.
            is_in_blocks: whether it gives each rank a contiguous block of them.
            options: the engine, and its options by which it takes experts as this folder has them.

        Raises:
            PlanError: the folder's experts are not where the engine wants them.
        """
        if self.expert_parallel and not (is_in_blocks and num_ranks == self.num_ranks):
            what = f"was converted with --expert-parallel for {self.num_ranks} ranks: run {options}"
            raise PlanError(f"{what}; or convert without --expert-parallel", path=path, code="unsupported")
        faster = f"`relayout convert SRC --tp {num_ranks}"
        if self.num_ranks != num_ranks:
            logger.warning(
                "relayout: %s was converted for %d ranks and is resharded for %d; %s` makes loads faster",
                path, self.num_ranks, num_ranks, faster,
            )  # fmt: skip
        if is_owned and not self.expert_parallel:
            logger.warning(
                "relayout: %s has experts cut for %d ranks, but the engine places them differently: they are read from"
                " the files of all ranks; %s --expert-parallel` makes loads faster, without data parallelism",
                path, self.num_ranks, faster,
            )  # fmt: skip


def find_folder(path: str, engine: str) -> Folder | None:
    """What relayout.json says of the folder; None for a plain checkpoint.

    Args:
        path: a folder, or the URL of a store.
        engine: how to ask the engine for its own way to load, for messages.

    Raises:
        FormatError: relayout.json is damaged, or missing from what was a converted folder; or RELAYOUT_TRUST wants a
            signature that is missing, or not of all that is there.
        PlanError: there is no such folder.
    """
    try:
        store = trusted(find_input(path), None)
        manifest = find_manifest(store)
        if isinstance(store, TrustedStore):
            store.prove_side_files()  # The engine reads them itself.
        if manifest is not None:
            return Folder(manifest.num_ranks, manifest.expert_parallel)
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
    return None


def source_url(model: str, revision: str | None) -> str:
    """The folder or URL of a model as engines name it: a folder, a URL, or the id of a repository on the hub."""
    if not _REPOSITORY.fullmatch(model) or Path(model).exists():
        return model
    return f"hf://{model}" + (f"@{revision}" if revision else "")


def folder_of(source: str) -> Folder | None:
    """How a folder or URL was converted; None: it was not. What is on the hub by its id is the engine's to find.

    Raises:
        FormatError, PlanError: as `find_folder`.
    """
    return None if scheme_of(source) == "hf" else find_folder(source, "--load-format auto")


def loads_itself(source: str) -> bool:
    """Whether engines load a plain checkpoint there by their own loaders: a local folder, or one on the hub."""
    return scheme_of(source) in (None, "hf")


def is_ours(source: str, *, is_asked_for: bool) -> bool:
    """Whether relayout loads what is there, and not the engine alone: it was asked for, or this is a converted folder.

    This is asked first in every load. Under a policy (RELAYOUT_TRUST) the engine's own loader never takes over:
    relayout loads a signed folder, and everything else is an error.

    Raises:
        FormatError, PlanError, OSError: as `find_folder`; or what is there is not signed as the policy says.
    """
    if policy_of(None) is None:
        return is_asked_for or (Path(source).is_dir() and folder_of(source) is not None)
    if scheme_of(source) == "hf":
        refuse_unproven(source, "is on the hub, where the engine finds it by itself")
    found = folder_of(source)
    assert found is not None  # Only a converted folder can be signed.
    return True


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
