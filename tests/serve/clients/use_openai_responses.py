"""The openai client: responses with a tool, the second one by the id of the first."""

import json
import os
import sys

from openai import OpenAI

stream = sys.argv[1] == "stream"
client = OpenAI(max_retries=0)
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {"type": "function", "name": "get_weather", "description": "The weather of a city."}
request = {
    "model": os.environ["OPENAI_MODEL"],
    "instructions": "Be brief.",
    "tools": [{**tool, "parameters": parameters}],
}
items = [{"role": "user", "content": "How is Oslo?"}]
previous = {}
while True:
    if stream:
        with client.responses.stream(**request, **previous, input=items) as events:
            for _ in events:
                pass
            response = events.get_final_response()
    else:
        response = client.responses.create(**request, **previous, input=items)
    previous = {"previous_response_id": response.id}
    items = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": f"Rain in {json.loads(item.arguments)['city']}.",
        }
        for item in response.output
        if item.type == "function_call"
    ]
    if not items:
        break
print(response.output_text)
