"""Trust: a policy that names signers, the verification of a signature, and a store that verifies every byte.

A signature (OpenSSF Model Signing) lists the SHA-256 of every file. The signature of relayout.json proves all bytes
that are read for a rank, chunk by chunk, through the BLAKE3 digest of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from relayout.checkpoint.bundle import SignedFiles, listed_by_certificates, listed_by_identity, listed_by_key
from relayout.checkpoint.converted import (
    MAX_SIGNATURE_NBYTES,
    PACKED,
    StoreOver,
    VerifiedFile,
    digests_of_side_files,
    digests_of_small,
    file_digests_of,
    index_of,
    names_of_index,
    read_record,
)
from relayout.core.arguments import path_text
from relayout.core.digests import new_blake3
from relayout.core.extents import BLOCK
from relayout.errors import FormatError, MissingPathError, PlanError, about, did_you_mean, how_to_install, shown
from relayout.format.fields import decode, parse_toml
from relayout.format.index import MANIFEST_NAME, SIGNATURE_NAME, Manifest
from relayout.format.manifest import MAX_MANIFEST_NBYTES, content_of, parse_manifest
from relayout.format.steps_index import step_of
from relayout.storage.stores import Access, FileStat, HeadFile, ReadableFile, Store, find_input, if_there, scheme_of
from relayout.storage.system import resident_nbytes

Trust: TypeAlias = str | os.PathLike[str] | None
"""A policy file; None: the file in RELAYOUT_TRUST, or no policy if that is not set."""

_VARIABLE = "RELAYOUT_TRUST"
_MAX_POLICY_NBYTES = 2**20
_MAX_SMALL_NBYTES = 2**30
"""Maximum bytes of a file that is verified whole, in memory, before it is read: all but weight files."""
_KINDS = ({"public_key"}, {"certificates"}, {"identity", "issuer"})
"""The sets of keys that a signer may have; it has one of them."""
_OPTIONAL = {"prefixes", "content"}


@dataclass(frozen=True, slots=True)
class Signer:
    """A signer that a policy accepts."""

    how: Mapping[str, Any]
    """The keys of one of `_KINDS`; paths are absolute."""
    prefixes: tuple[str, ...]
    """Folders and URLs for which the signer is accepted, with everything below them; empty: any."""
    content: frozenset[str]
    """Contents for which the signer is accepted, see `manifest.content_of`; empty: any."""

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.how.items())

    def is_for(self, store: Store) -> bool:
        """Return True if the signer is accepted for the store's path or URL."""
        place = _absolute(str(store))
        return not self.prefixes or any(
            place == prefix or place.startswith(prefix.rstrip("/") + "/") for prefix in map(_absolute, self.prefixes)
        )

    def listing(self, signature: bytes) -> SignedFiles:
        """Verify model.sig, and return the listed files. May raise any exception."""
        if "public_key" in self.how:
            return listed_by_key(signature, self.how["public_key"])
        if "certificates" in self.how:
            return listed_by_certificates(signature, self.how["certificates"])
        return listed_by_identity(signature, self.how["identity"], self.how["issuer"])


@dataclass(frozen=True, slots=True)
class Policy:
    """The accepted signers."""

    path: str
    """Path of the policy's file, for messages."""
    signers: tuple[Signer, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A signed statement about a folder or a delta, verified."""

    blob: bytes
    """relayout.json as stored."""
    digests: Mapping[str, str]
    """SHA-256 in hex of each file that is signed, by its name."""
    signature: bytes
    """model.sig as stored."""
    signer: str
    """The verified signer, as named in the policy."""
    policy: Policy


@dataclass(frozen=True, slots=True)
class SignedFolder(Statement):
    """A signed statement about a folder."""

    manifest: Manifest

    @property
    def lists_all(self) -> bool:
        """True if the signature lists every file. Otherwise it lists only relayout.json, which proves all others."""
        return set(self.digests) != {MANIFEST_NAME}


def policy_of(trust: Trust) -> Policy | None:
    """Return the policy of an argument, or else of the environment; None: no policy, any folder is accepted.

    Raises:
        PlanError: the policy is invalid, or RELAYOUT_TRUST is empty.
        OSError: it cannot be read.
    """
    if trust is None and _VARIABLE not in os.environ:
        return None
    path = os.environ[_VARIABLE] if trust is None else path_text(trust, "trust", "the path of a policy")
    if not path:  # An empty variable may be a mistake: not a reason to trust every signer.
        raise PlanError(f"{_VARIABLE if trust is None else 'trust'} is empty, expected a policy file", code="option")
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_POLICY_NBYTES + 1)
    except FileNotFoundError:
        raise MissingPathError("the trust policy does not exist", path=path) from None
    with about(path=path):
        if len(text) > _MAX_POLICY_NBYTES:
            raise PlanError(f"more than {_MAX_POLICY_NBYTES} bytes", code="limit")
        try:
            top = parse_toml(decode(text))
        except FormatError as error:
            raise PlanError(f"not a policy: {error.what}", code="option") from None
        signers = top.get("signer")
        if set(top) != {"signer"} or not isinstance(signers, list) or not signers:
            raise PlanError("not a policy: expected [[signer]], once or more, and nothing else", code="option")
        return Policy(path, tuple(_parse_signer(signer, Path(path).absolute().parent) for signer in signers))


def _parse_signer(top: object, folder: Path) -> Signer:
    if not isinstance(top, dict):
        raise PlanError("a signer is not a table", code="option")
    known = set().union(*_KINDS, _OPTIONAL)
    for name, value in top.items():
        if name not in known:
            raise PlanError(f"a signer has no {shown(name)}{did_you_mean(name, known)}", code="option")
        is_list = name in ("certificates", "prefixes", "content")
        texts = value if is_list else [value]
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            expected = "texts in a list" if is_list else "a text"
            raise PlanError(f"{name} is {shown(value)}, expected {expected}", code="option")
    how = top.keys() - _OPTIONAL
    if how not in _KINDS:
        raise PlanError("a signer needs public_key, or certificates, or identity and issuer", code="option")
    signer = {name: top[name] for name in how}
    if "public_key" in signer:
        signer["public_key"] = str(folder / signer["public_key"])
    if "certificates" in signer:
        signer["certificates"] = [folder / name for name in signer["certificates"]]
    prefixes = (prefix if scheme_of(prefix) else str(folder / prefix) for prefix in top.get("prefixes", ()))
    return Signer(signer, tuple(prefixes), frozenset(top.get("content", ())))


def _absolute(path: str) -> str:
    return path if scheme_of(path) else os.path.realpath(path)


def trusted(store: Store, trust: Trust) -> Store:
    """Wrap the store of a converted checkpoint to return only verified bytes; without a policy, do nothing."""
    policy = policy_of(trust)
    return store if policy is None else TrustedStore(store, verify_signature(store, policy))


def package_missing() -> PlanError:
    """Return the error for a missing package that makes and verifies signatures."""
    what = f"signatures need the package model-signing, which is not installed: {how_to_install('sign')}"
    return PlanError(what, code="unsupported")


def policy_over(store: Store) -> Policy | None:
    """Return the policy that verifies a store, or the base of its deltas; None: it is not verified."""
    while isinstance(store, StoreOver) and not isinstance(store, TrustedStore):
        store = store.base
    return store.signed.policy if isinstance(store, TrustedStore) else None


def verify_signature(store: Store, policy: Policy) -> SignedFolder:
    """Verify a folder's signature, before anything else of the folder is used."""
    said = verify_statement(store, policy)
    manifest = parse_manifest(said.blob, store.location(MANIFEST_NAME))
    return SignedFolder(said.blob, said.digests, said.signature, said.signer, said.policy, manifest)


def verify_source_signature(store: Store, policy: Policy) -> tuple[str, Mapping[str, str]]:
    """Verify the signature of a plain checkpoint, which has no relayout.json.

    Returns:
        The signer, as named in the policy, and the SHA-256 in hex of each signed file by its name.

    Raises:
        FormatError: the checkpoint has no signature of a signer in the policy. Signers with a `content` list are
            accepted for converted checkpoints only.
        PlanError: the policy has no signer for this location.
    """
    reasons: list[str] = []
    signature = _read_signed(store, SIGNATURE_NAME, MAX_SIGNATURE_NBYTES, policy)
    for signer, listing in _listings(signature, _signers_for(store, policy), reasons):
        if not signer.content:
            return str(signer), listing.digests
        reasons.append("the policy names contents of converted checkpoints")
    raise _unverified(store, policy, reasons)


def verify_statement(store: Store, policy: Policy, content: Callable[[bytes], str] = content_of) -> Statement:
    """Verify the signature of a folder or a delta, before anything else of it is used.

    A folder with the name of a step must be signed under that name: so a step cannot be passed off as another one.

    Args:
        content: function that returns the content id of a stored relayout.json, which a policy may name. It is called
            only for a signed one.
    """
    signers = _signers_for(store, policy)
    signature, blob = (
        _read_signed(store, name, limit, policy)
        for name, limit in ((SIGNATURE_NAME, MAX_SIGNATURE_NBYTES), (MANIFEST_NAME, MAX_MANIFEST_NBYTES))
    )
    listed, name = sha256(blob).hexdigest(), str(store).rstrip("/").rpartition("/")[2]
    reasons: list[str] = []
    for signer, listing in _listings(signature, signers, reasons):
        if listing.digests.get(MANIFEST_NAME) != listed:
            reasons.append(f"{MANIFEST_NAME} is not the one that was signed")
        elif step_of(name) is not None and listing.name != name:
            reasons.append(f"{shown(listing.name)} was signed, which is another step")
        elif signer.content and content(blob) not in signer.content:
            reasons.append(f"the content {content(blob)} is not one that the policy names")
        else:
            return Statement(blob, listing.digests, signature, str(signer), policy)
    raise _unverified(store, policy, reasons)


def _listings(signature: bytes, signers: Iterable[Signer], reasons: list[str]) -> Iterator[tuple[Signer, SignedFiles]]:
    """Yield each signer of the signature, and the listed files; for other signers, add to `reasons`."""
    for signer in signers:
        try:
            yield signer, signer.listing(signature)
        except ImportError:
            raise package_missing() from None
        except FormatError as error:
            reasons.append(error.what)
        except Exception as error:  # Packages and parsers raise any kind for foreign bytes.
            reasons.append(f"{type(error).__name__}: {shown(str(error))}")


def _unverified(store: Store, policy: Policy, reasons: Iterable[str]) -> FormatError:
    what = f"no signature of a signer in {policy.path}: {'; '.join(reasons)}"
    return FormatError(what, path=store.location(SIGNATURE_NAME), code="signature")


def check_signers(path: str | os.PathLike[str]) -> Policy | None:
    """Return the environment's policy, checked to have a signer for a path or URL; None: no policy is set.

    This check precedes the first request to a server.
    """
    policy = policy_of(None)
    if policy is not None:
        _signers_for(find_input(path), policy)
    return policy


def _signers_for(store: Store, policy: Policy) -> list[Signer]:
    signers = [signer for signer in policy.signers if signer.is_for(store)]
    if not signers:
        raise PlanError(f"the policy {policy.path} has no signer for this place", path=str(store), code="option")
    return signers


def _read_signed(store: Store, name: str, limit: int, policy: Policy) -> bytes:
    blob = if_there(lambda: store.read(name, limit))
    if blob is None:
        what = f"is not signed ({name} is missing), but the policy {policy.path} requires it: relayout sign"
        raise FormatError(what, path=str(store), code="signature")
    return blob


@dataclass(frozen=True, slots=True)
class TrustedStore(StoreOver):
    """A signed folder. Every byte is verified in the memory in which it is returned. Thread-safe.

    The store has no path and no descriptor. Unsigned files do not exist in it.
    """

    signed: SignedFolder
    _known_sides: list[dict[str, str]] = field(default_factory=list, init=False, repr=False, compare=False)

    def over(self, other: Store) -> TrustedStore:
        """Return a store that verifies a copy of the folder, such as in a cache, by the same signature."""
        return TrustedStore(other, self.signed)

    def verify_side_files(self) -> None:
        """Verify all files except weights and relayout's own: other programs read them directly in the folder."""
        own = {*names_of_index(self.signed.manifest), *(file.name for file in self.signed.manifest.files)}
        names = self.signed.digests.keys() - own if self.signed.lists_all else self._sides().keys()
        for name in names:
            opened = if_there(partial(self.base.open, name))
            if opened is None:
                raise self._missing(name)
            self._check_whole(name, opened)

    def stat(self, name: str) -> FileStat | None:
        if not self._is_signed(name):
            return None
        status = self.base.stat(name)
        # Files of ranks outside this folder may be missing.
        if status is None and index_of(self.signed.manifest, name) is None:
            raise self._missing(name)
        return status

    def read(self, name: str, limit: int) -> bytes:
        if name in (MANIFEST_NAME, SIGNATURE_NAME):
            return self.signed.blob if name == MANIFEST_NAME else self.signed.signature
        self._check_listed(name)
        blob = if_there(lambda: self.base.read(name, limit))
        if blob is None:
            raise self._missing(name)
        self._check_whole(name, HeadFile(blob, FileStat(len(blob), "")))
        return blob

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        self._check_listed(name)
        index = index_of(self.signed.manifest, name)
        if index is None and name not in PACKED:  # The manifest has digests of the parts.
            status = self.base.stat(name)
            if status is not None:
                status.check(self.location(name), nbytes, version)
            blob = self.read(name, _MAX_SMALL_NBYTES)
            return HeadFile(blob, FileStat(len(blob), "" if status is None else status.version))
        if index is None:
            return self.base.open(name, nbytes, access=access, version=version)
        manifest, where = self.signed.manifest, self.location(name)
        file = manifest.files[index]
        access = access if file.data_start % BLOCK == 0 else Access.BUFFERED
        opened = self.base.open(name, nbytes, access=access, version=version)
        try:
            fd = opened.fileno() if access is Access.AUTO else None
            if fd is not None and (resident_nbytes(fd, 0, file.nbytes) or 0) > file.nbytes // 2:
                opened.close()
                opened = self.base.open(name, nbytes, version=version)
            return VerifiedFile(opened, file_digests_of(self, manifest, index, with_header=True), where)
        except BaseException:
            opened.close()
            raise

    def _is_signed(self, name: str) -> bool:
        if name in self.signed.digests or name == SIGNATURE_NAME:
            return True
        manifest = self.signed.manifest
        own = name in names_of_index(manifest) or index_of(manifest, name) is not None
        return not self.signed.lists_all and (own or name in self._sides())

    def _check_listed(self, name: str) -> None:
        if not self._is_signed(name):
            raise FormatError("is not signed", path=self.location(name), code="missing")

    def _check_whole(self, name: str, file: ReadableFile) -> None:
        """Verify a file that is read whole: by its SHA-256, if that is signed; else by its BLAKE3 digest."""
        from relayout.storage.reading import sha256_hex  # Imported here: the load of a rank does not need it.

        proof, listed = new_blake3(), self.signed.digests.get(name)
        found = sha256_hex(file, proof)
        small = digests_of_small(self.signed.manifest)
        expected = listed or (small[name] if name in small else self._sides().get(name))
        if expected != (found if listed else proof.hexdigest()):
            raise self._other(name)

    def _sides(self) -> dict[str, str]:
        """Return the BLAKE3 digests of the side files by name, from the source record, which is read once."""
        if not self._known_sides:
            self._known_sides.append(digests_of_side_files(read_record(self, self.signed.manifest)))
        return self._known_sides[0]

    def _other(self, name: str) -> FormatError:
        return FormatError("is not the file that was signed", path=self.location(name), code="digest")

    def _missing(self, name: str) -> FormatError:
        return FormatError("is missing, and was signed", path=self.location(name), code="mismatch")
