"""The client side: local training, the encoding of updates, and the state of a client. This package does not depend on a transport such as
gRPC.
"""
