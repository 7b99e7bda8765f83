"""The MCP client of openai-agents plays an environment: ``use_agents_mcp.py URL``; prints what it saw."""

import asyncio
import json
import sys

from agents.mcp import MCPServerStreamableHttp  # noqa: TID251 - the package openai-agents


async def main(url: str) -> None:
    async with MCPServerStreamableHttp(params={"url": url}) as server:
        seen = [sorted(tool.name for tool in await server.list_tools())]
        result = await server.call_tool("start_episode", {})
        seen.append(result.content[0].text)
        for action in ("right", "down", "sideways", "right"):
            result = await server.call_tool("act", {"action": action})
            seen.append(result.content[0].text)
    print(json.dumps(seen))


asyncio.run(main(sys.argv[1]))
