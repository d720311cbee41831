"""relayout.checkpoint.bundle: it accepts what the package model-signing accepts, and imports none of it for a key."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support import prestarted
from support.signing import Keys, make_keys

from relayout.checkpoint.bundle import SignedFiles, listed_by_certificates, listed_by_key
from relayout.errors import FormatError

package = pytest.importorskip("model_signing", reason="model-signing is not installed")

Bundle = dict[str, Any]
PAYLOAD_TYPE = "application/vnd.in-toto+json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    (folder / "below").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "below" / "b").write_text("b")
    return folder


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("signer"))


def reference_signature(model: Path, key: Path, certificate: Path | None = None, chain: tuple[Path, ...] = ()) -> bytes:
    """model.sig of a folder, by the package."""
    from model_signing.signing import Config

    config = Config().use_elliptic_key_signer(private_key=key)
    if certificate is not None:
        config = Config().use_certificate_signer(
            private_key=key, signing_certificate=certificate, certificate_chain=chain
        )
    path = model.parent / "model.sig"
    config.sign(model, path)
    return path.read_bytes()


def stock(model: Path, signature: bytes, *, key: Path | None = None, root: Path | None = None) -> bool:
    """True if the package accepts a signature of an unchanged folder."""
    from model_signing.verifying import Config

    path = model.parent / "to-verify.sig"
    path.write_bytes(signature)
    try:
        verifier = Config()
        if key is not None:
            verifier.use_elliptic_key_verifier(public_key=key)
        else:
            verifier.use_certificate_verifier(certificate_chain=[] if root is None else [root])
        verifier.verify(model, path)
    except Exception:
        return False
    return True


def accepted(listed: Callable[[], SignedFiles]) -> bool:
    try:
        listed()
    except FormatError:
        return False
    return True


def digests_of(model: Path) -> dict[str, str]:
    from hashlib import sha256

    files = (path for path in model.rglob("*") if path.is_file())
    return {path.relative_to(model).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}


def pem(key: Any, folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a private key and of its public key."""
    form, public = serialization.PrivateFormat.PKCS8, serialization.PublicFormat.SubjectPublicKeyInfo
    private_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    private_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    public_path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, public))
    return private_path, public_path


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_signature_of_the_package_lists_the_digest_of_each_file(
    model: Path, tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    private, public = pem(ec.generate_private_key(curve), tmp_path, "one")
    _, other = pem(ec.generate_private_key(curve), tmp_path, "other")
    signature = reference_signature(model, private)
    assert listed_by_key(signature, str(public)) == SignedFiles("model", digests_of(model))
    with pytest.raises(FormatError, match="another key signed it"):
        listed_by_key(signature, str(other))
    bundle = json.loads(signature)
    del bundle["verificationMaterial"]["publicKey"]["hint"]
    with pytest.raises(FormatError, match="the signature is not of this key"):
        listed_by_key(json.dumps(bundle).encode(), str(other))


def test_a_key_that_no_signature_can_be_of_is_an_error(model: Path, signer: Keys, tmp_path: Path) -> None:
    signature = json.loads(reference_signature(model, signer.key))
    signature["verificationMaterial"]["publicKey"].pop("hint")
    for key in (ec.generate_private_key(ec.SECP256K1()), rsa.generate_private_key(65537, 2048)):
        _, public = pem(key, tmp_path, "odd")
        assert not stock(model, json.dumps(signature).encode(), key=public)
        with pytest.raises(FormatError, match="the key is not of secp256r1"):
            listed_by_key(json.dumps(signature).encode(), str(public))
    with pytest.raises(OSError, match="No such file"):
        listed_by_key(json.dumps(signature).encode(), str(tmp_path / "none"))


def signed_again(change: Callable[[Bundle], object]) -> Callable[[Bundle, Keys], None]:
    """A change to the statement, signed by the right key: what somebody with the key may sign."""

    def edit(bundle: Bundle, keys: Keys) -> None:
        statement = json.loads(b64decode(bundle["dsseEnvelope"]["payload"]))
        change(statement)
        sign_payload(bundle, json.dumps(statement).encode(), keys)

    return edit


def sign_payload(bundle: Bundle, payload: bytes, keys: Keys) -> None:
    """Sign by DSSE's own rules (secure-systems-lab/dsse, protocol.md)."""
    key = serialization.load_pem_private_key(keys.key.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    encoded = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)
    signature = key.sign(encoded, ec.ECDSA(hashes.SHA256()))
    bundle["dsseEnvelope"]["payload"] = b64encode(payload).decode()
    bundle["dsseEnvelope"]["signatures"][0]["sig"] = b64encode(signature).decode()


def changed(change: Callable[[Bundle], object]) -> Callable[[Bundle, Keys], None]:
    def edit(bundle: Bundle, keys: Keys) -> None:
        change(bundle)

    return edit


def resource(statement: Bundle, **fields: object) -> None:
    statement["predicate"]["resources"][0].update(fields)


EDITS: dict[str, tuple[bool, Callable[[Bundle, Keys], None]]] = {
    "as it is": (True, changed(lambda bundle: None)),
    "signed again": (True, signed_again(lambda statement: None)),
    "a field more in the statement": (True, signed_again(lambda statement: statement.update(x=1))),
    "no hint": (True, changed(lambda bundle: bundle["verificationMaterial"]["publicKey"].pop("hint"))),
    "another hint": (False, changed(lambda bundle: bundle["verificationMaterial"]["publicKey"].update(hint="00"))),
    "no key": (False, changed(lambda bundle: bundle["verificationMaterial"].pop("publicKey"))),
    "an older media type": (
        False,
        changed(lambda bundle: bundle.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.2")),
    ),
    "another payload type": (False, changed(lambda bundle: bundle["dsseEnvelope"].update(payloadType="text/plain"))),
    "no signatures": (False, changed(lambda bundle: bundle["dsseEnvelope"].update(signatures=[]))),
    "not base64": (False, changed(lambda bundle: bundle["dsseEnvelope"].update(payload="e30"))),
    "an empty signature": (False, changed(lambda bundle: bundle["dsseEnvelope"]["signatures"][0].update(sig=""))),
    "a statement of another type": (False, signed_again(lambda statement: statement.update(_type="x"))),
    "another predicate": (False, signed_again(lambda statement: statement.update(predicateType="x"))),
    "two subjects": (False, signed_again(lambda statement: statement["subject"].append(statement["subject"][0]))),
    "another root": (False, signed_again(lambda top: top["subject"][0]["digest"].update(sha256="0" * 64))),
    "another digest": (False, signed_again(lambda statement: resource(statement, digest="0" * 64))),
    "no resources": (False, signed_again(lambda statement: statement["predicate"].update(resources=[]))),
    "no statement": (False, lambda bundle, keys: sign_payload(bundle, b"[]", keys)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_bundle_is_accepted_where_the_package_accepts_it(model: Path, signer: Keys, name: str) -> None:
    is_accepted, edit = EDITS[name]
    bundle = json.loads(reference_signature(model, signer.key))
    edit(bundle, signer)
    signature = json.dumps(bundle).encode()
    assert stock(model, signature, key=signer.public) is is_accepted
    assert accepted(lambda: listed_by_key(signature, str(signer.public))) is is_accepted


STRICTER: dict[str, Callable[[Bundle, Keys], None]] = {
    "two signatures": changed(lambda bundle: bundle["dsseEnvelope"]["signatures"].append({"sig": "", "keyid": ""})),
    "a name twice": signed_again(lambda top: top["predicate"]["resources"].append(top["predicate"]["resources"][0])),
    "another hash": signed_again(lambda statement: resource(statement, algorithm="blake2b")),
    "shards": signed_again(lambda statement: statement["predicate"]["serialization"].update(method="shards")),
    "digits": signed_again(lambda statement: resource(statement, digest="A" * 64)),
}


@pytest.mark.parametrize("name", STRICTER)
def test_what_could_be_read_in_two_ways_is_refused(model: Path, signer: Keys, name: str) -> None:
    bundle = json.loads(reference_signature(model, signer.key))
    STRICTER[name](bundle, signer)
    with pytest.raises(FormatError):
        listed_by_key(json.dumps(bundle).encode(), str(signer.public))


@pytest.mark.parametrize("blob", [b"", b"[]", b"{}", b"\xff\xfe{}", b"[" * 100_000, b'{"mediaType": 1}'])
def test_bytes_that_are_no_bundle_are_an_error(signer: Keys, blob: bytes) -> None:
    with pytest.raises(FormatError):
        listed_by_key(blob, str(signer.public))
    with pytest.raises(FormatError):
        listed_by_certificates(blob, [signer.root])


class Authority:
    """A root, and certificates that lead to it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.key = folder, name, ec.generate_private_key(ec.SECP256R1())
        self.root = folder / f"{name}.root"
        self.root.write_bytes(self.issue(name, self.key.public_key(), is_authority=True))

    def issue(
        self,
        subject: str,
        key: ec.EllipticCurvePublicKey,
        *,
        is_authority: bool = False,
        usage: bool | None = None,
        extended: x509.ObjectIdentifier | None = None,
        days: tuple[float, float] = (-1, 1),
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self.name)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1]))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if is_authority or usage is not None:
            flags = dict.fromkeys(
                ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), usage is False
            )
            signs = {"digital_signature": usage is True, "key_cert_sign": is_authority, "crl_sign": is_authority}
            builder = builder.add_extension(
                x509.KeyUsage(**flags, **signs, encipher_only=False, decipher_only=False), critical=True
            )
        if extended is not None:
            builder = builder.add_extension(x509.ExtendedKeyUsage([extended]), critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


LEAVES: dict[str, tuple[bool, dict[str, Any]]] = {
    "for signatures": (True, {"usage": True}),
    "for code": (True, {"extended": ExtendedKeyUsageOID.CODE_SIGNING}),
    "for code, by both": (True, {"usage": False, "extended": ExtendedKeyUsageOID.CODE_SIGNING}),
    "expired since": (True, {"usage": True, "days": (-0.5, -0.25)}),
    "for encryption": (False, {"usage": False}),
    "for servers": (False, {"extended": ExtendedKeyUsageOID.SERVER_AUTH}),
    "for nothing": (False, {}),
    "older than the root": (False, {"usage": True, "days": (-30, 1)}),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_certificate_is_accepted_where_the_package_accepts_it(model: Path, tmp_path: Path, name: str) -> None:
    is_accepted, fields = LEAVES[name]
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    key = ec.generate_private_key(ec.SECP256R1())
    private, _ = pem(key, tmp_path, "leaf")
    (tmp_path / "leaf.crt").write_bytes(authority.issue("leaf", key.public_key(), **fields))
    signature = reference_signature(model, private, tmp_path / "leaf.crt", (authority.root,))
    assert stock(model, signature, root=authority.root) is is_accepted
    assert accepted(lambda: listed_by_certificates(signature, [authority.root])) is is_accepted
    assert not accepted(lambda: listed_by_certificates(signature, [stranger.root]))


def test_a_chain_is_followed_and_a_certificate_is_not_its_neighbor(model: Path, tmp_path: Path) -> None:
    root, below = Authority(tmp_path, "root"), Authority(tmp_path, "below")
    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    private, _ = pem(key, tmp_path, "leaf")
    (tmp_path / "below.crt").write_bytes(root.issue("below", below.key.public_key(), is_authority=True))
    (tmp_path / "leaf.crt").write_bytes(below.issue("leaf", key.public_key(), usage=True))
    signature = reference_signature(model, private, tmp_path / "leaf.crt", (tmp_path / "below.crt",))
    assert stock(model, signature, root=root.root)
    assert listed_by_certificates(signature, [root.root]) == SignedFiles("model", digests_of(model))
    for chain, says in (
        ((), "it has no certificate"),
        ((0,), "leads to none of the roots"),
        ((1, 0), "is not for signing|not of this key"),
    ):
        bundle = json.loads(signature)
        material = bundle["verificationMaterial"]["x509CertificateChain"]
        material["certificates"] = [material["certificates"][position] for position in chain]
        assert not stock(model, json.dumps(bundle).encode(), root=root.root)
        with pytest.raises(FormatError, match=says):
            listed_by_certificates(json.dumps(bundle).encode(), [root.root])
    # Another key's certificate below the same root does not make its signature this one's.
    bundle = json.loads(signature)
    (tmp_path / "other.crt").write_bytes(below.issue("other", other.public_key(), usage=True))
    der = x509.load_pem_x509_certificate((tmp_path / "other.crt").read_bytes())
    encoded = b64encode(der.public_bytes(serialization.Encoding.DER)).decode()
    bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][0]["rawBytes"] = encoded
    with pytest.raises(FormatError, match="the signature is not of this key"):
        listed_by_certificates(json.dumps(bundle).encode(), [root.root])


SCRIPT = """
import json, sys
import torch, relayout
found = []
for policy in (None, {policy!r}):
    relayout.load({folder!r}, 0, trust=policy)
    found.append(set(sys.modules))
print(json.dumps(sorted(found[1] - found[0])))
"""
PACKAGES = {"cryptography", "OpenSSL", "_openssl", "_cffi_backend", "hmac", "tomllib", "relayout"}
"""Packages that a load by a key or certificates imports in addition to an unsigned load."""


@pytest.mark.parametrize("by", ["public_key", "certificates"])
def test_a_signed_load_imports_what_it_verifies_with_and_no_more(
    copy_of: Path, keys: Keys, tmp_path: Path, by: str
) -> None:
    import relayout

    policy = tmp_path / "policy.toml"
    if by == "public_key":
        policy.write_text(f'[[signer]]\npublic_key = "{keys.public}"\n')
    else:
        policy.write_text(f'[[signer]]\ncertificates = ["{keys.root}"]\n')
        relayout.sign(copy_of, key=keys.key, certificate=keys.certificate, chain=[keys.root])
    script = SCRIPT.format(policy=str(policy), folder=str(copy_of))
    done = prestarted.run(script=script, imports=prestarted.LOADER)
    assert done.returncode == 0, done.stderr
    imported: list[str] = json.loads(done.stdout.splitlines()[-1])
    assert any(name.startswith("cryptography.") for name in imported)
    assert {name.partition(".")[0] for name in imported} <= PACKAGES
    assert len(imported) < 120
