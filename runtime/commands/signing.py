"""Signatures of files, as OpenSSF Model Signing has them: a Sigstore bundle in a file beside the one that is signed.

`model_signing` makes and checks them. It is an extra of the installation, imported only where a signature is wanted.
What it raises is of many types, so keys and bundles are looked at here first, to say what is wrong with them.
"""

import base64
import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginewright.errors import EngineError, SignatureError, UsageError
from enginewright.output_file import require_writable, same_file, write_file
from enginewright.regular_file import SMALL_FILE_BYTES, read_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec
    from model_signing import signing, verifying

SUFFIX = ".sig"  # of the signature, behind the whole name of the file
CURVES = ("secp256r1", "secp384r1", "secp521r1")
NEW_KEY = "Make one: openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem"
# What a bundle's verification material has, by who vouches for it.
KINDS = {"publicKey": "a key", "x509CertificateChain": "a certificate", "certificate": "an identity (keyless)"}


@dataclass(frozen=True)
class WithKey:
    """Sign with a private key on an elliptic curve."""

    key: Path  # PEM


@dataclass(frozen=True)
class WithCertificate:
    """Sign with a private key, and put the certificate for it into the signature."""

    key: Path  # PEM
    certificate: Path  # PEM, of this key
    chain: tuple[Path, ...]  # PEM, those that lead from there to a root


@dataclass(frozen=True)
class Keyless:
    """Sign with a short-lived certificate that Sigstore gives to an identity: the one of a CI job, or of a browser."""


@dataclass(frozen=True)
class TrustKey:
    """Believe what this public key has signed."""

    key: Path  # PEM

    kind = "publicKey"

    def __str__(self) -> str:
        return f"the key {self.key}"


@dataclass(frozen=True)
class TrustRoots:
    """Believe who has a certificate for signing that leads to one of these."""

    roots: tuple[Path, ...]  # PEM

    kind = "x509CertificateChain"

    def __str__(self) -> str:
        return f"a certificate of {', '.join(map(str, self.roots))}"


@dataclass(frozen=True)
class TrustIdentity:
    """Believe an identity whose certificate Sigstore has given out and logged."""

    identity: str  # an e-mail address, or the URL of a workflow
    issuer: str  # who knows the identity: https://token.actions.githubusercontent.com

    kind = "certificate"

    def __str__(self) -> str:
        return f"{self.identity} of {self.issuer}"


Signer = WithKey | WithCertificate | Keyless
Trust = TrustKey | TrustRoots | TrustIdentity


def choose_signer(key: Path | None, certificate: Path | None, chain: Sequence[Path], keyless: bool) -> Signer:
    """What the options of `engine sign` mean.

    Raises:
        UsageError: they name nothing to sign with, or two things.
    """
    if keyless and (key or certificate or chain):
        raise UsageError("--keyless signs without a key", fix="Leave --key, --certificate and --chain out.")
    if keyless:
        return Keyless()
    if key is None:
        fix = f"Name a private key with --key, or use --keyless. {NEW_KEY}"
        raise UsageError("there is nothing to sign with", fix=fix)
    if certificate is not None:
        return WithCertificate(key, certificate, tuple(chain))
    if chain:
        raise UsageError("--chain leads on from a certificate", fix="Name that with --certificate.")
    return WithKey(key)


def choose_trust(
    key: Path | None, certificates: Sequence[Path], identity: str | None, issuer: str | None
) -> Trust | None:
    """Whom the options of `engine verify` trust; None: nobody is named.

    Raises:
        UsageError: they contradict each other.
    """
    options = {"--key": key, "--certificate": certificates, "--identity": identity}
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} name several to trust", fix="A signature is of one: name that.")
    if (identity is None) != (issuer is None):
        raise UsageError("--identity and --issuer belong together", "an identity is what its issuer says it is")
    if key is not None:
        return TrustKey(key)
    if certificates:
        return TrustRoots(tuple(certificates))
    return TrustIdentity(identity, issuer) if identity and issuer else None


def signature_of(path: Path) -> Path:
    """Where the signature of a file is, unless somebody says otherwise."""
    return path.with_name(path.name + SUFFIX)


def sign(path: Path, signer: Signer, signature: Path | None = None) -> Path:
    """Sign a file of any kind; where the signature is. One that was there is replaced.

    Raises:
        UsageError: the file or a key cannot be read, or is none.
        EngineError: no identity or certificate is to be had, or the signature cannot be written.
    """
    signature = signature or signature_of(path)
    _check_file(path)
    require_writable(signature)
    if same_file(signature, path):
        raise UsageError(f"{signature} cannot be written", "it is the file to sign", "Name another one.")
    from model_signing import signing

    with _sigstore_errors(f"{path} cannot be signed"), tempfile.TemporaryDirectory() as folder:
        config = _signing_config(signing.Config(), signer)  # type: ignore[no-untyped-call]
        bundle = Path(folder, "bundle")
        config.sign(path.resolve(), bundle)
        data = bundle.read_bytes()
    write_file(signature, data)
    return signature


def check_signature(path: Path, trust: Trust, signature: Path | None = None) -> None:
    """Return if the file is what somebody trusted has signed.

    Raises:
        UsageError: the file, a key or a certificate cannot be read.
        SignatureError: there is no signature, or it is of another file, or of somebody else.
        EngineError: Sigstore's own keys are not to be had.
    """
    signature = signature or signature_of(path)
    _check_file(path)
    bundle = _read_bundle(path, signature)
    material = bundle.get("verificationMaterial")
    kinds = [kind for kind in KINDS if isinstance(material, dict) and kind in material]
    if kinds != [trust.kind]:
        signed_by = KINDS[kinds[0]] if len(kinds) == 1 else "nobody that is known"
        option = {"publicKey": "--key", "x509CertificateChain": "--certificate", "certificate": "--identity"}
        fix = f"Name whom you trust with {option[kinds[0]]}." if len(kinds) == 1 else ""
        raise SignatureError(f"{path} is not signed by {trust}", f"{signature} was made by {signed_by}", fix)
    from model_signing import verifying

    with _sigstore_errors(f"the signature of {path} cannot be checked"):
        config = _verifying_config(verifying.Config(), trust)  # type: ignore[no-untyped-call]
    try:
        config.verify(path.resolve(), signature)
    except OSError as error:
        raise EngineError(f"the signature of {path} cannot be checked", _said(error)) from error
    except Exception as error:  # of four libraries, and of no common type
        if _is_other_file(path, bundle):
            why = f"it is not the file that {signature} was made of: one of them has been changed or exchanged"
            raise SignatureError(f"the signature of {path} is wrong", why, "Do not run it. Get both again.") from error
        why = f"{signature} is somebody else's, or was altered ({_said(error)})"
        fix = "Do not run it, or name whom you trust."
        raise SignatureError(f"{path} is not signed by {trust}", why, fix) from error


def _signing_config(config: "signing.Config", signer: Signer) -> "signing.Config":
    if isinstance(signer, Keyless):
        return config.use_sigstore_signer(use_ambient_credentials=True)
    key = _load_key(signer.key, private=True)
    if isinstance(signer, WithKey):
        return config.use_elliptic_key_signer(private_key=signer.key)
    own, *_ = _load_certificates(signer.certificate)
    for one in signer.chain:
        _load_certificates(one)
    if own.public_key() != key:
        raise UsageError(f"{signer.certificate} is not the certificate of {signer.key}", "they do not match")
    return config.use_certificate_signer(
        private_key=signer.key,
        signing_certificate=signer.certificate,
        certificate_chain=signer.chain or (signer.certificate,),  # an empty chain cannot be read (1.1.1)
    )


def _verifying_config(config: "verifying.Config", trust: Trust) -> "verifying.Config":
    if isinstance(trust, TrustIdentity):
        return config.use_sigstore_verifier(identity=trust.identity, oidc_issuer=trust.issuer)
    if isinstance(trust, TrustKey):
        _load_key(trust.key, private=False)
        return config.use_elliptic_key_verifier(public_key=trust.key)
    for root in trust.roots:
        _load_certificates(root)
    return config.use_certificate_verifier(certificate_chain=trust.roots)


def _load_key(path: Path, *, private: bool) -> "ec.EllipticCurvePublicKey":
    """The public half of a key on a curve that signatures may have.

    Raises:
        UsageError: it is none.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    kind = "private" if private else "public"
    data, what = _read(path), f"{path} is not a {kind} key that can be used"
    key: object
    try:
        key = serialization.load_pem_private_key(data, None) if private else serialization.load_pem_public_key(data)
    except TypeError as error:
        fix = f"Take the password off, where nobody else reads it: openssl pkey -in {path} -out PLAIN.pem"
        raise UsageError(what, "it is encrypted with a password", fix) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        fix = NEW_KEY if private else "Make it of the private key: openssl pkey -in KEY.pem -pubout -out PUBLIC.pem"
        raise UsageError(what, f"it holds no PEM of a {kind} key", fix) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) or key.curve.name not in CURVES:
        raise UsageError(what, f"it is not on one of the curves {', '.join(CURVES)}", NEW_KEY)
    return key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key


def _load_certificates(path: Path) -> Sequence[Any]:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise UsageError(f"{path} cannot be used", "it holds no PEM of a certificate") from error


def _read_bundle(path: Path, signature: Path) -> dict[str, Any]:
    what = f"the signature {signature} cannot be read"
    try:
        data = read_regular(signature, SMALL_FILE_BYTES)
    except FileNotFoundError:
        fix = "Get it from where the file is from, or name it with --signature."
        raise SignatureError(f"{path} is not signed", f"there is no {signature}", fix) from None
    except OSError as error:
        raise SignatureError(what, error.strerror or str(error)) from error
    try:
        bundle = json.loads(data)
    except (ValueError, RecursionError):
        bundle = None
    if not isinstance(bundle, dict) or "verificationMaterial" not in bundle:
        raise SignatureError(what, "it is no Sigstore bundle")
    return bundle


def _is_other_file(path: Path, bundle: dict[str, Any]) -> bool:
    """Whether a signature that is not right says of itself that it is of other bytes."""
    try:
        statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
        (resource,) = statement["predicate"]["resources"]
        algorithm, digest = resource["algorithm"], resource["digest"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return False
    with path.open("rb") as file:
        return bool(algorithm == "sha256" and hashlib.file_digest(file, "sha256").hexdigest() != digest)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path} cannot be opened", "it is no file" if path.exists() else "there is no such file")


def _read(path: Path) -> bytes:
    try:
        return read_regular(path, SMALL_FILE_BYTES)
    except OSError as error:
        raise UsageError(f"{path} cannot be read", (error.strerror or str(error)).lower()) from error


@contextmanager
def _sigstore_errors(what: str) -> Iterator[None]:
    """What a keyless signature fails by: the network, or an identity that is not to be had."""
    from sigstore.errors import Error as SigstoreError

    try:
        yield
    except (SigstoreError, OSError, EOFError) as error:
        raise EngineError(what, _said(error), "Keyless signatures need the network; a key needs none.") from error


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
