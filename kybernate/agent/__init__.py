"""The agent of a node: one long-running asyncio program that carries out operations and knows what is on its node."""
