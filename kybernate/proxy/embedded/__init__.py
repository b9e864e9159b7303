"""The data plane in this process: HTTP/1.1, WebSocket, streams and plain TCP, by aiohttp on uvloop."""
