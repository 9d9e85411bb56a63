"""The shape of the million-parameter model that several benchmarks measure."""

from transformers import LlamaConfig


def small_llama(vocab_size: int, *, end_id: int | None = None, pad_id: int | None = None) -> LlamaConfig:
    """A Llama of four layers of width 128; without `end_id` nothing ends a reply but its length."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
