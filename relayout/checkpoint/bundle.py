"""Verifies model.sig: a Sigstore bundle with an in-toto statement in a DSSE envelope (OpenSSF Model Signing 1.0).

Signatures by a key or by certificates are verified here, with the packages cryptography and pyOpenSSL. The package
model-signing always imports the clients of Sigstore, which takes longer than the load of a rank. It is therefore used
here only for signatures by a Sigstore identity. The rules are those of model_signing 1.1.1 (`_signing/signing.py`,
`sign_sigstore_pb.py`, `sign_ec_key.py`, `sign_certificate.py`) and of DSSE 1.0.2 (`protocol.md`). This module is
stricter in three points: an envelope has one signature, names and keys of JSON are unique, and the encodings of
model_signing 0.2 are rejected.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from relayout.errors import FormatError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import SIGNATURE_NAME

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.x509 import Certificate

_MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
_PAYLOAD_TYPE = "application/vnd.in-toto+json"
_STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_OTHER_DIGESTS = "other digests are signed than the SHA-256 of each file"
_HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The signed hash, by the name of the key's curve."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """The files that a verified signature lists."""

    name: str
    """Name of the folder when it was signed."""
    digests: Mapping[str, str]
    """SHA-256 of each file in hex, by its path in the folder."""


_KeyOf: TypeAlias = "Callable[[Fields], EllipticCurvePublicKey]"
"""A function that returns the key that must have signed, by the bundle's verification material."""


def listed_by_key(signature: bytes, public_key: str) -> SignedFiles:
    """Verify model.sig by a public key.

    Args:
        signature: model.sig as stored.
        public_key: path of the key (PEM, P-256, P-384 or P-521).

    Raises:
        FormatError: the signature is not a bundle, or not signed with this key.
        ImportError: cryptography is not installed.
        ValueError, OSError: the key cannot be used or read.
    """
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    pem = Path(public_key).read_bytes()
    key: Any = load_pem_public_key(pem)
    canonical = _pem_of(key)

    def key_of(material: Fields) -> EllipticCurvePublicKey:
        hint = Fields(material.object("publicKey")).top.get("hint")
        if hint not in (None, "", hashlib.sha256(canonical).hexdigest()):
            raise FormatError("another key signed it", code="signature")
        return _supported(key)

    return _listed(signature, key_of)


def listed_by_certificates(signature: bytes, certificates: Sequence[Path]) -> SignedFiles:
    """Verify model.sig by a certificate that chains to one of these roots at the beginning of its own validity.

    Args:
        signature: model.sig as stored.
        certificates: paths of the roots (PEM).

    Raises:
        FormatError: the signature is not a bundle, or not signed by such a certificate.
        ImportError: cryptography or pyOpenSSL is not installed.
        ValueError, OSError: a root cannot be used or read.
    """
    from cryptography.x509 import load_pem_x509_certificates
    from OpenSSL.crypto import X509, X509Store

    store = X509Store()
    for certificate in load_pem_x509_certificates(b"".join(path.read_bytes() for path in certificates)):
        store.add_cert(X509.from_cryptography(certificate))

    def key_of(material: Fields) -> EllipticCurvePublicKey:
        entries = Fields(material.object("x509CertificateChain")).column("certificates", dict)
        chain = [_certificate(Fields(entry)) for entry in entries]
        if not chain:
            raise FormatError("it has no certificate", code="signature")
        _check_chain(store, chain)
        return _supported(chain[0].public_key())

    return _listed(signature, key_of)


def listed_by_identity(signature: bytes, identity: str, issuer: str) -> SignedFiles:
    """Verify model.sig by a Sigstore identity, with the package model-signing. May raise any exception."""
    from tempfile import TemporaryDirectory

    from model_signing.verifying import Config as AnyConfig

    Config: Any = AnyConfig  # Its methods have no types.
    taken = _FileDigestsStub()
    with TemporaryDirectory(prefix="relayout-") as folder:  # The package takes files only.
        path = Path(folder) / SIGNATURE_NAME
        path.write_bytes(signature)
        verifier = Config().use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
        verifier.set_hashing_config(taken).verify(Path(folder), path)
    if taken.listing is None or not taken.listing.digests:
        raise ValueError("the package compared nothing")
    return taken.listing


def _pem_of(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


def _supported(key: Any) -> EllipticCurvePublicKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    if not isinstance(key, EllipticCurvePublicKey) or key.curve.name not in _HASHES:
        raise FormatError(f"the key is not of {', '.join(_HASHES)}", code="signature")
    return key


def _certificate(entry: Fields) -> Certificate:
    from cryptography.x509 import load_der_x509_certificate

    try:
        return load_der_x509_certificate(_base64(entry, "rawBytes"))
    except ValueError:
        raise FormatError("a certificate is not DER", code="signature") from None


def _check_chain(store: Any, chain: Sequence[Certificate]) -> None:
    """Check that the first certificate chains through the rest to a root in the store, and is for signing."""
    from cryptography.x509 import ExtendedKeyUsage, ExtensionNotFound, KeyUsage
    from cryptography.x509.oid import ExtendedKeyUsageOID
    from OpenSSL.crypto import X509, X509StoreContext, X509StoreContextError

    signing, *others = chain
    store.set_time(signing.not_valid_before_utc)
    try:
        context = X509StoreContext(store, X509.from_cryptography(signing), [*map(X509.from_cryptography, others)])
        context.verify_certificate()
    except X509StoreContextError as error:
        what = f"its certificate leads to none of the roots: {shown(str(error))}"
        raise FormatError(what, code="signature") from None
    can_sign = False
    with suppress(ExtensionNotFound):
        can_sign = signing.extensions.get_extension_for_class(KeyUsage).value.digital_signature
    with suppress(ExtensionNotFound):
        usages = signing.extensions.get_extension_for_class(ExtendedKeyUsage).value
        can_sign = can_sign or ExtendedKeyUsageOID.CODE_SIGNING in usages
    if not can_sign:
        raise FormatError("its certificate is not for signing", code="signature")


def _listed(signature: bytes, key_of: _KeyOf) -> SignedFiles:
    """Verify a bundle, and parse its payload only after that."""
    bundle = Fields(parse_object(signature, SIGNATURE_NAME))
    _check(bundle, "mediaType", _MEDIA_TYPE)
    envelope = Fields(bundle.object("dsseEnvelope"))
    _check(envelope, "payloadType", _PAYLOAD_TYPE)
    payload, signatures = _base64(envelope, "payload"), envelope.column("signatures", dict)
    if len(signatures) != 1:
        raise FormatError(f"{len(signatures)} signatures, expected one", code="signature")
    key = key_of(Fields(bundle.object("verificationMaterial")))
    _verify(key, _base64(Fields(signatures[0]), "sig"), payload)
    return _parse(payload)


def _verify(key: EllipticCurvePublicKey, signature: bytes, payload: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    # The pre-authentication encoding of DSSE.
    signed = b"DSSEv1 %d %s %d %s" % (len(_PAYLOAD_TYPE), _PAYLOAD_TYPE.encode(), len(payload), payload)
    try:
        key.verify(signature, signed, ECDSA(getattr(hashes, _HASHES[key.curve.name])()))
    except InvalidSignature:
        raise FormatError("the signature is not of this key", code="signature") from None


def _parse(payload: bytes) -> SignedFiles:
    """Parse the statement of a verified signature."""
    top = Fields(parse_object(payload, SIGNATURE_NAME))
    _check(top, "_type", _STATEMENT_TYPE)
    _check(top, "predicateType", _PREDICATE_TYPE)
    subjects, predicate = top.column("subject", dict), Fields(top.object("predicate"))
    if len(subjects) != 1:
        raise FormatError(f"{len(subjects)} subjects, expected one", code="field")
    subject, serialization = Fields(subjects[0]), Fields(predicate.object("serialization"))
    if serialization.text("method") != "files":
        raise FormatError(_OTHER_DIGESTS, code="signature")
    digests: dict[str, str] = {}
    for resource in map(Fields, predicate.column("resources", dict)):
        name, digest = resource.text("name"), resource.text("digest")
        if resource.text("algorithm") != "sha256" or not _SHA256.fullmatch(digest):
            raise FormatError(_OTHER_DIGESTS, code="signature")
        if name in digests:
            raise FormatError(f"{shown(name)} is listed twice", code="field")
        digests[name] = digest
    root = hashlib.sha256(b"".join(map(bytes.fromhex, digests.values()))).hexdigest()
    if not digests or Fields(subject.object("digest")).text("sha256") != root:
        raise FormatError("the digest of its subject is not that of its files", code="signature")
    return SignedFiles(subject.text("name"), digests)


def _check(fields: Fields, name: str, expected: str) -> None:
    if fields.text(name) != expected:
        raise FormatError(f"{name} is {shown(fields.text(name))}, expected {expected}", code="signature")


def _base64(fields: Fields, name: str) -> bytes:
    try:
        return b64decode(fields.text(name), validate=True)
    except (binascii.Error, ValueError):
        raise FormatError(f"{name} is not base64", code="field") from None


class _FileDigestsStub:
    """Stub for the digests of a folder's files, which model-signing compares with the signed ones.

    It stores the signed digests, and reports no difference: each file is compared later, when it is read.
    """

    def __init__(self) -> None:
        self.listing: SignedFiles | None = None

    def add_ignored_paths(self, **ignored: object) -> None:
        """Do nothing: files that the signer left out are not signed."""

    def hash(self, model_path: object, *, files_to_hash: object = None) -> _FileDigestsStub:
        """Return this stub without reading any file."""
        return self

    def __ne__(self, signed: Any) -> bool:
        files = {each.identifier: each.digest for each in signed.resource_descriptors()}
        if signed.serialization_type["method"] != "files" or {each.algorithm for each in files.values()} != {"sha256"}:
            raise ValueError(_OTHER_DIGESTS)
        self.listing = SignedFiles(signed.model_name, {name: digest.digest_hex for name, digest in files.items()})
        return False

    __hash__ = None  # type: ignore[assignment]
