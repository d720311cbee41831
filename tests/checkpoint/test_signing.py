"""relayout.checkpoint.signing: what is signed, verified by cryptography alone."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.signing import make_keys

from relayout.checkpoint.signing import signed, signer_of
from relayout.errors import PlanError

DIGESTS = {"relayout.json": "0" * 64, "config.json": "1" * 64}


def test_a_signature_is_of_a_name_and_the_digest_of_each_file(tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    keys = make_keys(tmp_path, "signer")
    bundle = json.loads(signed(signer_of(keys.key, None, ()), "delta-000000001-00000000", DIGESTS))
    envelope = bundle["dsseEnvelope"]
    payload, kind = b64decode(envelope["payload"]), envelope["payloadType"]
    public = serialization.load_pem_public_key(keys.public.read_bytes())
    assert isinstance(public, ec.EllipticCurvePublicKey)
    # The encoding that DSSE signs (secure-systems-lab/dsse, protocol.md, version 1.0.2).
    encoded = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    [signature] = envelope["signatures"]
    public.verify(b64decode(signature["sig"]), encoded, ec.ECDSA(hashes.SHA256()))
    statement = json.loads(payload)
    assert [one["name"] for one in statement["subject"]] == ["delta-000000001-00000000"]
    assert {one["name"]: one["digest"] for one in statement["predicate"]["resources"]} == DIGESTS


def test_what_is_no_key_is_named(tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    (tmp_path / "odd.key").write_text("no key")
    with pytest.raises(PlanError, match=r"odd\.key: cannot sign with it"):
        signer_of(tmp_path / "odd.key", None, ())
