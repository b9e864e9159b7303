"""ttrpc, containerd's small RPC protocol over UNIX sockets: protocol cores without I/O, an asyncio server and client.

Unary calls only. Knows nothing of containerd's services. Source: github.com/containerd/ttrpc, PROTOCOL.md.
"""

from .client import Client
from .codes import Code, RpcError
from .connection import ProtocolViolated
from .methods import Call, Method, Services
from .peer import Credentials, same_user
from .server import Server

__all__ = [
    "Call",
    "Client",
    "Code",
    "Credentials",
    "Method",
    "ProtocolViolated",
    "RpcError",
    "Server",
    "Services",
    "same_user",
]
