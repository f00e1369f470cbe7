"""The client side: local training, the encoding of updates, and the state of a client. Nothing here depends on a transport such as gRPC."""
