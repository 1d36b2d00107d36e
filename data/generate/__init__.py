"""Back-ends that answer prompts, and the books that are kept about the answers."""
