"""Makes signatures, in the format of OpenSSF Model Signing, with the package model-signing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relayout.checkpoint.trust import package_missing
from relayout.errors import PlanError, shown
from relayout.format.index import SIGNATURE_NAME


def signer_of(
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None,
    chain: Sequence[str | os.PathLike[str]],
) -> Any:
    """Return the signer: a `model_signing.signing.Config`."""
    if chain and certificate is None:
        raise PlanError("--chain needs --certificate", code="option")
    try:
        from model_signing.signing import Config as AnyConfig
    except ImportError:
        raise package_missing() from None
    Config: Any = AnyConfig  # Its methods have no types.
    try:
        if certificate is None:
            return Config().use_elliptic_key_signer(private_key=key)
        return Config().use_certificate_signer(
            private_key=key, signing_certificate=certificate, certificate_chain=chain
        )
    except OSError:
        raise
    except Exception as error:  # The package and its parsers raise many kinds without a common base.
        what = f"cannot sign with it: {type(error).__name__}: {shown(str(error))}"
        raise PlanError(what, path=key, code="option") from None


def signed(signer: Any, name: str, digests: Mapping[str, str]) -> bytes:
    """Return the signature of a folder with these files, given by their SHA-256."""
    with TemporaryDirectory(prefix="relayout-") as folder:  # The package writes only to files.
        path = Path(folder) / SIGNATURE_NAME
        signer.set_hashing_config(_Hashes(name, digests)).sign(Path(folder), path)
        return path.read_bytes()


@dataclass(frozen=True, slots=True)
class _Digest:
    """A digest with the attributes that model-signing requires."""

    algorithm: str
    digest_hex: str

    @property
    def digest_value(self) -> bytes:
        return bytes.fromhex(self.digest_hex)


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Replaces the package's own hashing of a folder, which reads local files only."""

    name: str
    digests: Mapping[str, str]

    def hash(self, model_path: object) -> Any:
        """Return the manifest to be signed."""
        from model_signing.manifest import FileManifestItem, Manifest, SerializationType

        items = [
            FileManifestItem(path=Path(name), digest=_Digest("sha256", digest))  # type: ignore[arg-type]
            for name, digest in self.digests.items()
        ]
        how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_NAME]}
        return Manifest(self.name, items, SerializationType.from_args(how))
