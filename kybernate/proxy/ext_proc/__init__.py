"""The door for Envoy: its filter ext_proc asks here, by gRPC, where each request goes and when.

`answers` makes the messages, `conversation` is one request from its head to the end of its answer, `server` listens.
"""
