"""A tiny random target with a byte tokenizer: the smoke test's and the test suite's.

It is a real folder that transformers loads: config, weights, tokenizer, chat template. Its weights
are random but large, so that its greedy answers repeat patterns that a draft can learn.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.files import atomic_folder

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|mask|>")
NUM_BYTES = 256
STOP_ID, MASK_ID = NUM_BYTES + 1, NUM_BYTES + 2
VOCAB_SIZE = NUM_BYTES + len(SPECIAL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 0-255) and three special tokens; a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Added before transformers adds its own, so that ids follow the order of SPECIAL.
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[1],
        additional_special_tokens=[SPECIAL[0], SPECIAL[2]],
    )
    ids = fast.convert_tokens_to_ids(list(SPECIAL))
    if ids != list(range(NUM_BYTES, VOCAB_SIZE)):
        raise RuntimeError(f"unexpected special ids {ids}")
    fast.chat_template = CHATML
    return fast


def make_tiny_target(
    folder: Path, *, seed: int = 0, num_layers: int = 4, hidden_size: int = 64, tied: bool = False
) -> Path:
    """Writes the target; the same seed gives the same weights."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with atomic_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder
