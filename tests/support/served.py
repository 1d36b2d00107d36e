"""Runs the regenerator against servers, and reads what it left."""

import json
from pathlib import Path
from typing import Any

from data.config import RegenerateConfig
from data.corpus import Prompt
from data.fingerprint import Fingerprint
from data.regenerate import Summary, regenerate
from data.target import TargetFiles
from tests.support.stub_server import StubServer

PROMPTS = [Prompt((f"question {i}",), "chat", f"p.jsonl:{i}") for i in range(24)]
PLAYED = [
    Prompt(("one", "two", "three"), "math", "t.jsonl:1", system="be brief"),
    Prompt(("only",), "chat", "t.jsonl:2"),
    Prompt(("first", "then"), "code", "t.jsonl:3"),
]
LONG = [Prompt((f"long {i} " + "x" * 200,), "chat", f"l.jsonl:{i}") for i in range(6)]


def config_for(*servers: StubServer | str, **options: Any) -> RegenerateConfig:
    """Short waits; what a test does not care about is small."""
    urls = [s if isinstance(s, str) else s.url for s in servers]
    defaults = {"concurrency": 4, "timeout_s": 5.0, "max_retries": 2, "max_failures": 5}
    return RegenerateConfig(servers=urls, **{**defaults, **options})


def run(
    files: TargetFiles, output: Path, config: RegenerateConfig, prompts: list[Prompt] = PROMPTS
) -> Summary:
    return regenerate(files, prompts, config, output, Fingerprint.of_target(files))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_source(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows by source and turn; each occurs once."""
    rows = lines(path)
    found = {(row["source"], row["turn"]): row for row in rows}
    assert len(found) == len(rows)
    return found
