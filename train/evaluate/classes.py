"""Figures of one class of prompts and one decoding method, with their definitions."""

from collections.abc import Sequence
from dataclasses import dataclass

from train.decode.session import Decoded

# Printed with every table: acceptance means four different things elsewhere.
DEFINITIONS = {
    "tau": "accepted length: tokens committed per verify pass, the bonus token included, pooled "
    "over all rounds but those that the token limit kept from drafting a whole block. Equal to "
    "tokens per target pass after the prompt's own.",
    "tau_mean": "mean over prompts of the prompt's own tau",
    "accept_rate": "by slot: share of drafts that stood, among rounds in which all earlier slots "
    "stood (conditional)",
    "survival": "by slot: share of rounds that drafted the slot in which it and all earlier ones "
    "stood",
    "tokens_per_s": "new tokens after the first, over the seconds of their rounds (the prompt's "
    "pass excluded)",
    "speed_ratio": "tokens_per_s over that of plain decoding of the same prompts, measured "
    "alternately",
    "break_even_tau": "seconds of one round over seconds of one plain step: with a smaller tau "
    "speculation loses",
    "identical": "share of answers equal to plain decoding's, token for token (temperature 0 only)",
}


@dataclass(frozen=True)
class MethodFigures:
    """Figures of one method over a set of answers; see `DEFINITIONS`."""

    answers: int
    new_tokens: int
    rounds: int
    tau: float
    tau_mean: float
    accept_rate: list[float]
    survival: list[float]
    tokens_per_s: float
    speed_ratio: float
    round_s: float
    break_even_tau: float
    draft_share: float
    identical: float | None


def summarise_method(
    decoded: Sequence[Decoded], plain: Sequence[Decoded], greedy: bool
) -> MethodFigures:
    """Figures of one method beside plain decoding of the same prompts."""
    whole = [[r for r in d.rounds if not r.cut] for d in decoded]
    rounds = [r for of_answer in whole for r in of_answer]
    per_prompt = [_ratio(sum(r.committed for r in w), len(w)) for w in whole if w]
    num_slots = max((r.drafted for r in rounds), default=0)
    accept_rate, survival = [], []
    for k in range(num_slots):
        drafted = [r for r in rounds if r.drafted > k]
        reached = [r for r in drafted if r.accepted >= k]
        stood = sum(r.accepted > k for r in drafted)
        accept_rate.append(_ratio(stood, len(reached)))
        survival.append(_ratio(stood, len(drafted)))
    speed, plain_speed = _speed(decoded), _speed(plain)
    round_s = _ratio(sum(r.draft_s + r.verify_s for r in rounds), len(rounds))
    same = [a.tokens == b.tokens for a, b in zip(decoded, plain, strict=True)]
    return MethodFigures(
        answers=len(decoded),
        new_tokens=sum(len(d.tokens) for d in decoded),
        rounds=len(rounds),
        tau=_ratio(sum(r.committed for r in rounds), len(rounds)),
        tau_mean=_ratio(sum(per_prompt), len(per_prompt)),
        accept_rate=accept_rate,
        survival=survival,
        tokens_per_s=speed,
        speed_ratio=_ratio(speed, plain_speed),
        round_s=round_s,
        break_even_tau=round_s * plain_speed,
        draft_share=_ratio(
            sum(r.draft_s for r in rounds), sum(r.draft_s + r.verify_s for r in rounds)
        ),
        identical=_ratio(sum(same), len(same)) if greedy else None,
    )


def _speed(decoded: Sequence[Decoded]) -> float:
    return _ratio(
        sum(r.committed for d in decoded for r in d.rounds), sum(d.decode_s for d in decoded)
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
