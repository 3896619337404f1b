"""Round trips: a history as a family's template shows it to the model is what its parser reads back.

The templates are short ones of our own that touch messages as the families' real ones do.
"""

import json

import pytest

from jaxserve.chat_template import ChatTemplate
from serve.parsers.choose import FAMILIES, choose_formats
from serve.parsers.family import Tool
from serve.protocol.messages import Message
from tests.fake_llm import ByteTokenizer
from tests.test_tools_parsers import DS, parse, read

LOOP = "{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{{% for message in messages %}}{body}{{% endfor %}}"
CALLS = "{% if message.tool_calls %}"
REST = "{% else %}{{ message.role + ': ' + message.content }}{% endif %}"

HERMES = """{{ message.content }}{% for tool_call in message.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
CODER = """{{ message.content | trim }}{% for tool_call in message.tool_calls %}
<tool_call>
<function={{ tool_call.function.name }}>
{% for key, value in tool_call.function.arguments | items %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}"""
GLM = """{{ message.content.strip() }}{% for tool_call in message.tool_calls %}
<tool_call>{{ tool_call.function.name }}
{% for key, value in tool_call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson if value is not string else value }}</arg_value>
{% endfor %}</tool_call>{% endfor %}"""
LLAMA = """{% if message.tool_calls | length > 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}
{%- set call = message.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{# <|python_tag|> #}"""
MISTRAL = """{% for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"""
MISTRAL_ARRAY = """[TOOL_CALLS] [{% for call in message.tool_calls -%}
{%- if call.id | length < 9 %}{{ raise_exception('ids have nine letters') }}{% endif -%}
{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}{% endfor %}]"""
DEEPSEEK = (
    "{% if message['content'] is not none %}{{ message['content'] }}{% endif %}{{ '"
    + DS["begin"]
    + "' }}{% for tool in message['tool_calls'] %}{{ '"
    + DS["call"]
    + "function"
    + DS["sep"]
    + "' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```"
    + DS["end"]
    + "' }}{% endfor %}{{ '"
    + DS["ends"]
    + "' }}"
)
DEEPSEEK_31 = DEEPSEEK.replace("function" + DS["sep"], "").replace("\\n```json\\n", DS["sep"]).replace("\\n```", "")

TEMPLATES = {
    "hermes": HERMES,
    "qwen3_coder": CODER,
    "glm": GLM,
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "mistral_array": MISTRAL_ARRAY,
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_31,
}
ARGUMENTS = [{"city": 'Zürich "{', "days": 3, "where": {"x": [1, None]}}, {}]


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("content", [None, "I look."])
def test_history_reads_back(family, content):
    source = LOOP.format(body=CALLS + TEMPLATES[family] + REST)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = source
    found = choose_formats(tokenizer, "auto", "auto").tools
    assert found is not None
    assert found.name == family
    made = list(zip(("weather", "now"), ARGUMENTS, strict=True))[: 2 if found.parallel else 1]
    message = Message.model_validate(
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [
                {"id": f"call_{i}", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(made)
            ],
        }
    )
    text = ChatTemplate(source).render(found.messages([message.for_template("messages[0]")]))
    whole = parse(family, text)
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == made
    assert whole.text == ("" if content is None or "llama" in family or "mistral" in family else content)


def test_the_fallback_reads_back():
    family = FAMILIES["json"]
    message = Message.model_validate(
        {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "now", "arguments": "{}"}}]}
    )
    told = family.teach([message.for_template("m")], [])
    assert read(family.parser([Tool("now", {})]), [told[0]["content"]]).calls == [["now", "{}"]]
