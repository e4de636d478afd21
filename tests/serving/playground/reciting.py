"""A tiny model that knows one text by heart, word by word, some words better than others: what it writes
looks well on a page."""

from __future__ import annotations

from functools import cache

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion

TEXT = (
    "A lens gathers light from every point of an object and bends it so that the rays meet again. "
    "Where they meet, an image stands in the "
    "air, upside down and smaller than the thing itself. Put a second lens behind it and the image "
    "grows; put a screen there and it can be "
    "drawn by hand.\n\nThe first observers did not trust what they saw. They turned the tube on things "
    "they knew, a coin, a thread, the "
    "edge of a knife, and asked whether the instrument told the truth about them. Only when it did "
    "were they ready to believe the "
    "rest: the mountains on the moon, the cells in a slice of cork, the small animals in a drop of rain.\n\n"
)
CONTEXT = 640
WIDTH = 128
WORD = r" ?[A-Za-z]+|[\s\S]"
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def word_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the text, with the space before it, and per printable character."""
    split = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    words = [word for word, _ in split.pre_tokenize_str(TEXT)]
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {
        token: index for index, token in enumerate(dict.fromkeys([*SPECIAL.values(), *words, *characters]))
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **SPECIAL)
    fast.chat_template = TEMPLATE
    return fast


@cache
def reciting() -> DiffusionLM:
    """A bidirectional model whose prediction at a position is the text's token there, read round and round.

    The embedding of each position points to that of its token, more or less exactly; one layer of attention
    adds what the tokens around it have to say, so that unsure words depend on the order in which the text is
    revealed.
    """
    tokenizer = word_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    shape = {"vocab_size": len(tokenizer), "n_positions": CONTEXT, "n_embd": WIDTH, "n_layer": 1, "n_head": 4}
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(GPT2Config(**shape, **ends, initializer_range=0.08)).eval()
        directions_VD = torch.nn.functional.normalize(torch.randn(len(tokenizer), WIDTH), dim=-1)
        doubt_T1 = 1.8 * torch.rand(CONTEXT, 1) ** 3
        noise_TD = torch.nn.functional.normalize(torch.randn(CONTEXT, WIDTH), dim=-1)
    targets_T = torch.tensor([ids[position % len(ids)] for position in range(CONTEXT)])
    model.transformer.wte.weight.data = 1.4 * directions_VD
    model.transformer.wpe.weight.data = 8 * torch.nn.functional.normalize(
        directions_VD[targets_T] + doubt_T1 * noise_TD, dim=-1
    )
    return make_diffusion(model, tokenizer, attention="bidirectional", logit_shift=False)
