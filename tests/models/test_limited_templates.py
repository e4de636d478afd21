"""Chat templates that loop or grow without end are one error within seconds; others render as before."""

from __future__ import annotations

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from tests.data.test_encoding import CHATML, LLAMA3, PLAIN
from tests.errors import raises
from tests.helpers import partly_slow
from unmask.data.characters import character_tokenizer
from unmask.errors import DataError
from unmask.models.chat_template import TEMPLATES, render_template, turn_end
from unmask.models.limited_templates import LimitedEnvironment

NESTED = "{% set a0 = ['x'] %}" + "".join(f"{{% set a{n} = [a{n - 1}] * 1000 %}}" for n in range(1, 6))
BOMBS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a text": "{% set x = 'aaaaaaaaaa' * 1000 %}" + "{% for a in x %}" * 5 + "{% endfor %}" * 5,
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that doubles": "".join(
        f"{{% macro f{n}() %}}{{{{ f{n + 1}() }}}}{{{{ f{n + 1}() }}}}{{% endmacro %}}"
        for n in reversed(range(60))
    ).replace("f60()", "'x'")
    + "{{ f0() }}",
    "a text times a number": "{{ 'x' * 10000000000 }}",
    "a number of digits": "{{ 10 ** 10000000 }}",
    "a square of squares": (
        "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "doubling by ~": (
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "doubling by +": (
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "doubling by replace": (
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x.replace('x', ns.x) "
        "%}{% endfor %}"
    ),
    "doubling by a filter": (
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x|replace('x', ns.x) "
        "%}{% endfor %}"
    ),
    "doubling by join": (
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x.join(ns.x) %}{% endfor %}"
    ),
    "doubling by a block": "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set y %}{{ ns.x }}{{ ns.x "
    "}}{% "
    "endset "
    "%}"
    "{% set ns.x = y %}{% endfor %}",
    "a width": "{{ 'x'.center(10000000000) }}",
    "a width in a filter": "{{ 'x'|center(10000000000) }}",
    "a width in a format": "{{ '{:>10000000000}'.format('x') }}",
    "a width in a format's argument": "{{ '{:>{w}}'.format('x', w=10000000000) }}",
    "a width after %": "{{ '%10000000000d' % 1 }}",
    "a width for %": "{{ '%*d' % (10000000000, 1) }}",
    "a width for a name with parentheses": "{{ '%(a())10000000000d' % {'a()': 1} }}",
    "a width made of texts": "{{ '{:>1{w}}'.format('x', w='0000000000') }}",
    "a width in a list": "{{ '{:>{w[a]}}'.format('x', w={'a': 10000000000}) }}",
    "a precision": "{{ '%.010000000000d' % 1 }}",
    "a width in the filter": "{{ '%10000000000d'|format(1) }}",
    "widths for the filter": "{{ ('%*d' * 99999)|format(*([999999] * 199998)) }}",
    "many widths": "{{ ('{0:>999999}' * 99999).format('x') }}",
    "many widths after %": "{{ ('%(a)999999d' * 99999) % {'a': 1} }}",
    "many long values": "{{ ('{0}' * 99999).format('x' * 999999) }}",
    "many long values after %": "{{ ('%(a)s' * 99999) % {'a': 'x' * 999999} }}",
    "many long values by name": "{{ ('{a}' * 99999).format(a='x' * 999999) }}",
    "lists in lists after %": NESTED + "{{ '%s' % a5 }}",
    "lists in lists": NESTED + "{{ a5 }}",
    "lists in lists as JSON": NESTED + "{{ a5|tojson }}",
    "lists in lists as text": NESTED + "{{ a5|string|length }}",
    "lists in lists joined": NESTED + "{{ a5 ~ 'x' }}",
    "a batch of fill": "{{ [1]|batch(10000000000, 'x')|list|length }}",
    "a join of numbers": "{{ range(99999)|map('string')|join('x' * 1000000) }}",
    "a join of lists": "{{ ('x' * 1000000).join(['y'] * 99999) }}",
    "a translation": "{{ ('x' * 1000000).translate({120: 'x' * 1000000}) }}",
    "bytes": "{{ 'x'.encode().center(10000000000) }}",
    "a recursive loop": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
    "output without end": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
}


def tokenizer(template: str):
    made = character_tokenizer("abc")
    made.chat_template = template
    return made


@partly_slow("name", BOMBS, *range(0, len(BOMBS), 2))
def test_a_template_without_end_is_one_error(name: str) -> None:
    with raises(DataError, where=None):
        render_template(tokenizer(BOMBS[name]), [{"role": "user", "content": "a"}])
    assert turn_end(tokenizer(BOMBS[name])) is None


FEATURES = (
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if loop.first %}[{{ loop.length }}]{% "
    "endif %}{% set ns.n = ns.n + 1 %}"
    "{{ loop.index0 ~ ':' ~ m.role|upper + ' ' + m['content']|trim }}{{ loop.previtem.role if "
    "loop.previtem is defined }}"
    "{% if loop.last %}{{ '-' * 3 }}{{ ns.n % 2 }}{{ '%s' % m.role }}{{ messages|length }}{{ m|tojson "
    "}}{% endif %}{% endfor %}"
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ "
    "messages|map(attribute='role')|join(',') }}"
    "{% for m in messages if m.role == 'user' %}{{ m.content.split('a')|list }}{% else %}none{% endfor %}"
    "{% macro f(x, y='1') %}<{{ x }}{{ y }}>{% endmacro %}{{ f('a') }}"
    "{{ messages[-1].content.replace('b', 'xx') }}{{ ', '.join(['p', 'q']) }}"
)


@pytest.mark.parametrize("template", [CHATML, PLAIN, LLAMA3, *TEMPLATES.values(), FEATURES])
def test_other_templates_render_as_in_the_sandbox_of_jinja2(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [
        {"role": role, "content": content}
        for role, content in [("system", " s "), ("user", "ab\n"), ("assistant", "b")]
    ]
    compile_template = chat_template_utils._compile_jinja_template
    compile_template.cache_clear()
    limited = render_template(tokenizer(template), messages)
    assert isinstance(compile_template(template).environment, LimitedEnvironment)
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    compile_template.cache_clear()
    assert render_template(tokenizer(template), messages) == limited
    compile_template.cache_clear()


def test_long_numbers_in_a_text_that_is_formatted_are_no_widths() -> None:
    call = "Call (030) 12345678901, or 100%% of 5551234567."
    template = (
        f"{{{{ '{call} %s %(x)5s'.replace('%(x)', '%') % (messages[0].content, 1) }}}}{{{{ '{call} "
        f"{{:>4}}'.format(2) }}}}"
    )
    rendered = render_template(tokenizer(template), [{"role": "user", "content": "0123456789"}])
    assert rendered == f"{call.replace('%%', '%')} 0123456789     1{call}    2"


def test_a_long_conversation_is_rendered() -> None:
    messages = [
        {"role": role, "content": "word " * 2000} for _ in range(100) for role in ("user", "assistant")
    ]
    assert len(render_template(tokenizer(CHATML), messages)) > 2_000_000
