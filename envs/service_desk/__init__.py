"""ServiceDesk: answer a customer of a shop with tools, by a written policy."""
