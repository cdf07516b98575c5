"""Downloads files of a checkpoint that an engine needs, or a file of a data set, from the Hugging Face hub."""

import errno
import fnmatch
import glob
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]

from enginewright.builder.checkpoint.files import SourceFolder, first_line
from enginewright.builder.checkpoint.folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    MODELOPT_CONFIG,
    PICKLE_SUFFIXES,
    WEIGHTS,
    read_config,
    read_index,
    refuse_pickle,
)
from enginewright.builder.checkpoint.folder_tokenizer import TOKENIZER, TOKENIZER_FILES, check_tokenizer
from enginewright.builder.checkpoint.sentence_transformers import OF_MODULE
from enginewright.builder.checkpoint.sentence_transformers import TEXTS as MODULE_TEXTS
from enginewright.checkpoint_ref import HUB_ID
from enginewright.errors import EngineError, UsageError

CheckConfig = Callable[[Mapping[str, Any]], None]
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# With tokenizer.json these are not read; without it they name the kind of tokenizer in an error.
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json")
# kind → words for a repository, and for a local path
WORDS = {"model": ("checkpoint", "folder"), "adapter": ("adapter", "folder"), "dataset": ("data set", "file")}
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of an adapter of PEFT
UNREACHABLE = (HfHubHTTPError, TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError, OSError)


@dataclass(frozen=True)
class HubId:
    """The name of a repository on the Hugging Face hub, at a revision."""

    owner: str  # owner of the repository
    name: str  # name of the repository
    revision: str | None  # branch, tag or commit; None: the default branch
    kind: str = "model"  # key of WORDS

    @property
    def repo_type(self) -> str:
        """The hub's type of the repository."""
        return "dataset" if self.kind == "dataset" else "model"

    @property
    def repository(self) -> str:
        """Owner and name."""
        return f"{self.owner}/{self.name}"

    @property
    def elsewhere(self) -> str:
        """Advice for a machine that cannot download from the hub."""
        kind = "" if self.repo_type == "model" else f" --repo-type {self.repo_type}"
        command = f"`hf download{kind} {self.repository} --local-dir FOLDER`"
        return f"Or download it on a machine that reaches the hub ({command}), bring the folder here and name it."


@dataclass(frozen=True)
class HubSnapshot:
    """The downloaded files of a repository."""

    path: Path  # folder of the files
    root: Path  # the cache's folder of this repository, into which the snapshot's links may lead


def parse_hub_id(ref: str) -> HubId | None:
    """Parses a hub id; None if the text is not one."""
    match = HUB_ID.fullmatch(ref)
    return HubId(match["owner"], match["name"], match["revision"]) if match else None


def download(
    hub_id: HubId,
    *,
    hint: str = "",
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    only_cached: bool = False,
    check_config: CheckConfig | None = None,
) -> HubSnapshot:
    """Downloads the needed files of a repository into the cache; cached files are not fetched again.

    The config and the tokenizer come first, and weights only if those can be used.

    Args:
        hub_id: the repository.
        hint: another reading of the name, for the error if there is no such repository.
        endpoint: address of the hub; None is huggingface_hub's default.
        cache_dir: folder of the cache; None is huggingface_hub's default.
        only_cached: True uses the cache alone.
        check_config: called with the content of config.json before weights are fetched; its errors end the download.

    Raises:
        UsageError: the hub has no such repository or revision.
        EngineError: the hub cannot be reached and the cache has nothing, or access is denied.
    """
    id = hub_id.repository
    needed = [CONFIG, TOKENIZER]  # only a part of a repository's files is ever fetched
    if only_cached:
        path = _cached(hub_id, needed, cache_dir, "downloads are disabled", f"Get it: `hf download {id}`.")
        return HubSnapshot(path, path.parent.parent)
    try:
        with _refusals(hub_id, hint):
            info = HfApi(endpoint=endpoint).model_info(id, revision=hub_id.revision)
            names = [entry.rfilename for entry in info.siblings or []]
            weights = _plain_weights(id, names)
            texts = [name for name in names if _is_text(name)]
            if not any(name.endswith(".gguf") for name in weights):  # a GGUF file contains its config
                if CONFIG not in names:
                    raise UsageError(f"{id} on the hub is not a checkpoint", f"it holds no {CONFIG}")
                path = _snapshot(hub_id, texts, endpoint, cache_dir)
                files = SourceFolder(path, path.parent.parent)
                config = read_config(files)
                check_tokenizer(files)
                if check_config is not None:
                    check_config(config)
                weights = weights or sorted(set(read_index(files).values()))
            path = _snapshot(hub_id, [*texts, *weights], endpoint, cache_dir)
    except UNREACHABLE as error:
        path = _cached(hub_id, needed, cache_dir, *_unreachable(error), hint)
    return HubSnapshot(path, path.parent.parent)


def download_adapter(hub_id: HubId, *, endpoint: str | None = None, cache_dir: Path | None = None) -> HubSnapshot:
    """Downloads an adapter that PEFT has saved into the cache, unless it is there.

    Args:
        hub_id: the repository.
        endpoint: as in `download`.
        cache_dir: as in `download`.

    Raises:
        UsageError: the hub has no such repository or revision, or it holds no adapter.
        UnsupportedModelError: its weights are pickled.
        EngineError: the hub cannot be reached and the cache has nothing, or access is denied.
    """
    hub_id, wanted = replace(hub_id, kind="adapter"), [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    try:
        with _refusals(hub_id):
            info = HfApi(endpoint=endpoint).model_info(hub_id.repository, revision=hub_id.revision)
            names = [entry.rfilename for entry in info.siblings or []]
            if ADAPTER_CONFIG not in names:
                what = f"{hub_id.repository} on the hub is not an adapter"
                raise UsageError(what, f"it holds no {ADAPTER_CONFIG}")
            if ADAPTER_WEIGHTS not in names:
                if pickles := [name for name in names if name.endswith(PICKLE_SUFFIXES)]:
                    raise refuse_pickle(pickles[0], Path(hub_id.repository))
                raise EngineError(f"{hub_id.repository} on the hub holds no weights", f"there is no {ADAPTER_WEIGHTS}")
            path = _snapshot(hub_id, wanted, endpoint, cache_dir)
    except UNREACHABLE as error:
        path = _cached(hub_id, wanted, cache_dir, *_unreachable(error))
    return HubSnapshot(path, path.parent.parent)


def download_file(
    hub_id: HubId,
    choose: Callable[[list[str]], str],
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
) -> tuple[Path, str]:
    """Downloads one file of a data set into the cache, unless it is there.

    Args:
        hub_id: the data set.
        choose: names of its files → name of the file.
        endpoint: as in `download`.
        cache_dir: as in `download`.

    Returns:
        Path of the file, and its name.

    Raises:
        UsageError: the hub has no such data set or revision.
        EngineError: the hub cannot be reached and the cache has nothing, or access is denied.
    """
    hub_id = replace(hub_id, kind="dataset")
    try:
        with _refusals(hub_id):
            info = HfApi(endpoint=endpoint).dataset_info(hub_id.repository, revision=hub_id.revision)
            name = choose([entry.rfilename for entry in info.siblings or []])
            path = _snapshot(hub_id, [name], endpoint, cache_dir)
    except UNREACHABLE as error:
        path = _cached(hub_id, [], cache_dir, *_unreachable(error))
        name = choose(sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()))
    return SourceFolder(path, path.parent.parent).file(name), name


@contextmanager
def _refusals(hub_id: HubId, hint: str = "") -> Iterator[None]:
    """Turns the hub's refusals into our errors."""
    id, (what, here) = hub_id.repository, WORDS[hub_id.kind]
    try:
        yield
    except GatedRepoError as error:
        raise EngineError(
            f"the hub denies access to {id}",
            "its owner asks for an agreement first",
            f"Accept it on its page of the hub, then `hf auth login`. {hub_id.elsewhere}",
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{id} has no revision {hub_id.revision} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UsageError(
            f"there is no {what} {id}",
            f"no such {here} here, and no such repository on the hub, or it is private",
            hint or "Check the name; for a private repository, `hf auth login`.",
        ) from error
    except OSError as error:
        if error.errno in NO_ROOM:
            raise EngineError(f"{id} could not be stored in the hub's cache", str(error)) from error
        raise


def _is_text(name: str) -> bool:
    whole = (CONFIG, GENERATION_CONFIG, MODELOPT_CONFIG, INDEX, *TOKENIZER_FILES, *OTHER_TOKENIZERS, *MODULE_TEXTS)
    return name in whole or OF_MODULE.fullmatch(name) is not None


def _plain_weights(id: str, names: list[str]) -> list[str]:
    """Lists weight files that need no index: one safetensors file, or one GGUF file."""
    if WEIGHTS in names:
        return [WEIGHTS]
    if INDEX in names:
        return []
    top = [name for name in names if "/" not in name]
    if len(safetensors := fnmatch.filter(top, "*.safetensors")) == 1:
        return safetensors
    ggufs = fnmatch.filter(top, "*.gguf")
    if not safetensors and len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise UsageError(
            f"{id} on the hub holds {len(ggufs)} GGUF files",
            ", ".join(ggufs),
            f"Download one (`hf download {id} FILE --local-dir FOLDER`) and name it.",
        )
    if pickles := [name for name in top if name.endswith(PICKLE_SUFFIXES)]:
        raise refuse_pickle(pickles[0], Path(id))
    raise EngineError(f"{id} on the hub holds no weights", f"neither {WEIGHTS}, {INDEX} nor a GGUF file")


def _snapshot(hub_id: HubId, names: list[str], endpoint: str | None, cache_dir: Path | None) -> Path:
    patterns = [glob.escape(name) for name in names]
    return Path(
        snapshot_download(
            hub_id.repository,
            repo_type=hub_id.repo_type,
            revision=hub_id.revision,
            allow_patterns=patterns,
            endpoint=endpoint,
            cache_dir=cache_dir,
        )
    )


def _unreachable(error: Exception) -> tuple[str, str]:
    """Returns the reason why the hub cannot be reached, and advice."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set", "Unset HF_HUB_OFFLINE and try again."
    return f"the hub cannot be reached ({first_line(error)})", "Check the network and try again."


def _cached(hub_id: HubId, names: list[str], cache_dir: Path | None, why: str, fix: str, hint: str = "") -> Path:
    """Finds an earlier download with these files. why, fix: reason and advice if there is none."""
    try:
        return Path(
            snapshot_download(
                hub_id.repository,
                repo_type=hub_id.repo_type,
                revision=hub_id.revision,
                allow_patterns=names,
                cache_dir=cache_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, OSError, ValueError) as missing:
        raise EngineError(
            f"{hub_id.repository} cannot be downloaded",
            f"there is no {WORDS[hub_id.kind][1]} {hub_id.repository} here, the cache does not have it, and {why}",
            " ".join(filter(None, [hint, fix, hub_id.elsewhere])),
        ) from missing
