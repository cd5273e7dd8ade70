"""One source of training data: what the user said about it, what identifies its contents, and its rows."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.data_sources import FileReader, Row, SourceFile, dataset_rows, expand, is_saved_dataset
from harness.findings import user_error

_HASH_CHUNK_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """Where rows come from and how they are read.

    Attributes:
        files: names, globs and folders; or
        dataset_name, dataset_config_name, split: a dataset of the hub, or a folder that `load_dataset` takes.
        key: the flag that named it, for messages.
        encoding: of text files.
        line_mode: each line of a text file is a document.
    """

    files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    split: str = "train"
    key: str = "--train_file"
    encoding: str = "utf-8"
    line_mode: bool = False

    def open(self) -> Source:
        """The source, found but not read.

        Raises:
            UserError: it is not there.
        """
        if self.files:
            return FileSource(self, expand(self.files, self.key))
        return HubSource(self)


class FileSource:
    """Rows of local files."""

    def __init__(self, spec: SourceSpec, files: Sequence[SourceFile | Path]) -> None:
        self.spec = spec
        self.files = files
        self.skipped: dict[str, list[str]] = {}

    def _paths(self) -> list[Path]:
        """Every file that is read, those of save_to_disk folders included."""
        paths = []
        for file in self.files:
            if isinstance(file, SourceFile):
                paths.append(file.path)
            else:
                paths += sorted(path for path in file.rglob("*") if path.is_file() and not path.name.startswith("cache-"))
        return paths

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the files."""
        return sum(path.stat().st_size for path in self._paths())

    def identity(self) -> list[Any]:
        """What tells at once whether these are the same files as last time: names, sizes, times."""
        stats = [(str(path.resolve()), path.stat()) for path in self._paths()]
        return [[name, status.st_size, status.st_mtime_ns] for name, status in stats]

    def content(self) -> list[Any]:
        """What tells whether the contents are the same, wherever the files lie: kinds and hashes."""
        import xxhash

        result = []
        for path in self._paths():
            digest = xxhash.xxh3_128()
            with open(path, "rb") as file:
                while chunk := file.read(_HASH_CHUNK_BYTES):
                    digest.update(chunk)
            result.append(["".join(path.suffixes[-2:]), digest.hexdigest()])
        return result

    def rows(self, segment_chars: int | None, on_bytes: Callable[[int], None]) -> Iterator[Row]:
        """All rows; very long texts in parts of about `segment_chars` characters."""
        reader = FileReader(self.spec.key, self.spec.encoding, self.spec.line_mode, segment_chars, self.skipped, on_bytes)
        return reader.rows(self.files)


class HubSource:
    """Rows of a dataset that `datasets.load_dataset` knows."""

    def __init__(self, spec: SourceSpec) -> None:
        import datasets

        assert spec.dataset_name is not None
        self.spec = spec
        self.skipped: dict[str, list[str]] = {}
        self.num_bytes: int | None = None
        name = spec.dataset_name
        if Path(name).is_dir() and is_saved_dataset(Path(name)):
            raise user_error("--dataset_name", f"{name} was written by save_to_disk", f"give it as a file: --train_file {name}")
        try:
            self.builder = datasets.load_dataset_builder(name, spec.dataset_config_name)
        except ValueError as error:
            configs = _configs(name)
            if spec.dataset_config_name is None and len(configs) > 1:
                raise user_error(
                    "--dataset_config_name", f"{name} has several configurations", f"choose one of {', '.join(configs)}"
                ) from None
            if spec.dataset_config_name is not None and configs and spec.dataset_config_name not in configs:
                raise user_error(
                    "--dataset_config_name", f"{name} has no configuration {spec.dataset_config_name}", f"it has {', '.join(configs)}"
                ) from None
            raise user_error("--dataset_name", f"cannot load {name}: {error}") from None
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise user_error(
                "--dataset_name", f"cannot load {name}: {_first_line(error)}", "check the name, the network, and HF_TOKEN for gated data"
            ) from None

    def splits(self) -> list[str]:
        """Names of the dataset's splits; known without loading it only for some, so else from its files."""
        if self.builder.info.splits:
            return [str(split) for split in self.builder.info.splits]
        files = getattr(self.builder.config, "data_files", None)
        return [str(split) for split in files] if files else []

    def identity(self) -> list[Any]:
        """Name, configuration and version of the contents."""
        return [self.spec.dataset_name, self.builder.config_id, str(self.builder.cache_dir), self.spec.split]

    content = identity

    def rows(self, segment_chars: int | None, on_bytes: Callable[[int], None]) -> Iterator[Row]:
        """All rows of the split, downloaded first."""
        import datasets

        name = str(self.spec.dataset_name)
        try:
            self.builder.download_and_prepare()
            data = self.builder.as_dataset(split=self.spec.split)
        except ValueError as error:
            raise user_error("--dataset_name", f"{name}: {_first_line(error)}", f"it has the splits {', '.join(self.splits())}") from None
        except (OSError, datasets.exceptions.DatasetsError) as error:
            raise user_error("--dataset_name", f"cannot load {name}: {_first_line(error)}") from None
        return dataset_rows(data, f"{name} ({self.spec.split})")

    def stream(self) -> Any:
        """The split as a `datasets.IterableDataset`, nothing downloaded beforehand."""
        return self.builder.as_streaming_dataset(split=self.spec.split)


Source = FileSource | HubSource


def _configs(name: str) -> list[str]:
    import datasets

    try:
        names = list(datasets.get_dataset_config_names(name))
    except Exception:  # whatever it is, the first error is the one to report
        names = []
    # Without the hub, datasets loads what is in its cache, but does not list it.
    return names if Path(name).is_dir() or names not in ([], ["default"]) else _cached_configs(name) or names


def _cached_configs(name: str) -> list[str]:
    """Configurations of a dataset of the hub that are in the cache of `datasets`, prepared."""
    import datasets
    from datasets.naming import camelcase_to_snakecase

    *owner, last = name.split("/")
    folder = Path(os.path.expanduser(str(datasets.config.HF_DATASETS_CACHE))) / "___".join([*owner, camelcase_to_snakecase(last)])
    return sorted({path.parts[-4] for path in folder.glob("*/*/*/dataset_info.json")})


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def default_cache_dir() -> Path:
    """Where tokenised data is kept unless the user says otherwise."""
    import datasets

    return Path(os.path.expanduser(str(datasets.config.HF_DATASETS_CACHE))) / "harness"


def digest(value: Any) -> str:
    """32 hexadecimal digits that identify a JSON-like value."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """What tells tokenizers apart whose tokens differ."""
    if getattr(tokenizer, "is_fast", False):
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None)  # settings of whoever used it last
        state.pop("padding", None)
    else:
        state = sorted(tokenizer.get_vocab().items())
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return digest([type(tokenizer).__name__, state, special, getattr(tokenizer, "chat_template", None)])
