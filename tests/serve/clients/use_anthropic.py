"""The anthropic client: messages with a tool."""

import os
import sys

import anthropic

stream = sys.argv[1] == "stream"
client = anthropic.Anthropic(max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"name": "get_weather", "description": "The weather of a city.", "input_schema": schema}
messages = [{"role": "user", "content": "How is Oslo?"}]
while True:
    request = {
        "model": os.environ["ANTHROPIC_MODEL"],
        "messages": messages,
        "tools": [tool],
        "system": "Be brief.",
    }
    counted = client.messages.count_tokens(**request).input_tokens
    if stream:
        with client.messages.stream(**request, max_tokens=200) as events:
            for _ in events:
                pass
            message = events.get_final_message()
    else:
        message = client.messages.create(**request, max_tokens=200)
    # Rendered from its messages, a history has the tokens that the template writes for them.
    assert message.usage.input_tokens == counted
    messages.append({"role": "assistant", "content": message.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"Rain in {block.input['city']}."}
        for block in message.content
        if block.type == "tool_use"
    ]
    if not results:
        break
    assert message.stop_reason == "tool_use"
    messages.append({"role": "user", "content": results})
assert [model.id for model in client.models.list()] == [os.environ["ANTHROPIC_MODEL"]]
try:
    client.messages.create(model="other", max_tokens=1, messages=messages[:1])
except anthropic.NotFoundError as error:
    refused = error.body["error"]["type"]
assert refused == "not_found_error"
print(message.content[0].text)
