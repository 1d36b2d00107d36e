"""The frozen target taken apart: taps, heads, caches, stop tokens, and what is refused."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from data.config import Precision, TargetConfig
from data.errors import ConfigError, TargetError
from data.target import (
    LogitTransform,
    Target,
    embedding_scale,
    logit_transform,
    read_frozen_head,
    resolve_folder,
    resolve_taps,
    stop_ids,
    tensor_files,
)
from data.tiny import byte_tokenizer, make_tiny_target
from tests.support.tiny import CPU, TAPS, tiny_target


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    return tiny_target(tiny_folder)


def some_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, length), generator=generator)


def test_taps_are_the_hidden_states_behind_their_layers(target: Target) -> None:
    ids = some_ids(2, 9)
    output = target.forward(ids)
    own = target.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert output.taps.shape == (2, 9, len(TAPS), 64)
    for m, layer in enumerate(TAPS):
        torch.testing.assert_close(output.taps[:, :, m], own[layer + 1], rtol=0, atol=0)
    # transformers' newest entry is the final-normed state, which is ours to call `last`.
    torch.testing.assert_close(output.last, own[-1], rtol=0, atol=0)


def test_taps_can_be_chosen_apart_from_the_config(tiny_folder: Path, target: Target) -> None:
    config = TargetConfig(path=str(tiny_folder), tap_layers=[0])
    other = Target(config, CPU, precision=Precision.fp32, tap_layers=(1, 2))
    ids = some_ids(1, 5)
    assert other.tap_layers == (1, 2)
    torch.testing.assert_close(other.forward(ids).taps, target.forward(ids).taps[:, :, 1:])


def test_own_forward_is_the_models_own(target: Target) -> None:
    ids = some_ids(1, 6)
    logits, states = target.own_forward(ids)
    own = target.model(input_ids=ids, output_hidden_states=True)
    torch.testing.assert_close(logits, own.logits, rtol=0, atol=0)
    assert len(states) == len(own.hidden_states) == target.text_config.num_hidden_layers + 1


def test_logits_of_the_last_state_are_the_models_own(target: Target) -> None:
    ids = some_ids(3, 7)
    logits = target.logits(target.forward(ids).last)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, target.model(input_ids=ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_head_holds_the_models_own_tensors(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_target(tmp_path / "t", tied=tied, num_layers=2)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    frozen = read_frozen_head(folder)
    assert torch.equal(frozen.embedding, model.get_input_embeddings().weight)
    assert torch.equal(frozen.head, model.get_output_embeddings().weight)
    assert frozen.final_norm is not None
    assert torch.equal(frozen.final_norm, model.model.norm.weight)
    assert (frozen.embedding_scale, frozen.transform) == (1.0, LogitTransform())
    assert torch.equal(frozen.embedding, frozen.head) is tied
    moved = frozen.to(CPU, torch.bfloat16)
    assert moved.embedding.dtype == moved.head.dtype == torch.bfloat16
    assert (moved.head.data_ptr() == moved.embedding.data_ptr()) is tied
    with torch.inference_mode():
        own = model(input_ids=some_ids(1, 4), output_hidden_states=True)
    torch.testing.assert_close(frozen.logits(own.hidden_states[-1]), own.logits)


def test_frozen_head_names_a_tensor_that_the_files_lack(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_folder, tmp_path / "t"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TargetError, match=r"lm_head\.weight is not in the files"):
        read_frozen_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="no safetensors"):
        tensor_files(folder)


def test_default_taps_of_36_layers() -> None:
    assert resolve_taps([], 36) == (1, 9, 17, 25, 33)


@pytest.mark.parametrize("num_layers", range(3, 101))
def test_default_taps_can_be_served_at_every_depth(num_layers: int) -> None:
    taps = resolve_taps([], num_layers)
    assert list(taps) == sorted(set(taps))
    assert taps[0] >= 0
    assert taps[-1] <= num_layers - 2
    assert taps[-1] == max(num_layers - 3, 0)
    assert len(taps) == min(5, max(num_layers - 3, 1))


def test_chosen_taps_are_kept_and_the_last_layer_is_refused() -> None:
    assert resolve_taps([0, 3, 6], 8) == (0, 3, 6)
    for layer in (7, 8):
        with pytest.raises(ConfigError, match=rf"(?s){layer}\].*8 layers.*between 0 and 6"):
            resolve_taps([0, layer], 8)


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [(5, 7, (5, 7)), ([9, 2], 2, (2, 9)), (None, 3, (3,)), ([4], None, (4,)), (0, None, (0,))],
)
def test_stop_ids_are_those_of_generation_config_and_tokenizer(
    generation: object, tokenizer: object, expected: tuple[int, ...]
) -> None:
    found = stop_ids(
        SimpleNamespace(eos_token_id=generation), SimpleNamespace(eos_token_id=tokenizer)
    )
    assert found == expected


def test_target_without_a_stop_token_is_refused() -> None:
    nothing = SimpleNamespace(eos_token_id=None)
    with pytest.raises(TargetError, match="declares no stop token"):
        stop_ids(nothing, nothing)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_forward_in_two_pieces_through_a_cache_equals_one(target: Target, cut: int) -> None:
    ids = some_ids(2, 12)
    whole = target.forward(ids)
    cache = target.new_cache()
    pieces = [target.forward(ids[:, :cut], cache), target.forward(ids[:, cut:], cache)]
    assert cache.get_seq_length() == 12
    last = torch.cat([p.last for p in pieces], dim=1)
    taps = torch.cat([p.taps for p in pieces], dim=1)
    torch.testing.assert_close(last, whole.last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taps, whole.taps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 4])
def test_dropped_tokens_leave_no_trace_in_the_cache(target: Target, count: int) -> None:
    ids, others = some_ids(1, 8), some_ids(1, count, seed=1)
    cache = target.new_cache()
    target.forward(ids[:, :5], cache)
    if count:
        target.forward(others, cache)
    target.drop_last(cache, count)
    assert cache.get_seq_length() == 5
    found = target.forward(ids[:, 5:], cache)
    torch.testing.assert_close(found.last, target.forward(ids).last[:, 5:], rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_changes_no_real_token(target: Target) -> None:
    ids = some_ids(1, 10)
    padded = torch.nn.functional.pad(ids, (0, 6), value=3)
    found, expected = target.forward(padded), target.forward(ids)
    torch.testing.assert_close(found.last[:, :10], expected.last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.taps[:, :10], expected.taps, rtol=1e-4, atol=1e-4)


def test_target_is_frozen(target: Target) -> None:
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.forward(some_ids(1, 3)).last.requires_grad


def test_missing_folder_is_a_target_error_that_names_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "not-here"
    with pytest.raises(TargetError) as error:
        resolve_folder(TargetConfig(path=str(path)))
    assert str(path) in str(error.value)
    assert "fix: check the name" in str(error.value)
    assert "scripts/make_tiny_target.py" in str(error.value)


def test_tokenizer_without_a_template_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "t"))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TargetError, match="no chat template"):
        tiny_target(folder)


def test_scale_comes_before_the_soft_cap() -> None:
    logits = torch.tensor([0.0, 8.0, -100.0])
    found = LogitTransform(scale=0.5, softcap=2.0)(logits)
    expected = torch.tensor([0.0, 2 * math.tanh(2.0), 2 * math.tanh(-25.0)])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(LogitTransform(scale=0.5)(logits), logits / 2)
    assert torch.equal(LogitTransform()(logits), logits)


def test_transform_is_read_from_the_config() -> None:
    read = logit_transform
    assert read(SimpleNamespace()) == LogitTransform(1.0, None)
    assert read(SimpleNamespace(final_logit_softcapping=30.0)) == LogitTransform(1.0, 30.0)
    assert read(SimpleNamespace(logit_scale=0.25)) == LogitTransform(0.25)
    assert read(SimpleNamespace(logits_scaling=8.0)) == LogitTransform(0.125)


def test_embedding_scale_is_read_from_the_config() -> None:
    gemma = SimpleNamespace(model_type="gemma2", hidden_size=64)
    assert embedding_scale(gemma) == 8.0
    assert embedding_scale(SimpleNamespace(model_type="qwen3", hidden_size=64)) == 1.0
    granite = SimpleNamespace(model_type="granite", hidden_size=64, embedding_multiplier=12)
    assert embedding_scale(granite) == 12.0


def test_rejected_tokens_can_be_taken_back_behind_a_sliding_window(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=0,
        initializer_range=0.2,
        eos_token_id=257,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = tiny_target(tmp_path)
    assert "sliding_attention" in target.text_config.layer_types
    ids = torch.randint(0, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    whole = target.forward(ids).last
    cache = target.new_cache()
    target.forward(ids[:, :12], cache)
    target.forward(torch.zeros(1, 5, dtype=torch.long), cache)
    target.drop_last(cache, 5)
    rest = target.forward(ids[:, 12:], cache).last
    torch.testing.assert_close(rest, whole[:, 12:], rtol=1e-4, atol=1e-4)
