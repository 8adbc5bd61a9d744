"""Chat templates of our own that treat reasoning like those of public families; for tokenizers with ``<|im_start|>`` and ``<|im_end|>``."""

from __future__ import annotations

_SPLIT = (
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content or '' %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}{% set said = said.split('</think>')[-1].lstrip() %}"
    "{% endif %}"
)
_OTHERS = "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
_ASSISTANT = "{% for m in messages %}{% if m.role == 'assistant' %}" + _SPLIT + "{{ '<|im_start|>assistant\\n' }}"
_BLOCK = "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}"
_END = "{{ said + '<|im_end|>\\n' }}"

SWITCHED = (
    _ASSISTANT + "{% if loop.last %}" + _BLOCK + "{% endif %}" + _END + _OTHERS + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{% endif %}"
)
"""Like Qwen3: history has no reasoning, the last answer has a block even if it is empty, and ``enable_thinking`` false closes it in the
prompt."""
OPENED = (
    _ASSISTANT + "{% if loop.last and thought %}" + _BLOCK + "{% endif %}" + _END + _OTHERS + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""Like later models of DeepSeek-R1's kind: history has no reasoning, and the generation prompt opens it."""
ONE_LINE = OPENED.replace("'<think>\\n'", "'<think>'").replace("'\\n</think>\\n\\n'", "'</think>'").replace("<think>\\n'", "<think>'")
"""Like OPENED, without line feeds around the marks."""
STRIPPED = OPENED.replace("{% if loop.last and thought %}" + _BLOCK + "{% endif %}", "")
"""Like DeepSeek-R1's own: the generation prompt opens reasoning, which the template leaves out of the last answer too."""
KEPT = (
    _ASSISTANT + "{% if thought %}" + _BLOCK + "{% endif %}" + _END + _OTHERS + "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Keeps the reasoning of every turn."""
CHANNELS = (
    "{{ '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium') + '<|im_end|>\\n' }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}{{ '<|im_start|>assistant/analysis\\n' + m.thinking + '<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>assistant/final\\n' + m.content + ('<|endoftext|>' if loop.last else '<|im_end|>\\n') }}"
    + _OTHERS
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""Like gpt-oss: reasoning is called ``thinking`` and has a channel of its own, which history lacks; ``reasoning_effort`` stands in the
system message."""
TEMPLATES = {"switched": SWITCHED, "opened": OPENED, "one line": ONE_LINE, "stripped": STRIPPED, "kept": KEPT, "channels": CHANNELS}
