"""The context contract: what changes a fingerprint, and what a mismatch says."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data.errors import FingerprintMismatchError, TargetError
from data.fingerprint import Fingerprint, check_mask_token, hash_weights
from data.target import Target
from data.tiny import VOCAB_SIZE
from tests.support.tiny import tiny_target

FIELDS = {
    "tokenizer",
    "chat_template",
    "probe_renders",
    "stop_ids",
    "target_config",
    "target_weights",
}


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def original(target: Target) -> Fingerprint:
    return Fingerprint.of_target(target)


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "elsewhere" / "copy"))


def of_folder(folder: Path) -> Fingerprint:
    return Fingerprint.of_target(tiny_target(folder))


def differing(a: Fingerprint, b: Fingerprint) -> set[str]:
    assert a.fields.keys() == b.fields.keys() == FIELDS
    return {name for name in FIELDS if a.fields[name] != b.fields[name]}


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_moved_folder_has_the_same_fingerprint(original: Fingerprint, copy: Path) -> None:
    moved = of_folder(copy)
    assert differing(original, moved) == set()
    assert str(copy) not in json.dumps(moved.fields)
    moved.require_match(original, "this run", "the cache")
    # Nor does a newer transformers, which writes its own version into every config.
    assert "transformers_version" not in json.loads(moved.fields["target_config"])


def test_one_character_of_the_template_changes_template_and_renders_only(
    original: Fingerprint, copy: Path
) -> None:
    replace_in(copy / "chat_template.jinja", "<|im_start|>assistant", "<|im_start|>Assistant")
    changed = of_folder(copy)
    assert differing(original, changed) == {"chat_template", "probe_renders"}
    with pytest.raises(FingerprintMismatchError) as error:
        changed.require_match(original, "the target", "rows.jsonl")
    text = str(error.value)
    assert "chat_template (first difference at character" in text
    assert text.count("the target: ") == text.count("rows.jsonl: ") == 2
    assert "|>Assistant" in text
    assert "|>assistant" in text
    assert "run.allow_mismatch=[chat_template,probe_renders]" in text


def test_template_that_renders_the_same_changes_its_own_field_only(
    original: Fingerprint, copy: Path
) -> None:
    replace_in(copy / "chat_template.jinja", "{% endif %}", "{%  endif %}")
    assert differing(original, of_folder(copy)) == {"chat_template"}


def test_stop_ids_change_their_own_field_only(
    original: Fingerprint, target: Target, copy: Path
) -> None:
    path = copy / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "eos_token_id": [7, *target.stop_ids]}))
    changed = of_folder(copy)
    assert differing(original, changed) == {"stop_ids"}
    with pytest.raises(FingerprintMismatchError, match="stop_ids") as error:
        changed.require_match(original, "here", "there")
    assert f"here: '{json.dumps([7, *target.stop_ids])}'" in str(error.value)
    assert f"there: '{json.dumps(list(target.stop_ids))}'" in str(error.value)


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_one_number_of_one_weight_changes_the_weights_only(
    original: Fingerprint, copy: Path, name: str
) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors[name].view(-1)[-1] += 1e-3
    save_file(tensors, path, metadata={"format": "pt"})
    changed = of_folder(copy)
    assert differing(original, changed) == {"target_weights"}
    with pytest.raises(FingerprintMismatchError, match="target_weights"):
        changed.require_match(original, "here", "there")


def test_renamed_tensor_changes_the_hash_of_the_weights(copy: Path) -> None:
    before = hash_weights(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, path)
    assert hash_weights(copy) != before


def test_weights_split_over_files_have_the_same_hash(copy: Path) -> None:
    before = hash_weights(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    path.unlink()
    save_file({n: tensors[n] for n in names[::2]}, copy / "model-2.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, copy / "model-1.safetensors")
    assert hash_weights(copy) == before


def test_config_that_computes_something_else_changes_its_field_only(
    original: Fingerprint, copy: Path
) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 1e-3, "transformers_version": "9"}))
    assert differing(original, of_folder(copy)) == {"target_config"}


def test_only_fields_that_both_have_are_compared() -> None:
    Fingerprint({"a": "1", "b": "2"}).require_match(Fingerprint({"a": "1", "c": "3"}), "x", "y")


def test_mismatch_names_each_differing_field_with_both_texts_around_the_difference() -> None:
    long = "z" * 500
    mine = Fingerprint({"a": long + "MINE" + long, "b": "same", "c": "prefix"})
    theirs = Fingerprint({"a": long + "YOURS" + long, "b": "same", "c": "prefix and more"})
    with pytest.raises(FingerprintMismatchError) as error:
        mine.require_match(theirs, "this run", "cache/")
    text = str(error.value)
    assert "this run and cache/ do not come from the same context" in text
    assert "a (first difference at character 500)" in text
    assert "c (first difference at character 6)" in text
    assert "MINE" in text
    assert "YOURS" in text
    assert "b (" not in text
    assert len(text) < 1000


def test_allow_list_lets_exactly_the_named_fields_differ() -> None:
    mine, theirs = Fingerprint({"a": "1", "b": "2"}), Fingerprint({"a": "x", "b": "y"})
    mine.require_match(theirs, "here", "there", allow=["a", "b"])
    with pytest.raises(FingerprintMismatchError, match=r"allow_mismatch=\[b\]"):
        mine.require_match(theirs, "here", "there", allow=["a"])


def test_extended_adds_fields_and_leaves_the_original(original: Fingerprint) -> None:
    more = original.extended(tap_layers="[1]")
    assert more.fields == {**original.fields, "tap_layers": "[1]"}
    assert original.fields.keys() == FIELDS


def test_save_and_load_give_the_same_fields(original: Fingerprint, tmp_path: Path) -> None:
    path = tmp_path / "fingerprint.json"
    saved = original.extended(odd='line\n"quote" \N{SNOWMAN}')
    saved.save(path)
    assert Fingerprint.load(path).fields == saved.fields


@pytest.mark.parametrize("content", [None, b"", b"{", b"[1]", b'"text"', b"\xff\xfe{}"])
def test_missing_or_damaged_fingerprint_is_refused_with_its_path_and_the_fix(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "fingerprint.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FingerprintMismatchError, match=r"(?s)fingerprint\.json.*fix: run"):
        Fingerprint.load(path)


def test_mask_token_must_lie_in_the_embedding_and_stop_nothing(target: Target) -> None:
    stop = target.stop_ids
    check_mask_token(VOCAB_SIZE - 1, VOCAB_SIZE, stop)
    with pytest.raises(TargetError, match=rf"mask_token_id={VOCAB_SIZE} is outside .*{VOCAB_SIZE}"):
        check_mask_token(VOCAB_SIZE, VOCAB_SIZE, stop)
    with pytest.raises(TargetError, match=rf"mask_token_id={stop[0]} is a stop token"):
        check_mask_token(stop[0], VOCAB_SIZE, stop)
