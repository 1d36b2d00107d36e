"""Writing files so that a killed process or a full disk leaves either the old or the new state."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from data.errors import UserError


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fsync_dir(folder: Path) -> None:
    """Makes renames and new names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_file(path: Path) -> None:
    """Makes a file's content durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Writes a whole file: temporary name, fsync, rename, fsync of the folder."""
    content = content.encode() if isinstance(content, str) else content
    # No process id: two hosts that share a folder may have equal ones.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_bytes(content)
        fsync_file(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keeps other processes of this machine from writing into a folder; a kill frees it.

    Raises:
        UserError: somebody else holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{folder}: another process is writing here\n  fix: wait for it, or stop it"
            ) from error
        yield


@contextlib.contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """A folder to write files into; when the block ends it is synced and takes its name, in place
    of an older one. When the block fails nothing is left of it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for path in partial.iterdir():
            fsync_file(path)
        fsync_dir(partial)
    except BaseException:  # also Ctrl-C: nothing half written stays
        shutil.rmtree(partial, ignore_errors=True)
        raise
    # The older folder keeps its content until the new one has its name.
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        final.rename(old)
    partial.rename(final)
    fsync_dir(final.parent)
    for stale in final.parent.glob(f".{final.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
