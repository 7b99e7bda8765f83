"""The openai client: chat completions with a tool."""

import json
import os
import sys

from openai import OpenAI

stream = sys.argv[1] == "stream"
client = OpenAI(max_retries=0)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "get_weather", "description": "The weather of a city.", "parameters": parameters}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is Oslo?"}]
usage = 0
while True:
    request = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
    }
    if stream:
        with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
            for _ in events:
                pass
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**request)
    usage += completion.usage.total_tokens
    message = completion.choices[0].message
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in message.tool_calls or []:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"Rain in {city}."})
    if not message.tool_calls:
        break
assert usage > 0
assert [model.id for model in client.models.list()] == [os.environ["OPENAI_MODEL"]]
print(message.content)
