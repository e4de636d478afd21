"""Rendering: training and sampling see the same prompt, and every completion has one end token."""

from __future__ import annotations

import copy
import itertools
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

from tests.errors import raises
from tests.helpers import shared_path
from tests.tokenizers import tokenizer as every_kind
from unmask.data.characters import character_tokenizer
from unmask.data.decoding import text_after
from unmask.data.encoding import (
    encode_completion,
    encode_example,
    encode_pair,
    encode_preference,
    encode_prompt,
    encode_turns,
    is_conversational,
    split_implicit_prompt,
)
from unmask.data.rows import iter_text_rows
from unmask.errors import ConfigError, DataError
from unmask.models.chat_template import TEMPLATES, read_template, turn_end, without_start

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if "
    "add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ "
    "m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
words = st.text(string.ascii_letters + " .\n", max_size=15)


def _tokenizer(template: str | None = None, **special: str):
    tokenizer = character_tokenizer(string.ascii_letters + string.digits + " .,:[]\n=!|_>")
    if template and "<|im_start|>" in template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template
    return tokenizer


def _spaced(**how: str) -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before a text, as SentencePiece does."""
    spaced = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    spaced.pre_tokenizer, spaced.decoder = pre_tokenizers.Metaspace(**how), decoders.Metaspace(**how)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = [string.ascii_letters + " .[]", "and then and then the girl was here", " the and", "girl then"]
    spaced.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=spaced, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=PLAIN
    )


SPACED = {scheme: _spaced(prepend_scheme=scheme) for scheme in ("always", "first", "never")}
BARE, CHAT, PLAIN_CHAT, SIMPLE = (
    _tokenizer(),
    _tokenizer(CHATML),
    _tokenizer(PLAIN),
    _tokenizer(TEMPLATES["simple"]),
)


def _turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


ASKED, ANSWER, OTHER = [_turn("user", "a")], [_turn("assistant", "b")], [_turn("assistant", "c")]


def _text(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@given(words, words)
def test_strings(prompt, completion):
    prompt_ids, completion_ids = encode_pair(BARE, prompt, completion)
    assert prompt_ids == encode_prompt(BARE, prompt) == BARE(prompt)["input_ids"]
    assert prompt_ids[0] == BARE.bos_token_id and BARE.bos_token_id not in prompt_ids[1:] + completion_ids
    assert (
        completion_ids[-1] == BARE.eos_token_id and BARE.eos_token_id not in prompt_ids + completion_ids[:-1]
    )
    assert (_text(BARE, prompt_ids), _text(BARE, completion_ids)) == (prompt, completion)
    assert all(type(token) is int for token in prompt_ids + completion_ids)


def test_a_real_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(shared_path("models", "stories260K"))
    prompt_ids, completion_ids = encode_pair(tokenizer, "Once upon a time", ", there was a girl.")
    assert prompt_ids == tokenizer("Once upon a time")["input_ids"]
    assert completion_ids.count(tokenizer.eos_token_id) == 1 and completion_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.bos_token_id not in completion_ids
    with raises(DataError, where=tokenizer.name_or_path):
        encode_prompt(tokenizer, [_turn("user", "hi")])


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Once upon a time", ", there was a girl."),
        ("Once", " upon a time\nthere"),
        ("One day\n", "Lily saw"),
        ("", "Tim"),
    ],
)
def test_an_answer_continues_the_prompt(prompt, answer):
    tokenizer = AutoTokenizer.from_pretrained(shared_path("models", "stories260K"))
    prompt_ids, completion_ids = encode_pair(tokenizer, prompt, answer)
    assert [*prompt_ids, *completion_ids[:-1]] == tokenizer(prompt + answer)["input_ids"]


def _masking(tokenizer, **how: bool):
    """The tokenizer with a mask token."""
    masking = copy.deepcopy(tokenizer)
    masking.add_special_tokens({"mask_token": AddedToken("<mask>", special=True, **how)})
    return masking


MASKING = {scheme: _masking(tokenizer) for scheme, tokenizer in SPACED.items()}


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(parts=st.lists(words.map(lambda text: text.replace("\n", " ")), min_size=1, max_size=5))
def test_text_after_a_mask_token_continues_the_text(scheme, parts):
    """As a string, as a continuation, and in a message, after which the template goes on."""
    tokenizer = MASKING[scheme]
    keep, mask = [tokenizer.mask_token], tokenizer.mask_token_id
    after = [[mask, *encode_completion(tokenizer, "a", part)] for part in parts[1:]]
    text = "<mask>".join(parts)
    assert encode_prompt(tokenizer, text, keep) == [
        *encode_prompt(tokenizer, parts[0]),
        *itertools.chain(*after),
    ]
    continuing = [*encode_completion(tokenizer, "a", parts[0]), *itertools.chain(*after)]
    assert encode_completion(tokenizer, "a", text, keep) == continuing
    asked = encode_prompt(tokenizer, [_turn("user", text)], keep)
    written = "".join(tokenizer.convert_ids_to_tokens(asked)).replace("\u2581", " ")
    assert written.removeprefix("<s>").lstrip() == f"[user]{text}[assistant]"


def test_a_mask_token_that_takes_the_space_beside_it_still_does():
    """As that of XLM-RoBERTa, which stands for a word with the space before it."""
    tokenizer = _masking(SPACED["always"], lstrip=True)
    ids = encode_prompt(tokenizer, "then  <mask> then", ["<mask>"])
    assert ids == [
        *encode_prompt(tokenizer, "then"),
        tokenizer.mask_token_id,
        *encode_completion(tokenizer, "a", " then"),
    ]


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@given(prompt=words, answer=words)
def test_no_space_is_inserted_between_prompt_and_answer(scheme, prompt, answer):
    tokenizer = SPACED[scheme]
    prompt, answer = (text.replace("\n", " ") for text in (prompt, answer))
    prompt_ids, completion_ids = encode_pair(tokenizer, prompt, answer)
    if prompt[:1].strip():  # else the tokenizer writes no other space
        assert _text(tokenizer, prompt_ids + completion_ids) == prompt + answer
    prompt_ids, completion_ids = encode_pair(tokenizer, [_turn("user", prompt)], [_turn("assistant", answer)])
    assert _text(tokenizer, prompt_ids + completion_ids) == f"[user]{prompt}[assistant]{answer}"


def test_the_beginning_of_sequence_is_added_once_if_the_tokenizer_adds_it():
    parses = _tokenizer()
    parses.parse_special_tokens = True
    assert encode_prompt(parses, "<s>ab") == encode_prompt(BARE, "ab")
    ends_too = _tokenizer()
    ends_too.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ends_too.bos_token_id), ("</s>", ends_too.eos_token_id)]
    )
    assert encode_prompt(ends_too, "ab") == encode_prompt(BARE, "ab")
    adds_none = _tokenizer()
    adds_none.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    assert encode_prompt(adds_none, "ab") == encode_prompt(BARE, "ab")[1:]


@given(st.lists(st.integers(0, 1000), max_size=9))
def test_ids_are_unchanged(ids):
    assert encode_prompt(BARE, ids) == ids
    assert encode_pair(BARE, tuple(ids), "ab")[0] == ids


@pytest.mark.parametrize("prompt", [None, 3, 1.5, ["a"], [1, "a"], {"role": "user"}, [{"content": "a"}]])
def test_other_types_of_prompt_are_refused(prompt):
    with raises(DataError, where="prompt"):
        encode_prompt(BARE, prompt)


@pytest.mark.parametrize("tokenizer", [CHAT, PLAIN_CHAT, SIMPLE], ids=["chatml", "plain", "simple"])
@given(system=words, question=words, answer=words)
def test_messages(tokenizer, system, question, answer):
    prompt, completion = [_turn("system", system), _turn("user", question)], [_turn("assistant", answer)]
    prompt_ids, completion_ids = encode_pair(tokenizer, prompt, completion)
    assert prompt_ids == encode_prompt(tokenizer, prompt)
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt_ids) == start
    assert completion_ids == [
        *tokenizer(answer, add_special_tokens=False)["input_ids"],
        tokenizer.eos_token_id,
    ]
    assert encode_example(tokenizer, {"prompt": prompt, "completion": completion}) == (
        prompt_ids,
        completion_ids,
    )
    whole = encode_example(tokenizer, {"messages": prompt + completion})
    assert whole[0] + whole[1] == prompt_ids + completion_ids
    assert whole[0] == ([] if tokenizer is CHAT else [tokenizer.bos_token_id])


def test_only_the_last_end_of_turn_ends_a_conversation():
    turns = [_turn("user", "a"), _turn("assistant", "b"), _turn("user", "c"), _turn("assistant", "d")]
    ids = encode_example(CHAT, {"messages": turns})[1]
    assert ids.count(CHAT.eos_token_id) == 4 and ids[-1] == CHAT.eos_token_id
    assert CHAT.decode(ids) + "\n" == CHAT.apply_chat_template(turns, tokenize=False)


conversations = st.lists(st.tuples(words, words.filter(str.strip)), min_size=1, max_size=4)


def _conversation(pairs: list[tuple[str, str]], system: str = "") -> list[dict]:
    turns = [
        _turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return [_turn("system", system), *turns] if system else turns


@pytest.mark.parametrize("tokenizer", [CHAT, SIMPLE], ids=["chatml", "simple"])
@given(pairs=conversations, system=words, rest=st.lists(words, max_size=1))
def test_every_answer_of_a_conversation_is_learnt_with_its_end_and_nothing_else(
    tokenizer, pairs, system, rest
):
    messages = _conversation(pairs, system) + [_turn("user", text) for text in rest]
    prompt, answer, learnt = encode_turns(tokenizer, messages, "all")
    assert (prompt, answer) == encode_turns(tokenizer, messages, "last")[:2]
    whole = tokenizer.apply_chat_template(_conversation(pairs, system), tokenize=False)
    assert tokenizer.decode(prompt + answer) == whole.removesuffix("\n").removesuffix(
        "\n" if tokenizer is SIMPLE else ""
    )
    assert answer == encode_pair(tokenizer, "", pairs[-1][1])[1] and len(learnt) == len(prompt)
    found, end = [[]], tokenizer.eos_token_id
    for token, is_trained in zip(prompt, learnt, strict=True):
        if is_trained:
            found[-1].append(token)
        elif found[-1]:
            found.append([])
    assert [run for run in found if run] == [
        [*tokenizer(text, add_special_tokens=False)["input_ids"], end] for _, text in pairs[:-1]
    ]


@pytest.mark.parametrize("tokenizer", [CHAT, SIMPLE, PLAIN_CHAT], ids=["chatml", "simple", "plain"])
@given(pairs=conversations, system=words)
def test_the_last_answer_alone_is_a_completion(tokenizer, pairs, system):
    messages = _conversation(pairs, system)
    prompt, answer, learnt = encode_turns(tokenizer, messages, "last")
    assert (prompt, answer) == encode_pair(tokenizer, messages[:-1], messages[-1:]) and not any(learnt)


def test_white_space_in_an_earlier_answer_is_learnt_where_the_tokenizer_trims_it():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([""], trainer)
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="</s>", chat_template=TEMPLATES["simple"]
    )
    prompt, _, learnt = encode_turns(tokenizer, _conversation([("a  b", " b  c "), ("d", "e")]), "all")
    assert (
        tokenizer.decode([token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained])
        == " b  c </s>"
    )


def _two_ends(template: str) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """A tokenizer whose EOS is none of its template's tokens, and EOS with the turn's end."""
    tokenizer = _tokenizer()
    special = [
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|user|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer, [tokenizer.eos_token_id, *([] if (end := turn_end(tokenizer)) is None else [end])]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA3, "<|eot_id|>"),
        (TEMPLATES["simple"], "</s>"),
        (CHATML.replace("<|im_end|>", " <|im_end|>"), "<|im_end|>"),  # as Mistral writes its own
        # as Phi 3
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}{{ eos_token }}",
            "<|im_end|>",
        ),
        (PLAIN, None),
        (PLAIN.replace("{{ m.content }}", "{{ m.content }}[end]"), None),
        (CHATML.replace("<|im_end|>", ""), None),
        # the next turn's beginning is no end
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", None),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{% for m in messages %}", None),
        (None, None),
    ],
)
def test_the_token_that_ends_a_turn_is_found_by_rendering_one(template, end):
    tokenizer, _ = _two_ends(template)
    assert turn_end(tokenizer) == (None if end is None else tokenizer.convert_tokens_to_ids(end))


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
@given(pairs=conversations)
def test_the_end_of_turn_closes_an_answer_without_an_additional_eos(template, end, pairs):
    """As SDAR's, Llama 3's and LLaDA's, whose templates end turns with another token than EOS."""
    tokenizer, ends = _two_ends(template)
    pairs = [(question.strip(), answer.strip()) for question, answer in pairs]
    prompt, answer, learnt = encode_turns(tokenizer, _conversation(pairs), "all", ends)
    assert tokenizer.decode(answer) == pairs[-1][1] + end
    text = tokenizer.decode([token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained])
    assert text == "".join(earlier + end for _, earlier in pairs[:-1])
    ids = encode_example(tokenizer, {"messages": _conversation(pairs)}, ends)[1]
    assert ids[-1] == ends[1] and tokenizer.eos_token_id not in ids
    alone = tokenizer.decode(encode_turns(tokenizer, _conversation(pairs), "last")[1])
    # a model that stops at EOS alone learns to write it
    assert alone.replace("\n", "").endswith(end + "</s>")


@pytest.mark.parametrize(
    "closing", ["<|im_end|>", "</s>", "<|im_end|></s>", "<|im_end|>\n</s>\n", " <|im_end|>"]
)
@given(answer=words.filter(str.strip))
def test_an_answer_that_has_any_end_token_ends_once(closing, answer):
    tokenizer, ends = _two_ends(CHATML)
    asked, ended = [_turn("user", "a")], [_turn("assistant", answer + closing)]
    brought = "</s>" if closing == "</s>" else "<|im_end|>"
    kept = answer + " " * closing.startswith(" ")
    assert tokenizer.decode(encode_pair(tokenizer, "a", answer + closing, ends)[1]) == kept + brought
    assert tokenizer.decode(encode_pair(tokenizer, asked, ended, ends)[1]) == kept + "<|im_end|>"
    assert tokenizer.decode(encode_example(tokenizer, {"text": answer + closing}, ends)[1]) == kept + brought
    assert tokenizer.decode(encode_pair(tokenizer, "a", answer, ends)[1]) == answer + "</s>"


@pytest.mark.parametrize(
    "answer", ["b<|im_end|>c", "b<|im_end|>c</s>", "b</s>c<|im_end|>", "b<|im_end|><|im_end|>", "<|im_end|>b"]
)
def test_an_answer_with_any_end_token_inside_is_refused(answer):
    tokenizer, ends = _two_ends(CHATML)
    for render_it in (
        lambda: encode_pair(tokenizer, "a", answer, ends),
        lambda: encode_pair(tokenizer, [_turn("user", "a")], [_turn("assistant", answer)], ends),
        lambda: encode_preference(tokenizer, {"prompt": "a", "chosen": "b", "rejected": answer}, ends),
    ):
        with raises(DataError, where="completion") as caught:
            render_it()
        assert caught.value.reason == "end token inside the text"
    with raises(DataError, where="completion"):
        encode_pair(tokenizer, "a", "<|im_end|>", ends)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([_turn("user", "a")], "without an answer"),
        ([_turn("assistant", "a")], "answer without a question"),
        ([_turn("user", "a"), _turn("assistant", "b"), _turn("assistant", "c")], "answer without a question"),
        ("abc", "wrong type"),
    ],
)
@pytest.mark.parametrize("learn", ["all", "last"])
def test_conversations_without_an_answer_to_learn_are_refused(learn, turns, reason):
    with raises(DataError, where="messages") as caught:
        encode_turns(CHAT, turns, learn)
    assert caught.value.reason == reason


def test_templates_that_change_or_do_not_end_earlier_turns_are_refused():
    turns = _conversation([("a", "b"), ("c", "d")])
    forgets = _tokenizer(
        "{% for m in messages %}[{{ m.role }}]{% if loop.last or m.role == 'user' %}{{ m.content }}{% "
        "endif %}!{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with raises(
        DataError, where="prompt [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]"
    ):
        encode_turns(forgets, turns, "all")
    with raises(DataError, where=None) as caught:
        encode_turns(PLAIN_CHAT, turns, "all")
    assert caught.value.reason is None  # of the template: no row would be better
    assert encode_turns(PLAIN_CHAT, turns[:2], "all")[1] == encode_pair(BARE, "", "b")[1]


@pytest.mark.parametrize("start", range(1, len("<|im_end|>")))
def test_an_earlier_answer_may_look_like_its_end(start):
    answer = "<|im_end|>"[start:]
    prompt, _, learnt = encode_turns(CHAT, _conversation([("a", answer), ("c", "d")]), "all")
    assert (
        CHAT.decode([token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained])
        == answer + "<|im_end|>"
    )


@pytest.mark.parametrize("content", ["", None])
def test_an_earlier_answer_may_be_only_a_tool_call(content):
    called = {"role": "assistant", "content": content, "tool_calls": [{"name": "f"}]}
    turns = [*ASKED, called, _turn("tool", "b"), *ANSWER]
    said, calls = "{{ m.content or '' }}", "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}"
    tokenizer = _tokenizer(CHATML.replace("{{ m.content }}", said + calls))
    prompt, _, learnt = encode_turns(tokenizer, turns, "all")
    assert (
        tokenizer.decode([token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained])
        == "f<|im_end|>"
    )
    with raises(DataError, where=None):
        encode_turns(_tokenizer(PLAIN.replace("{{ m.content }}", said + calls)), turns, "all")


def test_a_template_by_name_or_from_a_file(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(CHATML, encoding="utf-8")
    assert read_template(str(path)) == CHATML
    assert read_template("simple") == TEMPLATES["simple"]
    for wrong in ("simpel", str(tmp_path)):
        with raises(ConfigError, where="data.chat_template"):
            read_template(wrong)
    with raises(DataError, where=None) as caught:
        encode_prompt(_tokenizer("{% for m in messages %}"), [_turn("user", "a")])
    assert caught.value.reason is None


def test_the_simple_template_needs_no_special_tokens():
    turns = _conversation([("a", "b"), ("c", "d")], "s")
    text = "<s>system:\ns\n\nuser:\na\n\nassistant:\nb</s>\n\nuser:\nc\n\nassistant:\nd</s>\n\n"
    assert SIMPLE.apply_chat_template(turns, tokenize=False) == text
    assert len(SIMPLE) == len(BARE)


def test_a_started_answer_is_continued():
    begun = [_turn("user", "a"), _turn("assistant", "b")]
    assert (
        CHAT.decode(encode_prompt(CHAT, begun)) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    )


def test_templates_that_cannot_serve_are_refused():
    marks_the_last = _tokenizer(
        "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}"
    )
    with raises(DataError, where="prompt [{'role': 'user', 'content': 'a'}]"):
        encode_pair(marks_the_last, [_turn("user", "a")], [_turn("assistant", "b")])
    refuses = _tokenizer("{{ raise_exception('roles must alternate') }}")
    with raises(DataError, where=None) as caught:
        encode_prompt(refuses, [_turn("user", "a")])
    assert "roles must alternate" in caught.value.what
    joins = _tokenizer("{% for m in messages %}{{ 'a' + m.content }}{% endfor %}")
    rewrites = _tokenizer("{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    for tokenizer, turn in ((joins, _turn("user", ["b"])), (rewrites, _turn("assistant", "b"))):
        with raises(DataError, where=None) as caught:
            encode_prompt(tokenizer, [turn])
        assert caught.value.reason == "refused by the chat template"
    with raises(DataError, where=None):
        encode_pair(BARE, [_turn("user", "a")], [_turn("assistant", "b")])


def test_a_tokenizer_without_an_end_of_sequence():
    endless = _tokenizer()
    endless.eos_token = None
    with raises(DataError, where=None):
        encode_pair(endless, "a", "b")


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("a", [_turn("assistant", "b")]), ([_turn("user", "a")], "b"), ("a", None), ([_turn("user", "a")], [])],
)
def test_strings_and_messages_are_not_mixed(prompt, completion):
    with raises(DataError, where="prompt, completion"):
        encode_pair(CHAT, prompt, completion)


@pytest.mark.parametrize("tokenizer", [CHAT, SIMPLE, PLAIN_CHAT], ids=["chatml", "simple", "plain"])
@given(answer=words.filter(str.strip), behind=st.text(" \n", max_size=2))
def test_an_answer_that_has_its_end_token_ends_once(tokenizer, answer, behind):
    eos = tokenizer.eos_token
    asked, ended = [_turn("user", "a")], [_turn("assistant", answer + eos + behind)]
    assert encode_pair(tokenizer, asked, ended) == encode_pair(tokenizer, asked, [_turn("assistant", answer)])
    assert encode_pair(tokenizer, "a", answer + eos + behind) == encode_pair(tokenizer, "a", answer)
    if tokenizer is not PLAIN_CHAT:
        again = asked + ended + asked
        assert encode_turns(tokenizer, again + ended, "all") == encode_turns(
            tokenizer, _conversation([("a", answer)] * 2), "all"
        )


@pytest.mark.parametrize("answer", ["b{}c", "b{}{}", "{}b{}"])
def test_an_answer_with_an_end_token_inside_is_refused(answer):
    asked, other = [_turn("user", "a")], [_turn("assistant", "b")]
    broken = [_turn("assistant", answer.replace("{}", CHAT.eos_token))]
    for render_it in (
        lambda: encode_pair(CHAT, asked, broken),
        lambda: encode_pair(CHAT, "a", broken[0]["content"]),
        lambda: encode_turns(CHAT, asked + broken + asked + other, "all"),
    ):
        with raises(DataError, where="completion") as caught:
            render_it()
        assert caught.value.reason == "end token inside the text"
    with raises(DataError, where="completion") as caught:
        encode_pair(CHAT, "a", CHAT.eos_token)
    assert caught.value.reason == "empty"


def test_language_modeling():
    assert (
        encode_example(BARE, {"text": "ab"})
        == encode_pair(BARE, "", "ab")
        == ([BARE.bos_token_id], [4, 5, BARE.eos_token_id])
    )
    with raises(DataError, where="messages"):
        encode_example(CHAT, {"messages": "a"})


@given(words, words, words)
def test_preferences_with_the_prompt_given(prompt, chosen, rejected):
    ids = encode_preference(BARE, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    assert ids == (*encode_pair(BARE, prompt, chosen), encode_pair(BARE, prompt, rejected)[1])


def test_preferences_with_an_implicit_prompt():
    prompt, good, bad = [_turn("user", "a")], [_turn("assistant", "b")], [_turn("assistant", "c")]
    explicit = {"prompt": prompt, "chosen": good, "rejected": bad}
    implied = {"chosen": prompt + good, "rejected": prompt + bad}
    assert (
        encode_preference(CHAT, implied)
        == encode_preference(CHAT, {**implied, "prompt": None})
        == encode_preference(CHAT, explicit)
    )
    texts = {"chosen": "two and two: 4", "rejected": "two and two: 5"}
    assert encode_preference(BARE, texts) == encode_preference(
        BARE, {"prompt": "two and two:", "chosen": " 4", "rejected": " 5"}
    )


@pytest.mark.parametrize(("chosen", "rejected"), [("b", "c"), (" b", " c"), (ASKED + ANSWER, OTHER)])
def test_an_implicit_prompt_is_not_empty(chosen, rejected):
    with raises(DataError, where="chosen, rejected") as caught:
        encode_preference(CHAT, {"chosen": chosen, "rejected": rejected})
    assert caught.value.reason == "empty"


@given(words, words.filter(bool), words.filter(bool))
def test_an_implicit_prompt_loses_nothing(prompt, a, b):
    if a == b:
        with raises(DataError, where="chosen, rejected"):
            split_implicit_prompt(prompt + a, prompt + b)
        return
    start, chosen, rejected = split_implicit_prompt(prompt + a, prompt + b)
    assert (start + chosen, start + rejected) == (prompt + a, prompt + b)
    assert chosen and rejected
    assert chosen[0] == " " or chosen[0] != rejected[0] or min(len(chosen), len(rejected)) == 1


turns = st.lists(
    st.builds(_turn, st.sampled_from(["user", "assistant"]), st.sampled_from("ab")), min_size=1, max_size=4
)


@given(turns, turns, turns)
def test_an_implicit_prompt_of_messages(prompt, a, b):
    if a != b:
        start, chosen, rejected = split_implicit_prompt(prompt + a, prompt + b)
        assert (start + chosen, start + rejected) == (prompt + a, prompt + b)
        assert chosen and rejected and len(start) >= len(prompt)


@pytest.mark.parametrize(
    ("prompt", "completion", "reason"),
    [
        (ASKED + OTHER, ANSWER, "answer without a question"),
        (ASKED, OTHER + ANSWER, "answer without a question"),
        (ASKED, OTHER + ASKED + ANSWER, "other roles in the answer"),
        (ASKED, ANSWER + ASKED, "other roles in the answer"),
        (ASKED, ASKED, "other roles in the answer"),
    ],
)
@pytest.mark.parametrize("tokenizer", [CHAT, PLAIN_CHAT, SIMPLE], ids=["chatml", "plain", "simple"])
def test_a_completion_is_a_single_answer(tokenizer, prompt, completion, reason):
    with pytest.raises(DataError) as caught:
        encode_pair(tokenizer, prompt, completion)
    assert caught.value.reason == reason
    for chosen, rejected in ((completion, ANSWER), (ANSWER, completion)):
        with pytest.raises(DataError):
            encode_preference(tokenizer, {"prompt": prompt, "chosen": chosen, "rejected": rejected})


def test_preferences_that_differ_before_the_last_answer_are_refused():
    with raises(DataError, where="completion") as caught:
        encode_preference(
            CHAT, {"chosen": ASKED + ANSWER + ASKED + ANSWER, "rejected": ASKED + OTHER + ASKED + ANSWER}
        )
    assert caught.value.reason == "other roles in the answer"
    alike = {"chosen": ASKED + OTHER + ASKED + ANSWER, "rejected": ASKED + OTHER + ASKED + OTHER}
    assert encode_preference(CHAT, alike)[0] == encode_prompt(CHAT, ASKED + OTHER + ASKED)


@pytest.mark.parametrize("field", ["prompt", "completion", "chosen", "rejected", "messages"])
def test_is_conversational(field):
    assert is_conversational({"x": 1, field: [_turn("user", "a")]})
    assert not any(is_conversational({field: value}) for value in ("a", [], [1, 2], None, [{"content": "a"}]))
    assert not is_conversational({"text": [_turn("user", "a")]})


SPACE_BEFORE_ANSWERS = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ "
    "m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
"""As Vicuna's: the model writes the space."""


@pytest.mark.parametrize("template, space", [(SPACE_BEFORE_ANSWERS, " "), (PLAIN, "")])
@pytest.mark.parametrize("kind", ["bytes", "llama", "mistral"])
def test_a_model_is_shown_its_answer_as_it_wrote_it(kind, template, space):
    tokenizer = copy.deepcopy(every_kind(kind))
    tokenizer.chat_template = template
    prompt, answer = encode_pair(tokenizer, ASKED, [_turn("assistant", "the sun")])
    written = text_after(tokenizer, prompt, answer, [tokenizer.eos_token_id])
    assert written == f"{space}the sun"
    conversation = [*ASKED, _turn("assistant", written), _turn("user", "a")]
    assert encode_prompt(tokenizer, without_start(tokenizer, conversation))[
        : len(prompt) + len(answer) - 1
    ] == [*prompt, *answer[:-1]]
    assert without_start(tokenizer, [_turn("user", " a"), _turn("assistant", "\n b")]) == [
        _turn("user", " a"),
        _turn("assistant", "\n b"),
    ]


def _learnt(tokenizer, prompt: list[int], answer: list[int], learnt: list[bool]) -> str:
    return tokenizer.decode(
        [*(token for token, is_trained in zip(prompt, learnt, strict=True) if is_trained), *answer]
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, 1])), min_size=1, max_size=4))
def test_an_answer_with_weight_0_is_not_learnt(answers):
    turns = []
    for text, weight in answers:
        turns += [
            _turn("user", "q"),
            _turn("assistant", text) | ({} if weight is None else {"weight": weight}),
        ]
    wanted = [text for text, weight in answers if weight != 0]
    if not wanted:
        with raises(DataError, where="weight") as caught:
            encode_turns(CHAT, turns, "all")
        assert caught.value.reason == "without an answer"
        return
    through = 2 * max(index for index, (_, weight) in enumerate(answers) if weight != 0) + 2
    for learn, expected in (("all", wanted), ("last", wanted[-1:])):
        prompt, answer, learnt = encode_turns(CHAT, turns, learn)
        assert _learnt(CHAT, prompt, answer, learnt) == "".join(f"{text}<|im_end|>" for text in expected)
        assert [*prompt, *answer] == encode_example(
            CHAT, {"messages": [_turn(t["role"], t["content"]) for t in turns[:through]]}
        )[1]


def test_an_answer_with_weight_0_is_refused_where_it_would_be_learnt():
    unlearnt = [ANSWER[0] | {"weight": 0}]
    for encode in (
        lambda: encode_pair(CHAT, ASKED, unlearnt),
        lambda: encode_preference(
            CHAT, {"prompt": ASKED, "chosen": ANSWER, "rejected": [OTHER[0] | {"weight": 0}]}
        ),
        lambda: encode_example(CHAT, {"messages": [*ASKED, *unlearnt, *ASKED, *ANSWER]}),
    ):
        with pytest.raises(DataError) as caught:
            encode()
        assert caught.value.where == "weight"


@pytest.mark.parametrize(
    "tokenizer",
    [BARE, CHAT, SPACED["always"], SPACED["never"]],
    ids=["characters", "chatml", "spaced", "unspaced"],
)
@pytest.mark.parametrize("parses", [False, True])
def test_a_document_begins_and_ends_once(tokenizer, parses):
    """In every verb that reads texts, also if the text spells, or renders, its beginning and its end."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.parse_special_tokens = parses
    bos, eos = tokenizer.bos_token or "", tokenizer.eos_token
    begins = [tokenizer.bos_token_id] if tokenizer("")["input_ids"] else []
    for before, after in itertools.product(
        ["", bos] if parses else [""], ["", eos, f"{eos}\n" if parses else eos]
    ):
        prompt, ids = encode_example(tokenizer, {"text": f"{before}ab{after}"})
        assert [*prompt, *ids] == [
            *begins,
            *tokenizer("ab", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        [row] = iter_text_rows(tokenizer, [f"{before}ab{after}"], 64)
        assert row["input_ids"] == [tokenizer.bos_token_id, *ids]


@pytest.mark.parametrize("tokenizer", [CHAT, SIMPLE], ids=["chatml", "simple"])
def test_a_rendered_conversation_has_the_ids_of_its_messages(tokenizer):
    parses = copy.deepcopy(tokenizer)
    parses.parse_special_tokens = True
    text = tokenizer.apply_chat_template([*ASKED, *ANSWER], tokenize=False)
    expected = encode_example(tokenizer, {"messages": [*ASKED, *ANSWER]})[1]
    assert encode_example(parses, {"text": text})[1] == expected
    [row] = iter_text_rows(parses, [text, ""], 1024)
    assert row["input_ids"] == [parses.bos_token_id, *expected]
