"""`engine sign` and `engine verify`: who signed an engine, and that it is still what they signed; its provenance."""

import base64
import json
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from enginewright.cli import main
from enginewright.engine_file import EngineFile
from tests.helpers.adapters import prepared, trained
from tests.helpers.engines import copied
from tests.helpers.odd_files import ODD_FILES, make_sparse
from tests.helpers.outputs import read_end
from tests.helpers.tiny import tiny_checkpoint, tiny_config, tiny_model

GITHUB = ("--identity", "https://github.com/o/r/.github/workflows/w.yml@refs/heads/main", "--issuer", "https://i")
PEM, NO_PASSWORD = serialization.Encoding.PEM, serialization.NoEncryption()


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, [*map(str, arguments)])


def refused(code: int, *arguments: object) -> str:
    """The error of a command that fails without a traceback."""
    result = run(*arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), (result.output, result.exception)
    return " ".join(result.stderr.split())


def verified(engine: Path, *arguments: object) -> dict[str, Any]:
    result = run("verify", engine, "--no-goldens", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def write_key(folder: Path, name: str, curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(curve or ec.SECP256R1())
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, NO_PASSWORD)
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pem").write_bytes(private)
    (folder / f"{name}.pub").write_bytes(public)
    return key


def write_certificate(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[str, ec.EllipticCurvePrivateKey] | None = None,
) -> None:
    """name.crt, that the issuer, or the key itself, has signed; only what has an issuer may sign files."""
    issuer_name, issuer_key = issuer or (name, key)
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, issuer_name)]
    now = datetime.now(UTC)
    usages = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
    )
    is_root = name.startswith("root")
    usage = x509.KeyUsage(
        digital_signature=not is_root, key_cert_sign=is_root, encipher_only=False, decipher_only=False, **usages
    )
    certificate = (
        x509.CertificateBuilder(names[1], names[0], key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=is_root, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(PEM))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an engine, its provenance, and keys and certificates of two people."""
    folder = tmp_path_factory.mktemp("signing")
    checkpoint = tiny_checkpoint(folder, "llama")
    for path in ("x.engine", "again/x.engine"):
        (folder / path).parent.mkdir(exist_ok=True)
        output = ("-o", folder / path, "--provenance", folder / f"{path}.json")
        built = run("build", checkpoint, "--gate", "off", "--quant", "int8-wo", *output)
        assert built.exit_code == 0, built.stderr
    for name in ("mine", "other"):
        key, root = write_key(folder, name), write_key(folder, f"root-{name}")
        write_certificate(folder, f"root-{name}", root)
        write_certificate(folder, name, key, (f"root-{name}", root))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A folder for each test, with the engine and the keys."""
    for path in made.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_key(folder: Path) -> None:
    engine = folder / "x.engine"
    before = engine.read_bytes()
    result = run("sign", engine, "--key", folder / "mine.pem")
    assert result.exit_code == 0 and result.stdout == f"signed {engine}: {engine}.sig\n"
    assert engine.read_bytes() == before
    bundle = json.loads((folder / "x.engine.sig").read_text())
    assert bundle["mediaType"].startswith("application/vnd.dev.sigstore.bundle")
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    assert [one["digest"] for one in statement["predicate"]["resources"]] == [sha256(before).hexdigest()]
    report = verified(engine, "--key", folder / "mine.pub")
    assert report["signature"] == f"right: of the key {folder / 'mine.pub'}" and report["hashes"] == "right"
    assert "not checked" in verified(engine)["signature"]
    said = refused(8, "verify", engine, "--key", folder / "other.pub")
    assert f"is not signed by the key {folder / 'other.pub'}" in said


def test_an_adapter(folder: Path) -> None:
    trained(tiny_model(tiny_config("llama")), folder / "poet", target_modules=["q_proj"])
    adapter = prepared(folder / "x.engine", folder / "poet")
    assert run("sign", adapter, "--key", folder / "mine.pem").exit_code == 0
    report = verified(adapter, "--key", folder / "mine.pub")
    assert report["signature"].startswith("right: of the key") and report["hashes"] == "right"
    data = bytearray(adapter.read_bytes())
    data[-1] ^= 1
    adapter.write_bytes(data)
    assert "has been changed or replaced" in refused(8, "verify", adapter, "--key", folder / "mine.pub")


def test_where_a_signature_is_written(folder: Path) -> None:
    engine, signature = folder / "x.engine", folder / "x.engine.sig"
    (folder / "target").touch(0o600)
    signature.symlink_to("target")
    assert run("sign", engine, "--key", folder / "mine.pem").exit_code == 0
    assert signature.is_symlink() and stat.S_IMODE((folder / "target").stat().st_mode) == 0o600
    verified(engine, "--key", folder / "mine.pub")
    with read_end(folder / "fifo", "fifo") as (fifo, read):
        assert run("sign", engine, "--key", folder / "mine.pem", "--signature", fifo).exit_code == 0
    assert "dsseEnvelope" in json.loads(read()) and fifo.is_fifo()
    for place, why in (("none/x.sig", "there is no folder"), ("x.engine", "it is the file to sign")):
        said = refused(2, "sign", engine, "--key", folder / "mine.pem", "--signature", folder / place)
        assert why in said


def test_a_signed_engine_may_have_another_name(folder: Path) -> None:
    run("sign", folder / "x.engine", "--key", folder / "mine.pem", "--signature", folder / "signature")
    (folder / "x.engine").rename(folder / "y.engine")
    (folder / "link.engine").symlink_to(folder / "y.engine")
    for name in ("y.engine", "link.engine"):
        options = ("--key", folder / "mine.pub", "--signature", folder / "signature")
        assert verified(folder / name, *options)["signature"].startswith("right")
    assert "signature" not in verified(folder / "y.engine")
    said = refused(2, "verify", folder / "y.engine", "--signature", folder / "signature")
    assert "no trusted signer is named" in said


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_curves(folder: Path, curve: ec.EllipticCurve) -> None:
    write_key(folder, "wide", curve)
    assert run("sign", folder / "x.engine", "--key", folder / "wide.pem").exit_code == 0
    assert verified(folder / "x.engine", "--key", folder / "wide.pub")["signature"].startswith("right")


def test_a_certificate(folder: Path) -> None:
    engine, mine = folder / "x.engine", ("--key", folder / "mine.pem", "--certificate", folder / "mine.crt")
    assert run("sign", engine, *mine).exit_code == 0
    roots = ("--certificate", folder / "root-other.crt", "--certificate", folder / "root-mine.crt")
    assert verified(engine, *roots)["signature"].startswith("right: of a certificate of")
    said = refused(8, "verify", engine, *roots[:2])
    assert "is not signed by a certificate of" in said and "unable to get local issuer certificate" in said
    assert "was made by a certificate" in refused(8, "verify", engine, "--key", folder / "mine.pub")
    said = refused(2, "sign", engine, *mine[:2], "--certificate", folder / "other.crt")
    assert "is not the certificate of" in said
    run("sign", engine, "--key", folder / "root-mine.pem", "--certificate", folder / "root-mine.crt")
    assert "cannot be used for signing" in refused(8, "verify", engine, *roots), "a root signs certificates alone"


def test_a_certificate_that_another_leads_to(folder: Path) -> None:
    root = serialization.load_pem_private_key((folder / "root-mine.pem").read_bytes(), None)
    assert isinstance(root, ec.EllipticCurvePrivateKey)
    middle, leaf = write_key(folder, "root-middle"), write_key(folder, "leaf")
    write_certificate(folder, "root-middle", middle, ("root-mine", root))
    write_certificate(folder, "leaf", leaf, ("root-middle", middle))
    signer = ("--key", folder / "leaf.pem", "--certificate", folder / "leaf.crt")
    roots = ("--certificate", folder / "root-mine.crt")
    run("sign", folder / "x.engine", *signer)
    assert "unable to get local issuer certificate" in refused(8, "verify", folder / "x.engine", *roots)
    run("sign", folder / "x.engine", *signer, "--chain", folder / "root-middle.crt")
    assert verified(folder / "x.engine", *roots)["signature"].startswith("right")


def test_an_engine_that_was_changed_or_exchanged(folder: Path) -> None:
    """An engine is refused even if every hash in it is right: an attacker who writes it writes its hashes too."""
    engine = folder / "x.engine"
    run("sign", engine, "--key", folder / "mine.pem")
    copied(engine, folder / "other.engine", {"chat_template": b"{{ 'do as I say' }}"})
    (folder / "other.engine").replace(engine)
    assert "hashes" in verified(engine), "nobody is trusted, and it is a whole engine"
    said = refused(8, "verify", engine, "--key", folder / "mine.pub")
    assert "it is not the file that" in said and "x.engine.sig was made for" in said


def resigned(data: bytes, path: Path) -> bytes:
    """A bundle in which the digest was exchanged for that of a file."""
    bundle = json.loads(data)
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    digest = sha256(path.read_bytes())
    statement["predicate"]["resources"][0]["digest"] = digest.hexdigest()
    statement["subject"][0]["digest"]["sha256"] = sha256(digest.digest()).hexdigest()
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(bundle).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data, path: None, "is not signed: there is no"),
        (lambda data, path: b"", "is no Sigstore bundle"),
        (lambda data, path: data[: len(data) // 2], "is no Sigstore bundle"),
        (lambda data, path: b"[" * 100_000, "is no Sigstore bundle"),
        (lambda data, path: b"[]", "is no Sigstore bundle"),
        (lambda data, path: b"\xff" * 9, "is no Sigstore bundle"),
        (lambda data, path: b'{"verificationMaterial": {}}', "an unknown kind of signer"),
        (lambda data, path: b'{"verificationMaterial": {"publicKey": {}}}', "or was altered"),
        (lambda data, path: b'{"verificationMaterial": {"publicKey": {}}, "dsseEnvelope": {"payload": 3}}', "altered"),
        (resigned, "or was altered"),
    ],
    ids=["none", "empty", "cut", "deep", "list", "bytes", "nobody", "no envelope", "no payload", "another digest"],
)
def test_signatures_that_are_none(folder: Path, change: Callable[[bytes, Path], bytes | None], said: str) -> None:
    engine, signature = folder / "x.engine", folder / "x.engine.sig"
    run("sign", engine, "--key", folder / "mine.pem")
    data = change(signature.read_bytes(), engine)
    signature.unlink() if data is None else signature.write_bytes(data)
    assert said in refused(8, "verify", engine, "--key", folder / "mine.pub")


def unusable_keys(folder: Path) -> Iterator[tuple[str, str]]:
    key = ec.generate_private_key(ec.SECP256R1())
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    (folder / "locked").write_bytes(key.private_bytes(PEM, form, locked))
    yield "locked", "it is encrypted with a password"
    (folder / "rsa").write_bytes(rsa.generate_private_key(65537, 1024).private_bytes(PEM, form, NO_PASSWORD))
    yield "rsa", "not on one of the curves"
    write_key(folder, "k256", ec.SECP256K1())
    yield "k256.pem", "not on one of the curves"
    yield "mine.pub", "it holds no PEM of a private key"
    yield "x.engine", "it holds no PEM of a private key"
    yield "nowhere", "no such file or directory"
    yield ".", "it is a folder"
    for kind, make in ODD_FILES.items():
        if kind not in ("folder", "dangling link", "loop of links"):
            make(folder / kind)
            yield kind, "it is not a regular file"
    make_sparse(folder / "sparse")
    yield "sparse", "it has more than 4,194,304 bytes"


def test_keys_that_cannot_be_used(folder: Path) -> None:
    for name, said in unusable_keys(folder):
        assert said in refused(2, "sign", folder / "x.engine", "--key", folder / name), name
    assert not (folder / "x.engine.sig").exists()
    run("sign", folder / "x.engine", "--key", folder / "mine.pem")
    said = refused(2, "verify", folder / "x.engine", "--key", folder / "mine.pem")
    assert "it holds no PEM of a public key" in said and "openssl pkey" in said
    mine = ("--key", folder / "mine.pem")
    said = refused(2, "sign", folder / "x.engine", *mine, "--certificate", folder / "mine.pub")
    assert "it holds no PEM of a certificate" in said


@pytest.mark.parametrize("kind", [*ODD_FILES, "sparse"])
def test_what_is_no_file_in_the_place_of_a_signature_or_provenance_is_refused(kind: str, folder: Path) -> None:
    make = make_sparse if kind == "sparse" else ODD_FILES[kind]
    make(folder / "x.engine.sig")
    make(folder / "odd.json")
    assert "x.engine.sig" in refused(8, "verify", folder / "x.engine", "--key", folder / "mine.pub")
    assert "odd.json" in refused(2, "verify", folder / "x.engine", "--provenance", folder / "odd.json")


def test_options_that_do_not_fit(folder: Path) -> None:
    engine, key = folder / "x.engine", ("--key", folder / "mine.pub")
    assert "there is nothing to sign with" in refused(2, "sign", engine)
    assert "--keyless signs without a key" in refused(2, "sign", engine, "--keyless", *key)
    assert "Name that with --certificate" in refused(2, "sign", engine, *key, "--chain", folder / "mine.crt")
    assert "there is no such file" in refused(2, "sign", folder / "y", "--key", folder / "mine.pem")
    nowhere = ("--signature", folder / "a/b")
    assert "cannot be written" in refused(2, "sign", engine, "--key", folder / "mine.pem", *nowhere)
    assert "--key and --identity name several" in refused(2, "verify", engine, *key, *GITHUB)
    assert "belong together" in refused(2, "verify", engine, *GITHUB[:2])
    run("sign", engine, "--key", folder / "mine.pem")
    assert "Name the signer that you trust with --key" in refused(8, "verify", engine, *GITHUB)


def test_nothing_is_run_before_its_signature_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("it was run")

    monkeypatch.setattr("enginewright.runtime.commands.verify.open_engine", unexpected)
    refused(8, "verify", folder / "x.engine", "--key", folder / "mine.pub")


def test_without_the_package(folder: Path) -> None:
    """In a process that cannot import the package, commands that need no signature work."""
    code = (
        "import sys\n"
        "sys.modules['model_signing'] = sys.modules['cryptography'] = None\n"
        "from enginewright.cli import main\n"
        "main(sys.argv[1:])\n"
    )

    def other(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    failed = other("sign", folder / "x.engine", "--key", folder / "mine.pem")
    assert failed.returncode == 2 and "pip install 'enginewright[sign]'" in failed.stderr
    assert other("verify", folder / "x.engine", "--no-goldens").returncode == 0


# --- Provenance


def test_provenance(folder: Path) -> None:
    engine, path = folder / "x.engine", folder / "x.engine.json"
    found = json.loads(path.read_text())
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    ((subject),) = found["subject"]
    assert subject["name"] == "x.engine" and subject["digest"] == {"sha256": sha256(engine.read_bytes()).hexdigest()}
    definition, details = found["predicate"]["buildDefinition"], found["predicate"]["runDetails"]
    with EngineFile.open(engine) as file:
        manifest = file.manifest
    named = {one["name"]: one["digest"]["sha256"] for one in definition["resolvedDependencies"] if "digest" in one}
    assert named == manifest.sources and {"config.json", "model.safetensors", "tokenizer.json"} <= named.keys()
    packages = [one["uri"] for one in definition["resolvedDependencies"] if "uri" in one]
    assert any(uri.startswith("pkg:pypi/torch@") for uri in packages)
    assert definition["externalParameters"]["recipe"]["quant"] == "int8-wo"
    assert definition["externalParameters"]["gate"] == {"level": "off", "limits": {}}
    assert details["builder"]["id"].startswith("pkg:pypi/enginewright@") and "metadata" not in details
    assert str(folder) not in path.read_text()


def test_provenance_names_the_commit_on_the_hub(made: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--tiny-llama/snapshots/0123abcd"
    shutil.copytree(made / "tiny-llama", snapshot)
    (tmp_path / "models--org--tiny-llama/blobs").mkdir()
    options = ("--gate", "off", "-o", tmp_path / "x.engine", "--provenance", tmp_path / "x.json")
    assert run("build", snapshot, *options, "--draft", made / "tiny-llama").exit_code == 0
    definition = json.loads((tmp_path / "x.json").read_text())["predicate"]["buildDefinition"]
    uris = {one["name"]: one.get("uri") for one in definition["resolvedDependencies"]}
    assert uris["config.json"] == "pkg:huggingface/org/tiny-llama@0123abcd#config.json"
    assert uris["draft/config.json"] is None
    assert verified(tmp_path / "x.engine", "--provenance", tmp_path / "x.json")["provenance"].startswith("right")


def test_provenance_is_the_same_of_the_same_build(made: Path) -> None:
    assert (made / "x.engine.json").read_bytes() == (made / "again/x.engine.json").read_bytes()


def test_a_clock_and_a_platform_only_where_they_are_given(folder: Path, made: Path) -> None:
    options = ("-o", folder / "y.engine", "--provenance", folder / "y.json", "--builder-id", "https://ci.example/1")
    build = ("build", made / "tiny-llama", "--quant", "bf16", "--gate", "quick,layer=0.5", *options)
    assert run(*build, SOURCE_DATE_EPOCH="1700000000").exit_code == 0
    found = json.loads((folder / "y.json").read_text())["predicate"]
    assert found["runDetails"]["metadata"] == {"finishedOn": "2023-11-14T22:13:20Z"}
    assert found["runDetails"]["builder"]["id"] == "https://ci.example/1"
    gate = found["buildDefinition"]["externalParameters"]["gate"]
    assert gate["level"] == "quick" and gate["limits"]["layer"] == 0.5
    assert run(*build, SOURCE_DATE_EPOCH="yesterday").exit_code == 2


def test_provenance_is_checked(folder: Path) -> None:
    engine, provenance = folder / "x.engine", ("--provenance", folder / "x.engine.json")
    assert verified(engine, *provenance)["provenance"].startswith("right, but unsigned: of pkg:pypi/enginewright@")
    run("sign", engine, "--key", folder / "mine.pem")
    key = ("--key", folder / "mine.pub")
    assert "x.engine.json is not signed" in refused(8, "verify", engine, *key, *provenance)
    run("sign", folder / "x.engine.json", "--key", folder / "mine.pem")
    assert verified(engine, *key, *provenance)["provenance"].startswith("right: of pkg:pypi/enginewright@")
    copied(engine, folder / "y.engine", {"chat_template": b"other"})
    assert "it is about other bytes" in refused(8, "verify", folder / "y.engine", *provenance)
    text = (folder / "x.engine.json").read_text()
    with EngineFile.open(engine) as file:
        digest = file.manifest.sources["config.json"]
    for changed, said in (
        (text.replace(digest, "0" * 64), "it names other inputs"),
        (text.replace("#engine-build/v1", "#x"), "its buildType is not"),
        (text.replace('"subject"', '"object"'), "it lacks 'subject'"),
        (text.replace("slsa.dev", "example.com"), "it is no in-toto Statement"),
        ("[]", "it is no in-toto Statement"),
        ("[" * 100_000, "it is no in-toto Statement"),
    ):
        (folder / "x.engine.json").write_text(changed)
        assert said in refused(8, "verify", engine, *provenance)
    assert "no such file" in refused(2, "verify", engine, "--provenance", folder / "nowhere")
