"""Chat templates of the structures in use, written for these tests."""

from typing import Any

from data.tiny import CHATML, byte_tokenizer

# name -> (template, the text that ends an answer)
TEMPLATES: dict[str, tuple[str, str]] = {
    "chatml": (CHATML, "<|im_end|>"),
    # A default system prompt, as SmolLM2's.
    "default-system": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    # Llama-3: headers, trimmed content, no newline behind the end of a turn.
    "llama3": (
        "{{ '<|mask|>' }}{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}",
        "<|im_end|>",
    ),
    # Gemma: 'model' for the assistant, no system role, strict alternation.
    "gemma": (
        "{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
        "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' "
        "+ m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}",
        "<|im_end|>",
    ),
    # Qwen3: earlier turns lose their reasoning; without thinking the generation prompt supplies an
    # empty block, which the answer's own render repeats.
    "qwen3": (
        "{% set think = enable_thinking is not defined or enable_thinking %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and loop.last %}"
        "{{ '<think>\n' + (m['reasoning_content'] if m['reasoning_content'] and think else '') "
        "+ '\n</think>\n\n' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if not think %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
        "<|im_end|>",
    ),
    # No end-of-turn token at all.
    "bare": (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        "",
    ),
}
TRIMMING = ("llama3", "gemma")
# Every render only extends the one before it, stop tokens included.
EXTENDING = ("chatml", "default-system", "llama3", "gemma")


def tokenizer_with(name: str) -> Any:
    """The byte tokenizer under one of the templates."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATES[name][0]
    return tokenizer
