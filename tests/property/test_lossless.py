"""Speculative decoding keeps the target's law: all paths of real sessions, by probability."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import train.decode.verify
from data.config import Precision, TargetConfig
from data.target import Target, TargetOutput, read_frozen_head
from tests.support.enumerate import EnumeratingChooser, law_of
from train.config import DraftConfig
from train.decode.drafters import Drafter, LookupDrafter, ModelDrafter, Proposal
from train.decode.session import Session
from train.decode.verify import Chooser, Sampling, law
from train.models.draft import Draft, DraftShape

VOCAB, STOP, MASK, TAPS = 8, 7, 6, (0, 1)
PROMPT = [1, 2, 3, 1, 2]
FULL = Sampling(temperature=1.0)
CUT = Sampling(temperature=0.7, top_k=4, top_p=0.8)
Law = dict[tuple[int, ...], float]


def write_target(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.15,
        eos_token_id=STOP,
        pad_token_id=STOP,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=str(STOP))
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


class RememberedTarget(Target):
    """The real target, one pass per distinct text: its key/value cache is the list of its tokens.

    The tokens of a cache are what `Session` fed and dropped, so a wrong drop changes the law.
    """

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config, torch.device("cpu"))
        self._known: dict[tuple[int, ...], TargetOutput] = {}

    def new_cache(self) -> Any:
        return []

    @staticmethod
    def drop_last(cache: Any, count: int) -> None:
        if count:
            del cache[-count:]

    def forward(self, token_ids: Tensor, cache: Any = None) -> TargetOutput:
        new = token_ids[0].tolist()
        cache += new
        text = tuple(cache)
        if text not in self._known:
            self._known[text] = super().forward(torch.tensor([text]))
        whole = self._known[text]
        return TargetOutput(whole.last[:, -len(new) :], whole.taps[:, -len(new) :])


class RememberedDrafter:
    """A drafter whose laws are computed once per text: `propose` draws from them each time."""

    def __init__(self, draft: Draft, sampling: Sampling) -> None:
        self._drafter = ModelDrafter(draft, sampling)
        self._known: dict[tuple[int, ...], list[Tensor]] = {}

    @property
    def block_size(self) -> int:
        return self._drafter.block_size

    def start(self) -> None:
        self._drafter.start()

    def extend(self, taps: Tensor) -> None:
        self._drafter.extend(taps)

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        drafted: list[int] = []
        laws: list[Tensor] = []
        for k in range(min(limit, 2)):
            text = (*tokens, *drafted)
            key = (len(tokens), *text)
            if key not in self._known:
                forced = Forced(drafted)
                proposal = self._drafter.propose(tokens, k + 1, forced)
                assert proposal.probs is not None
                self._known[key] = list(proposal.probs)
            laws = self._known[key]
            drafted.append(chooser.categorical(laws[k]))
        return Proposal(drafted, torch.stack(laws))


class Forced:
    """Draws the given tokens, then token 0."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = [*tokens, 0]

    def categorical(self, probs: Tensor) -> int:  # noqa: ARG002
        return self._tokens.pop(0)

    def accept(self, probability: float) -> bool:
        raise AssertionError(f"a drafter asks for no verdict ({probability})")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> RememberedTarget:
    folder = tmp_path_factory.mktemp("eight") / "target"
    write_target(folder)
    config = TargetConfig(
        path=str(folder), precision=Precision.fp32, tap_layers=list(TAPS), mask_token_id=MASK
    )
    return RememberedTarget(config)


def make_draft(target: Target) -> Draft:
    torch.manual_seed(5)
    config = DraftConfig(num_layers=1, block_size=2, head_rank=4, confidence=False)
    shape = DraftShape.of_target(target.text_config, TAPS, MASK, config)
    draft = Draft(shape, read_frozen_head(target.folder).to(target.device, torch.float32))
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.mul_(25.0)
    return draft


def target_law(target: Target, prompt: list[int], length: int, sampling: Sampling) -> Law:
    """Product of the target's own conditionals, ending at the stop token."""
    found: Law = {}

    def extend(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == length or (tokens and tokens[-1] == STOP):
            found[tokens] = probability
            return
        logits = target.own_forward(torch.tensor([[*prompt, *tokens]]))[0][0, -1]
        probs = law(logits, sampling).double()
        for token, p in enumerate((probs / probs.sum()).tolist()):
            if p > 0:
                extend((*tokens, token), probability * p)

    extend((), 1.0)
    return found


def session_law(
    target: Target, drafter: Drafter | None, prompt: list[int], length: int, sampling: Sampling
) -> Law:
    session = Session(target, drafter, sampling)

    def decode(chooser: EnumeratingChooser) -> tuple[int, ...]:
        return tuple(session.decode(prompt, length, chooser).tokens)

    return law_of(decode)


def distance(found: Law, expected: Law) -> float:
    """Largest difference of a probability."""
    return max(abs(found.get(o, 0.0) - expected.get(o, 0.0)) for o in found.keys() | expected)


def require_same(found: Law, expected: Law) -> None:
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    assert distance(found, expected) < 1e-6


def test_the_draft_differs_from_the_target_so_that_drafts_are_rejected(
    target: RememberedTarget,
) -> None:
    session = Session(target, ModelDrafter(make_draft(target), FULL), FULL)
    chosen = [
        session.decode(PROMPT, 6, train.decode.verify.RandomChooser(i)).rounds for i in range(30)
    ]
    rounds = [r for rs in chosen for r in rs]
    assert 0.1 < sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds) < 0.9


def test_the_target_law_has_short_outputs_that_end_at_the_stop_token(
    target: RememberedTarget,
) -> None:
    expected = target_law(target, PROMPT, 3, FULL)
    assert len(expected) == 1 + 7 * (1 + 7 * 8)
    assert sum(p for o, p in expected.items() if o[-1] == STOP) > 0.05


def test_plain_decoding_has_the_targets_law(target: RememberedTarget) -> None:
    for sampling in (FULL, CUT):
        found = session_law(target, None, PROMPT, 3, sampling)
        require_same(found, target_law(target, PROMPT, 3, sampling))


@pytest.mark.parametrize(
    ("sampling", "length"), [(FULL, 3), (CUT, 3), (CUT, 4)], ids=["full", "cut", "cut-longer"]
)
def test_decoding_with_a_draft_has_the_targets_law(
    target: RememberedTarget, sampling: Sampling, length: int
) -> None:
    drafter = RememberedDrafter(make_draft(target), sampling)
    found = session_law(target, drafter, PROMPT, length, sampling)
    require_same(found, target_law(target, PROMPT, length, sampling))


def test_the_real_drafter_without_memory_has_the_targets_law(target: RememberedTarget) -> None:
    # No laws are remembered here: the drafter's key/value cache takes part.
    sampling = Sampling(temperature=0.7, top_k=2)
    drafter = ModelDrafter(make_draft(target), sampling)
    found = session_law(target, drafter, PROMPT, 4, sampling)
    require_same(found, target_law(target, PROMPT, 4, sampling))


@pytest.mark.parametrize("sampling", [FULL, CUT], ids=["full", "cut"])
def test_decoding_with_prompt_lookup_has_the_targets_law(
    target: RememberedTarget, sampling: Sampling
) -> None:
    found = session_law(target, LookupDrafter(2), PROMPT, 4, sampling)
    require_same(found, target_law(target, PROMPT, 4, sampling))


Wrong = Callable[[Tensor, Tensor], Tensor]


@pytest.mark.parametrize(
    "wrong", [lambda p, _q: p, lambda p, _q: torch.full_like(p, 1 / VOCAB)], ids=["target", "even"]
)
def test_a_wrong_residual_is_noticed(
    target: RememberedTarget, monkeypatch: pytest.MonkeyPatch, wrong: Wrong
) -> None:
    monkeypatch.setattr(train.decode.verify, "residual", wrong)
    drafter = RememberedDrafter(make_draft(target), CUT)
    drafters: list[Drafter] = [drafter, LookupDrafter(2)]
    for each in drafters:
        found = session_law(target, each, PROMPT, 3, CUT)
        assert distance(found, target_law(target, PROMPT, 3, CUT)) > 1e-3


def test_a_wrong_acceptance_is_noticed(
    target: RememberedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.decode.verify, "acceptance", lambda p, _q, t: float(p[t]))
    found = session_law(target, RememberedDrafter(make_draft(target), CUT), PROMPT, 3, CUT)
    assert distance(found, target_law(target, PROMPT, 3, CUT)) > 1e-3


def test_a_token_left_in_the_cache_after_a_rejection_is_noticed(
    target: RememberedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "drop_last", lambda _cache, _count: None)
    found = session_law(target, RememberedDrafter(make_draft(target), CUT), PROMPT, 3, CUT)
    assert distance(found, target_law(target, PROMPT, 3, CUT)) > 1e-3
