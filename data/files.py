"""Writing files so that a killed process or a full disk leaves either the old or the new state."""

import os
from pathlib import Path


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
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        fsync_file(partial)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def create_exclusive(path: Path, content: str) -> None:
    """Writes a file that must not exist yet; it appears complete or not at all.

    Raises:
        FileExistsError: somebody else has created it.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(content, encoding="utf-8")
        fsync_file(partial)
        os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_dir(path.parent)
