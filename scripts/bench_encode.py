"""Conversations encoded a second on one core, and what bounds it.

    python scripts/bench_encode.py [TARGET_FOLDER]

Conversations of one turn and about 200 tokens, under the target's own tokenizer and template; the
share of the two tokenizer calls and of the two template renders is measured on the same texts.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from data.machine import configure_process

COUNT, ROUNDS = 400, 5
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "in", "spring")


def main() -> None:
    """Measures and prints a table; medians of the rounds, user CPU time."""
    configure_process()
    from data.chat import Conversation, encode_conversation, render
    from data.target import load_stop_ids, load_tokenizer

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/targets/smollm2-135m")
    tokenizer = load_tokenizer(folder)
    stops = load_stop_ids(folder, tokenizer)
    texts = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(150)) for i in range(COUNT)]
    talks = [
        [{"role": "user", "content": t[:60]}, {"role": "assistant", "content": t}] for t in texts
    ]
    conversations = [Conversation(tuple(m), "", f"bench:{i}") for i, m in enumerate(talks)]
    tokens = sum(len(r) for c in conversations for r in encode_conversation(tokenizer, c, stops))
    prompts = [render(tokenizer, m[:1], True) for m in talks]
    answers = [render(tokenizer, m, False)[len(p) :] for m, p in zip(talks, prompts, strict=True)]

    def encode() -> None:
        for conversation in conversations:
            encode_conversation(tokenizer, conversation, stops)

    def tokenise() -> None:
        for prompt, answer in zip(prompts, answers, strict=True):
            tokenizer.encode(prompt, add_special_tokens=False)
            tokenizer.encode(answer, add_special_tokens=False)

    def render_all() -> None:
        for messages in talks:
            render(tokenizer, messages[:1], True)
            render(tokenizer, messages, False)

    whole = seconds(encode)
    sys.stdout.write(f"{COUNT} conversations, {tokens / COUNT:.0f} tokens each\n")
    sys.stdout.write(f"encode_conversation: {COUNT / whole:,.0f} conversations/s/core\n")
    for name, work in (("tokenizer alone", tokenise), ("template alone", render_all)):
        part = seconds(work)
        sys.stdout.write(f"{name}: {COUNT / part:,.0f}/s, {part / whole:.0%} of the time\n")


def seconds(work: Callable[[], None]) -> float:
    """Median CPU seconds of the work."""
    found = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


if __name__ == "__main__":
    main()
