"""A tokenizer of 32,000 tokens for the invented language, made once: the demo's has 2,048 and would make four times the tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How Qwen2 and Llama 3 split text into words."""
VOCABULARY = 32_000
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def model_directory(directory: Path, texts: Callable[[], Any]) -> Path:
    """The tokenizer with its template in `directory`; trained on `texts()` unless it is there."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if (directory / "tokenizer_config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def usual_tokenizer(directory: Path) -> Callable[[list[list[dict[str, Any]]]], int]:
    """Ids and assistant masks of chats by the transformers library; returns the number of tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)

    def tokenize(chats: list[list[dict[str, Any]]]) -> int:
        out: Any = tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return sum(map(len, out["input_ids"]))

    return tokenize
