"""Evaluation by real decoding: every method on the same prompts, alternately, class by class."""

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data.batch import content_hash
from data.chat import Message, encode_prompt
from data.corpus import Prompt
from data.files import write_atomic
from data.progress import Meter
from data.target import Target
from train.config import EvaluateConfig
from train.decode.drafters import Drafter
from train.decode.session import Decoded, Session
from train.decode.verify import RandomChooser, Sampling
from train.evaluate.classes import DEFINITIONS, MethodFigures, summarise_method

log = logging.getLogger(__name__)

PLAIN = "plain"
OVERALL = "all"
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Evaluation:
    """Figures by class (and ``all``) and method."""

    figures: dict[str, dict[str, MethodFigures]]
    prompts: dict[str, int]


def evaluate(
    target: Target,
    drafters: dict[str, Drafter],
    prompts: Sequence[Prompt],
    config: EvaluateConfig,
    folder: Path,
    identity: str,
) -> Evaluation:
    """Decodes every prompt with every method and writes ``folder/<class>.json`` per class.

    A class whose file has the same identity, prompts and settings is not decoded again.

    Args:
        target: taps the layers that the draft reads.
        drafters: by name; plain decoding is always run beside them.
        prompts: turns of a prompt are played one after the other.
        config: sampling, lengths and limits.
        folder: where results go.
        identity: what is evaluated (checkpoint and its step).
    """
    sampling = Sampling(config.temperature, config.top_k, config.top_p)
    sessions = {PLAIN: Session(target, None, sampling)}
    sessions |= {name: Session(target, d, sampling) for name, d in drafters.items()}
    by_class: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_class[prompt.class_name or "prompts"].append(prompt)
    chosen = {n: p[: config.max_prompts_per_class] for n, p in by_class.items()}
    folder.mkdir(parents=True, exist_ok=True)
    everything: dict[str, list[Decoded]] = defaultdict(list)
    figures: dict[str, dict[str, MethodFigures]] = {}
    with Meter("evaluate", sum(map(len, chosen.values())), "prompts") as meter:
        for class_name, members in chosen.items():
            settings = asdict(config) | {"precision": config.precision.value}
            turns = [[p.system, *p.turns] for p in members]
            key = content_hash([identity, settings, turns])
            path = folder / f"{class_name}.json"
            decoded = _load(path, key)
            if decoded is None:
                if not figures:
                    _warm_up(target, sessions, members[0], config)
                decoded = defaultdict(list)
                for i, prompt in enumerate(members):
                    _play(target, sessions, prompt, config, i, decoded)
                    meter.add(1, class_name)
            else:
                meter.add(len(members), class_name)
            figures[class_name] = _figures(decoded, config)
            for name, answers in decoded.items():
                everything[name] += answers
            _save(path, key, len(members), figures[class_name], decoded)
    figures[OVERALL] = _figures(everything, config)
    counts = {n: len(p) for n, p in chosen.items()}
    counts[OVERALL] = sum(counts.values())
    for class_name, methods in figures.items():
        for name, f in methods.items():
            if f.identical is not None and f.identical < 1:
                log.warning(
                    "%s, %s: %.0f %% of the answers differ from plain decoding%s",
                    class_name,
                    name,
                    100 * (1 - f.identical),
                    "" if config.precision.value == "fp32" else " (expected below fp32: near ties)",
                )
    summary = {
        "identity": identity,
        "prompts": counts,
        "definitions": DEFINITIONS,
        "classes": {c: {m: asdict(f) for m, f in v.items()} for c, v in figures.items()},
    }
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    return Evaluation(figures, counts)


def _warm_up(
    target: Target, sessions: dict[str, Session], prompt: Prompt, config: EvaluateConfig
) -> None:
    """A few untimed tokens: the first passes of a process choose kernels and fill caches."""
    ids = encode_prompt(target.tokenizer, [{"role": "user", "content": prompt.turns[0]}])
    for session in sessions.values():
        session.decode(ids, min(_WARM_UP_TOKENS, config.max_new_tokens), RandomChooser(0))


def _play(
    target: Target,
    sessions: dict[str, Session],
    prompt: Prompt,
    config: EvaluateConfig,
    index: int,
    decoded: dict[str, list[Decoded]],
) -> None:
    """All turns of one prompt; plain decoding's answers are the context of later turns, so that
    all methods answer the same. Their order changes from prompt to prompt.
    """
    messages: list[Message] = []
    if prompt.system is not None:
        messages.append({"role": "system", "content": prompt.system})
    names = list(sessions)
    shift = index % len(names)
    for turn in prompt.turns:
        messages.append({"role": "user", "content": turn})
        ids = encode_prompt(target.tokenizer, messages)
        for name in names[shift:] + names[:shift]:
            chooser = RandomChooser(config.seed)
            decoded[name].append(sessions[name].decode(ids, config.max_new_tokens, chooser))
        answer = [t for t in decoded[PLAIN][-1].tokens if t not in target.stop_ids]
        messages.append({"role": "assistant", "content": target.tokenizer.decode(answer)})


def _figures(decoded: dict[str, list[Decoded]], config: EvaluateConfig) -> dict[str, MethodFigures]:
    greedy = config.temperature == 0
    return {n: summarise_method(d, decoded[PLAIN], greedy) for n, d in decoded.items()}


def _save(
    path: Path,
    key: str,
    prompts: int,
    figures: dict[str, MethodFigures],
    decoded: dict[str, list[Decoded]],
) -> None:
    value = {
        "key": key,
        "prompts": prompts,
        "figures": {name: asdict(f) for name, f in figures.items()},
        "answers": {name: [asdict(d) for d in answers] for name, answers in decoded.items()},
    }
    write_atomic(path, json.dumps(value) + "\n")


def _load(path: Path, key: str) -> dict[str, list[Decoded]] | None:
    """Answers of an earlier run of the same evaluation."""
    if not path.is_file():
        return None
    value = json.loads(path.read_text())
    if value["key"] != key:
        return None
    return {n: [Decoded.from_plain(d) for d in answers] for n, answers in value["answers"].items()}
