"""The frozen target. Nothing else in the project knows how a transformers model is taken apart."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
)
from transformers.utils.logging import disable_progress_bar

from data.config import Precision, TargetConfig
from data.errors import ConfigError, TargetError

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}
NUM_DEFAULT_TAPS = 5
KVCache = DynamicCache  # keys and values of earlier tokens; the only cache that is used


@dataclass(frozen=True)
class LogitTransform:
    """What the target does between its head and its logits (scale first, then soft-cap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Float[Tensor, "*s V"]) -> Float[Tensor, "*s V"]:
        """Applies scale and soft-cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class FrozenHead:
    """The target's tensors that a draft shares with it: they are read, never trained.

    Attributes:
        embedding: token embedding, before ``embedding_scale``.
        head: output head; the same tensor as ``embedding`` when the target ties them.
        final_norm: weight of the target's final norm, or None when it has another form.
    """

    embedding: Float[Tensor, "V D"]
    head: Float[Tensor, "V D"]
    final_norm: Float[Tensor, " D"] | None
    embedding_scale: float
    transform: LogitTransform

    def logits(self, last: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        """Logits of a final-normed state, in fp32."""
        return self.transform(nn.functional.linear(last.to(self.head.dtype), self.head).float())

    def to(self, device: torch.device, dtype: torch.dtype) -> "FrozenHead":
        """The head on another device and in another type; tied tensors stay tied."""
        embedding = self.embedding.to(device, dtype)
        tied = self.head.data_ptr() == self.embedding.data_ptr()
        head = embedding if tied else self.head.to(device, dtype)
        return FrozenHead(embedding, head, self.final_norm, self.embedding_scale, self.transform)


@dataclass(frozen=True)
class TargetOutput:
    """One forward pass: last state (after the final norm) and outputs of the tapped layers."""

    last: Float[Tensor, "B T D"]
    taps: Float[Tensor, "B T M D"]


def resolve_folder(config: TargetConfig) -> Path:
    """The folder of the target's files; a hub name is downloaded (weights as safetensors only).

    Raises:
        TargetError: neither a folder nor a name that the hub can be asked for.
    """
    if Path(config.path).is_dir():
        return Path(config.path)
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    if config.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(
            snapshot_download(config.path, revision=config.revision, allow_patterns=patterns)
        )
    except GatedRepoError as error:
        raise TargetError(
            f"target.path={config.path}: the hub asks for a login\n"
            "  fix: accept the model's licence on its page, then 'hf auth login'"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError) as error:
        raise TargetError(
            f"target.path={config.path}: neither a folder nor reachable on the hub "
            f"({type(error).__name__})\n  fix: check the name; the demo's target is made by "
            "'python scripts/fetch_demo_target.py', the smoke test's by "
            "'python scripts/make_tiny_target.py'"
        ) from error


def text_config(model_config: Any) -> Any:  # noqa: ANN401 - configs are model-specific
    """The part of a model's config that describes its text model."""
    return model_config.get_text_config()


def load_tokenizer(
    folder: Path, trust_remote_code: bool = False, thinking: bool | None = None
) -> Any:  # noqa: ANN401
    """The target's tokenizer. ``thinking`` becomes part of every render that it makes, so that no
    stage can forget it, and the fingerprint's probe renders see it.

    Raises:
        TargetError: it has no chat template, so no prompt can be rendered.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise TargetError(f"{folder}: the tokenizer has no chat template\n  fix: add one")
    if thinking is not None:
        template = tokenizer.apply_chat_template
        cast("Any", tokenizer).apply_chat_template = partial(template, enable_thinking=thinking)
    return tokenizer


def load_model_config(folder: Path, trust_remote_code: bool = False) -> Any:  # noqa: ANN401
    """The target's config.json as transformers reads it."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def resolve_taps(tap_layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The tapped layers; without a choice five, evenly spaced from 1 to ``num_layers - 3``.

    Raises:
        ConfigError: a layer that engines cannot serve (the last one is tapped before its norm).
    """
    taps = tuple(tap_layers)
    if not taps:
        last = max(num_layers - 3, 0)
        count = min(NUM_DEFAULT_TAPS, last) or 1
        step = (last - 1) / (count - 1) if count > 1 else 0
        taps = tuple(math.floor(1 + i * step) if last else 0 for i in range(count))
    if min(taps) < 0 or max(taps) > num_layers - 2:
        raise ConfigError(
            f"target.tap_layers={list(taps)}",
            f"not all of them can be served (the target has {num_layers} layers)",
            f"tap layers between 0 and {num_layers - 2}",
        )
    return taps


class Target:
    """The frozen target with hooks on its tapped layers.

    Attributes:
        folder: where its files are.
        tap_layers: 0-based layers whose outputs `forward` returns, in increasing order.
        stop_ids: ids that end an answer.
    """

    def __init__(
        self,
        config: TargetConfig,
        device: torch.device,
        precision: Precision | None = None,
        tap_layers: Sequence[int] | None = None,
    ) -> None:
        disable_progress_bar()  # one bar per load hides what the verb itself says
        self.folder = resolve_folder(config)
        self.tokenizer = load_tokenizer(self.folder, config.trust_remote_code, config.thinking)
        self.device = device
        model = AutoModelForCausalLM.from_pretrained(
            self.folder,
            dtype=DTYPES[precision or config.precision],
            attn_implementation=config.attention,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            device_map=config.device_map,
        )
        if config.device_map is None:
            model = nn.Module.to(model, device)
        else:  # what comes out of the last layer, and the head, lie where the head lies
            self.device = model.get_output_embeddings().weight.device
        self.model: Any = model.eval().requires_grad_(False)
        self.text_config = text_config(self.model.config)
        self.decoder: nn.Module = self.model.get_decoder()
        taps = config.tap_layers if tap_layers is None else tap_layers
        self.tap_layers = resolve_taps(taps, self.text_config.num_hidden_layers)
        self.stop_ids = stop_ids(self.model.generation_config, self.tokenizer)
        # transformers fills every unset sampling option from here: a repetition penalty or a
        # min_p that ships with the target would change the law of its answers unseen.
        self.model.generation_config = GenerationConfig(eos_token_id=list(self.stop_ids))
        self._tapped: dict[int, Tensor] = {}
        for layer in self.tap_layers:
            self._layers()[layer].register_forward_hook(self._tap(layer))

    @property
    def model_config(self) -> Any:  # noqa: ANN401 - configs are model-specific
        """The model's config."""
        return self.model.config

    @property
    def transform(self) -> LogitTransform:
        """What happens between the head and the logits."""
        return logit_transform(self.text_config)

    @torch.inference_mode()
    def forward(
        self, token_ids: Int[Tensor, "B T"], cache: DynamicCache | None = None
    ) -> TargetOutput:
        """Runs the target without its head.

        Args:
            token_ids: padded on the right only: a causal model's real tokens never see it.
            cache: keys and values of earlier tokens; grows by T.
        """
        self._tapped.clear()
        output = self.decoder(
            input_ids=token_ids.to(self.device), cache=cache, use_cache=cache is not None
        )
        # With a device map the layers lie on several devices.
        taps = torch.stack([self._tapped[i].to(self.device) for i in self.tap_layers], dim=2)
        self._tapped.clear()
        return TargetOutput(output.last_hidden_state.to(self.device), taps)

    @torch.inference_mode()
    def logits(self, last: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        """Logits of final-normed states, in fp32."""
        return self.transform(self.model.get_output_embeddings()(last).float())

    @torch.inference_mode()
    def logits_fp32(self, last: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        """Logits of final-normed states, computed in fp32 whatever the type of the head."""
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        return self.transform(nn.functional.linear(last.float(), head.weight.float(), bias))

    def new_cache(self) -> DynamicCache:
        """An empty key/value cache. It keeps all tokens, also for layers with a sliding window:
        a layer that has dropped tokens could not take back rejected ones.
        """
        return DynamicCache()

    @staticmethod
    def branch(cache: DynamicCache, copies: int) -> DynamicCache:
        """A copy that goes on from the same tokens, ``copies`` times as a batch."""
        branched = copy.deepcopy(cache)
        if copies > 1:
            branched.batch_repeat_interleave(copies)
        return branched

    @staticmethod
    def drop_last(cache: DynamicCache, count: int) -> None:
        """Removes the newest ``count`` tokens from a key/value cache."""
        if count:
            cache.crop(-count)

    @torch.inference_mode()
    def own_forward(self, token_ids: Int[Tensor, "B T"]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The model's own logits and hidden states, for self-checks: not through our hooks."""
        output = self.model(
            input_ids=token_ids.to(self.device), output_hidden_states=True, use_cache=False
        )
        return output.logits.float(), output.hidden_states

    def _layers(self) -> nn.ModuleList:
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise TargetError(
                f"{self.folder}: {type(self.decoder).__name__} has no 'layers'\n"
                "  fix: only decoder-only models with a list of layers can be tapped"
            )
        return layers

    def _tap(self, layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:  # noqa: ANN401
            self._tapped[layer] = output[0] if isinstance(output, tuple) else output

        return hook


class TargetFiles:
    """What a target's files say without its weights: enough to render prompts and to fingerprint.

    Attributes:
        folder, tokenizer, stop_ids: as in `Target`.
        model_config: config.json as transformers reads it.
    """

    def __init__(self, config: TargetConfig) -> None:
        self.folder = resolve_folder(config)
        self.tokenizer = load_tokenizer(self.folder, config.trust_remote_code, config.thinking)
        self.stop_ids = load_stop_ids(self.folder, self.tokenizer)
        self.model_config = load_model_config(self.folder, config.trust_remote_code)


def stop_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Every id that ends an answer: the generation config's and the tokenizer's, sorted.

    Raises:
        TargetError: there is none, so that no answer could ever end.
    """
    ids: set[int] = set()
    for value in (generation_config.eos_token_id, tokenizer.eos_token_id):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise TargetError("the target declares no stop token\n  fix: set eos_token_id")
    return tuple(sorted(ids))


def load_stop_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Stop ids from the target's files, without its weights."""
    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:  # a target without generation_config.json: its config has the ids
        generation = GenerationConfig.from_model_config(load_model_config(folder))
    return stop_ids(generation, tokenizer)


def logit_transform(config: Any) -> LogitTransform:  # noqa: ANN401
    """Scale and soft-cap that the target's config declares."""
    scale = getattr(config, "logit_scale", None) or 1.0
    if divisor := getattr(config, "logits_scaling", None):
        scale = scale / divisor
    return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def embedding_scale(config: Any) -> float:  # noqa: ANN401
    """Factor between the rows of the embedding and what enters the first layer."""
    if multiplier := getattr(config, "embedding_multiplier", None):
        return float(multiplier)
    return math.sqrt(config.hidden_size) if config.model_type.startswith("gemma") else 1.0


def read_frozen_head(folder: Path, trust_remote_code: bool = False) -> FrozenHead:
    """Reads embedding, head and final norm from the target's files, and no other tensor.

    Raises:
        TargetError: a tensor cannot be found in the files.
    """
    config = load_model_config(folder, trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    files = tensor_files(folder)
    embedding_weight = model.get_input_embeddings().weight
    head_weight = model.get_output_embeddings().weight
    text = text_config(config)
    embedding = _read(folder, files, _names(model, embedding_weight))
    tied = head_weight is embedding_weight or bool(getattr(text, "tie_word_embeddings", False))
    head = embedding if tied else _read(folder, files, _names(model, head_weight))
    norm_weight = getattr(getattr(model.get_decoder(), "norm", None), "weight", None)
    # Gemma's norm multiplies by 1 + weight; ours by weight.
    final_norm = None
    if norm_weight is not None and not config.model_type.startswith("gemma"):
        final_norm = _read(folder, files, _names(model, norm_weight)).float()
    return FrozenHead(embedding, head, final_norm, embedding_scale(text), logit_transform(text))


def read_layer(folder: Path, index: int, trust_remote_code: bool = False) -> dict[str, Tensor]:
    """Weights of one layer by their names inside it, fp32; norms as factors.

    Raises:
        ConfigError: the target has no such layer.
    """
    marker, files = f".layers.{index}.", tensor_files(folder)
    names = [n for n in files if marker in n and "visual" not in n and "vision" not in n]
    if not names:
        raise ConfigError(f"target layer {index}", "is not in the target's files", "count from 0")
    # Gemma's norms multiply by 1 + weight; ours by weight.
    model_type = load_model_config(folder, trust_remote_code).model_type
    shift = 1.0 if model_type.startswith("gemma") else 0.0
    found = {}
    for name in names:
        with safe_open(files[name], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name).float()
        found[name.split(marker, 1)[1]] = tensor + shift if "norm" in name else tensor
    return found


def tensor_files(folder: Path) -> dict[str, Path]:
    """Every tensor of a folder of safetensors, and the file that holds it.

    Raises:
        TargetError: the folder holds no safetensors.
    """
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))
    if not files:
        raise TargetError(f"{folder}: no safetensors\n  fix: convert the weights to safetensors")
    return files


def _names(model: nn.Module, parameter: Tensor) -> list[str]:
    """Every name of a parameter: a tied one has several, and files keep only one of them."""
    return [n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]


def _read(folder: Path, files: dict[str, Path], names: Sequence[str]) -> Tensor:
    found = next((n for n in names if n in files), None)
    if found is None:
        # Files of nested models carry other prefixes than the text model's own modules.
        tails = {".".join(n.split(".")[-2:]) for n in names}
        similar = [n for n in files if any(n.endswith(f".{t}") for t in tails)]
        matches = [n for n in similar if "visual" not in n and "vision" not in n]
        if len(matches) != 1:
            raise TargetError(
                f"{folder}: tensor {' = '.join(names)} is not in the files (similar: {matches})"
            )
        found = matches[0]
    with safe_open(files[found], framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(found)
    return tensor
