"""The bytes of tokens are those that decoding writes."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.errors import raises
from tests.tiny import toy_lm
from unmask.data.decoding import BYTES
from unmask.errors import GenerationError
from unmask.generation.constraints.vocabulary import Vocabulary, read_vocabulary

CHARACTERS = {byte: character for character, byte in BYTES.items()}


class Named:
    """A model's tokenizer and tokens, as far as a vocabulary needs them."""

    def __init__(self, decoder, names: list[str], **more):
        backend = Tokenizer(models.BPE({name: index for index, name in enumerate(["</s>", *names])}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoder
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", **more)
        self.eos_token_ids, self.mask_token_id = [0], len(names) + 1
        self.noise = "masked"
        self.vocab_size = len(names) + 3


SENTENCEPIECE = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
BYTE_LEVEL = [
    "".join(CHARACTERS[byte] for byte in written) for written in (b" a", b"\xc3", b"\xa9", b"\n", b"x")
]


@pytest.mark.parametrize(
    "decoder, names, tokens",
    [
        (decoders.ByteLevel(), BYTE_LEVEL, [1, 2, 3, 4, 1]),
        (decoders.Sequence(SENTENCEPIECE), ["▁a", "<0xC3>", "<0xA9>", "<0x0A>", "x▁"], [1, 2, 3, 4, 1, 5]),
        (
            decoders.Sequence(SENTENCEPIECE[:3]),
            ["▁a", "<0xC3>", "<0xA9>", "<0x0A>", "x▁"],
            [1, 2, 3, 4, 1, 5],
        ),
        (decoders.Metaspace(), ["▁a", "b", "▁▁"], [1, 2, 1, 3]),
        (decoders.Metaspace(prepend_scheme="never"), ["▁a", "b", "▁▁"], [1, 2, 1, 3]),
        (decoders.Fuse(), ["a", " b", "é"], [2, 1, 3, 2]),
    ],
)
def test_the_bytes_together_are_the_text(decoder, names, tokens):
    lm = Named(decoder, names)
    vocabulary = read_vocabulary(lm)
    written = b"".join(vocabulary.bytes_V[token] for token in tokens)
    assert (
        written.removeprefix(b" ") if vocabulary.strips_space else written
    ).decode() == lm.tokenizer.decode(tokens)
    assert (
        vocabulary.bytes_V[0] is None
        and len(vocabulary.bytes_V) == lm.vocab_size
        and vocabulary.bytes_V[-1] is None
    )
    assert read_vocabulary(lm) is vocabulary and vocabulary.end_token_ids == (0,)


@pytest.mark.parametrize(
    "decoder", [decoders.WordPiece(), decoders.Strip(" ", 1, 0), decoders.Sequence([decoders.BPEDecoder()])]
)
def test_a_decoder_that_does_not_write_tokens_one_by_one_is_refused(decoder):
    with raises(GenerationError, where="tokenizer"):
        read_vocabulary(Named(decoder, ["a"]))


def test_a_tokenizer_that_removes_spaces_is_refused():
    with raises(GenerationError, where="tokenizer"):
        read_vocabulary(Named(decoders.Fuse(), ["a"], clean_up_tokenization_spaces=True))


def test_special_tokens_match_no_text():
    lm = toy_lm()
    vocabulary = read_vocabulary(lm)
    assert [written for written in vocabulary.bytes_V if written is not None] == [b"a", b"b"]
    assert (
        vocabulary.end_token_ids == tuple(lm.eos_token_ids)
        and lm.tokenizer.pad_token_id in vocabulary.fill_token_ids
    )
    assert vocabulary.digest != Vocabulary(vocabulary.bytes_V).digest
