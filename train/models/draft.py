"""The DSpark draft: one parallel pass over a block, a sequential head, a confidence head."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from data.errors import ConfigError
from data.target import FrozenHead
from train.config import DraftConfig, HeadKind
from train.models.attention import context_visible
from train.models.backbone import BackboneConfig, ContextKeysValues, DraftLayer, RMSNorm
from train.models.heads import HEADS, ConfidenceHead
from train.models.rope import rope_tables, rope_theta

_INIT_STD = 0.02


@dataclass(frozen=True)
class DraftShape:
    """Everything that fixes a draft's tensors and its meaning; saved with every checkpoint.

    The block layout is anchor-first: the block's inputs are the anchor token and
    ``block_size - 1`` mask tokens, and slot k predicts the token k+1 places after the anchor.
    """

    backbone: BackboneConfig
    vocab_size: int
    tap_layers: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    head: str
    head_rank: int
    confidence: bool
    max_position_embeddings: int

    @classmethod
    def of_target(
        cls,
        text_config: Any,  # noqa: ANN401 - configs are model-specific
        tap_layers: tuple[int, ...],
        mask_token_id: int,
        config: DraftConfig,
    ) -> "DraftShape":
        """The draft that fits a target.

        Raises:
            ConfigError: the target's rotary form or activation is not implemented.
        """
        activation = getattr(text_config, "hidden_act", None) or text_config.hidden_activation
        if activation not in ("silu", "gelu_pytorch_tanh"):
            raise ConfigError(f"target's hidden_act={activation}", "unknown", "use another target")
        heads = text_config.num_attention_heads
        return cls(
            BackboneConfig(
                hidden_size=text_config.hidden_size,
                intermediate_size=config.intermediate_size or text_config.intermediate_size,
                num_layers=config.num_layers,
                num_heads=heads,
                num_kv_heads=text_config.num_key_value_heads,
                head_dim=getattr(text_config, "head_dim", None) or text_config.hidden_size // heads,
                rms_norm_eps=text_config.rms_norm_eps,
                rope_theta=config.rope_theta or rope_theta(text_config),
            ),
            vocab_size=text_config.vocab_size,
            tap_layers=tap_layers,
            num_target_layers=text_config.num_hidden_layers,
            block_size=config.block_size,
            mask_token_id=mask_token_id,
            head=config.head.value,
            head_rank=config.head_rank,
            confidence=config.confidence,
            max_position_embeddings=text_config.max_position_embeddings,
        )

    def to_json(self) -> str:
        """JSON that `from_json` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "DraftShape":
        """Reads what `to_json` wrote."""
        value = json.loads(text)
        value["backbone"] = BackboneConfig(**value["backbone"])
        value["tap_layers"] = tuple(value["tap_layers"])
        return cls(**value)


@dataclass(frozen=True)
class SlotOutput:
    """The counted slots of a batch.

    Attributes:
        states: final-normed.
        embedded: input of the sequential head's last matrix, one a distinct position.
        confidence: logit of conditional survival, or None.
    """

    states: Float[Tensor, "S D"]
    embedded: Float[Tensor, "P R"]
    confidence: Float[Tensor, " S"] | None


class Draft(nn.Module):
    """The trained part. Embedding and head are the target's: they are held beside the module, so
    that they are never trained, saved, or copied between ranks.
    """

    def __init__(self, shape: DraftShape, frozen: FrozenHead) -> None:
        super().__init__()
        config = shape.backbone
        D = config.hidden_size
        self.shape, self.frozen = shape, frozen
        self.fc = nn.Linear(len(shape.tap_layers) * D, D, bias=False)
        self.hidden_norm = RMSNorm(D, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(D, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_INIT_STD)
        head = HEADS[HeadKind(shape.head)]
        self.markov_head = head(shape.vocab_size, shape.head_rank) if shape.head_rank else None
        self.confidence_head = ConfidenceHead(D, shape.head_rank) if shape.confidence else None

    def init_layers(self, sources: Sequence[Mapping[str, Tensor]]) -> None:
        """Starts every layer from a layer of the target, and the context's norm from the norm
        before the first one's attention. What the target's layers lack stays as it is.

        Args:
            sources: weights by name, see `data.target.read_layer`; one for each layer.

        Raises:
            ConfigError: the shapes differ.
        """
        with torch.no_grad():
            for layer, source in zip(self._layers, sources, strict=True):
                for name, parameter in layer.named_parameters():
                    if (weight := source.get(name)) is not None:
                        _require_shape(name, weight, parameter)
                        parameter.copy_(weight)
            if (norm := sources[0].get("input_layernorm.weight")) is not None:
                self.hidden_norm.weight.copy_(norm)

    def init_fc_as_average(self) -> None:
        """Starts the projection of the tapped states as their average."""
        taps = len(self.shape.tap_layers)
        with torch.no_grad():
            one = torch.eye(self.shape.backbone.hidden_size, device=self.fc.weight.device)
            self.fc.weight.copy_(one.repeat(1, taps) / taps)

    def init_norm_from_target(self) -> None:
        """Starts the final norm from the target's.

        Raises:
            ConfigError: the target's norm has another form.
        """
        if self.frozen.final_norm is None:
            raise ConfigError(
                "draft.init_norm_from_target=true",
                "the target's final norm is not a plain RMSNorm",
                "draft.init_norm_from_target=false",
            )
        with torch.no_grad():
            self.norm.weight.copy_(self.frozen.final_norm)

    def forward(
        self,
        taps: Float[Tensor, "B T M D"],
        token_ids: Int[Tensor, "B T"],
        anchor_pos: Int[Tensor, "B N"],
        slot_mask: Bool[Tensor, "B N K"],
        distinct: Int[Tensor, " P"],
        position: Int[Tensor, " S"],
    ) -> SlotOutput:
        """What training needs of the counted slots, teacher-forced, before any vocabulary.

        The previous token of slot k is the row's own token at ``anchor_pos + k``. Slots that do
        not count take part in their block's attention but never reach the head.

        Args:
            taps: of the batch.
            token_ids: of the batch.
            anchor_pos: sorted anchors of every row.
            slot_mask: slots that count.
            distinct: flat positions ``row * T + t`` of their previous tokens, each once.
            position: index into them of every counted slot.
        """
        states = self.states(taps, token_ids, anchor_pos)[slot_mask]
        embedded = self.embed_previous(token_ids.flatten()[distinct])
        return SlotOutput(states, embedded, self.confidence_logits(states, embedded[position]))

    def slot_logits(
        self,
        taps: Float[Tensor, "B T M D"],
        token_ids: Int[Tensor, "B T"],
        anchor_pos: Int[Tensor, "B N"],
        slot_mask: Bool[Tensor, "B N K"],
    ) -> tuple[Float[Tensor, "S V"], Float[Tensor, " S"] | None]:
        """Logits and confidence logits of the counted slots: the plain way, for comparison."""
        states = self.states(taps, token_ids, anchor_pos)[slot_mask]
        slots = torch.arange(self.shape.block_size, device=anchor_pos.device)
        positions = (anchor_pos.unsqueeze(-1) + slots).clamp_max(token_ids.shape[1] - 1)
        previous = token_ids.gather(1, positions.flatten(1)).view_as(positions)[slot_mask]
        embedded = self.embed_previous(previous)
        logits = self.base_logits(states) + self.head_bias(embedded)
        return logits, self.confidence_logits(states, embedded)

    @property
    def head_weight(self) -> Float[Tensor, "V R"] | None:
        """Last matrix of the sequential head, None without one."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def states(
        self,
        taps: Float[Tensor, "B T M D"],
        token_ids: Int[Tensor, "B T"],
        anchor_pos: Int[Tensor, "B N"],
    ) -> Float[Tensor, "B N K D"]:
        """Final-normed states of all blocks of a batch.

        Row padding is never seen: it lies behind every anchor.
        """
        positions = torch.arange(taps.shape[1], device=taps.device)
        contexts = self.context(taps, positions)
        visible = context_visible(anchor_pos, taps.shape[1])
        return self.block(token_ids.gather(1, anchor_pos), anchor_pos, contexts, visible)

    def context(
        self, taps: Float[Tensor, "B C M D"], positions: Int[Tensor, " C"]
    ) -> list[ContextKeysValues]:
        """Keys and values of context tokens in every layer (DSpark Eq. 2 and 3)."""
        features = self.hidden_norm(self.fc(taps.flatten(-2).to(self._compute_dtype)))
        rope = self._rope(positions.unsqueeze(0))
        return [layer.self_attn.keys_values(features, rope) for layer in self._layers]

    def block(
        self,
        anchor_ids: Int[Tensor, "B N"],
        anchor_pos: Int[Tensor, "B N"],
        contexts: list[ContextKeysValues],
        visible: Bool[Tensor, "B N C"] | None = None,
    ) -> Float[Tensor, "B N K D"]:
        """Final-normed states of the blocks at the given anchors.

        Args:
            anchor_ids: the anchors' own tokens.
            anchor_pos: their positions.
            contexts: keys and values per layer, see `context`.
            visible: context that each block sees; None: all of it.
        """
        K = self.shape.block_size
        ids = torch.full((*anchor_ids.shape, K), self.shape.mask_token_id, device=anchor_ids.device)
        ids[..., 0] = anchor_ids
        x = self.frozen.embedding[ids].to(self.fc.weight.dtype) * self.frozen.embedding_scale
        slots = torch.arange(K, device=anchor_pos.device)
        rope = self._rope(anchor_pos.unsqueeze(-1) + slots)
        for layer, context in zip(self._layers, contexts, strict=True):
            x = layer(x, rope, context, visible)
        normed: Tensor = self.norm(x)
        return normed

    def base_logits(self, states: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        """Logits before the sequential head, through the target's head, fp32."""
        return self.frozen.logits(states)

    def embed_previous(self, previous: Int[Tensor, "*s"]) -> Float[Tensor, "*s R"]:
        """``W1[x]`` of the previous token; of width 0 without a sequential head."""
        if self.markov_head is None:
            return self.fc.weight.new_zeros(*previous.shape, 0)
        return self.markov_head.embed(previous)

    def head_bias(self, embedded: Float[Tensor, "*s R"]) -> Float[Tensor, "*s V"] | float:
        """What the sequential head adds to the base logits."""
        return 0.0 if self.markov_head is None else self.markov_head.bias(embedded)

    def confidence_logits(
        self, states: Float[Tensor, "*s D"], embedded: Float[Tensor, "*s R"]
    ) -> Float[Tensor, "*s"] | None:
        """Logit of conditional survival; None without a confidence head."""
        return None if self.confidence_head is None else self.confidence_head(states, embedded)

    @property
    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]

    @property
    def _compute_dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.shape.backbone.head_dim, self.shape.backbone.rope_theta)


def _require_shape(name: str, weight: Tensor, parameter: Tensor) -> None:
    if weight.shape != parameter.shape:
        raise ConfigError(
            "draft.init_layers",
            f"the target's {name} is {tuple(weight.shape)}, the draft's {tuple(parameter.shape)}",
            "give the draft the target's sizes (draft.intermediate_size=null), or leave it out",
        )
