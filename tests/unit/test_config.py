"""Configuration: every preset composes, bad keys and values are refused with key and fix."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from data.config import FINGERPRINT_FIELDS
from data.errors import ConfigError
from data.fingerprint import Fingerprint
from tests.support.processes import dspark
from tests.support.tiny import tiny_target
from train.config import VERBS, PipelineConfig
from train.help import group_options, known_keys, verb_help, verbs_help
from train.rules import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hydra() -> Iterator[None]:
    ConfigStore.instance().store(name="schema", node=PipelineConfig)
    with initialize_config_module("configs", version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def load(verb: str, *overrides: str) -> PipelineConfig:
    return load_config(compose(verb, overrides=list(overrides)), verb)


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("experiment", ["demo", "smoke"])
def test_experiments_compose_for_every_verb(verb: str, experiment: str) -> None:
    config = load(verb, f"experiment={experiment}")
    assert config.run.name == experiment
    assert config.run_dir == Path("outputs") / experiment


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("target", sorted(set(group_options("target")) - {"default"}))
def test_targets_compose(target: str) -> None:
    config = load("train", f"target={target}")
    assert config.target.path
    assert config.target.mask_token_id >= 0


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("group", ["cache", "draft", "objective", "optim", "run", "corpus"])
def test_presets_compose(group: str) -> None:
    for option in group_options(group):
        load("train", "target=tiny", f"{group}={option}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("draft.blok_size=3", ["draft.blok_size", "draft.block_size"]),
        ("+draft.blok_size=3", ["draft.blok_size", "unknown key"]),
        ("+nonsense=3", ["nonsense", "unknown key"]),
        ("optim.lr=abc", ["optim.lr", "abc", "learning rate"]),
        ("draft.head=transformer", ["draft.head", "transformer"]),
        ("target.tap_layers=[1,x]", ["target.tap_layers", "x"]),
        ("target.tap_layers=[3,1]", ["target.tap_layers", "increasing"]),
        ("objective.decay_scale=0", ["objective.decay_scale", "null"]),
        ("draft.confidence=false", ["objective.confidence_weight", "draft.confidence=true"]),
        ("optim.rows_per_step=0", ["optim.rows_per_step=0", "at least 1"]),
        ("target=nosuch", ["target/nosuch", "qwen3_4b"]),
        ("optim.lr=[1", ["optim.lr=[1", "key=value"]),
        ("run.name=a/b", ["run.name=a/b", "folder"]),
        ("target.mask_token_id=-1", ["target.mask_token_id", "give target.mask_token_id"]),
        ("regenerate.top_p=0.5", ["regenerate.top_p", "no effect on 'dspark train'"]),
        ("corpus=demo", ["corpus=demo", "no effect on 'dspark train'"]),
        ("cache.batch_tokens=5", ["cache.batch_tokens=5", "no effect on 'dspark train'"]),
        ("target.precision=fp32", ["target.precision", "no effect on 'dspark train'"]),
        ("run.seed=-1", ["run.seed=-1", "at least 0"]),
        ("run.allow_mismatch=[nonsense]", ["run.allow_mismatch", "chat_template"]),
        (
            "objective.confidence_weight=0",
            ["objective.confidence_weight", "draft.confidence=false"],
        ),
    ],
)
def test_bad_override_is_refused_with_key_and_fix(
    override: str, words: list[str], tmp_path: Path
) -> None:
    output = dspark("train", "experiment=smoke", override, cwd=tmp_path, expect=2)
    for word in [*words, "fix:"]:
        assert word in output, output
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir()), "nothing is written before the configuration is valid"


def test_unknown_verb_lists_the_verbs(tmp_path: Path) -> None:
    output = dspark("trian", cwd=tmp_path, expect=1)
    assert all(verb in output for verb in VERBS)


@pytest.mark.usefixtures("hydra")
def test_several_samples_need_a_temperature() -> None:
    with pytest.raises(ConfigError, match="all the same answer"):
        load(
            "regenerate",
            "experiment=smoke",
            "regenerate.samples_per_prompt=2",
            "regenerate.temperature=0",
        )


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("verb", VERBS)
def test_there_is_no_target_until_one_is_chosen(verb: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)target\.path.*preset target="):
        load(verb, "evaluate.prompts=x") if verb in ("evaluate", "export") else load(verb)


@pytest.mark.usefixtures("hydra")
def test_cache_can_be_checked_without_its_target() -> None:
    assert load("cache", "mode=verify").target.path == ""


def test_every_recorded_fingerprint_field_may_be_named(tiny_folder: Path) -> None:
    fields = Fingerprint.of_target(tiny_target(tiny_folder)).fields
    assert set(fields) <= set(FINGERPRINT_FIELDS)


@pytest.mark.usefixtures("hydra")
def test_verb_that_needs_prompts_says_so() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.prompts"):
        load("evaluate", "target=tiny")


@pytest.mark.parametrize("verb", VERBS)
def test_help_documents_every_key_that_the_verb_reads(verb: str) -> None:
    text = verb_help(verb)
    for key, doc in known_keys().items():
        if VERBS[verb].reads_key(key):
            assert f"{key}=" in text
            assert len(doc.split(")", 1)[1]) > 5, f"{key} has no documentation"
        else:
            assert f"    {key}=" not in text
    assert "usage:" in text


def test_help_of_the_command_names_all_verbs(tmp_path: Path) -> None:
    assert dspark("--help", cwd=tmp_path) == verbs_help()
    assert "Distils a draft" in dspark("train", "--help", cwd=tmp_path)
    assert all(verb in verbs_help() for verb in VERBS)


def test_resolved_configuration_can_be_printed(tmp_path: Path) -> None:
    output = dspark("train", "experiment=smoke", "--cfg", "job", "--resolve", cwd=tmp_path)
    assert "dir: outputs/smoke" in output
