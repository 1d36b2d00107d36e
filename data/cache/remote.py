"""Caches in buckets (s3, gs, az, abfs) and, to read only, behind http(s), through obstore.

Credentials and endpoints come from the environment alone, as obstore reads it: AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ALLOW_HTTP=true for an endpoint without
TLS, AWS_SKIP_SIGNATURE=true for a public bucket; GOOGLE_... and AZURE_... likewise. Profile files
are not read. Endpoints of one's own get path-style requests unless
AWS_VIRTUAL_HOSTED_STYLE_REQUEST=true.
"""

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import SplitResult, urlsplit

from data.cache.local_copy import CopiedSource, LocalCopy, Ranges
from data.cache.store import LocalStore, Sink, Source, Store
from data.errors import ConfigError, ShardError, UserError

if TYPE_CHECKING:  # an optional dependency
    from obstore import ObjectMeta, UpdateVersion
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

LOCAL_BYTES = 64 << 30
PATIENCE_S = 120.0
_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "http", "https")
_PART_BYTES = 8 << 20  # S3 takes 10,000 parts: objects of up to 78 GiB
_PARTS_IN_FLIGHT = 4  # so a sink holds about 40 MiB
_TEXT_LENGTH = 400
_NUMBERS = {
    "AlreadyExistsError": errno.EEXIST,
    "FileNotFoundError": errno.ENOENT,
    "NotImplementedError": errno.ENOTSUP,
    "NotSupportedError": errno.ENOTSUP,
    "PermissionDeniedError": errno.EACCES,
    "PreconditionError": errno.ESTALE,
    "UnauthenticatedError": errno.EACCES,
}


def open_store(
    location: str | Path,
    local_copy: Path | None = None,
    local_bytes: int = LOCAL_BYTES,
    patience_s: float = PATIENCE_S,
) -> Store:
    """The store at a location: a folder, or what `RemoteStore` takes.

    Raises:
        ConfigError: the location cannot be used.
    """
    text = str(location)
    if "://" in text:
        return RemoteStore(text, local_copy, local_bytes, patience_s)
    if text.startswith(tuple(f"{scheme}:/" for scheme in _SCHEMES)):
        problem = "has one slash: a Path folds them"
        raise ConfigError(f"cache.path={text}", problem, "write scheme://bucket/prefix")
    return LocalStore(Path(location))


class RemoteStore(Store):
    """Objects under a URL.

    May be sent to another process, where it connects anew. A process that was forked from one that
    had used a store gets a UserError at once: the threads that obstore waits for do not exist
    there, and every call would hang (obstore 0.12.1; also of a store that the child opens).

    Args:
        location: s3://bucket/prefix, gs://..., az://..., abfs://..., or http(s)://... to read.
        local_copy: folder for what sources fetch, see `LocalCopy`.
        local_bytes: largest size of that folder.
        patience_s: how long a failing request is tried again; also bounds the time-outs.

    Raises:
        ConfigError: the location cannot be used, or obstore is not installed.
    """

    _process: ClassVar[int | None] = None  # the one that obstore's threads belong to

    def __init__(
        self,
        location: str,
        local_copy: Path | None = None,
        local_bytes: int = LOCAL_BYTES,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._options = (location, local_copy, local_bytes, patience_s)
        scheme = _require_plain(location).scheme
        self.url = location.rstrip("/")
        self._folder = hashlib.sha256(self.url.encode()).hexdigest()[:32]
        self._is_http = scheme.startswith("http")
        self._backend = _connect(self.url, scheme, patience_s)
        self._has_swap = True
        self._contents: dict[tuple[str, int], str] = {}
        self._copy: LocalCopy | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["RemoteStore"], tuple[str, Path | None, int, float]]:
        return RemoteStore, self._options

    @contextlib.contextmanager
    def request(self, key: str, *, http: bool = False) -> Iterator["ObjectStore"]:
        """The connection, for one request. What it raises becomes an OSError that names the object.

        Args:
            key: the object.
            http: whether the request also works over http(s).
        """
        self._require_process()
        if self._is_http and not http:
            problem = "http(s) can only be read: neither written to nor listed"
            raise OSError(errno.EROFS, problem, self.locate(key))
        from obstore.exceptions import BaseError

        try:
            yield self._backend
        except (BaseError, NotImplementedError, ValueError, OSError) as error:
            # Without the cause, whose text repeats the request at length.
            raise _translated(error, self.locate(key)) from None

    def read(self, key: str) -> bytes:
        """See `Store.read`."""
        with self.request(key, http=True) as backend:
            return bytes(backend.get(key).bytes())

    def size(self, key: str) -> int | None:
        """See `Store.size`."""
        try:
            with self.request(key, http=True) as backend:
                return backend.head(key)["size"]
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> dict[str, int]:
        """See `Store.list`."""
        with self.request(prefix) as backend:
            return {meta["path"]: meta["size"] for meta in backend.list(prefix or None).collect()}

    def write(self, key: str, content: bytes) -> None:
        """See `Store.write`."""
        with self.request(key) as backend:
            backend.put(key, content)

    def create(self, key: str, content: bytes) -> None:
        """See `Store.create`."""
        try:
            with self.request(key) as backend:
                backend.put(key, content, mode="create")
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            problem = "the store cannot refuse to overwrite (If-None-Match), which a cache needs"
            raise OSError(errno.ENOTSUP, problem, self.locate(key)) from error

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """See `Store.swap`.

        A store without conditional updates is compared and then written to. Two processes that do
        so at once are both told that they swapped: they do the same work twice, and the objects
        that they publish are the same.
        """
        try:
            with self.request(key) as backend:
                found = backend.get(key)
                content, version = bytes(found.bytes()), self._version_of(found.meta)
        except FileNotFoundError:
            return False
        if content != old:
            return False
        try:
            with self.request(key) as backend:
                backend.put(key, new, mode=version or "overwrite")
        except OSError as error:
            if error.errno == errno.ESTALE:
                return False
            if error.errno != errno.ENOTSUP:
                raise
            self._has_swap = False
            self.write(key, new)
        return True

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with contextlib.suppress(FileNotFoundError), self.request(key) as backend:
            backend.delete(key)

    def open_sink(self, key: str, token: str) -> Sink:
        """See `Store.open_sink`. Uploads are kept apart without the token."""
        del token
        return _RemoteSink(self, key)

    def open_source(self, key: str, size: int) -> Source:
        """See `Store.open_source`. Also raises OSError."""
        self._require_process()
        content = self._contents.get((key, size)) or self._find_content(key, size)
        with self._lock:
            if self._copy is None:
                self._copy = LocalCopy(*self._options[1:3])

        def read_ranges(ranges: Ranges) -> Sequence[memoryview]:
            begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
            with self._missing_is_bad(key), self.request(key, http=True) as backend:
                parts = backend.get_ranges(key, starts=begins, ends=ends, coalesce=0)
                return [memoryview(part) for part in parts]

        name = f"{self._folder}/{key}.{content}"
        return CopiedSource(self._copy, name, size, self.locate(key), read_ranges)

    def free_bytes(self) -> int | None:
        """See `Store.free_bytes`. A bucket does not say."""
        return None

    def remove_partials(self, keys: Iterable[str] | None = None) -> None:
        """Does nothing: an upload that was only begun has no key, and obstore cannot list such
        uploads. A lifecycle rule of the bucket (AbortIncompleteMultipartUpload) removes them.
        """

    def _require_process(self) -> None:
        if RemoteStore._process not in (None, os.getpid()):
            raise UserError(
                f"{self.url}: this process was forked after its parent had used an object store"
                "\n  fix: use threads, or processes of multiprocessing.get_context('spawn')"
            )
        RemoteStore._process = os.getpid()

    @contextlib.contextmanager
    def _missing_is_bad(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ShardError(self.locate(key), f"is missing ({error.strerror})") from error

    def _find_content(self, key: str, size: int) -> str:
        """What tells an object from an older one of its key: that one's chunks match their
        checksums too, and must not be taken from the local copy. One request an object.
        """
        with self._missing_is_bad(key), self.request(key, http=True) as backend:
            meta = backend.head(key)
        if meta["size"] != size or not size:
            problem = f"has {meta['size']} bytes, its commit record says {size}"
            raise ShardError(self.locate(key), problem)
        text = f"{size} {meta['e_tag'] or meta['last_modified']}"
        content = self._contents[key, size] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return content

    def _version_of(self, meta: "ObjectMeta") -> "UpdateVersion":
        """The condition of an update; empty when the store has none."""
        version: UpdateVersion = {}
        if self._has_swap and meta["e_tag"] is not None:
            version["e_tag"] = meta["e_tag"]
        if self._has_swap and meta["version"] is not None:
            version["version"] = meta["version"]
        return version


class _RemoteSink(Sink):
    """A multipart upload; one PUT when it is small."""

    def __init__(self, store: RemoteStore, key: str) -> None:
        self._store, self._key, self._is_published = store, key, False
        with store.request(key) as backend:
            from obstore import open_writer

            self._writer = open_writer(
                backend, key, buffer_size=_PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT
            )

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with self._store.request(self._key):
            # A copy: obstore reads the caller's memory after it has returned.
            self._writer.write(bytes(data))

    def publish(self) -> None:
        with self._store.request(self._key):
            self._writer.close()
        self._is_published = True

    def discard(self) -> None:
        if self._is_published:
            return
        # An exception that leaves the writer's block is how obstore aborts an upload. If that
        # fails too, nobody can see what remains: `RemoteStore.remove_partials`.
        with contextlib.suppress(OSError), self._store.request(self._key):
            self._writer.__exit__(RuntimeError, RuntimeError("discarded"), None)


def _require_plain(location: str) -> SplitResult:
    """Takes a location apart; one that may hold a secret is not repeated in the message."""
    try:
        parts = urlsplit(location)
    except ValueError:
        raise ConfigError("cache.path", "is no URL", "write scheme://bucket/prefix") from None
    user = parts.username is not None and not parts.scheme.startswith("abfs")
    if user or parts.password is not None or "?" in location or "#" in location:
        raise ConfigError(
            "cache.path",
            "the URL (not shown) has a user, a password, a query or a fragment",
            "write scheme://bucket/prefix; credentials belong in the environment",
        )
    if parts.scheme not in _SCHEMES or not parts.netloc:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise ConfigError(f"cache.path={location}", "unknown place", f"a folder, or {known}")
    return parts


def _connect(url: str, scheme: str, patience_s: float) -> "ObjectStore":
    """Makes no request and starts no thread."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import HTTPStore, from_url
    except ImportError as error:
        problem = "object stores need the package obstore"
        fix = "pip install 'dspark-pipeline[remote]'"
        raise ConfigError(f"cache.path={url}", problem, fix) from error
    variables = ("AWS_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP", "AZURE_ALLOW_HTTP")
    allowed = any(os.environ.get(v, "").lower() in ("true", "1", "yes") for v in variables)
    client: ClientConfig = {
        # obstore forgets the environment's client options once any are given.
        "allow_http": scheme == "http" or allowed,
        "connect_timeout": timedelta(seconds=min(patience_s, 5)),
        "read_timeout": timedelta(seconds=min(patience_s, 60)),  # without a byte
        "timeout": timedelta(hours=1),  # of a whole request, however slow the line
    }
    retry: RetryConfig = {"retry_timeout": timedelta(seconds=patience_s)}
    try:
        if scheme.startswith("http"):
            return HTTPStore(url, client_options=client, retry_config=retry)
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        problem = str(_translated(error, url).strerror)
        fix = "set the variables that are missing: AWS_..., GOOGLE_... or AZURE_..."
        raise ConfigError(f"cache.path={url}", problem, fix) from None


def _translated(error: Exception, where: str) -> OSError:
    """The OSError for what obstore raised, without its debug text."""
    text = str(error).partition("\n\nDebug source")[0]
    text = " ".join(text.split())[:_TEXT_LENGTH]
    if text.endswith("builder error"):
        text += " (an endpoint without TLS needs AWS_ALLOW_HTTP=true)"
    number = _NUMBERS.get(type(error).__name__, errno.EIO)
    return OSError(errno.ENOTSUP if "501 Not Implemented" in text else number, text, where)
