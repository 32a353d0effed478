"""Writes the lab's model: a Qwen3.5 mixture of experts with random weights, which travels in a second.

It has the architecture of the models that two Sparks are bought for (linear and full attention layers,
experts, a vision part), so the serving engine takes the same paths; what it answers means nothing. Same
inputs give the same bytes. Runs inside the serving image's environment: ``python tiny_model.py FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

SEED = 0
VOCABULARY_SIZE = 320
HIDDEN_SIZE = 64
MAX_POSITIONS = 2048

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}{{- part.get('text', '') -}}{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write a tokenizer of single bytes with a ChatML template; returns the numbers of its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-not-found]
    from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [*SPECIAL_TOKENS, *VISION_TOKENS]
    tokenizer.add_special_tokens(specials)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 (a token of text, no secret)
        pad_token="<|endoftext|>",  # noqa: S106
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return {name: wrapped.convert_tokens_to_ids(name) for name in specials}


def write_model(folder: Path, tokens: dict[str, int]) -> None:
    """Write config.json, generation_config.json, and the weights with their index."""
    import torch  # type: ignore[import-not-found]
    from safetensors.torch import save_file  # type: ignore[import-not-found]
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig(
        text_config={
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            # The CPU kernel of the linear layers knows this head size only.
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
            "bos_token_id": None,
            "eos_token_id": tokens["<|im_end|>"],
            "pad_token_id": tokens["<|endoftext|>"],
            "dtype": "bfloat16",
        },
        vision_config={
            "depth": 1,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": HIDDEN_SIZE,
            "num_position_embeddings": 64,
        },
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = Qwen3_5MoeForConditionalGeneration(config).to(torch.bfloat16).eval()
    model.generation_config.eos_token_id = tokens["<|im_end|>"]
    model.save_pretrained(folder)
    _as_indexed_shard(folder, save_file)


def _as_indexed_shard(folder: Path, save_file: Callable[..., None]) -> None:
    """Name the weights as those of a big model are named: numbered shards and an index."""
    from safetensors import safe_open  # type: ignore[import-not-found]

    single = folder / "model.safetensors"
    shard = "model-00001-of-00001.safetensors"
    with safe_open(single, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
    save_file(tensors, folder / shard, metadata={"format": "pt"})
    single.unlink()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def main(arguments: list[str]) -> int:
    """Write the model into the folder that is named."""
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, write_tokenizer(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
