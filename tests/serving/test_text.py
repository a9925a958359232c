"""Text: tokens as they are generated, stop strings, and chat templates that strangers wrote."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers", reason="needs the extra text")
pytest.importorskip("jinja2", reason="needs the extra text")

from ejkernel_eqx.serving.text import ByteTokenizer, ChatTemplate, ChatTemplateError, TextStream, Tokenizer

from .byte_tokenizer import byte_tokenizer

# A published form: roles, a default, an own refusal, tools as JSON, a namespace, a macro.
TEMPLATE = """{%- macro header(role) -%}<|{{ role }}|>{%- endmacro -%}
{%- set ns = namespace(system='none') -%}
{%- if messages[0]['role'] == 'system' -%}
  {%- set ns.system = messages[0].content | trim -%}
  {%- set messages = messages[1:] -%}
{%- endif -%}
{{- bos_token + header('system') + ns.system }}
{%- if tools is defined and tools %} {{ tools | tojson }}{% endif %}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must alternate') -}}
  {%- endif -%}
  {%- generation %}{{ header(message.role) ~ message['content'].strip() }}{% endgeneration -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif -%}"""
USER = {"role": "user", "content": " hello <b> é "}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("text") / "tokenizer.json"))


@pytest.fixture(params=["file", "bytes"])
def either(request, tokenizer):
    """The tokenizer of a file, and that without one."""
    return tokenizer if request.param == "file" else ByteTokenizer()


def test_special_tokens_are_added_unless_they_are_left_out(tokenizer, tmp_path):
    import tokenizers

    path = byte_tokenizer(tmp_path / "tokenizer.json")
    file = tokenizers.Tokenizer.from_file(str(path))
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    file.save(str(path))
    plain = tokenizer.encode("ab")
    assert (
        Tokenizer(path).encode("ab") == [256, *plain] and Tokenizer(path).encode("ab", special=False) == plain
    )


def test_half_a_surrogate_pair_is_a_question_mark(either):
    assert either.encode("a\ud83d") == either.encode("a?") and len(either.encode("\U0001f600")) == 4


def pieces_of(tokenizer, text, **options):
    stream = tokenizer.stream(**options)
    tokens = tokenizer.encode(text)
    return [*map(stream.push, tokens), stream.end()], stream


def test_no_piece_ends_within_a_character(either):
    text = "aé€𝄞 b"
    pieces, _ = pieces_of(either, text)
    assert "".join(pieces) == text and either.decode(either.encode(text)) == text
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_character_are_shown_in_the_end(either):
    half = either.encode("€")[:2]
    stream = either.stream()
    assert [stream.push(token) for token in half] == ["", ""] and stream.end() == "\ufffd"
    stream = either.stream()
    shown = "".join(stream.push(half[1]) for _ in range(40))
    assert 10 < len(shown) < 40 and set(shown) == {"\ufffd"}
    assert shown + stream.end() == "\ufffd" * 40
    stream = either.stream()
    assert "".join(map(stream.push, [*half, *either.encode("x")])) == "\ufffdx"


def test_text_continues_a_prompt():
    """The decoder drops a space in front of a text, which is none behind a prompt."""
    words = ["▁a", "▁b", "c"]
    decode = lambda tokens: "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")
    alone, behind = TextStream(decode), TextStream(decode, prompt=[0])
    assert "".join(map(alone.push, [1, 2])) == "bc"
    assert "".join(map(behind.push, [1, 2])) == " bc"


def test_special_tokens_are_not_text(either):
    tokens = [256, *either.encode("ab"), 257]
    assert either.decode(tokens) == "ab"
    assert either.vocab_size == (256 if isinstance(either, ByteTokenizer) else 258)
    stream = either.stream()
    assert "".join(map(stream.push, tokens)) + stream.end() == "ab"


def test_a_stop_string_spans_tokens(tokenizer):
    pieces, stream = pieces_of(tokenizer, "one STOP two", stop=["STOP"])
    assert "".join(pieces) == "one " and stream.stopped
    # What may become one is held until it does not.
    stream = tokenizer.stream(stop=["STOP"])
    shown = [stream.push(token) for token in tokenizer.encode("aSTxSTO")]
    assert shown == ["a", "", "", "STx", "", "", ""] and not stream.stopped
    assert stream.end() == "STO" and stream.push(tokenizer.encode("P")[0]) == ""


@settings(max_examples=60, deadline=None)
@given(
    st.text("ab€", max_size=12),
    st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
)
def test_stop_strings_do_not_depend_on_tokens(text, stop, sizes):
    """The text before the stop string that is complete first, however it is divided."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    tokens, rest = [], text
    for size in sizes:
        tokens, rest = [*tokens, rest[:size]], rest[size:]
    tokens.append(rest)
    stream = TextStream(lambda numbers: "".join(tokens[n] for n in numbers), stop=stop)
    shown = ""
    for n in range(len(tokens)):
        shown += stream.push(n)
        assert expected.startswith(shown)
    assert shown + stream.end() == expected


def test_what_is_no_tokenizer_is_refused(tmp_path, tokenizer):
    (tmp_path / "tokenizer.json").write_text("{}")
    for name, message in (("tokenizer.json", "is none"), ("none.json", "is not there; copy")):
        with pytest.raises(ValueError, match=rf"path: expected a tokenizer.json, but '.*json' {message}"):
            Tokenizer(tmp_path / name)
    for wrong in ("ab", [""], [1]):
        with pytest.raises(ValueError, match="stop: expected texts that are not empty"):
            tokenizer.stream(stop=wrong)


# Chat templates


def test_a_published_template():
    template = ChatTemplate(TEMPLATE, bos_token="<s>")
    assert template.render([USER]) == "<s><|system|>none<|user|>hello <b> é<|assistant|>"
    messages = [{"role": "system", "content": " be short\n"}, USER, {"role": "assistant", "content": "ok"}]
    text = template.render(messages, add_generation_prompt=False, tools=[{"name": "é<"}])
    assert text == '<s><|system|>be short [{"name": "é<"}]<|user|>hello <b> é<|assistant|>ok'
    with pytest.raises(
        ChatTemplateError, match="messages: the model's chat template refuses them: roles must"
    ):
        template.render([USER, USER])
    assert template.render([USER]).startswith("<s>")  # what a refusal leaves behind harms nobody


def test_what_templates_may_call():
    render = lambda source, **variables: ChatTemplate(source).render([USER], **variables)
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ x | tojson(indent=2) }}", x={"b": 1}) == '{\n  "b": 1\n}'
    assert render("{{ x | join(', ') ~ (x | length) ~ x[1:] ~ -x[0] }}", x=[1, 2]) == "1, 22[2]-1"
    assert render("{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{{ 'a-b'.replace('-', '+') | indent(2, true) }}{{ 'ab' * 2 }}") == "  a+babab"
    assert render("{{ x is defined }}{{ messages | map(attribute='role') | list }}") == "False['user']"
    assert (
        render("{% for k, v in x.items() %}{{ loop.last }}{{ k }}{{ v }}{% endfor %}", x={1: 2}) == "True12"
    )


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "lists": "{% set x = 'abcdefghij' %}" + "{% for a in x %}" * 12 + "{% endfor %}" * 12,
    "long range": "{{ range(10**9) | list | length }}",
    "ranges": "{% for a in range(9999) %}{{ range(99999) | list | length }}{% endfor %}",
    "items": "{% set x = {'a': 1, 'b': messages * 9999} %}{% for a in range(99999) %}{% set y = x.values() | list %}{% endfor %}",
    "output": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "a block": "{% set x %}{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "concatenation": "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "addition": "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nesting": "{% set n = namespace(x=[1]) %}{% for a in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "arguments": "{% set n = namespace(x=[1]) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    "{% for a in range(99) %}{{ f(n.x, n.x) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "deep macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "text": "{{ 'x' * 10**10 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(x=9) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "form": "{{ '%999999999d' % 1 }}",
    "method": "{{ 'x'.center(10**10) }}",
    "replace": "{% set x = 'x' * 10**6 %}{{ x.replace('x', x) }}",
    "comparison": "{% set x = 'x' * 10**6 %}{% for a in range(9999) %}{{ 'y' in x }}{% endfor %}",
    "filter": "{{ 'x' | center(10**10) }}",
    "recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "attributes": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__.x }}",
    "change": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "brackets": "{{ " + "(" * 5000 + " }}",
    "syntax": "{% for %}",
    "missing": "{{ messages[0].x.y }}",
    "division": "{{ 1 // 0 }}",
    "size": "x" * (2**18 + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_an_error(name):
    start = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"^(chat_template|messages): "):
        ChatTemplate(HOSTILE[name]).render([USER])
    assert time.process_time() - start < 8


def test_templates_of_folders(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    assert ChatTemplate.from_folder(tmp_path) is None
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None}))
    assert ChatTemplate.from_folder(tmp_path) is None

    def render(template, **more):
        config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": template} | more))
        found = ChatTemplate.from_folder(tmp_path)
        assert found is not None
        return found.render([USER])

    assert render("{{ bos_token }}{{ eos_token }}", eos_token="</s>") == "<s></s>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert render(named) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert render("config") == "file"
    (tmp_path / "chat_template.jinja").unlink()
    for content in ("[]", "{", '{"chat_template": 3}', "[" * 10**5):
        config.write_text(content)
        with pytest.raises(
            ChatTemplateError, match=r"folder: .* has no readable template|expected a text of"
        ):
            ChatTemplate.from_folder(tmp_path)
