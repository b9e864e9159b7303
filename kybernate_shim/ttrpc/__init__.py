"""ttrpc, containerd's small RPC protocol over UNIX sockets: protocol cores without I/O, an asyncio server and client.

Unary calls only. Knows nothing of containerd's services. Source: github.com/containerd/ttrpc, PROTOCOL.md.
"""

from kybernate_shim.ttrpc.client import Client
from kybernate_shim.ttrpc.codes import Code, RpcError
from kybernate_shim.ttrpc.methods import Call, Method, Services
from kybernate_shim.ttrpc.peer import Credentials, same_user
from kybernate_shim.ttrpc.server import Server

__all__ = ["Call", "Client", "Code", "Credentials", "Method", "RpcError", "Server", "Services", "same_user"]
