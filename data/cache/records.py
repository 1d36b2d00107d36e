"""Control files: the commit record of each part, and the manifest of the finished cache."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import CacheError, ShardError
from data.files import create_exclusive

Skipped = tuple[tuple[int, str], ...]


def commit_path(folder: Path, part: int) -> Path:
    """The record whose presence says that a part exists."""
    return folder / "commits" / f"part-{part:08d}.json"


@dataclass(frozen=True)
class CommitRecord:
    """What a part's record says.

    Attributes:
        cache_uuid: the cache that the part was built for.
        objects: file, relative to the cache's folder, and its bytes.
        skipped: (sample, reason) of rows that must not be used.
    """

    cache_uuid: str
    objects: dict[str, int]
    skipped: Skipped

    @classmethod
    def load(cls, folder: Path, part: int) -> "CommitRecord":
        """Reads a record.

        Raises:
            ShardError: it is missing or damaged.
        """
        path = commit_path(folder, part)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            cache_uuid = str(record["cache_uuid"])
            objects = {key: int(entry["bytes"]) for key, entry in record["objects"].items()}
            skipped = tuple((int(sample), str(reason)) for sample, reason in record["skipped"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ShardError(path, f"unreadable commit record ({error!r})") from error
        return cls(cache_uuid, objects, skipped)


@dataclass(frozen=True)
class Manifest:
    """What the finished cache holds, and digests of the control files that have no checksum."""

    cache_uuid: str
    num_parts: int
    num_samples: int
    num_tokens: int
    total_bytes: int
    header_sha256: str
    commits_sha256: str
    samples_sha256: str
    skipped: Skipped

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads the manifest and compares the header with it.

        Raises:
            CacheError: the cache is unfinished, or one of the two is damaged.
        """
        path = folder / "manifest.json"
        if not path.is_file():
            raise CacheError(
                f"{folder}: the cache is not finished\n  fix: run 'dspark cache' again"
            )
        try:
            value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            value["skipped"] = tuple((int(s), str(r)) for s, r in value["skipped"])
            manifest = cls(**value)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CacheError(
                f"{path}: unreadable manifest ({error!r})\n  fix: delete it and run 'dspark cache' "
                "again; finished parts stay"
            ) from error
        if manifest.header_sha256 != file_digest(folder / "cache.json"):
            raise CacheError(
                f"{folder / 'cache.json'}: the header is damaged, or not this cache's\n"
                "  fix: rebuild the cache"
            )
        return manifest

    def save(self, folder: Path) -> None:
        """Creates the manifest; its presence says that the cache is complete."""
        create_exclusive(folder / "manifest.json", json.dumps(asdict(self), indent=1) + "\n")


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def commits_digest(folder: Path, num_parts: int) -> str:
    """SHA-256 over all commit records."""
    digest = hashlib.sha256()
    for part in range(num_parts):
        digest.update(commit_path(folder, part).read_bytes())
    return digest.hexdigest()


def samples_digest(folder: Path) -> str:
    """SHA-256 over the files of the sample table: zarr reads a missing chunk as zeros."""
    root = folder / "data.zarr" / "samples"
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
