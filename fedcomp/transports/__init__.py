"""Transports, which carry messages between the server and the clients."""
