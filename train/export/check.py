"""Reloads an export by its own rules and compares what it drafts with the trainer's decoder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data.target import FrozenHead, Target
from train.decode.drafters import Drafter, ModelDrafter, Proposal
from train.decode.session import Session
from train.decode.verify import Chooser, RandomChooser, Sampling
from train.errors import ExportError
from train.export.portable import read_portable
from train.models.draft import Draft


@dataclass(frozen=True)
class CheckReport:
    """Blocks drafted by the trainer's decoder and by the reloaded export.

    Attributes:
        blocks: rounds compared, on real contexts.
        tokens: drafted tokens compared; all are identical, or the check would have failed.
        same_as_master: share of those blocks that the fp32 masters draft identically too; below 1
            only where rounding the weights to bf16 tips a near tie.
        tensors: tensors whose name, shape and type were checked.
    """

    blocks: int
    tokens: int
    same_as_master: float
    tensors: int


class _Recorder:
    """Passes everything to one drafter and lets others draft the same blocks."""

    def __init__(self, lead: Drafter, others: Sequence[Drafter]) -> None:
        self._lead, self._others = lead, others
        self.blocks: list[list[Proposal]] = []

    @property
    def block_size(self) -> int:
        return self._lead.block_size

    def start(self) -> None:
        for drafter in (self._lead, *self._others):
            drafter.start()

    def extend(self, taps: torch.Tensor) -> None:
        for drafter in (self._lead, *self._others):
            drafter.extend(taps)

    def propose(self, tokens: list[int], limit: int, chooser: Chooser) -> Proposal:
        lead = self._lead.propose(tokens, limit, chooser)
        others = [d.propose(tokens, limit, chooser) for d in self._others]
        self.blocks.append([lead, *others])
        return lead


def check_portable(
    folder: Path,
    draft: Draft,
    frozen: FrozenHead,
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> CheckReport:
    """Decodes greedily and compares every drafted block.

    The trainer's decoder runs with its masters rounded to bf16, which is what was written; then
    both must agree on every token.

    Raises:
        ExportError: they differ, or the file breaks the format's contract.
    """
    reloaded = read_portable(folder, frozen)
    rounded = Draft(draft.shape, frozen).to(target.device)
    as_written = {n: t.to(torch.bfloat16).to(t.dtype) for n, t in draft.state_dict().items()}
    rounded.load_state_dict(as_written)
    greedy = Sampling()
    recorder = _Recorder(
        ModelDrafter(rounded, greedy),
        [ModelDrafter(reloaded.to(target.device), greedy), ModelDrafter(draft, greedy)],
    )
    session = Session(target, recorder, greedy)
    for ids in prompts:
        session.decode(ids, max_new_tokens, RandomChooser(0))
    if not recorder.blocks:
        raise ExportError(
            "nothing was drafted on the check prompts\n  fix: raise evaluate.max_new_tokens, or "
            "give other prompts (evaluate.prompts)"
        )
    for number, (mine, theirs, _) in enumerate(recorder.blocks):
        if mine.tokens != theirs.tokens:
            raise ExportError(
                f"{folder}: block {number} differs after reloading:\n  trainer {mine.tokens}\n"
                f"  export  {theirs.tokens}"
            )
    same = sum(mine.tokens == master.tokens for mine, _, master in recorder.blocks)
    return CheckReport(
        blocks=len(recorder.blocks),
        tokens=sum(len(mine.tokens) for mine, _, _ in recorder.blocks),
        same_as_master=same / len(recorder.blocks),
        tensors=len(reloaded.state_dict()),
    )
