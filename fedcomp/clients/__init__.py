"""Clients: the session that trains, proposes and settles, with its state. It knows no transport."""
