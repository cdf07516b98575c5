"""Calibration data from a hub of our own on this machine."""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginewright.builder.calibration import data
from enginewright.builder.calibration.data import read_texts
from enginewright.builder.checkpoint import hub
from enginewright.errors import EngineError, UsageError
from tests.helpers.hub_server import Hub, serving

FILES = {
    "README.md": b"# Texts",
    "dataset_infos.json": b"{}",
    "data/train.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(FILES) as served:
        ask = functools.partial(hub.download_file, endpoint=served.endpoint, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(data, "download_file", ask)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield served


def texts(ref: str) -> list[object]:
    return [text.content for text in read_texts(ref)]


def test_the_one_file_of_texts(remote: Hub) -> None:
    for ref in ("owner/Texts", "owner/Texts@main", "owner/Texts:data/train.jsonl", "owner/Texts@main:data/train.jsonl"):
        assert texts(ref) == ["one", "two"]
    assert remote.fetched == ["data/train.jsonl"], "nothing else is fetched, nor that twice"
    assert texts("owner/Texts:README.md") == ["# Texts"]


def test_a_line_is_named_with_its_data_set(remote: Hub) -> None:
    remote.files["data/train.jsonl"] = b'{"text": "one"}\n{}\n'
    with pytest.raises(UsageError, match=r"owner/Texts:data/train\.jsonl, line 2"):
        read_texts("owner/Texts")


def test_one_of_several_files_has_to_be_named(remote: Hub) -> None:
    remote.files["data/test.jsonl"] = b""
    with pytest.raises(UsageError, match=r"several files: data/train\.jsonl, data/test\.jsonl") as refused:
        read_texts("owner/Texts")
    assert refused.value.fix == "Name one: owner/Texts:data/train.jsonl"
    with pytest.raises(UsageError, match=r"has no file data/tests\.jsonl") as refused:
        read_texts("owner/Texts:data/tests.jsonl")
    assert refused.value.fix == "Name one: owner/Texts:data/test.jsonl"
    assert remote.fetched == []


def test_what_is_not_read_is_not_fetched(remote: Hub) -> None:
    del remote.files["data/train.jsonl"]
    remote.files["data/train-0.parquet"] = b"PAR1"
    with pytest.raises(UsageError, match=r"data/train-0\.parquet: this form cannot be read") as refused:
        read_texts("owner/Texts")
    assert refused.value.exit_code == 2 and remote.fetched == []
    with pytest.raises(UsageError, match=r"\.parquet: this form cannot be read"):
        read_texts("owner/Texts:data/train-0.parquet")


def test_without_network_the_cache_serves(remote: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_texts("owner/Texts")
    closed = functools.partial(hub.download_file, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
    monkeypatch.setattr(data, "download_file", closed)
    assert texts("owner/Texts") == texts("owner/Texts:data/train.jsonl") == ["one", "two"]
    with pytest.raises(
        EngineError, match=r"owner/Other cannot be downloaded: there is no file owner/Other here"
    ) as refused:
        read_texts("owner/Other")
    assert "hf download --repo-type dataset owner/Other" in refused.value.fix and refused.value.exit_code == 1


def test_no_such_data_set_or_revision(remote: Hub) -> None:
    with pytest.raises(UsageError, match="there is no data set owner/Nothing: no such file here"):
        read_texts("owner/Nothing")
    with pytest.raises(UsageError, match="owner/Texts has no revision v7"):
        read_texts("owner/Texts@v7")


def test_gated(remote: Hub) -> None:
    remote.refusal = (403, "GatedRepo")
    with pytest.raises(EngineError, match="the hub denies access to owner/Texts") as refused:
        read_texts("owner/Texts")
    assert "hf auth login" in refused.value.fix
