"""The tools of any MCP server as an environment."""
