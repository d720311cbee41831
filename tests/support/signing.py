"""Keys, certificates and policies for tests, and the stock verifier of model-signing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import relayout

UNTRUSTED = ("plain", "unsigned", "by another", "without relayout.json", "without model.sig", "damaged")
"""What `write_states` writes beside what is signed; and "another config", which only those see who read that file."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Files of one signer."""

    key: Path
    public: Path
    certificate: Path
    """Of the key, by the root."""
    root: Path
    policy: Path
    """That trusts the public key alone."""


def make_keys(folder: Path, name: str = "signer") -> Keys:
    """A key, its certificate, and a policy."""
    key, authority = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    keys = Keys(*(folder / f"{name}{end}" for end in (".key", ".pub", ".crt", ".root", ".toml")))
    keys.key.write_bytes(_private(key))
    keys.public.write_bytes(_public(key))
    keys.root.write_bytes(_certificate(authority, authority, is_root=True))
    keys.certificate.write_bytes(_certificate(key, authority, is_root=False))
    keys.policy.write_text(f'[[signer]]\npublic_key = "{keys.public.name}"\n')
    return keys


def write_states(source: Path, root: Path, keys: Keys) -> None:
    """A checkpoint, converted for two ranks: signed by these keys, and what no policy lets in."""
    shutil.copytree(source, root / "plain")
    for name in ("signed", "unsigned", "by another"):
        relayout.convert(source, root / name, tp=2)
    relayout.sign(root / "signed", key=keys.key)
    relayout.sign(root / "by another", key=make_keys(root, "stranger").key)
    for name in ("relayout.json", "model.sig"):
        shutil.copytree(root / "signed", root / f"without {name}")
        (root / f"without {name}" / name).unlink()
    shutil.copytree(root / "signed", root / "damaged")
    for file in (root / "damaged").glob("*.safetensors"):
        blob = bytearray(file.read_bytes())
        blob[-1000] ^= 1
        file.write_bytes(blob)
    shutil.copytree(root / "signed", root / "another config")
    (root / "another config" / "config.json").write_text("{}")


def reference_accepts(folder: Path, keys: Keys) -> bool:
    """Whether the package, which hashes all files of a folder itself, accepts the folder."""
    from model_signing.verifying import Config

    try:
        Config().use_elliptic_key_verifier(public_key=keys.public).verify(folder, folder / "model.sig")
    except Exception:
        return False
    return True


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def _certificate(key: ec.EllipticCurvePrivateKey, issuer: ec.EllipticCurvePrivateKey, *, is_root: bool) -> bytes:
    root = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    subject = root if is_root else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "signer")])
    now = datetime.now(UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    built = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(root)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True, key_cert_sign=is_root, crl_sign=is_root, decipher_only=False, **usage
            ),
            critical=True,
        )
    )
    return built.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
