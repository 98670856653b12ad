"""Chat templates that write tool calls in different ways, and calls as the first of them writes these."""

from __future__ import annotations

import json
from typing import Any

_HEAD = (
    "{% if tools %}<tools>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
)
_TAIL = (
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{{ 'key: told' if messages[-1].role == 'tool' else messages[-1].content }}{% endif %}"
)
TAGS = (
    _HEAD + "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    + _TAIL
)
BARE = (
    _HEAD + "{% for call in message.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}' + _TAIL
)
REVERSED = TAGS.replace(
    '"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}',
    '"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"',
)
HIDDEN = _HEAD + "{% if tools %}<tool_call> begins a call{% endif %}" + _TAIL
OTHER = _HEAD + "{% for call in message.tool_calls or [] %}CALL {{ call.function | tojson }}!{% endfor %}" + _TAIL


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
