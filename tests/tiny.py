"""Models of three architectures, small and random, with a tokenizer of their own: made in no time.

Their GGUF files are written here by hand, so that what is tested does not test itself.
"""

from functools import cache

import numpy as np

ARCHITECTURES = ("qwen2", "llama", "gemma2")
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OF_GEMMA = ["<unk>", "<pad>", "<eos>", "<bos>", "<mask>"]
TEXT = ["What is the capital of France? It is Paris, and it's 1234 years old.\n"] * 3
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def model_of(architecture, tied=False):
    """A random model; its weights are large enough to make it opinionated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(len(architecture))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokens(architecture)[0]),
    }
    own = {"head_dim": 16, "query_pre_attn_scalar": 16} if architecture == "gemma2" else {}
    config = AutoConfig.for_model(
        architecture,
        **sizes,
        **own,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=tied or architecture == "gemma2",
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():  # vectors begin as ones and zeros
        if weight.ndim == 1:
            weight.data += 0.3 * torch.randn(weight.shape)
    # llama.cpp tells nothing of a token that is half a letter or special: let none be the best.
    unsaid = [
        at
        for at, token in enumerate(tokens(architecture)[0])
        if kind_of(token) != 1 or not token.isascii()
    ]
    model.get_output_embeddings().weight.data[unsaid] *= 0.1
    return model


@cache
def tokens(architecture):
    """The vocabulary and the merges of a BPE: of bytes, or of words as Gemma's sentencepiece."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = architecture == "gemma2"
    alphabet = [] if words else sorted(pre_tokenizers.ByteLevel.alphabet())
    special = SPECIAL + (OF_GEMMA + [f"<0x{byte:02X}>" for byte in range(256)] if words else [])
    split = pre_tokenizers.Metaspace if words else pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split(
        **({"prepend_scheme": "never"} if words else {"add_prefix_space": False})
    )
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 40 if words else 300,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    vocabulary = sorted(state["vocab"], key=state["vocab"].get)
    return vocabulary, [" ".join(merge) for merge in state["merges"]]


def tokenizer_of(architecture="qwen2", template=TEMPLATE, **special):
    """A fast BPE tokenizer of the tiny models, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary, merges = tokens(architecture)
    ids = {token: number for number, token in enumerate(vocabulary)}
    made = Tokenizer(models.BPE(ids, [tuple(merge.split(" ")) for merge in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = template
    return tokenizer


def save_model(folder):
    """Save a tiny Qwen2 and its tokenizer, and return the folder."""
    model_of("qwen2").save_pretrained(folder)
    tokenizer_of().save_pretrained(folder)
    return folder


def kind_of(token):
    """llama.cpp's kinds of tokens: 1 text, 2 unknown, 3 control, 6 byte."""
    if token == "<unk>":
        return 2
    if token in SPECIAL + OF_GEMMA:
        return 3
    return 6 if token.startswith("<0x") else 1


def in_pairs(weight, heads):
    """Rows of halves as rows of pairs: row i and row i + half of a head become neighbours."""
    size = len(weight) // heads
    order = [
        head * size + half * (size // 2) + at
        for head in range(heads)
        for at in range(size // 2)
        for half in (0, 1)
    ]
    return weight[order]


def name_of(name, architecture):
    """llama.cpp's name of a tensor."""
    after = "post_attention_norm" if architecture == "gemma2" else "ffn_norm"
    for theirs, ours in {**NAMES, "post_attention_layernorm": after}.items():
        name = name.replace(theirs, ours)
    return name


def write_gguf(model, path, **changes):
    """Write a model as llama.cpp's converter would; `changes` are keys of the metadata."""
    import gguf

    config, architecture = model.config, model.config.model_type
    vocabulary, merges = tokens(architecture)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(0)
    if architecture == "llama":
        writer.add_rope_dimension_count(16)
    if architecture == "gemma2":
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_sliding_window(config.sliding_window)
    writer.add_token_list(vocabulary)
    writer.add_token_types([kind_of(token) for token in vocabulary])
    if architecture == "gemma2":
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(at) for at in range(len(vocabulary))])
        writer.add_add_space_prefix(False)
        writer.add_unk_token_id(3)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in changes.items():
        key = key.replace("__", ".")
        del writer.kv_data[0][key]
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, weight in model.state_dict().items():
        weight = weight.numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj" in name:
            weight = in_pairs(weight, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            weight = in_pairs(weight, config.num_key_value_heads)
        if architecture == "gemma2" and "norm" in name:
            weight = weight + np.float32(1)
        writer.add_tensor(name_of(name, architecture), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model, ids):
    """The logits (tokens, vocabulary) of one row."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
