"""The portable export: its contract, its round trip, and checks that notice a wrong file."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.fingerprint import Fingerprint
from data.target import Target
from tests.support.tiny import TAPS, tiny_draft, tiny_shape, tiny_target
from train.errors import ExportError
from train.export.check import check_portable
from train.export.portable import (
    WEIGHTS,
    check_contract,
    engine_warnings,
    portable_config,
    read_portable,
    shape_of_config,
    write_portable,
)
from train.models.draft import Draft

FINGERPRINT = Fingerprint({"tokenizer": "bytes"})
PROMPTS = [[72, 101, 108, 108, 111], [1, 2, 3]]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"head_rank": 0},
    {"confidence": False},
    {"head_rank": 0, "confidence": False},
]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


@pytest.fixture(scope="module")
def draft(target: Target) -> Draft:
    return tiny_draft(target, scale=5.0)


@pytest.fixture
def folder(draft: Draft, tmp_path: Path) -> Path:
    write_portable(draft, tmp_path / "export", FINGERPRINT)
    return tmp_path / "export"


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(change(tensors), folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_what_is_written_is_read_back_rounded_to_bf16(
    target: Target, tmp_path: Path, options: dict[str, Any]
) -> None:
    draft = tiny_draft(target, **options)
    write_portable(draft, tmp_path / "new" / "export", FINGERPRINT)
    reloaded = read_portable(tmp_path / "new" / "export", draft.frozen)
    assert reloaded.shape == draft.shape
    found, expected = reloaded.state_dict(), draft.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.bfloat16().float()), name


def test_the_folder_holds_config_tensors_and_fingerprint(folder: Path) -> None:
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "fingerprint.json",
        "model.safetensors",
    ]
    assert Fingerprint.load(folder / "fingerprint.json").fields == FINGERPRINT.fields


def test_tensors_are_bf16_without_embedding_or_head(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not [n for n in tensors if "embed_tokens" in n or "lm_head" in n]
    assert "fc.weight" in tensors
    assert "layers.1.self_attn.q_norm.weight" in tensors


def test_config_has_the_fields_that_engines_read(draft: Draft, folder: Path) -> None:
    dspark = {
        "block_size": 4,
        "num_target_layers": 4,
        "mask_token_id": 258,
        "target_layer_ids": [0, 1, 2],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    theta = draft.shape.backbone.rope_theta
    assert read_config(folder) == {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "vocab_size": 259,
        "draft_vocab_size": 259,
        "target_hidden_size": 64,
        "max_position_embeddings": 1024,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "sample_from_anchor": True,
        "num_anchors": 512,
        **dspark,
        "dflash_config": {"projector_type": "dspark", "causal": False, **dspark},
    }


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_shape_of_config_inverts_portable_config(target: Target, options: dict[str, Any]) -> None:
    shape = tiny_shape(target, **options)
    shape = replace(shape, backbone=replace(shape.backbone, rope_theta=123.0, num_layers=3))
    text = json.dumps(portable_config(shape))
    assert shape_of_config(json.loads(text)) == shape


@pytest.mark.parametrize("field", ["head_dim", "rope_parameters", "block_size", "markov_rank"])
def test_a_missing_field_is_named(target: Target, field: str) -> None:
    config = portable_config(tiny_shape(target))
    del config[field]
    with pytest.raises(ExportError, match=field):
        shape_of_config(config)


def test_another_block_layout_is_refused(target: Target) -> None:
    config = portable_config(tiny_shape(target)) | {"sample_from_anchor": False}
    with pytest.raises(ExportError, match="sample_from_anchor"):
        shape_of_config(config)


def test_a_good_file_fits_its_contract(folder: Path) -> None:
    check_contract(folder, read_config(folder))


def without_fc(tensors: Tensors) -> Tensors:
    del tensors["fc.weight"]
    return tensors


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fc.weight", without_fc),
        ("lm_head.weight", lambda t: t | {"lm_head.weight": t["norm.weight"].clone()}),
        ("norm.weight", lambda t: t | {"norm.weight": t["norm.weight"][:-1]}),
        ("fc.weight", lambda t: t | {"fc.weight": t["fc.weight"].T.contiguous()}),
        ("norm.weight", lambda t: t | {"norm.weight": t["norm.weight"].float()}),
        ("norm.weight", lambda t: t | {"norm.weight": t["norm.weight"].half()}),
    ],
    ids=["missing", "extra", "short", "transposed", "fp32", "fp16"],
)
def test_contract_names_the_tensor_that_breaks_it(
    folder: Path, draft: Draft, name: str, change: Callable[[Tensors], Tensors]
) -> None:
    edit(folder, change)
    with pytest.raises(ExportError, match=name) as raised:
        check_contract(folder, read_config(folder))
    # Nothing else is reported, and reading refuses too.
    assert len(str(raised.value).splitlines()) == 2
    with pytest.raises(ExportError, match=name):
        read_portable(folder, draft.frozen)


def test_a_truncated_file_is_an_error_that_names_it(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-10])
    with pytest.raises(ExportError, match=WEIGHTS):
        check_contract(folder, read_config(folder))


def test_settings_that_lose_an_engine_are_named(target: Target) -> None:
    assert engine_warnings(tiny_draft(target)) == []
    (no_head, no_markov) = engine_warnings(tiny_draft(target, head_rank=0))
    assert "SGLang" in no_head
    assert "llama.cpp" in no_markov
    (no_confidence,) = engine_warnings(tiny_draft(target, confidence=False))
    assert "confidence" in no_confidence
    assert len(engine_warnings(tiny_draft(target, head_rank=0, confidence=False))) == 2


def test_a_good_export_drafts_what_the_trainer_drafts(
    folder: Path, draft: Draft, target: Target
) -> None:
    before = {n: p.detach().clone() for n, p in draft.named_parameters()}
    report = check_portable(folder, draft, draft.frozen, target, PROMPTS, 12)
    assert report.blocks >= 2
    assert report.tokens >= report.blocks
    assert 0 <= report.same_as_master <= 1
    assert report.tensors == len(draft.state_dict())
    # The masters stay as they were: only a copy is rounded.
    assert all(torch.equal(p, before[n]) for n, p in draft.named_parameters())


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight",
        "norm.weight",
        "layers.0.self_attn.v_proj.weight",
        "layers.1.mlp.down_proj.weight",
        "markov_head.markov_w2.weight",
    ],
)
def test_an_export_with_another_tensor_is_refused(
    folder: Path, draft: Draft, target: Target, name: str
) -> None:
    edit(folder, lambda t: t | {name: -3 * t[name]})
    with pytest.raises(ExportError, match="differs after reloading"):
        check_portable(folder, draft, draft.frozen, target, PROMPTS, 12)


def test_a_config_that_says_another_thing_is_refused(
    folder: Path, draft: Draft, target: Target
) -> None:
    config = read_config(folder) | {"target_layer_ids": list(TAPS[:2])}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=r"fc\.weight"):
        check_portable(folder, draft, draft.frozen, target, PROMPTS, 12)


def test_a_failed_write_leaves_the_old_export_and_nothing_else(
    folder: Path, draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    (folder / "note").write_text("the old one")
    monkeypatch.setattr(Fingerprint, "save", fail)
    for place in (folder, folder.with_name("fresh")):
        with pytest.raises(ExportError, match=r"no space left.*\n  fix: make room"):
            write_portable(draft, place, FINGERPRINT)
    assert [p.name for p in folder.parent.iterdir()] == ["export"]
    assert (folder / "note").exists()


def test_a_full_disk_leaves_no_folder(draft: Draft, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ExportError, match="could not be written"):
            write_portable(draft, tmp_path / "export", FINGERPRINT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_new_export_replaces_the_old_one(folder: Path, target: Target) -> None:
    other = tiny_draft(target, seed=3)
    write_portable(other, folder, FINGERPRINT)
    assert torch.equal(
        load_file(folder / WEIGHTS)["fc.weight"], other.fc.weight.detach().bfloat16()
    )
