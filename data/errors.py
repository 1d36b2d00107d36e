"""What a user did wrong: every message names the file, key or row, and the fix."""

from pathlib import Path


class UserError(Exception):
    """A mistake in what the user gave: shown as one message, without a traceback."""


class ConfigError(UserError):
    """A configuration value that cannot work."""

    def __init__(self, key: str, problem: str, fix: str) -> None:
        super().__init__(f"{key}: {problem}\n  fix: {fix}")
        self.key = key


class DataError(UserError):
    """A prompt, row or conversation that cannot be used.

    Attributes:
        source: ``file:line``.
        reason: short code by which such rows are counted.
    """

    def __init__(self, source: str, problem: str, fix: str = "", reason: str = "format") -> None:
        super().__init__(f"{source}: {problem}" + (f"\n  fix: {fix}" if fix else ""))
        self.source, self.problem, self.reason = source, problem, reason


class TargetError(UserError):
    """A target that cannot be loaded or taken apart."""


class ServerError(UserError):
    """Servers that answer prompts and cannot be used, or stopped working."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"regenerate.servers: {problem}\n  fix: {fix}")


class CacheError(UserError):
    """A cache that is damaged, incomplete, or not the one that was asked for."""


class ShardError(CacheError):
    """One file of a cache is missing, short or damaged."""

    def __init__(
        self,
        path: Path | str,
        problem: str,
        fix: str = "run 'dspark cache mode=repair': it rebuilds what is bad and keeps the rest",
    ) -> None:
        super().__init__(f"{path}: {problem}\n  fix: {fix}")
        self.path, self.problem = path, problem


class FingerprintMismatchError(UserError):
    """Two artefacts were not made from the same context (see docs/glossary.md, fingerprint)."""
