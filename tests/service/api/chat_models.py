"""Folders of models as they are published: tokenizer, special tokens, chat template. Templates keep the lines that matter."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from service.api.context import ServedModel
from tests.service.api.rig import served_model
from tests.tiny_models import _save_tokenizer

# ruff: noqa: E501 - templates have long lines
#: Qwen 3 and, without the reasoning, Qwen 2.5 and Hermes.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content is string %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set tool_call = tool_call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

#: DeepSeek's distilled models: the prompt opens the reasoning.
R1 = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content.split('</think>')[-1] }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if tools %}
    {{- "Given the following functions, please respond with a JSON for a function call with its proper arguments.\\n" }}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.id is undefined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}{{- ", " if not loop.last else "]" }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content }}
    {%- else %}
        {{- raise_exception("Only user, tool and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

#: Added tokens, and whether they are special: special ones give no text.
TOKENS = {
    "qwen3": {"<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False},
    "hidden": {"<think>": True, "</think>": True, "<tool_call>": True, "</tool_call>": True},
    "mistral": {"[INST]": True, "[/INST]": True, "[TOOL_CALLS]": True},
    "llama": {"<|python_tag|>": True},
    "r1": {"<think>": False, "</think>": False},
}
TEMPLATES = {"qwen3": QWEN3, "hidden": QWEN3, "mistral": MISTRAL, "llama": LLAMA31, "r1": R1}


def chat_model(folder: Path, kind: str) -> ServedModel:
    _save_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in TOKENS[kind].items()])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATES[kind])
    return served_model(folder)
