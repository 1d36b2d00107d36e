"""Control files: the commit record of each part, and the manifest of the finished cache."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from data.cache.store import Store
from data.errors import CacheError, ShardError

MANIFEST_KEY = "manifest.json"
FINGERPRINT_KEY = "fingerprint.json"
COMMITS = "commits/"
Skipped = tuple[tuple[str, str, str], ...]


def commit_key(part: int) -> str:
    """The record whose presence says that a part exists."""
    return f"{COMMITS}part-{part:08d}.json"


def committed_parts(store: Store) -> set[int]:
    """Parts that exist: one listing."""
    return {int(key.rsplit("-", 1)[1].removesuffix(".json")) for key in store.list(COMMITS)}


@dataclass(frozen=True)
class CommitRecord:
    """What a part's record says.

    Attributes:
        cache_uuid: the cache that the part was built for.
        objects: key -> bytes and last checksum.
        skipped: (entry of the plan, source, reason) of pieces that must not be used.
        computed_tokens: tokens that the target ran over, padding apart.
    """

    cache_uuid: str
    objects: dict[str, tuple[int, int]]
    skipped: tuple[tuple[int, str, str], ...]
    computed_tokens: int

    @classmethod
    def load(cls, store: Store, part: int) -> "CommitRecord":
        """Reads a record.

        Raises:
            ShardError: it is missing or damaged.
        """
        key = commit_key(part)
        try:
            content = store.read(key)
            record = json.loads(content)
            del record["sha256"]
            if cls.to_bytes(record) != content:
                raise ValueError("its own digest does not match")
            if record["part"] != part:
                raise ValueError(f"it is the record of part {record['part']}")
            cache_uuid = str(record["cache_uuid"])
            objects = {
                str(name): (int(entry["bytes"]), int(entry["crc32c"]))
                for name, entry in record["objects"].items()
            }
            skipped = tuple((int(i), str(s), str(r)) for i, s, r in record["skipped"])
            computed = int(record["computed_tokens"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"unreadable commit record ({error!r})"
            raise ShardError(store.locate(key), problem) from error
        return cls(cache_uuid, objects, skipped, computed)

    @staticmethod
    def to_bytes(record: dict[str, object]) -> bytes:
        """The JSON form of a record, with its digest."""
        value = json.loads(json.dumps(record))
        return (json.dumps({**value, "sha256": _digest_of(value)}) + "\n").encode()


@dataclass(frozen=True)
class Manifest:
    """What the finished cache holds, and digests of the control files that have no checksum.

    Attributes:
        num_samples, num_tokens: rows that may be used, and their tokens.
        stored_tokens: tokens of all pieces; less than ``num_tokens`` when prefixes are shared.
        computed_tokens: tokens that the target ran over.
        total_bytes: of all objects.
        class_names, languages: what the ids of the sample table mean.
        dataset_hash: hash over the identities of the rows.
        digests: SHA-256 of every control file by its key; of all commit records under `COMMITS`.
        skipped: (row id, source, reason).
    """

    cache_uuid: str
    num_parts: int
    num_samples: int
    num_tokens: int
    stored_tokens: int
    computed_tokens: int
    total_bytes: int
    class_names: tuple[str, ...]
    languages: tuple[str, ...]
    dataset_hash: str
    digests: dict[str, str]
    skipped: Skipped

    @classmethod
    def load(cls, store: Store) -> "Manifest":
        """Reads the manifest.

        Raises:
            CacheError: the cache is unfinished, or the manifest is damaged.
        """
        where = store.locate(MANIFEST_KEY)
        try:
            content = store.read(MANIFEST_KEY)
        except FileNotFoundError as error:
            raise CacheError(
                f"{store.url}: the cache is not finished\n  fix: run 'dspark cache' again"
            ) from error
        try:
            value: dict[str, Any] = json.loads(content)
            own = value.pop("sha256")
            if own != _digest_of(value):
                raise ValueError("its own digest does not match")
            value["skipped"] = tuple((str(i), str(s), str(r)) for i, s, r in value["skipped"])
            for name in ("class_names", "languages"):
                value[name] = tuple(value[name])
            return cls(**value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CacheError(
                f"{where}: unreadable manifest ({error!r})\n  fix: run 'dspark cache "
                "mode=repair'; finished parts stay"
            ) from error

    def save(self, store: Store) -> None:
        """Writes the manifest; its presence says that the cache is complete."""
        value = json.loads(json.dumps(asdict(self)))
        text = json.dumps({**value, "sha256": _digest_of(value)}, indent=1) + "\n"
        store.write(MANIFEST_KEY, text.encode())

    def read(self, store: Store, key: str) -> bytes:
        """A control file that is as the finished build left it.

        Raises:
            ShardError: it is missing, damaged, or not this cache's.
        """
        try:
            content = store.read(key)
        except FileNotFoundError as error:
            raise ShardError(store.locate(key), "is missing") from error
        if self.digests.get(key) != digest([content]):
            raise ShardError(store.locate(key), "damaged, or not this cache's (SHA-256)")
        return content


def digest(contents: Iterable[bytes]) -> str:
    """SHA-256 over files, one after another."""
    total = hashlib.sha256()
    for data in contents:
        total.update(data)
    return total.hexdigest()


def _digest_of(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
