"""Signatures of files in the format of OpenSSF Model Signing: a Sigstore bundle in a file next to the signed one.

`model_signing` makes and checks them. It is an extra of the installation, imported only when a signature is needed.
It raises errors of many types, so keys and bundles are checked here first, to give clear messages.
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

SUFFIX = ".sig"  # appended to the name of the signed file
CURVES = ("secp256r1", "secp384r1", "secp521r1")
NEW_KEY = "Make one: openssl ecparam -name prime256v1 -genkey -noout -out KEY.pem"
# Keys of a bundle's verification material, with the kind of signer.
KINDS = {"publicKey": "a key", "x509CertificateChain": "a certificate", "certificate": "an identity (keyless)"}


@dataclass(frozen=True)
class WithKey:
    """Signs with a private key on an elliptic curve."""

    key: Path  # PEM file of the private key


@dataclass(frozen=True)
class WithCertificate:
    """Signs with a private key, and puts its certificate into the signature."""

    key: Path  # PEM file of the private key
    certificate: Path  # PEM file of the key's certificate
    chain: tuple[Path, ...]  # PEM files of the certificates from there to a root


@dataclass(frozen=True)
class Keyless:
    """Signs with a short-lived certificate from Sigstore for an identity: that of a CI job, or of a browser login."""


@dataclass(frozen=True)
class TrustKey:
    """Trusts signatures of a key."""

    key: Path  # PEM file of the public key

    kind = "publicKey"

    def __str__(self) -> str:
        return f"the key {self.key}"


@dataclass(frozen=True)
class TrustRoots:
    """Trusts signatures of certificates that lead to a root."""

    roots: tuple[Path, ...]  # PEM files of the roots

    kind = "x509CertificateChain"

    def __str__(self) -> str:
        return f"a certificate of {', '.join(map(str, self.roots))}"


@dataclass(frozen=True)
class TrustIdentity:
    """Trusts signatures of an identity whose certificate Sigstore has issued and logged."""

    identity: str  # e-mail address, or URL of a workflow
    issuer: str  # provider of the identity: https://token.actions.githubusercontent.com

    kind = "certificate"

    def __str__(self) -> str:
        return f"{self.identity} of {self.issuer}"


Signer = WithKey | WithCertificate | Keyless
Trust = TrustKey | TrustRoots | TrustIdentity


def choose_signer(key: Path | None, certificate: Path | None, chain: Sequence[Path], keyless: bool) -> Signer:
    """The signer that the options of `engine sign` name.

    Args:
        key: PEM file of a private key.
        certificate: PEM file of its certificate.
        chain: PEM files of the certificates from there to a root.
        keyless: whether to use a certificate from Sigstore.

    Raises:
        UsageError: they name no signer, or two.
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
        raise UsageError("--chain continues a certificate", fix="Name that with --certificate.")
    return WithKey(key)


def choose_trust(
    key: Path | None, certificates: Sequence[Path], identity: str | None, issuer: str | None
) -> Trust | None:
    """The signer that the options of `engine verify` trust.

    Args:
        key: PEM file of a public key.
        certificates: PEM files of root certificates.
        identity: the identity of a keyless signer.
        issuer: the provider of this identity.

    Returns:
        None if the options name nobody.

    Raises:
        UsageError: they contradict each other.
    """
    options = {"--key": key, "--certificate": certificates, "--identity": identity}
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(given)} name several signers", fix="A signature has one signer: name that one."
        )
    if (identity is None) != (issuer is None):
        raise UsageError("--identity and --issuer belong together", "an identity is only valid for its issuer")
    if key is not None:
        return TrustKey(key)
    if certificates:
        return TrustRoots(tuple(certificates))
    return TrustIdentity(identity, issuer) if identity and issuer else None


def signature_of(path: Path) -> Path:
    """Default path of the signature of a file."""
    return path.with_name(path.name + SUFFIX)


def sign(path: Path, signer: Signer, signature: Path | None = None) -> Path:
    """Signs a file of any kind. An existing signature is replaced.

    Args:
        path: the file.
        signer: the key or identity.
        signature: the file to write; None is the default path.

    Returns:
        The path of the signature.

    Raises:
        UsageError: the file or a key cannot be read, or is not valid.
        EngineError: no identity or certificate can be obtained, or the signature cannot be written.
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
    """Checks that a trusted signer has signed the file.

    Args:
        path: the file.
        trust: the trusted signer.
        signature: the file of the signature; None is the default path.

    Raises:
        UsageError: the file, a key or a certificate cannot be read.
        SignatureError: there is no signature, or it is of another file or another signer.
        EngineError: Sigstore's own keys cannot be downloaded.
    """
    signature = signature or signature_of(path)
    _check_file(path)
    bundle = _read_bundle(path, signature)
    material = bundle.get("verificationMaterial")
    kinds = [kind for kind in KINDS if isinstance(material, dict) and kind in material]
    if kinds != [trust.kind]:
        signed_by = KINDS[kinds[0]] if len(kinds) == 1 else "an unknown kind of signer"
        option = {"publicKey": "--key", "x509CertificateChain": "--certificate", "certificate": "--identity"}
        fix = f"Name the signer that you trust with {option[kinds[0]]}." if len(kinds) == 1 else ""
        raise SignatureError(f"{path} is not signed by {trust}", f"{signature} was made by {signed_by}", fix)
    from model_signing import verifying

    with _sigstore_errors(f"the signature of {path} cannot be checked"):
        config = _verifying_config(verifying.Config(), trust)  # type: ignore[no-untyped-call]
    try:
        config.verify(path.resolve(), signature)
    except OSError as error:
        raise EngineError(f"the signature of {path} cannot be checked", _message(error)) from error
    except Exception as error:  # errors of four libraries have no common type
        if _is_other_file(path, bundle):
            why = f"it is not the file that {signature} was made for: one of them has been changed or replaced"
            raise SignatureError(f"the signature of {path} is wrong", why, "Do not run it. Get both again.") from error
        why = f"{signature} is of another signer, or was altered ({_message(error)})"
        fix = "Do not run it, or name the signer that you trust."
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
    """Public half of a key on a curve that signatures may use.

    Raises:
        UsageError: the file has no such key.
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
        fix = f"Remove the password, where nobody else can read the file: openssl pkey -in {path} -out PLAIN.pem"
        raise UsageError(what, "it is encrypted with a password", fix) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        fix = NEW_KEY if private else "Make it from the private key: openssl pkey -in KEY.pem -pubout -out PUBLIC.pem"
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
        fix = "Get it from the source of the file, or name it with --signature."
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
    """True if an invalid signature declares that it belongs to other bytes."""
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
    """Converts errors of keyless signatures: of the network, or an identity that cannot be obtained."""
    from sigstore.errors import Error as SigstoreError

    try:
        yield
    except (SigstoreError, OSError, EOFError) as error:
        raise EngineError(what, _message(error), "Keyless signatures need the network; a key needs none.") from error


def _message(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
