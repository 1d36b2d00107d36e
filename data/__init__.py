"""The data side: prompts, rows, the frozen target, the cache, and what feeds a trainer from it."""
