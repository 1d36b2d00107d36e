"""The portable layout: one folder that vLLM, SGLang and llama.cpp's converter load as it is.

bf16 tensors under the engines' names, without prefix, embedding or head: every engine takes both
from the target. Each field is written because an engine reads it; nothing is inherited from the
target's config that training did not use.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import atomic_folder
from data.fingerprint import Fingerprint
from data.target import FrozenHead, LogitTransform
from train.errors import ExportError
from train.models.backbone import BackboneConfig
from train.models.draft import Draft, DraftShape

ARCHITECTURE = "Qwen3DSparkModel"
WEIGHTS = "model.safetensors"
# DeepSpec's constructor asks for it; it has no meaning after training.
_NUM_ANCHORS = 512


def portable_config(shape: DraftShape) -> dict[str, Any]:
    """Content of config.json."""
    backbone = shape.backbone
    dspark = {
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.tap_layers),
        "markov_rank": shape.head_rank,
        "markov_head_type": shape.head,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence and shape.head_rank > 0,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": backbone.hidden_size,
        "intermediate_size": backbone.intermediate_size,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "num_key_value_heads": backbone.num_kv_heads,
        "head_dim": backbone.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": backbone.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": backbone.hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "layer_types": ["full_attention"] * backbone.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": backbone.rope_theta},
        "rope_theta": backbone.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "sample_from_anchor": True,
        "num_anchors": _NUM_ANCHORS,
        **dspark,
        "dflash_config": {"projector_type": "dspark", "causal": False, **dspark},
    }


def shape_of_config(config: dict[str, Any]) -> DraftShape:
    """The draft that a portable config.json describes.

    Raises:
        ExportError: a field is missing, or another block layout.
    """
    try:
        if not config["sample_from_anchor"]:
            raise ExportError("config.json: sample_from_anchor=false is not this layout")
        return DraftShape(
            BackboneConfig(
                hidden_size=config["hidden_size"],
                intermediate_size=config["intermediate_size"],
                num_layers=config["num_hidden_layers"],
                num_heads=config["num_attention_heads"],
                num_kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                rms_norm_eps=config["rms_norm_eps"],
                rope_theta=config["rope_parameters"]["rope_theta"],
            ),
            vocab_size=config["vocab_size"],
            tap_layers=tuple(config["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            head=config["markov_head_type"],
            head_rank=config["markov_rank"],
            confidence=config["enable_confidence_head"],
            max_position_embeddings=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise ExportError(f"config.json: field {error} is missing") from error


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the engines expect for a config, from the format's own table."""
    H, I = config["hidden_size"], config["intermediate_size"]  # noqa: E741 - the format's symbols
    hd, V, r = config["head_dim"], config["vocab_size"], config["markov_rank"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(config["target_layer_ids"]) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= {
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
            f"layers.{i}.self_attn.q_proj.weight": (q, H),
            f"layers.{i}.self_attn.k_proj.weight": (kv, H),
            f"layers.{i}.self_attn.v_proj.weight": (kv, H),
            f"layers.{i}.self_attn.o_proj.weight": (H, q),
            f"layers.{i}.self_attn.q_norm.weight": (hd,),
            f"layers.{i}.self_attn.k_norm.weight": (hd,),
            f"layers.{i}.mlp.gate_proj.weight": (I, H),
            f"layers.{i}.mlp.up_proj.weight": (I, H),
            f"layers.{i}.mlp.down_proj.weight": (H, I),
        }
    if r > 0:
        tensors |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (V, r)}
    if config["enable_confidence_head"]:
        width = H + (r if config["confidence_head_with_markov"] else 0)
        tensors |= {
            "confidence_head.proj.weight": (1, width),
            "confidence_head.proj.bias": (1,),
        }
    return tensors


def engine_warnings(draft: Draft) -> list[str]:
    """Settings that lose an engine, or that it must know."""
    shape, lost = draft.shape, []
    embedding_scale, transform = draft.frozen.embedding_scale, draft.frozen.transform
    if shape.head_rank == 0:
        lost.append("head_rank 0: SGLang refuses it, vLLM loads it as method 'dspark' on one GPU")
    if not shape.confidence:
        lost.append("no confidence head: no confidence-scheduled verification in any engine")
    elif shape.head_rank == 0:
        lost.append("confidence head without Markov embedding: llama.cpp cannot load it")
    if embedding_scale != 1.0:
        lost.append(f"embedding scaled by {embedding_scale:.3g}: engines must do so for the draft")
    if transform != LogitTransform():
        lost.append(f"logits changed by {transform}: engines must do so for the draft")
    return lost


def write_portable(
    draft: Draft,
    folder: Path,
    fingerprint: Fingerprint,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Writes config.json, model.safetensors and fingerprint.json; complete or not at all.

    ``check`` gets the folder before it takes its name: when it raises, an older export stays.

    Raises:
        ExportError: the disk is full or the folder cannot be written.
    """
    tensors: dict[str, Tensor] = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    try:
        with atomic_folder(folder) as partial:
            save_file(tensors, partial / WEIGHTS, {"format": "pt"})
            text = json.dumps(portable_config(draft.shape), indent=1) + "\n"
            (partial / "config.json").write_text(text)
            fingerprint.save(partial / "fingerprint.json")
            check(partial)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder}: could not be written ({error})\n  fix: make room") from error


def read_portable(folder: Path, frozen: FrozenHead) -> Draft:
    """The draft of an exported folder, in fp32, from config.json and the tensors alone.

    Raises:
        ExportError: the config is incomplete, or a tensor has another name, shape or type.
    """
    config = json.loads((folder / "config.json").read_text())
    check_contract(folder, config)
    draft = Draft(shape_of_config(config), frozen)
    draft.load_state_dict({n: t.float() for n, t in load_file(folder / WEIGHTS).items()})
    return draft


def check_contract(folder: Path, config: dict[str, Any]) -> None:
    """Compares the file's names, shapes and types with `expected_tensors`.

    Raises:
        ExportError: names what is missing, unknown or different.
    """
    expected = expected_tensors(config)
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as opened:
            found = {n: opened.get_slice(n) for n in opened.keys()}  # noqa: SIM118 - not a dict
            shapes = {n: (tuple(s.get_shape()), s.get_dtype()) for n, s in found.items()}
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{folder / WEIGHTS}: unreadable ({error})") from error
    wanted = {name: (shape, "BF16") for name, shape in expected.items()}
    if shapes != wanted:
        names = sorted(n for n in shapes.keys() | wanted.keys() if shapes.get(n) != wanted.get(n))
        lines = "\n".join(f"  {n}: is {shapes.get(n)}, must be {wanted.get(n)}" for n in names)
        raise ExportError(f"{folder / WEIGHTS} does not fit its config.json:\n{lines}")
