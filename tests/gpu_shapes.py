"""Shapes of tiny models that the GPU kernels support, as changes to tiny.CONFIG."""

SHAPES = {
    "qwen3": {},
    "groups of 4, untied": {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "llama of 3 heads each": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "qwen2 with biases": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
}
