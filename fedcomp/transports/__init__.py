"""How messages travel between the server and the clients."""
