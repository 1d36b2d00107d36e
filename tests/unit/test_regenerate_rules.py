"""Values of regenerate.* that cannot work are refused with the key and the fix."""

from typing import Any

import pytest

from data.config import CorpusConfig, RegenerateConfig, TargetConfig
from data.errors import ConfigError
from train.config import PipelineConfig
from train.help import verb_help
from train.rules import validate

URL = "http://localhost:8000/v1"


def check(**options: Any) -> None:
    config = PipelineConfig(
        target=TargetConfig(path="x"),
        corpus=CorpusConfig(prompts="p.jsonl"),
        regenerate=RegenerateConfig(**options),
    )
    validate(config, "regenerate")


def test_good_values_pass() -> None:
    check()
    check(servers=[URL, "https://host.example:8443/v1"], server_model="m", concurrency=1000)
    check(servers=[URL], max_retries=0, max_failures=1, timeout_s=0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "concurrency=0: must be at least 1"),
        ({"concurrency": 1001}, "concurrency=1001: .*name more servers"),
        ({"timeout_s": 0.0}, "timeout_s=0.0: must be positive"),
        ({"max_retries": -1}, "max_retries=-1: must be at least 0"),
        ({"max_failures": 0}, "max_failures=0: must be at least 1"),
        ({"server_model": "m"}, "server_model=m: has no effect without servers"),
        ({"servers": [URL, URL]}, "an address occurs twice"),
        ({"servers": ["localhost:8000/v1"]}, "http:// or https://"),
        ({"servers": ["ftp://localhost/v1"]}, "http:// or https://"),
        ({"servers": ["http://"]}, "with a host"),
        ({"servers": ["http://me:pw@localhost/v1"]}, "OPENAI_API_KEY"),
        ({"servers": [URL + "?key=pw"]}, "OPENAI_API_KEY"),
    ],
)
def test_bad_value_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}") as error:
        check(**options)
    assert f"regenerate.{next(iter(options))}" in str(error.value)
    assert "pw" not in str(error.value)


def test_help_shows_how_to_name_servers_and_where_the_key_comes_from() -> None:
    text = verb_help("regenerate")
    assert f"[{URL}]" in text
    assert "OPENAI_API_KEY" in text
    assert "truncated=keep  (keep | drop)" in text
