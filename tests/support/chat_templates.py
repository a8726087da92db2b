"""Chat templates that treat thinking, channels and tool calls as those of popular models do."""

from transformers import PreTrainedTokenizerFast

from support.tokenizers import byte_level

# Writes what the answers after the last question thought, and calls as JSON; drops other thinking.
QWEN = """
{%- set ns = namespace(last=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
{%- if m.role == 'user' and not ns.found %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{%- set ns.found = true %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}
{%- set content = m.content if m.content is string else '' %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}<|im_start|>assistant
{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought.strip('\\n') }}
</think>

{% endif %}{{ content.lstrip('\\n') }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% endif %}{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Has channels: analysis, final, and commentary for calls, whose results it writes as JSON. Drops
# the analysis of an answer that another message follows, unless it calls.
HARMONY = """<|start|>system<|message|>You are a model.<|end|>
{%- set ns = namespace(name='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.tool_calls %}{%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif loop.last and not add_generation_prompt %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}
{%- elif m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary
{{- '<|message|>' ~ (m.content | tojson) }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Drops what answers thought.
DEEPSEEK = """<bos>{% for m in messages %}
{%- if m.role == 'user' %}<|User|>{{ m.content }}
{%- elif m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}<eos>
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

# Writes in its place that nothing was thought; calls have an element for each argument.
GLM = """[gMASK]<sop>{% for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
<think></think>
{{ m.content.split('</think>')[-1].strip() }}
{%- for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for key, value in c.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

TEMPLATES = {"qwen": QWEN, "harmony": HARMONY, "deepseek": DEEPSEEK, "glm": GLM}


def with_template(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one of the templates, whose marks are no special tokens."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer
